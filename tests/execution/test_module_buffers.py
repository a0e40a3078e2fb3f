"""Buffers in a step, microbatch by microbatch and without ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.combined_buffers import CombinedBuffers
from lightning_cephalo.execution.module_buffers import COPIED_BYTES, ModuleBuffers
from lightning_cephalo.execution.module_state import ModuleState


class _Top(nn.Module):
    def __init__(self, numel: int = 3) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(numel))
        self.register_buffer("still", torch.ones(2))
        self.inner = nn.Module()
        self.inner.register_buffer("shared", self.kept)
        self.local = []


def _buffers(module):
    return ModuleBuffers(module, lambda *given: module.local.append(given))


def _step(buffers, module, write, microbatches=2):
    """Two phases of each microbatch; return what each found at its beginning and at its end."""
    buffers.begin([1] * microbatches)
    found = []
    for phase in range(2):
        for index in range(microbatches):
            buffers.resume(index)
            found.append(module.kept.clone())
            if phase == 0:
                write(module, index)
            buffers.pause(index)
    values = [entry.values for entry in buffers.written]
    buffers.finish()
    return found, values


def _in_place(module, index):
    module.inner.shared += index + 1


def _assigned(module, index):
    module.kept = module.inner.shared = module.kept + index + 1


@pytest.mark.parametrize("write", [_in_place, _assigned])
def test_each_microbatch_starts_from_the_values_of_the_step(write):
    module = _Top()
    own, still, buffers = module.kept, module.still, _buffers(module)
    for _ in range(2):
        found, values = _step(buffers, module, write)
        assert [float(each[0]) for each in found] == [0.0, 0.0, 1.0, 2.0]
        assert [float(each[0]) for each in values[0]] == [1.0, 2.0]
        assert len(values) == 1 and buffers.wrote()
        assert module.kept is own and module.inner.shared is own and module.still is still
        assert not own.any()
    _step(buffers, module, lambda module, index: None)
    assert not buffers.wrote()


def test_what_a_hook_writes_is_the_beginning_of_the_next_step():
    module = _Top()
    buffers = _buffers(module)
    _step(buffers, module, lambda module, index: None)
    module.kept.fill_(5.0)
    assert _step(buffers, module, _in_place)[0][0][0] == 5.0
    module.kept = module.inner.shared = torch.full((3,), 7.0)
    assert _step(buffers, module, _in_place)[0][1][0] == 7.0


def test_a_unit_that_is_recomputed_finds_what_it_found():
    module = _Top()
    buffers = _buffers(module)
    buffers.begin([1, 1])
    seen = []
    for index in range(2):
        buffers.resume(index)
        first = buffers.now([module])
        module.kept += 1 + index
        buffers.pause(index)  # a microbatch parks before it enters a unit
        buffers.resume(index)
        second = buffers.now([module])
        module.kept += 10
        buffers.pause(index)
        seen += [first, second]
    buffers.finish()
    module.kept.fill_(99.0)
    shown = []
    for each in seen:
        with buffers.replayed(each):
            shown.append(float(module.kept[0]))
        assert module.kept[0] == 99.0
    assert shown == [0.0, 1.0, 0.0, 2.0]


def test_a_large_buffer_that_is_first_written_late_is_refused_and_an_assigned_one_is_right():
    module = _Top(COPIED_BYTES // 4 + 1)
    buffers = _buffers(module)
    _step(buffers, module, lambda module, index: None)
    with pytest.raises(UnitUseError, match="'kept' for the first time in a later step"):
        _step(buffers, module, _in_place)
    buffers.abandon()
    found, _ = _step(buffers, module, _assigned)
    assert [float(each[0]) for each in found[:2]] == [1.0, 1.0], "the refused write stands"


def test_a_buffer_of_another_shape_is_left_to_the_microbatches():
    module = _Top()

    def grow(module, index):
        module.kept = module.inner.shared = torch.zeros(7)

    buffers = _buffers(module)
    _step(buffers, module, grow)
    assert [place.key for place, _, _ in module.local] == ["kept", "shared"]
    assert not buffers.written and buffers.localised == ["kept", "kept"]


def test_a_unit_finds_a_buffer_that_it_shares_with_a_module_outside():
    module = _Top()
    buffers = _buffers(module)
    buffers.begin([1])
    buffers.resume(0)
    module.kept += 1
    buffers.pause(0)  # before it enters a unit
    buffers.resume(0)
    shown = buffers.now([module.inner])
    module.kept += 10
    with buffers.replayed(shown):
        assert module.inner.shared[0] == 1.0 and module.kept is module.inner.shared
    assert module.inner.shared[0] == 11.0


def test_a_rank_without_samples_has_written_nothing():
    module = _Top()
    buffers = _buffers(module)
    _step(buffers, module, _in_place)
    buffers.begin([])
    buffers.finish()
    assert not buffers.wrote() and buffers.written[0].values == []


class _OtherRank:
    """Stands for the messages of this rank and of one other."""

    rank, world_size = 0, 1

    def __init__(self, says) -> None:
        self._says = list(says)

    def gather(self, said):
        return [said, self._says.pop(0)]

    def together(self, doing, function):
        return function()


def test_a_buffer_that_has_changed_its_shape_once_is_local_for_good():
    """Another buffer is first written later: the ranks agree anew."""
    module = _Top()
    others = [({"kept": None}, []), ({"kept": None, "still": None}, [])]
    device = accelerator_of(torch.device("cpu"))
    combined = CombinedBuffers(module, ModuleState(module), _OtherRank(others), device)
    of_microbatches, step = combined.of_microbatches, iter(range(2))

    def write(microbatch):
        if next(step) == 0:
            module.kept = module.inner.shared = torch.ones(7)
        else:
            module.still += 1

    for _ in range(2):
        combined.begin([1])
        of_microbatches.resume(0)
        write(0)
        of_microbatches.pause(0)
        said = [combined.finish(), 0.0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a buffer of the samples
            combined.agree(said)
        combined.combine()
    assert combined._agreed == {"still"}


def test_integers_beyond_the_precision_of_floats_arrive_exactly():
    module = _Top()
    module.register_buffer("bits", torch.tensor([2**53 + 1, -(2**62) - 3, -1]))
    wanted = module.bits + 2
    device = accelerator_of(torch.device("cpu"))
    combined = CombinedBuffers(module, ModuleState(module), _OtherRank([({}, [])]), device)
    combined.begin([3, 1])
    for index in range(2):
        combined.of_microbatches.resume(index)
        module.bits += 2
        combined.of_microbatches.pause(index)
    combined.agree([combined.finish()])
    combined.combine()
    assert torch.equal(module.bits, wanted)
