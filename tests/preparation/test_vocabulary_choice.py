"""Where the plan may choose, the shorter step decides whether a vocabulary stays cut."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_cut_vocabulary import CUT, WHOLE

from lightning_cephalo.common.errors import InfeasibleError, ProfilingError
from lightning_cephalo.plan import Plan, RankPlan
from lightning_cephalo.preparation import vocabulary_choice
from lightning_cephalo.preparation.limits import Limits
from lightning_cephalo.preparation.options import Options
from lightning_cephalo.preparation.prepare import Job

SHORT = replace(CUT, ranks=tuple(replace(rank, columns_s=0) for rank in CUT.ranks))
SLOW_TAIL = replace(WHOLE, root_gather_s=100)


class Model:
    """What the choice needs of a sharded model of one rank."""

    def __init__(self, *tables: str) -> None:
        self.units = [SimpleNamespace(vocabulary=tables)]
        self.control = SimpleNamespace(
            rank=0, broadcast=lambda value: value, together=lambda doing, run: run()
        )
        self.is_cut = bool(tables)

    def cut_vocabulary(self, is_cut: bool) -> None:
        self.is_cut = is_cut and bool(self.units[0].vocabulary)


def job(**options: Any) -> Job:
    given = {"vocabulary_sharding": "auto", "verbose": False, **options}
    return Job(Options(**given), (Limits.none(),), 4)


def chosen(monkeypatch, cut, whole, *tables, **options):
    model, measured = Model(*tables), []
    monkeypatch.setattr(vocabulary_choice, "check_capacities", lambda *_: None)

    def measure(own: Job) -> Any:
        measured.append((own.options.vocabulary_sharding, model.is_cut))
        found = cut if own.options.vocabulary_sharding else whole
        if isinstance(found, Exception):
            raise found
        return found

    planned = vocabulary_choice.measured_and_planned(job(**options), model, measure)
    assert planned.job.options.vocabulary_sharding == model.is_cut
    assert (planned.plan.vocabulary_sharding is True) == model.is_cut
    return planned, measured


@pytest.mark.parametrize(
    ("cut", "whole", "is_cut", "said"),
    [
        (CUT, WHOLE, False, "is gathered whole: 21 s a step, and 24.8 s cut."),
        (CUT, SLOW_TAIL, True, "stays cut: "),
        # no shorter by a fiftieth
        (replace(SHORT, meeting_forward_s=0), replace(WHOLE, root_gather_s=0.6), False, "whole"),
        (CUT, replace(WHOLE, gathered_bytes=2000), True, "Whole, it fails: Memory binds"),
        (CUT, ProfilingError("no rank has room.\nMore."), True, "Whole, it fails: no rank has"),
        (ProfilingError("module.weight is used"), WHOLE, False, "Cut, it fails: module.weight"),
    ],
)  # fmt: skip
def test_the_shorter_step_wins_and_a_way_that_fails_leaves_the_other(
    monkeypatch, cut, whole, is_cut, said
):
    planned, measured = chosen(monkeypatch, cut, whole, "table")
    assert planned.job.options.vocabulary_sharding is is_cut
    assert measured == [(False, False), (True, True)]
    assert len(planned.notes) == 1 and said in planned.notes[0]


def test_what_fails_both_ways_says_why_it_fails_whole(monkeypatch):
    cut, whole = (replace(each, gathered_bytes=2000) for each in (CUT, WHOLE))
    with pytest.raises(InfeasibleError, match="the gathered buffers that every rank"):
        chosen(monkeypatch, cut, whole, "table")


def test_a_lost_rank_ends_the_choice(monkeypatch):
    lost = ProfilingError("lost")
    lost.__cause__ = RuntimeError("Connection closed by peer")
    with pytest.raises(ProfilingError, match="lost"):
        chosen(monkeypatch, CUT, lost, "table")


def test_models_without_tables_and_settled_options_are_measured_once(monkeypatch):
    planned, measured = chosen(monkeypatch, CUT, WHOLE)
    assert len(measured) == 1 and "no embedding can stay cut" in planned.notes[0]
    planned, measured = chosen(monkeypatch, CUT, WHOLE, "table", vocabulary_sharding=True)
    assert len(measured) == 1 and planned.notes == ()


@pytest.mark.parametrize("says", [True, False, None])
def test_a_given_plan_says_whether_it_stays_cut(says):
    model = Model("table")
    plan = Plan((RankPlan((4,), 1.0),), vocabulary_sharding=says)
    settled = vocabulary_choice.as_planned(replace(job(), plan=plan), model)
    assert settled.options.vocabulary_sharding is model.is_cut is (says is True)
