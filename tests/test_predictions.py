"""The pure parts of benchmarks/predictions.py: plans that deal out a batch, and what a row says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_cephalo.plan import KeptCurves, Plan, Problem, RankPlan, RankProfile, StateBytes

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def problem(speeds, samples):
    def curve(speed):
        return [size / speed for size in range(1, samples + 1)]

    return Problem(
        ranks=[
            RankProfile(
                "",
                curve(speed),
                curve(speed),
                curve(speed),
                curve(1),
                100.0,
                kept=KeptCurves(curve(2 * speed), curve(0.5)),
            )
            for speed in speeds
        ],
        units=4,
        state=StateBytes(8.0),
        global_batch_size=samples,
        boundary_bytes=1.0,
        kept_bytes=2.0,
    )


@pytest.mark.parametrize(("speeds", "samples"), [((3, 1), 8), ((2, 1, 1), 8), ((3, 1), 16)])
def test_every_plan_shares_out_the_batch_and_is_predicted(speeds, samples):
    from predicting.plans import QUICK, cases

    made = cases(problem(speeds, samples), speeds)
    names = [case.name for case in made]
    assert len(set(names)) == len(names) >= 8
    assert set(QUICK) < set(names)
    for case in made:
        case.plan.check(world_size=len(speeds), global_batch_size=samples)
        assert case.plan.step_s > 0
        for rank in case.plan.ranks:
            assert rank.memory_bytes > 0 and rank.forward_s is not None
    plans = {case.name: case.plan for case in made}
    assert plans["last without data"].ranks[-1].microbatch_sizes == ()
    assert plans["state all on the last"].ranks[-1].state_fraction == 1.0
    assert plans["last offloads"].ranks[-1].offload
    assert plans["none recomputes"].step_s < plans["by speed, even state"].step_s


def outcome(name, predicted, measured):
    from predicting.measuring import Figures, Outcome

    plan = Plan((RankPlan((3,), 0.5), RankPlan((), 0.5)))
    return Outcome(name, plan, Figures(*predicted), Figures(*measured))


def test_summaries_take_every_rank_and_name_the_worst():
    from predicting.report import Differences, summaries

    good = outcome("good", (1.0, (1.0, 0.0), (10.0, 10.0)), (1.01, (1.02, 0.3), (10.0, 9.9)))
    bad = outcome("bad", (1.0, (1.0, 0.0), (10.0, 10.0)), (0.8, (0.98, 0.3), (10.4, 10.0)))
    assert Differences.of(bad).step == pytest.approx(-0.2)
    step, busy, memory = summaries({"model": [good, bad]})
    assert len(step.differences) == len(busy.differences) == 2  # nothing was predicted of the idle
    assert len(memory.differences) == 4
    assert step.worst == (pytest.approx(-0.2), "model: bad")
    assert step.median == pytest.approx(0.105)
    assert memory.worst == (pytest.approx(0.04), "model: bad")
    assert (step.holds, busy.holds, memory.holds) == (False, True, True)
