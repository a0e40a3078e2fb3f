"""Shares of optimizer state mean the same units for the planner and for every rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.plan import Plan, Problem, RankPlan, RankProfile
from lightning_cephalo.plan.moving import choices
from lightning_cephalo.plan.state_homes import home_bytes
from lightning_cephalo.preparation.host_state import HostState

RANK = RankProfile(
    "a",
    (1.0,),
    (1.0,),
    (1.0,),
    (1.0,),
    1e9,
    host_capacity_bytes=1e9,
    host_updated_parameters_per_s=1.0,
)
# Rows and their widths, of units of similar size; the last rank holds no rows.
SHAPES = [(16, 4096), (64, 1024), (8, 8192), (64, 1024), (8, 8192), (16, 4096), (1, 65536)]
SHARES = (0.3, 0.45, 0.25, 0.0)


@dataclass
class _Flat:
    """What the homes of state depend on."""

    numel: int
    sizes: tuple[int, ...]
    trainable: bool = True
    layout: bool = True


def _cut(rows: int, width: int, trainable: bool = True) -> Any:
    ends = [round(sum(SHARES[:count]) * rows) * width for count in range(len(SHARES) + 1)]
    sizes = tuple(end - start for start, end in itertools.pairwise(ends))
    return SimpleNamespace(flats=[_Flat(rows * width, sizes, trainable)])


def test_ranks_whose_rows_are_cut_differently_move_the_units_that_the_planner_has():
    units = [*(_cut(*shape) for shape in SHAPES), _cut(16, 64, False)]
    model: Any = SimpleNamespace(units=units, accelerator=SimpleNamespace(pins_host_memory=False))
    whole = (*(rows * width for rows, width in SHAPES), 0)
    problem = Problem(
        [RANK],
        len(SHAPES),
        state_bytes=16.0 * sum(whole),
        global_batch_size=1,
        optimizer_offload="auto",
        unit_parameters=whole,
        moment_bytes=8.0,
    )
    control: Any = None
    state = HostState(model, 1e9, control)
    optimizers = [torch.optim.Adam([torch.zeros(2, requires_grad=True)])]
    for moved in choices(problem, RANK):
        part = {
            "resident_fraction": moved.resident_fraction,
            "host_update_fraction": moved.host_update_fraction,
        }
        plan = Plan(tuple(RankPlan((1,), share, **part) for share in SHARES))
        found = state.predicted(plan, [RankMemory()] * len(SHARES), optimizers)
        for rank, memory in enumerate(found):
            rows = [
                sum(flat.sizes[rank] for flat in unit.flats if flat.trainable) for unit in units
            ]
            expected = home_bytes(rows, moved.homes, 8.0).host if plan.moves_state else None
            assert memory.host_bytes == expected, (rank, moved)
        assert not plan.moves_state or found[-1].host_bytes == 0
