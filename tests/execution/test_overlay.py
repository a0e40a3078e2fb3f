"""What microbatches write on modules, step by step and without ranks."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.overlay import Overlay
from lightning_cephalo.execution.overlay_buffers import COPIED_BYTES
from lightning_cephalo.execution.overlay_merge import Share
from lightning_cephalo.execution.overlay_slots import Start


class _Ranks:
    """Stands for the messages of this rank, and of another one that gives these."""

    rank, world_size = 0, 1

    def __init__(self, *others: Any) -> None:
        self._others = list(others)

    def gather(self, own: Any) -> list[Any]:
        return [own, *self._others[:1]]

    def together(self, doing: str, function: Any) -> Any:
        return function()


def _overlay(module: nn.Module, *others: Any) -> Overlay:
    control: Any = _Ranks(*others)
    return Overlay(module, control, accelerator_of(torch.device("cpu")))


def _run(overlay, sizes, write, *codes, phases=1):
    """Run a step, microbatch by microbatch; ``write`` gets the phase and the microbatch."""
    overlay.begin(sizes)
    for phase in range(phases):
        for index in range(len(sizes)):
            overlay.resume(index)
            write(phase, index)
            overlay.pause(index)
    overlay.finish()
    overlay.combine([overlay.code, *codes])


# -- attributes -------------------------------------------------------------------------------


class _Top(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 1))
        self.kept = None


def _step(overlay, module, sizes, stores):
    """Run a step of two phases; return what each microbatch found."""
    found = []

    def write(phase, index):
        if phase:
            assert module.kept is stores[index]
        else:
            found.append(module.kept)
            module.kept = stores[index]

    _run(overlay, sizes, write, phases=2)
    return found


def test_each_microbatch_finds_its_own_rows_and_hooks_find_all():
    module = _Top()
    overlay = _overlay(module)
    stores = [torch.ones(2, 3, 4), torch.zeros(2, 2, 4)]
    assert _step(overlay, module, (3, 2), stores) == [None, None]
    assert torch.equal(module.kept, torch.cat(stores, 1))
    found = _step(overlay, module, (3, 2), stores)
    assert [tensor.shape for tensor in found] == [(2, 3, 4), (2, 2, 4)]
    assert all(map(torch.equal, found, stores))


def test_a_value_that_equals_the_one_before_is_found():
    module = _Top()
    module.kept = torch.zeros(1)
    equal = [torch.zeros(1), torch.zeros(1)]
    _step(_overlay(module), module, (1, 1), equal)  # compares objects, and never their values


def test_a_rank_without_samples_keeps_its_values():
    module = _Top()
    overlay = _overlay(module)
    stores = [torch.ones(3, 4), torch.zeros(2, 4)]
    _step(overlay, module, (3, 2), stores)
    _step(overlay, module, (), [])
    assert all(map(torch.equal, _step(overlay, module, (3, 2), stores), stores))


def test_a_hook_that_sets_or_changes_the_values_changes_them_for_all():
    module = _Top()
    overlay = _overlay(module)
    stores = [torch.ones(3, 4), torch.zeros(2, 4)]
    _step(overlay, module, (3, 2), stores)
    module.kept = None
    assert _step(overlay, module, (3, 2), stores) == [None, None]
    module.kept.fill_(7.0)
    found = _step(overlay, module, (3, 2), stores)
    assert torch.equal(found[1], torch.full((2, 4), 7.0))


def test_the_values_of_another_batch_size_fit_no_microbatch():
    module = _Top()
    overlay = _overlay(module)
    _step(overlay, module, (2,), [torch.ones(2, 4)])
    found = _step(overlay, module, (2, 2), [torch.ones(2, 4), torch.ones(2, 4)])
    assert [len(tensor) for tensor in found] == [4, 4]


def test_scalars_are_means_and_what_has_no_rule_is_the_last_ones_and_named_once():
    module = _Top()
    overlay = _overlay(module)
    stores = [
        {"loss": torch.tensor(1.0), "map": torch.ones(7, 7), "same": torch.tensor(3), "text": "a"},
        {"loss": torch.tensor(4.0), "map": torch.zeros(7, 7), "same": torch.tensor(3), "text": "a"},
    ]
    with pytest.warns(UserWarning, match="different values in 'kept'"):
        _step(overlay, module, (2, 1), stores)
    assert module.kept["loss"] == 2.0 and not module.kept["map"].any()
    _step(overlay, module, (2, 1), [{**each} for each in stores])
    stores = [{**each, "map": torch.ones(7, 7)} for each in stores]
    _step(_overlay(module), module, (2, 1), stores)  # all the same


def test_flags_are_shared_as_they_say_that_code_has_run_and_other_objects_are_named():
    module = _Top()
    module.is_ready, calls = False, []

    def write(phase, index):
        if not module.is_ready:
            module.is_ready = True
            calls.append(index)

    _run(_overlay(module), (2, 1), write)
    assert calls == [0]
    with pytest.warns(UserWarning, match="different values in 'kept'"):
        _run(_overlay(module), (2, 1), lambda *_: setattr(module, "kept", object()))


def test_graphs_end_with_the_step():
    module = _Top()
    overlay = _overlay(module)
    stores = [torch.ones(2, 4, requires_grad=True) * 2]
    _step(overlay, module, (2,), stores)
    assert not module.kept.requires_grad and torch.equal(module.kept, stores[0])


def test_a_gradient_that_the_step_retains_is_refused_by_name():
    module = _Top()
    stores = [torch.ones(size, 2, requires_grad=True) * 2 for size in (3, 2)]
    for each in stores:
        each.retain_grad()
    with pytest.raises(UnitUseError, match=r"a tensor in 'kept' whose gradient.*gradients.append"):
        _step(_overlay(module), module, (3, 2), stores)


def _store(module):
    module.gradient = torch.ones(2)


def _store_on_a_layer(module):
    module.inner[0].gradient = torch.ones(2)


def _average(module):
    module.mean = 0.9 * module.mean + 0.1


def _fill(module):
    module.held["h"] = torch.ones(2)


def _fill_own(module):
    module.local[1]["h"] = torch.ones(2)


def _append_to_own(module):
    module.local[2].append(torch.ones(2))


@pytest.mark.parametrize(
    ("store", "name"),
    [
        (_store, "gradient"),
        (_store_on_a_layer, "inner.0.gradient"),
        (_average, "mean"),
        (_fill, "held"),
        (_fill_own, "kept"),
        (_append_to_own, "kept"),
    ],
)
def test_what_hooks_of_a_backward_store_is_refused_by_name_with_several_microbatches(store, name):
    module = _Top()
    module.mean, module.held = 1.0, {}
    overlay = _overlay(module)
    stores: list[Any] = [[], []] if store is _append_to_own else [{}, {}]
    _step(overlay, module, (3, 2), stores)
    module.local = (None, stores[0], stores[0])  # of closures
    with (
        pytest.raises(UnitUseError, match=f"A hook stores '{name}'.* this rank has 2"),
        overlay.backward(has_hooks=True),
    ):
        store(module)
    _step(overlay, module, (3,), stores[:1])
    with overlay.backward(has_hooks=True):  # one microbatch
        store(module)


def test_hooks_of_a_backward_find_all_samples_and_may_fill_lists_and_set_flags():
    module = _Top()
    module.gradients, module.is_ready = [], False
    overlay = _overlay(module)
    stores = [torch.ones(3, 4), torch.zeros(2, 4)]
    _step(overlay, module, (3, 2), stores)
    with overlay.backward(has_hooks=True):
        for index in (1, 0):
            module.gradients.append(stores[index])
            module.is_ready = True
        assert torch.equal(module.kept, torch.cat(stores))
    assert len(module.gradients) == 2


def test_a_step_without_gradients_stores_as_without_this_package():
    module = _Top()
    overlay = _overlay(module)
    _step(overlay, module, (3, 2), [torch.ones(3, 4), torch.zeros(2, 4)])
    for value in (torch.full((7, 4), 5.0), torch.full((4, 4), 6.0)):  # two batches of validation
        overlay.resume(0)
        module.kept = value
        overlay.pause(0)
        assert module.kept is value
    overlay.resume(0)
    assert module.kept is value


def test_numbers_start_from_the_steps_values_and_a_counter_counts_one_step():
    module = _Top()
    module.kept, overlay = 5, _overlay(module)

    def write(phase, index):
        assert module.kept == count
        module.kept += 1

    for count in (5, 6):
        _run(overlay, (3, 2), write)
        assert module.kept == count + 1


def test_floats_are_means_over_samples_and_other_integers_are_refused_by_name():
    module = _Top()
    module.part = _Top()
    overlay = _overlay(module)

    def write(phase, index):
        module.part.kept = stores[index]

    stores: list[Any] = [1.0, 6.0]
    _run(overlay, (3, 2), write)
    assert module.part.kept == 3.0
    stores = [1, 6]
    with pytest.raises(UnitUseError, match=r"in the integer 'part.kept'.*summed_buffers"):
        _run(overlay, (3, 2), write)


def test_the_numbers_of_another_rank_count_by_its_samples():
    module = _Top()
    overlay = _overlay(module, Share(numbers={"kept": 7.0}, weight=1.0))
    _run(overlay, (3,), lambda *_: setattr(module, "kept", 3.0), 2.0)
    assert module.kept == 4.0
    overlay = _overlay(module, Share(numbers={"kept": 7}, weight=1.0))
    with pytest.raises(UnitUseError, match="in the integer 'kept'"):
        _run(overlay, (3,), lambda *_: setattr(module, "kept", 3), 2.0)


def test_a_rank_without_samples_takes_the_numbers_of_the_others():
    module = _Top()
    module.part = _Top()
    others = Share(numbers={"kept": 7, "part.kept": 2, "gone.kept": 1}, weight=1.0)
    _run(_overlay(module, others), (), None, 2.0)
    assert module.kept == 7 and module.part.kept == 2


def test_scalars_of_hooks_and_of_steps_that_do_not_set_them_stay_as_they_are():
    module = _Top()
    overlay = _overlay(module)
    for value in (2.0, None, 4.0):
        if value is not None:
            _run(
                overlay,
                (3, 1),
                lambda _, i, value=value: setattr(module, "kept", value + torch.tensor(4.0 * i)),
            )
            assert module.kept == value + 1.0
            module.kept = torch.tensor(7.0)  # a hook's
        else:
            _run(overlay, (3, 1), lambda *_: None)
            assert module.kept == 7.0


def test_a_recomputed_unit_finds_its_attributes_and_modes_and_what_it_writes_is_dropped():
    module = _Top()
    overlay = _overlay(module)
    overlay.begin((1, 1))
    views = []
    for index in (0, 1):
        for round_ in (0, 1):
            overlay.resume(index)
            module.kept = 10 * index + round_
            module.inner.train(bool(round_))
            overlay.pause(index)
            overlay.resume(index)
            views.append((overlay.now([]), module.kept, module.inner.training))
            overlay.pause(index)
    module.kept = 50
    for view, kept, mode in views:
        with overlay.replayed(view):
            assert module.kept == kept and module.inner[0].training == mode
            module.kept = 99
        assert module.kept == 50 and module.inner[0].training


def test_what_a_recomputed_unit_appends_is_dropped():
    module = _Top()
    overlay = _overlay(module)
    overlay.begin((1,))
    overlay.resume(0)
    module.kept = []
    overlay.pause(0)
    view = overlay.now([])
    module.kept.append(1.0)
    overlay.finish()
    with overlay.replayed(view):
        module.kept.append(1.0)
    assert module.kept == [1.0]


@pytest.mark.parametrize("kind", ["dict", "list", "deque"])
def test_what_microbatches_change_in_place_is_named_once(kind):
    module = _Top()
    held: Any = {"dict": {}, "list": [], "deque": deque(maxlen=1)}[kind]
    module.held = held
    overlay = _overlay(module)

    def step(values):
        def write(phase, index):
            if kind == "dict":
                held["h"] = (values[index], 1)
            else:
                held.append(values[index])

        _run(overlay, (3, 2), write)

    step(["a", 1])  # of no samples
    with pytest.warns(UserWarning, match="changes 'held', a .*, in place"):
        step([torch.zeros(3, 7), torch.ones(2, 7)])
    step([torch.zeros(3, 7), torch.ones(2, 7)])


# -- modes ------------------------------------------------------------------------------------


def _plain() -> nn.Module:
    return nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))


def _scripted() -> nn.Module:
    """A scripted module keeps its mode elsewhere than among its attributes."""
    return nn.Sequential(nn.Dropout(), torch.jit.script(nn.Sequential(nn.Dropout())))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("make", [_plain, _scripted])
def test_each_microbatch_finds_the_modes_that_it_has_left(make):
    model = make()
    overlay = _overlay(model)

    def modes():
        return [module.training for module in model.modules()]

    overlay.begin((1, 1))
    overlay.resume(0)
    model[1].eval()
    overlay.pause(0)
    overlay.resume(1)
    assert modes() == [True] * 4
    model.training = False
    overlay.pause(1)
    for index, left in enumerate([[True, True, False, False], [False, True, True, True]]):
        overlay.resume(index)
        assert modes() == left
        overlay.pause(index)
    overlay.put_back()


# -- undoing ----------------------------------------------------------------------------------


def _module() -> Any:
    module: Any = nn.Linear(2, 2)
    module.taken, module.count = ["before"], 1
    return module


def test_a_list_that_the_forward_has_filled_and_replaced_is_as_before():
    module = _module()
    taken = module.taken
    start = Start({"": vars(module)})
    module.taken.append("of the forward")
    module.taken, module.new, module.count = [], 3, 2
    start.finish()
    start.put_back()
    assert module.taken is taken and taken == ["before"]
    assert module.count == 1 and not hasattr(module, "new")


def test_what_is_stored_behind_the_forward_stays():
    module = _module()
    start = Start({"": vars(module)})
    module.count = 2
    start.finish()
    module.taken.append("of a hook")
    module.count = 5
    start.put_back()
    assert module.taken == ["before", "of a hook"] and module.count == 5


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_step_that_is_put_back_shows_its_start_to_every_microbatch(is_finished):
    module = _Top()
    module.register_buffer("mean", torch.zeros(1))
    module.held = []
    overlay = _overlay(module)
    overlay.keeps_start = True
    stores = [torch.ones(5, 3, 4), torch.zeros(5, 2, 4)]  # rows along the second dimension

    def write(phase, index):
        found.append((module.kept, float(module.mean)))
        module.kept = stores[index].clone()
        module.mean += 1.0
        module.inner.train(len(found) < 3)
        if not is_finished and len(found) == 4:
            raise RuntimeError("out of memory")

    found: list[Any] = []
    _run(overlay, (3, 2), write)
    if is_finished:
        _run(overlay, (3, 2), write)
        module.note = "of a hook"
        with pytest.raises(RuntimeError), overlay.backward(has_hooks=True):
            module.kept, module.of_a_hook = stores[0], 3.0
            module.held.append(3.0)
            raise RuntimeError("out of memory")
    else:
        with pytest.raises(RuntimeError):
            _run(overlay, (3, 2), write)
    overlay.put_back()
    assert torch.equal(module.kept, torch.cat(stores, 1)) and module.mean == 1.0
    assert module.inner.training and hasattr(module, "note") == is_finished
    assert not module.held and not hasattr(module, "of_a_hook")
    if is_finished:
        _run(overlay, (3, 2), write)
    assert all(torch.equal(kept, stores[at % 2]) for at, (kept, _) in enumerate(found) if at > 1)
    assert [mean for _, mean in found] == [0.0] * 2 + [1.0] * (4 if is_finished else 2)


# -- buffers ----------------------------------------------------------------------------------


class _Buffers(nn.Module):
    def __init__(self, numel: int = 3) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(numel))
        self.register_buffer("still", torch.ones(2))


def _in_place(module, index):
    module.kept += index + 1


def _assigned(module, index):
    module.kept = module.kept + index + 1


def _found(overlay, module, write):
    """Run a step of two phases; return what each microbatch found in each."""
    found = []

    def visit(phase, index):
        found.append(float(module.kept[0]))
        if not phase and write is not None:
            write(module, index)

    _run(overlay, (1, 1), visit, phases=2)
    return found


@pytest.mark.parametrize("write", [_in_place, _assigned])
def test_each_microbatch_starts_from_the_buffers_of_the_step_and_they_become_means(write):
    module = _Buffers()
    own, still, overlay = module.kept, module.still, _overlay(module)
    for start in (0.0, 1.5):
        found = _found(overlay, module, write)
        assert found == [start, start, start + 1.0, start + 2.0] and overlay.code
        assert module.kept is own and module.still is still
        assert own.tolist() == [start + 1.5] * 3 and still.tolist() == [1.0] * 2
    _found(overlay, module, None)
    assert not overlay.code


def test_what_a_hook_writes_to_buffers_is_the_beginning_of_the_next_step():
    module = _Buffers()
    overlay = _overlay(module)
    _found(overlay, module, None)
    module.kept.fill_(5.0)
    assert _found(overlay, module, _in_place)[0] == 5.0
    module.kept = torch.full((3,), 7.0)
    assert _found(overlay, module, _in_place)[1] == 7.0


def test_a_recomputed_unit_finds_the_buffers_that_it_found():
    module = _Buffers()
    overlay = _overlay(module)
    views = []

    def visit(phase, index):
        views.append(overlay.now([module]))
        module.kept += 1 + index if not phase else 10

    _run(overlay, (1, 1), visit, phases=2)
    module.kept.fill_(99.0)
    shown = []
    for view in views:
        with overlay.replayed(view):
            shown.append(float(module.kept[0]))
            module.kept += 3.0  # as in its first forward
        assert module.kept[0] == 99.0
    assert shown == [0.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize("counts", [True, False])
def test_a_recomputed_unit_finds_statistics_that_raise_no_version(counts):
    norm, x = nn.BatchNorm1d(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    if not counts:
        norm.num_batches_tracked = None
    overlay = _overlay(norm)
    views = []

    def visit(phase, index):
        views.append(overlay.now([norm]))
        norm(x)

    _run(overlay, (2,), visit, phases=2)
    means = []
    for view in views:
        with overlay.replayed(view):
            means.append(norm.running_mean.tolist())
            norm(x)
    assert means == [[0.0, 0.0], pytest.approx([0.2, 0.3])]
    assert norm.num_batches_tracked == (2 if counts else None)


def test_a_large_buffer_that_is_first_written_late_is_refused_and_an_assigned_one_is_right():
    module = _Buffers(COPIED_BYTES // 4 + 1)
    overlay = _overlay(module)
    _found(overlay, module, None)
    with pytest.raises(UnitUseError, match="'kept' for the first time in a later step"):
        _found(overlay, module, _in_place)
    overlay.abandon()
    assert _found(overlay, module, _assigned)[:2] == [1.0, 1.0], "the refused write stands"


def _add_index(module):
    return lambda phase, index: module.kept.add_(index)


def test_a_buffer_that_changes_its_shape_is_the_last_microbatchs_also_in_later_steps():
    module = _Buffers()
    overlay = _overlay(module)

    def longer(phase, index):
        module.still = torch.full((7,), float(index))

    with pytest.warns(UserWarning, match="different values in 'still'"):
        _run(overlay, (1, 1), longer)
    assert module.still.tolist() == [1.0] * 7
    _run(overlay, (1, 1), lambda _, index: module.still.add_(index + 1))
    assert module.still.tolist() == [3.0] * 7
    # another is first written later: the ranks agree anew
    _run(overlay, (1, 1), _add_index(module))
    assert module.still.tolist() == [3.0] * 7 and module.kept.tolist() == [0.5] * 3


def test_a_buffer_that_has_another_shape_on_another_rank_is_this_ranks_last():
    module = _Buffers()
    overlay = _overlay(module, Share(left=frozenset({"kept"}), weight=1.0))
    _run(overlay, (1, 1), _add_index(module), 4.0)
    assert module.kept.tolist() == [1.0] * 3


def test_what_a_failed_step_has_written_is_not_what_the_next_one_starts_from():
    module = _Buffers()
    overlay = _overlay(module)
    overlay.begin((1, 1))
    overlay.resume(0)
    module.kept += 5.0  # it fails before it pauses
    overlay.abandon()
    overlay.put_back()
    assert _found(overlay, module, _in_place)[:2] == [0.0, 0.0]


@pytest.mark.parametrize("write", [_in_place, _assigned])
def test_a_buffer_of_several_modules_is_refused_when_it_is_written(write):
    module = _Buffers()
    module.inner = nn.Module()
    module.inner.register_buffer("shared", module.kept)
    overlay = _overlay(module)
    _found(overlay, module, None)
    with pytest.raises(UnitUseError, match="'kept', which several modules share"):
        _found(overlay, module, write)


def test_a_rank_without_samples_has_written_nothing():
    module = _Buffers()
    overlay = _overlay(module)
    _found(overlay, module, _in_place)
    overlay.begin(())
    overlay.finish()
    assert not overlay.code


def test_integers_beyond_the_precision_of_floats_arrive_exactly():
    module = _Buffers()
    module.register_buffer("bits", torch.tensor([2**53 + 1, -(2**62) - 3, -1]))
    wanted = module.bits + 2
    _run(_overlay(module), (3, 1), lambda *_: module.bits.add_(2))
    assert torch.equal(module.bits, wanted)


def test_summed_buffers_add_up_and_other_integers_are_refused():
    module = _Buffers()
    module.register_buffer("count", torch.tensor([5]))
    overlay = _overlay(module)
    overlay.buffers.sum_up(["cou*"])
    _run(overlay, (3, 1), lambda _, index: module.count.add_(index + 1))
    assert module.count.tolist() == [8]
    with pytest.raises(UnitUseError, match="in the integer buffer 'count'"):
        _run(_overlay(module), (3, 1), lambda _, index: module.count.add_(index + 1))
