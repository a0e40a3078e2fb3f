"""What every test shares: slow tests go last, and tests that need a GPU are skipped without one."""

import os

import pytest
import torch

# Forked ranks hang in OpenMP if this process has ever run it with several threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _cache_of_the_test(tmp_path_factory, monkeypatch):
    """What is measured in a test is not to be planned with later, nor by another test."""
    monkeypatch.setenv("LIGHTNING_CEPHALO_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory):
    """Likewise for fixtures that several tests share."""
    before = os.environ.get("LIGHTNING_CEPHALO_CACHE")
    os.environ["LIGHTNING_CEPHALO_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["LIGHTNING_CEPHALO_CACHE"]
    else:
        os.environ["LIGHTNING_CEPHALO_CACHE"] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
