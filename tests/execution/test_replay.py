"""Modes, random numbers and buffers are as they were when a microbatch goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_cephalo.accelerator.cpu import Cpu
from lightning_cephalo.execution.replay import ChangingBuffers, ThreadState


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


class Counting(nn.Module):
    """A buffer that changes, in place or replaced by another tensor, and one that never does."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("nothing", None)
        self.still = nn.Module()
        self.still.register_buffer("table", torch.arange(3.0))

    def forward(self) -> None:
        if self.in_place:
            self.count += 1
        else:
            self.count = self.count + 1


def run(module: nn.Module, buffers: ChangingBuffers):
    versions, saved = buffers.versions(), buffers.save()
    module()
    return buffers.changed_since(versions, saved)


@pytest.mark.parametrize("in_place", [False, True])
def test_buffers_are_shown_as_before_the_forward_and_then_as_now(in_place):
    module = Counting(in_place)
    buffers = ChangingBuffers(module)
    for step in range(3):
        changed = run(module, buffers)
        assert [entry.name for entry in changed] == ["count"], "only what changes is copied"
        with ChangingBuffers.replayed(changed):
            assert module.count.item() == step
            module()
        assert module.count.item() == step + 1, "a microbatch counts once"


def test_after_the_first_forward_only_changing_buffers_are_copied():
    module = Counting(in_place=True)
    buffers = ChangingBuffers(module)
    assert len(buffers.save()) == 2
    run(module, buffers)
    assert [entry.name for entry in buffers.save()] == ["count"]


def test_running_statistics_that_raise_no_version_are_found_by_their_counter():
    norm = nn.BatchNorm1d(2)
    buffers = ChangingBuffers(norm)
    versions, saved = buffers.versions(), buffers.save()
    norm(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    changed = buffers.changed_since(versions, saved)
    assert {entry.name for entry in changed} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    with ChangingBuffers.replayed(changed):
        assert torch.equal(norm.running_mean, torch.zeros(2))
    assert not torch.equal(norm.running_mean, torch.zeros(2))
