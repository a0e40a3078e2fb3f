"""Collectives are timed as steps run them, and gradients that travel are counted."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from launch import run_ranks
from torch import nn

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.execution.sharded_model import Dtypes, ShardedModel
from lightning_cephalo.plan import Problem, RankProfile, StateBytes
from lightning_cephalo.plan.program import Operation, Visit, compile_step
from lightning_cephalo.profiling.memory_model import state_of
from lightning_cephalo.profiling.network import mean_times, with_network_times
from lightning_cephalo.ranks.groups import Groups
from lightning_cephalo.sharding.discovery import UnitKind
from lightning_cephalo.sharding.unit import UnitState

PLENTY = 1e9


UNIT_BYTES = 4 * (8 * 8 + 8)


def _model(reduce_dtype: torch.dtype | None = None) -> ShardedModel:
    return ShardedModel(
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]),
        Groups.create(timedelta(seconds=100)),
        accelerator_of(torch.device("cpu")),
        fractions=[0.5, 0.3, 0.2],
        units=[nn.Linear],
        dtypes=Dtypes(reduce=reduce_dtype),
    )


def _reducing(model: ShardedModel) -> tuple[float, float]:
    """Return what full gradients take, and what ranks receive into, in units."""
    gradients = model.gathered_gradient_bytes / UNIT_BYTES
    # in addition to parameters, gradients and two moments
    received = (state_of(model)[0].held_bytes - 4 * 3 * UNIT_BYTES) / UNIT_BYTES
    return gradients, received


def _begun(rank: int) -> tuple[list[tuple[str, int]], tuple[float, float, float | None]]:
    """Return what each of four passes calls of which unit, and the times by a clock of waits."""
    model, called, now_s = _model(), [], 0.0
    waits_s = {"wait_gather": 4e-3, "wait_reduce": 9e-3}

    def noting(number: int, name: str) -> Callable[..., None]:
        do = getattr(model.units[number], name)

        def note(*given: Any, **named: Any) -> None:
            nonlocal now_s
            if name != "start_gather" or model.units[number].state is UnitState.SHARDED:
                called.append((name, number))  # a wait begins what has not begun
            now_s += waits_s.get(name, 0.0)
            do(*given, **named)

        return note

    for number in (1, 2, 3):
        for name in ("start_gather", "wait_gather", "start_reduce", "wait_reduce"):
            setattr(model.units[number], name, noting(number, name))
    times = mean_times(model, lambda: now_s, model.of_kind(UnitKind.BLOCK))
    once = called[: len(called) // 4]
    assert called == 4 * once
    return once, (times.gather_s, times.reduce_s, times.both_s)


def test_collectives_are_timed_in_the_order_of_a_step() -> None:
    program = compile_step([Visit(unit) for unit in (1, 2, 3)], 1, [True] * 4)
    names = {Operation.GATHER: "start_gather", Operation.REDUCE: "start_reduce"}
    ordered = [
        (names[one.operation], one.unit)
        for one in program.instructions
        if one.operation in names and one.unit
    ]
    for once, (gather_s, reduce_s, both_s) in run_ranks(3, _begun):
        assert [one for one in once if one[0].startswith("start")] == ordered
        assert (gather_s, reduce_s) == pytest.approx((4e-3, 9e-3))
        # a backward waits for each of the gathers, and for all reduces but the last one
        assert both_s == pytest.approx(3 * 4e-3 + 2 * 9e-3 - gather_s - reduce_s)


def _rounding(rank: int) -> list[tuple[float, float]]:
    return [_reducing(_model(dtype)) for dtype in (None, torch.float32, torch.bfloat16)]


def test_gradients_that_travel_as_bfloat16_count_half_and_with_their_copy_and_sum() -> None:
    for plain, same, rounded in run_ranks(3, _rounding):
        assert plain == same == (2.0, 3.0)
        assert rounded == (2.0 + 0.5, 3 * 0.5 + 1.0)


def _measured(rank: int) -> float:
    model, now_s = _model(), 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    rank = RankProfile("a", [1.0], [1.0], [1.0], [1.0], 1000.0)
    problem = Problem([rank] * 3, 3, state=StateBytes(1), global_batch_size=1)
    return with_network_times(problem, model, clock, PLENTY).links.gather_s


def test_a_gather_takes_its_part_of_the_time_of_all_units() -> None:
    # by this clock, all three gathers of a forward together take a second
    assert run_ranks(3, _measured) == [pytest.approx(1 / 3)] * 3
