"""Writes are counted below dispatch modes as without them."""

from contextlib import nullcontext

import pytest
import torch

from lightning_cephalo.accelerator.emulated.memory_tracker import MemoryTracker


def _raised(write):
    tensors = [torch.ones(2), torch.ones(3)]
    write(tensors)
    return [tensor._version for tensor in tensors]


WRITES = {
    "in place": lambda tensors: [tensor.mul_(2) for tensor in tensors],
    "foreach": lambda tensors: torch._foreach_mul_(tensors, 2),
    "foreach of data": lambda tensors: torch._foreach_copy_(
        [tensor.detach() for tensor in tensors], [torch.zeros(2), torch.zeros(3)]
    ),
    "reads": lambda tensors: torch._foreach_add(tensors, 1),
}


@pytest.mark.parametrize("write", WRITES)
def test_modes_change_no_version(write):
    modes = [nullcontext(), MemoryTracker()]
    found = []
    for mode in modes:
        with torch.no_grad(), mode:
            found.append(_raised(WRITES[write]))
    assert found == [[0, 0] if write == "reads" else [1, 1]] * len(modes)
