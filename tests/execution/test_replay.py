"""Modes of the thread and random numbers are as they were when a microbatch goes on."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_cephalo.accelerator.cpu import Cpu
from lightning_cephalo.execution.replay import ThreadState


def modes() -> ThreadState:
    return ThreadState.capture(("cpu",))


@pytest.fixture(autouse=True)
def _modes_as_before():
    before = modes()
    yield
    before.restore()
    assert modes() == before


def no_grad():
    return torch.no_grad()


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


def one_kernel():
    return sdpa_kernel([SDPBackend.MATH])


@pytest.mark.parametrize("context", [no_grad, autocast, one_kernel])
def test_modes_are_found_again(context):
    outside = modes()
    with context():
        inside = modes()
        assert inside != outside
        outside.restore()
        assert modes() == outside
        inside.restore()
        assert modes() == inside
    assert modes() == outside


def test_the_default_dtype_is_found_again():
    outside = modes()
    torch.set_default_dtype(torch.float64)
    outside.restore()
    assert torch.ones(1).dtype is torch.float32


def test_modes_of_several_device_types_are_found_again():
    types = ("cpu", "cuda")
    outside = ThreadState.capture(types)
    with torch.autocast("cpu", dtype=torch.float16):
        inside = ThreadState.capture(types)
        outside.restore()
        assert ThreadState.capture(types) == outside
        inside.restore()
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert inside.autocast_cache
    outside.restore()


def test_random_numbers_are_drawn_again_and_the_order_goes_on():
    accelerator = Cpu(torch.device("cpu"))
    torch.manual_seed(3)
    states = accelerator.random_states()
    first, following = torch.rand(2), torch.rand(2)
    accelerator.restore_random_states(states)
    assert torch.equal(torch.rand(2), first) and torch.equal(torch.rand(2), following)
