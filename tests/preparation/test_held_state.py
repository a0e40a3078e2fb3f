"""Plans count on the state that the user's optimizers hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_cephalo.adapters.held_state import OptimizerFacts, held_by_unit
from lightning_cephalo.plan import InfeasibleError, Problem, RankProfile, StateBytes, solve
from lightning_cephalo.plan.state_homes import StateHome, state_homes
from lightning_cephalo.preparation.prepare import with_optimizers
from lightning_cephalo.sharding.contents import Contents
from lightning_cephalo.sharding.discovery import UnitKind

SIZES = (16, *[32] * 8)


class _Unit:
    """Of one trained parameter in rows of four elements, and a frozen one."""

    def __init__(self, size: int, kind: UnitKind) -> None:
        self.kind = kind
        self.parameter = nn.Parameter(torch.zeros(size // 4, 4))
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)
        context: Any = None
        contents = Contents(("trained",), ((size // 4, 4),), torch.float32, context)
        self.flats = self.trained = [SimpleNamespace(contents=contents, trainable=True)]

    def named_sharded(self) -> list[tuple[str, nn.Parameter]]:
        return [("trained", self.parameter), ("frozen", self.frozen)]


def _model() -> Any:
    kinds = [UnitKind.ROOT, *[UnitKind.BLOCK] * (len(SIZES) - 1)]
    units = [_Unit(size, kind) for size, kind in zip(SIZES, kinds, strict=True)]
    flats = [flat for unit in units for flat in unit.flats]
    return SimpleNamespace(units=units, flats=flats)


def _parameters(model: Any) -> list[nn.Parameter]:
    return [parameter for unit in model.units for _, parameter in unit.named_sharded()]


OPTIMIZERS: list[tuple[Any, float]] = [
    (lambda p: SGD(p, lr=0.1), 0),
    (lambda p: SGD(p, lr=0.1, momentum=0.9), 4),
    (Adagrad, 4),
    (Adam, 8),
    (lambda p: Adam(p, capturable=True), 8),
    (lambda p: Adam(p, lr=torch.tensor(0.1), foreach=True, capturable=True), 8),
    (lambda p: AdamW(p, amsgrad=True, fused=True), 12),
    (NAdam, 8),
    (Rprop, 8),
    (RMSprop, 4),
    (lambda p: RMSprop(p, centered=True, momentum=0.9), 12),
    (Adafactor, 8),  # not known: as of Adam
]


@pytest.mark.parametrize(("optimizer", "expected"), OPTIMIZERS)
def test_the_bytes_of_state_are_those_that_the_optimizer_makes(optimizer, expected):
    model = _model()
    own: Optimizer = optimizer(_parameters(model))
    assert {unit.state_bytes for unit in held_by_unit([own], model)} == {expected}
    if isinstance(own, Adafactor) or own.defaults.get("capturable"):
        return
    for parameter in _parameters(model):
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    own.step()
    own.step()
    for unit, counted in zip(model.units, held_by_unit([own], model), strict=True):
        made = [v for v in own.state[unit.parameter].values() if isinstance(v, torch.Tensor)]
        held = sum(value.nbytes for value in made if value.shape == unit.parameter.shape)
        assert counted.elements == unit.parameter.numel() and counted.parameter_bytes == 4
        assert counted.elements * counted.state_bytes == held


def test_groups_count_where_they_are():
    model = _model()
    held = [unit.parameter for unit in model.units]
    groups = [{"params": held[:1], "amsgrad": True}, {"params": held[1:2]}]
    # two moments for what nobody trains, as a group may be added
    found = held_by_unit([Adam(groups)], model)
    assert [unit.state_bytes for unit in found] == [12, 8, *[8] * 7]


class _NotCopied:
    """An attribute of the user's, such as one that holds the whole data."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("It takes too long.")


def test_counting_calls_no_hooks_and_copies_no_attributes():
    model, called = _model(), []
    own: Any = AdamW(_parameters(model))
    own.data = _NotCopied()
    handle = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        assert {unit.state_bytes for unit in held_by_unit([own], model)} == {8}
    finally:
        handle.remove()
    assert not called and not own.state


def _problem(capacity: float, **fields: Any) -> Problem:
    rank = RankProfile(
        "a",
        (1.0, 1.5),
        (1.0, 1.5),
        (0.0, 0.0),
        (10.0, 400.0),
        capacity,
        host_capacity_bytes=5000.0,
        to_device_bytes_per_s=1e3,
        to_host_bytes_per_s=1e3,
    )
    given = {
        "state": StateBytes(12.0 * sum(SIZES)),
        "global_batch_size": 2,
        "unit_parameters": SIZES,
    }
    return Problem([rank], 8, **{**given, "moment_bytes": 8.0, **fields})


