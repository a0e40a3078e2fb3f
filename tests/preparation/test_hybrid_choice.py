"""Where the plan may choose, the shorter step decides whether each node holds the whole state."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_cephalo.accelerator import Device
from lightning_cephalo.common.errors import InfeasibleError, ProfilingError
from lightning_cephalo.plan import Problem, RankProfile
from lightning_cephalo.preparation import hybrid_choice, planned
from lightning_cephalo.preparation.limits import Limits
from lightning_cephalo.preparation.options import Options
from lightning_cephalo.preparation.prepare import Job

GROUPS = (0, 0, 1)
RANK = RankProfile("card", [1, 2], [2, 4], [1, 2], [10, 20], 300)
# gathers of 8 cross between nodes; inside of a node they take 1
TOGETHER = Problem(
    [RANK] * 3,
    2,
    state_bytes=240,
    global_batch_size=6,
    gather_s=8,
    reduce_s=8,
    root_gather_s=4,
    root_reduce_s=4,
    fill_s=16,
)
GROUPED = replace(
    TOGETHER,
    gather_s=1,
    reduce_s=10,
    root_gather_s=0.5,
    root_reduce_s=5,
    fill_s=11,
    hybrid_sharding=True,
    state_groups=GROUPS,
)
SLOW = replace(GROUPED, gather_s=20)
COMPUTING = replace(TOGETHER, gather_s=0, reduce_s=0, root_gather_s=0, root_reduce_s=0, fill_s=0.1)


NUMEL, BEFORE = 24, (0.2, 0.3, 0.5)


class Model:
    """What the choice needs of a sharded model of three ranks; this one shares a node."""

    def __init__(self, runs_on_device: bool = False) -> None:
        self.control = SimpleNamespace(
            rank=0, broadcast=lambda value: value, together=lambda doing, run: run(), all=bool
        )
        self.backend = SimpleNamespace(runs_on_device=runs_on_device)
        self.flats = [SimpleNamespace(numel=2 * NUMEL, master_dtype=torch.float32)]
        self.gathered_bytes = 0
        self.state_groups: tuple[int, ...] = ()
        self.fractions = BEFORE

    def group_state(self, state_groups: tuple[int, ...], fractions: Any) -> None:
        self.state_groups, self.fractions = state_groups, tuple(fractions)


def chosen(
    monkeypatch, grouped, together=TOGETHER, model=None, nodes=(4, 4, 7), capacity=1000, **options
):
    model, measured = model or Model(), []
    monkeypatch.setattr(planned, "check_capacities", lambda *_: None)

    def measure(own: Job, known: Any = None) -> Any:
        measured.append((own.state_groups, model.state_groups, known is not None))
        found = grouped if own.state_groups else together
        if isinstance(found, Exception):
            raise found
        return found

    given = {"hybrid_sharding": "auto", "verbose": False, **options}
    limits = replace(Limits.none(), device=Device("card", capacity_bytes=capacity))
    job = Job(Options(**given), (limits,) * 3, 6, nodes=nodes)
    found = hybrid_choice.measured_and_planned(job, model, measure)
    assert found.plan.state_groups == found.job.state_groups == model.state_groups
    assert model.state_groups or model.fractions == BEFORE
    return found, measured


@pytest.mark.parametrize(
    ("grouped", "is_grouped", "said"),
    [
        (GROUPED, True, "Each node holds the whole state (hybrid sharding): 36.5 s a step, and 52"),
        (SLOW, False, "hold the state together: 52 s a step, and 70.5 s with hybrid sharding."),
        (replace(GROUPED, state_bytes=2000), False, "it fails: Memory binds in a group"),
        (ProfilingError("no rank has room.\nMore."), False, "it fails: no rank has room."),
    ],
)
def test_the_shorter_step_wins_and_a_way_that_fails_leaves_the_other(
    monkeypatch, grouped, is_grouped, said
):
    planned, measured = chosen(monkeypatch, grouped)
    assert planned.job.options.hybrid_sharding is bool(planned.job.state_groups) is is_grouped
    # the second time the ranks' own measurements are known
    assert measured == [((), (), False), (GROUPS, GROUPS, True)]
    assert len(planned.notes) == 1 and said in planned.notes[0]


def test_what_needs_the_least_memory_has_to_be_possible(monkeypatch):
    with pytest.raises(InfeasibleError):
        chosen(monkeypatch, GROUPED, replace(TOGETHER, state_bytes=2000))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"together": COMPUTING}, ": 14.1 s a step, and with hybrid sharding 14 s or more."),
        ({"nodes": (4, 4, 4)}, "all 3 ranks are on one node. Nodes are told apart by"),
        ({"model": Model(runs_on_device=True)}, "over gloo only"),
        ({"capacity": 4 * NUMEL - 1}, "a node has no room"),
        ({"optimizer_offload": "auto"}, "optimizer_offload does not work"),
    ],
)
def test_where_it_is_no_choice_nothing_is_measured_twice(monkeypatch, given, said):
    planned, measured = chosen(monkeypatch, GROUPED, **given)
    assert planned.job.options.hybrid_sharding is False
    assert len(measured) == 1 and said in planned.notes[0]


def test_a_settled_option_is_measured_once(monkeypatch):
    planned, measured = chosen(monkeypatch, GROUPED, hybrid_sharding=False)
    assert len(measured) == 1 and planned.notes == ()
