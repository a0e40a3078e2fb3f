"""Shares of optimizer state mean the same units for the planner and for every rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.accelerator.cgroup import memory_limit
from lightning_cephalo.accelerator.cpu import Cpu
from lightning_cephalo.accelerator.host import USABLE_SHARE, host_share
from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.plan import (
    InfeasibleError,
    Plan,
    PlanError,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
    solve,
)
from lightning_cephalo.plan.moving import choices
from lightning_cephalo.plan.state_homes import host_bytes
from lightning_cephalo.preparation import limits
from lightning_cephalo.preparation.host_state import HostState
from lightning_cephalo.preparation.limits import HostMemory, Limits
from lightning_cephalo.preparation.options import Options, Planner
from lightning_cephalo.sharding.discovery import UnitKind

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

    contents: Any
    cut: Any
    trainable: bool = True


def _cut(rows: int, width: int, trainable: bool = True, kind: Any = UnitKind.BLOCK) -> Any:
    ends = [round(sum(SHARES[:count]) * rows) * width for count in range(len(SHARES) + 1)]
    sizes = tuple(end - start for start, end in itertools.pairwise(ends))
    parameter = nn.Parameter(torch.empty(rows, width, device="meta"), requires_grad=trainable)
    named = [("weight", parameter)]
    cut = SimpleNamespace(sizes=sizes, layout=True)
    flats = [_Flat(SimpleNamespace(numel=rows * width), cut, trainable)]
    trained = flats if trainable else []
    return SimpleNamespace(flats=flats, trained=trained, kind=kind, named_sharded=lambda: named)


def _all_cut() -> list[Any]:
    root, *blocks = SHAPES
    return [_cut(*root, kind=UnitKind.ROOT), *(_cut(*shape) for shape in blocks)]


def _model_of(units: list[Any]) -> Any:
    return SimpleNamespace(
        units=units,
        accelerator=accelerator_of(torch.device("cpu")),
        of_kind=lambda kind: [unit for unit in units if unit.kind is kind],
    )


def test_ranks_whose_rows_are_cut_differently_move_the_units_that_the_planner_has():
    units = [*_all_cut(), _cut(16, 64, False)]
    model = _model_of(units)
    whole = (*(rows * width for rows, width in SHAPES), 0)
    problem = Problem(
        [RANK],
        len(SHAPES),
        state=StateBytes(16.0 * sum(whole)),
        global_batch_size=1,
        optimizer_offload="auto",
        unit_parameters=whole,
        moment_bytes=8.0,
    )
    state = HostState(model, HostMemory(1e9), 0)
    parameters = [unit.named_sharded()[0][1] for unit in units]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "amsgrad": True}]
    optimizers = [torch.optim.Adam(groups)]
    for moved in choices(problem, RANK):
        part = {
            "resident_fraction": moved.resident_fraction,
            "host_update_fraction": moved.host_update_fraction,
        }
        plan = Plan(tuple(RankPlan((1,), share, **part) for share in SHARES))
        found = state.predicted(plan, [RankMemory()] * len(SHARES), optimizers)
        for rank, memory in enumerate(found):
            rows = [SHARES[rank] * size for size in whole]
            expected = sum(
                host_bytes(size, home, 8.0 if unit < 3 else 12.0)
                for unit, (size, home) in enumerate(zip(rows, moved.homes, strict=True))
            )
            expected = pytest.approx(expected, abs=64 * len(whole)) if plan.moves_state else None
            assert memory.host_bytes == expected, (rank, moved)
        assert not plan.moves_state or found[-1].host_bytes == 0


# -- control groups --------------------------------------------------------------------------------


class _Apart(Cpu):
    """A CPU that takes its host for another one's, as a GPU does."""

    host_is_apart = True


def _limits(folder: Path, monkeypatch: Any, limit: int, used: int, cap: Any = None) -> Limits:
    """The limits of one of two ranks in a container with such a limit."""
    (folder / "cgroup").write_text("0::/\n")
    mount = folder / "mount"
    mount.mkdir(exist_ok=True)
    (mount / "memory.max").write_text(f"{limit}\n")
    (mount / "memory.current").write_text(f"{used}\n")
    read = partial(memory_limit, folder / "cgroup", mount)
    monkeypatch.setattr(limits, "host_share", partial(host_share, limit_of=read))
    monkeypatch.setattr(limits, "_copy_rate", lambda accelerator: 1e9)
    options = Options(planner=Planner(host_memory_cap=cap))
    return limits.read_limits(_Apart(torch.device("cpu")), 2, 0, options)


SIZES = (0, *[2**18] * 16)
# 12 bytes of each of 4 Mi parameters, 8 of them moments; the device has 24 MiB
MOVING = Problem(
    [replace(RANK, capacity_bytes=24.0 * 2**20, host_capacity_bytes=0.0)],
    len(SIZES) - 1,
    state=StateBytes(12.0 * sum(SIZES)),
    global_batch_size=1,
    optimizer_offload="auto",
    unit_parameters=SIZES,
    moment_bytes=8.0,
)


def test_plans_obey_the_control_groups_limit_or_name_it(tmp_path, monkeypatch):
    # without a cap, a rank has a half of what is free: of 128 MiB used to a quarter, 19.2 MiB
    for limit, fits in ((2**27, False), (2**28, True)):
        own = _limits(tmp_path, monkeypatch, limit, limit // 4)
        share = limit * 0.75 * USABLE_SHARE / 2 / 2
        assert own.host.capacity_bytes == share
        problem = limits.with_host_memory(MOVING, [own.host], boundaries=False)
        if fits:
            (rank,) = solve(problem).ranks
            assert 28 * 2**20 < (rank.state_host_bytes or 0) <= share
            continue
        with pytest.raises(InfeasibleError) as raised, limits.named_where_nothing_fits([own]):
            solve(problem)
        assert "more host memory" in str(raised.value)
        name = f"its control group ({tmp_path}/mount/memory.max: 128.0 MiB)"
        assert f"is limited by {name}. A larger limit may do." in str(raised.value)
    with pytest.raises(PlanError, match=r"host_memory_cap .* by its control group"):
        _limits(tmp_path, monkeypatch, 2**28, 0, 2**29)


def test_a_given_plan_that_asks_more_than_the_control_group_allows_names_it(tmp_path, monkeypatch):
    own = _limits(tmp_path, monkeypatch, 2**20, 0)
    units = _all_cut()
    model = _model_of(units)
    state = HostState(model, own.host, 0)
    optimizers = [torch.optim.Adam([unit.named_sharded()[0][1] for unit in units])]
    plan = Plan((RankPlan((1,), 1.0, resident_fraction=0.0),))
    said = r"may use 0\.\d MiB.* limited by its control group \(.*memory\.max: 1\.0 MiB\)"
    with pytest.raises(HostMemoryError, match=said):
        state.check_room(plan.ranks[0], optimizers)