def _counted(problem: Problem, optimizer: Any) -> Problem:
    """Return the problem with what an optimizer of the model holds."""
    model = _model()
    model.control = SimpleNamespace(gather=lambda own: [own])
    facts = OptimizerFacts.of([optimizer(_parameters(model))], model, VIEW)
    return with_optimizers(problem, model, facts)


VIEW: Any = SimpleNamespace(module=SimpleNamespace(automatic_optimization=True))
AMSGRAD = lambda p: Adam(p, amsgrad=True)  # noqa: E731


def test_plans_count_on_what_the_optimizer_holds():
    problem = _problem(10_000.0)
    before = solve(problem)
    for optimizer, each in ((AMSGRAD, 12), (Adam, 8), (lambda p: SGD(p, lr=0.1), 0)):
        counted = _counted(problem, optimizer)
        more = (each - 8) * sum(SIZES) + max(0, each - 8) * 4  # and a row
        assert solve(counted).ranks[0].memory_bytes == before.ranks[0].memory_bytes + more
        assert counted.state.held_bytes == problem.state.held_bytes + (each - 8) * sum(SIZES)
        assert counted.moment_bytes == each
    assert _counted(problem, Adafactor) == problem  # which holds an amount that is not known


def test_a_plan_has_memory_for_the_optimizers_state():
    # 3264 bytes of state with two moments, 4352 with three: two samples at once no more
    problem = _problem(4500.0)
    assert solve(problem).ranks[0].microbatch_sizes == (2,)
    (rank,) = solve(_counted(problem, AMSGRAD)).ranks
    assert rank.microbatch_sizes == (1, 1) and rank.memory_bytes <= 4500.0
    with pytest.raises(InfeasibleError):
        solve(_counted(_problem(3800.0), AMSGRAD))


def test_state_that_moves_is_planned_for_what_the_optimizer_holds():
    moves = _problem(2400.0, optimizer_offload="auto", offloads_boundaries=False)
    assert solve(moves).moves_state
    # it has no state, and fits
    assert not solve(_counted(moves, lambda p: SGD(p, lr=0.1))).moves_state
    (rank,) = solve(_counted(moves, AMSGRAD)).ranks
    assert rank.moves_state and rank.memory_bytes <= 2400.0
    away = round((1 - rank.resident_fraction) * sum(SIZES))
    assert 12 * away - 1 <= rank.state_host_bytes <= 5000.0


@pytest.mark.parametrize(
    ("change", "late", "stays"),
    [
        (lambda own: None, "", ""),
        (lambda own: own.register_step_pre_hook(lambda *_: None), "hooks of Adam", ""),
        (lambda own: setattr(own, "step", print), "Adam.step is replaced", "Adam.step is replaced"),
    ],
)
def test_all_ranks_count_on_what_one_rank_finds(change, late, stays):
    model = _model()
    own = Adam(_parameters(model))
    change(own)
    other = ("", "", 8.0)
    model.control = SimpleNamespace(gather=lambda found: [other, found])
    facts = OptimizerFacts.of([own], model, VIEW)
    assert (facts.late, facts.stays, facts.each_bytes) == (late, stays, 8)


FIRST_AMSGRAD = lambda p: Adam([{"params": p[:10], "amsgrad": True}, {"params": p[10:]}])  # noqa: E731
LAST_AMSGRAD = lambda p: Adam([{"params": p[:10]}, {"params": p[10:], "amsgrad": True}])  # noqa: E731


@pytest.mark.parametrize(
    "optimizer", [FIRST_AMSGRAD, LAST_AMSGRAD, lambda p: Adam(p[:10]), lambda p: Adam(p[10:])]
)
@pytest.mark.parametrize("capacity", [2100.0, 2500.0, 2700.0])
def test_no_device_holds_more_than_planned_where_units_differ(optimizer, capacity):
    problem = _problem(capacity, optimizer_offload="auto", offloads_boundaries=False)
    counted = _counted(problem, optimizer)
    (rank,) = solve(counted).ranks
    homes = state_homes(SIZES, rank.resident_fraction, rank.host_update_fraction)
    model = _model()
    counted_units = held_by_unit([optimizer(_parameters(model))], model)
    held = [own.elements * own.state_bytes for own in counted_units]

    def on_device(state: list[float]) -> float:
        pairs = list(zip(state, homes, strict=True))
        streamed = [own for own, home in pairs if home is StateHome.STREAMED]
        resident = [own for own, home in pairs if home is StateHome.RESIDENT]
        return sum(resident) + 2 * max(streamed, default=0.0)

    assert rank.moves_state and rank.memory_bytes <= capacity
    assert on_device(held) <= on_device([counted.moment_bytes * size for size in SIZES])
