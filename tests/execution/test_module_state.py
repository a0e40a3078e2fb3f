"""Values that microbatches store on modules, step by step and without ranks."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from lightning_cephalo.execution.module_state import ModuleState


class _Top(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 1))
        self.kept = None


def _step(state, module, sizes, stores):
    """Run a step of two phases, microbatch by microbatch; return what each found."""
    state.begin(sizes)
    found = []
    for index in range(len(sizes)):
        state.resume(index)
        found.append(module.kept)
        module.kept = stores[index]
        state.pause(index)
    for index in range(len(sizes)):
        state.resume(index)
        assert module.kept is stores[index]
        state.pause(index)
    state.finish()
    return found


def test_each_microbatch_finds_its_own_values_and_hooks_find_all():
    module = _Top()
    state = ModuleState(module)
    stores = [torch.ones(2, 3, 4), torch.zeros(2, 2, 4)]
    assert _step(state, module, (3, 2), stores) == [None, None]
    assert torch.equal(module.kept, torch.cat(stores, 1))
    found = _step(state, module, (3, 2), stores)
    assert [tensor.shape for tensor in found] == [(2, 3, 4), (2, 2, 4)]
    assert all(map(torch.equal, found, stores))


def test_a_value_that_equals_the_one_before_is_found():
    module = _Top()
    module.kept = torch.zeros(1)
    equal = [torch.zeros(1), torch.zeros(1)]
    _step(ModuleState(module), module, (1, 1), equal)  # compares objects, and never their values


def test_a_rank_without_samples_keeps_its_values():
    module = _Top()
    state = ModuleState(module)
    stores = [torch.ones(3, 4), torch.zeros(2, 4)]
    _step(state, module, (3, 2), stores)
    _step(state, module, (), [])
    assert all(map(torch.equal, _step(state, module, (3, 2), stores), stores))


def test_a_hook_that_sets_or_changes_the_values_changes_them_for_all():
    module = _Top()
    state = ModuleState(module)
    stores = [torch.ones(3, 4), torch.zeros(2, 4)]
    _step(state, module, (3, 2), stores)
    module.kept = None
    assert _step(state, module, (3, 2), stores) == [None, None]
    module.kept.fill_(7.0)
    found = _step(state, module, (3, 2), stores)
    assert torch.equal(found[1], torch.full((2, 4), 7.0))


def test_the_values_of_another_batch_size_fit_no_microbatch():
    module = _Top()
    state = ModuleState(module)
    _step(state, module, (2,), [torch.ones(2, 4)])
    found = _step(state, module, (2, 2), [torch.ones(2, 4), torch.ones(2, 4)])
    assert [len(tensor) for tensor in found] == [4, 4]


def test_scalars_are_averaged_over_samples_and_others_are_the_last_ones():
    module = _Top()
    state = ModuleState(module)
    stores = [
        {"loss": torch.tensor(1.0), "map": torch.ones(7, 7), "count": torch.tensor(3)},
        {"loss": torch.tensor(4.0), "map": torch.zeros(7, 7), "count": torch.tensor(2)},
    ]
    _step(state, module, (2, 1), stores)
    assert module.kept["loss"] == 2.0 and module.kept["count"] == 2
    assert not module.kept["map"].any()


def test_graphs_end_with_the_step():
    module = _Top()
    state = ModuleState(module)
    stores = [torch.ones(2, 4, requires_grad=True) * 2]
    _step(state, module, (2,), stores)
    assert not module.kept.requires_grad and torch.equal(module.kept, stores[0])


def test_a_step_without_gradients_stores_as_without_this_package():
    module = _Top()
    state = ModuleState(module)
    _step(state, module, (3, 2), [torch.ones(3, 4), torch.zeros(2, 4)])
    for value in (torch.full((7, 4), 5.0), torch.full((4, 4), 6.0)):  # two batches of validation
        state.resume(0)
        module.kept = value
        state.pause(0)
        assert module.kept is value
    state.resume(0)
    assert module.kept is value


def test_numbers_start_from_the_steps_values_in_each_microbatch():
    module = _Top()
    module.kept = 5
    state = ModuleState(module)
    for count in (5, 6):
        state.begin((3, 2))
        for index in (0, 1):
            state.resume(index)
            assert module.kept == count
            module.kept += 1
            state.pause(index)
        state.finish()
        assert state.has_numbers() and state.numbers() == ({"kept": (count + 1, 5.0)}, {})
        state.take_numbers({"kept": count + 1})
        assert module.kept == count + 1


def test_floats_are_means_over_samples_and_other_integers_are_named():
    module = _Top()
    state = ModuleState(module)
    _step_of_numbers(state, module, [1.0, 6.0])
    assert module.kept == 3.0 and not state.differing
    _step_of_numbers(state, module, [1, 6])
    assert module.kept == 6 and state.differing == ["kept"]


def _step_of_numbers(state, module, stores):
    state.begin((3, 2))
    for index, value in enumerate(stores):
        state.resume(index)
        module.kept = value
        state.pause(index)
    state.finish()


def test_a_rank_without_samples_takes_the_numbers_of_the_others():
    module = _Top()
    module.part = _Top()
    state = ModuleState(module)
    state.begin(())
    state.finish()
    assert not state.has_numbers()
    state.take_numbers({"kept": 7, "part.kept": 2, "gone.kept": 1})
    assert module.kept == 7 and module.part.kept == 2


class _Record:
    def __init__(self):
        self.rows = None


@pytest.mark.parametrize("kind", ["dict", "list", "deque", "object", "new object"])
def test_rows_of_samples_in_what_microbatches_share_are_named_once(kind):
    module = _Top()
    held = {"dict": {}, "list": [], "deque": deque(maxlen=1)}.get(kind, _Record())
    module.held = held
    state = ModuleState(module)

    def step(rows):
        state.begin((3, 2))
        for index, tensor in enumerate(rows):
            state.resume(index)
            if kind == "dict":
                held["h"] = (tensor, 1)
            elif "object" in kind:
                module.held = held if kind == "object" else _Record()
                module.held.rows = tensor
            else:
                held.append(tensor)
            state.pause(index)
        state.finish()

    step([torch.zeros(()), torch.ones(())])  # losses are no rows
    if kind == "list":
        step([torch.ones(3, 7), torch.ones(3, 7)])  # nor are copies of a buffer
    with pytest.warns(UserWarning, match="into 'held', .*another microbatch"):
        step([torch.zeros(3, 7), torch.ones(2, 7)])
    step([torch.zeros(3, 7), torch.ones(2, 7)])
