"""What every test shares: slow tests go last, and tests that need a GPU are skipped without one."""

import pytest
import torch

# Forked ranks hang in OpenMP if this process has ever run it with several threads.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
