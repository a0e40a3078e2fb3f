"""A stage's wave as a problem: what it holds, and what its collectives and crossings take."""

from __future__ import annotations

import dataclasses
import math

import pytest
from pipeline_cases import problem_of, rank

from lightning_cephalo.offline.pipeline.stages import (
    Stage,
    planned_times,
    stage_problem,
    with_shared_root,
)
from lightning_cephalo.plan import PlanError, RankPlan, predict, solve

TWO = [rank(2.0, 5000), rank(1.0, 5000)]


def _stage(*blocks: int, units: int = 4, regathers: bool = True, **more) -> Stage:
    values = {"is_first": False, "is_last": False, "waves": 4, "wave_samples": 2} | more
    return Stage(blocks, units, regathers, **values)


def test_memory_is_that_of_the_whole_step():
    problem = problem_of(TWO, TWO)
    for regathers, held in ((True, 2), (False, 4)):
        stage = stage_problem(problem, _stage(0, regathers=regathers))
        parts = [RankPlan((2,), 0.75), RankPlan((), 0.25)]
        memory = [part.memory_bytes for part in predict(stage, parts).ranks]
        # state and one reduce's buffer, full units, boundaries of 4 waves of 2 samples through 4
        # units and of one more wave from and to both neighbours, the peak of 2 samples
        state, buffers, boundaries = 4 * 160 + 40, held * 60, 2 * (4 * 4 + 2) * 2
        assert memory[0] == pytest.approx(0.75 * state + buffers + boundaries + 20)
        assert memory[1] == pytest.approx(0.25 * state + buffers)


def test_the_root_is_held_by_the_first_and_the_last_stage_only():
    problem = problem_of(TWO, TWO)
    middle, first, last = (
        stage_problem(problem, _stage(0, is_first=which == 1, is_last=which == 2))
        for which in range(3)
    )
    assert middle.state.held_bytes == 4 * 160 + 40
    assert first.state.held_bytes == last.state.held_bytes == middle.state.held_bytes + 80
    assert first.gathered_bytes == last.gathered_bytes == middle.gathered_bytes + 30
    assert (first.ranks[0].tail_s, last.ranks[0].tail_s) == ((0.0, 0.0), TWO[0].tail_s[:2])
    assert last.boundary_bytes < middle.boundary_bytes


def test_collectives_are_in_a_wave_only_where_it_gathers():
    problem = problem_of(TWO, TWO, TWO, between=10.0, inside=100.0)
    inner = stage_problem(problem, _stage(0))
    assert (inner.links.gather_s, inner.links.reduce_s) == pytest.approx((0.1, 0.2))
    wide = stage_problem(problem, _stage(0, 2))
    assert wide.links.gather_s == pytest.approx(3 / 4 * 2 + 0.01)
    held = stage_problem(problem, _stage(0, 2, regathers=False))
    assert (held.links.gather_s, held.links.reduce_s) == (0.0, 0.0)
    assert len(wide.ranks) == 4


def test_the_seconds_of_a_planned_stage():
    problem = problem_of(TWO, TWO, between=10.0, inside=100.0)
    stage = _stage(1, is_first=True, units=3)
    plan = solve(stage_problem(problem, stage))
    times = planned_times(problem, stage, plan)
    assert times.forward_s == max(part.forward_s for part in plan.ranks)
    assert times.wave_forward_s + times.wave_backward_s == pytest.approx(plan.step_s)
    assert (times.gather_s, times.reduce_s) == pytest.approx((0.1, 0.2))
    assert (times.ready_s, times.after_s) == pytest.approx((0.05, 0.1))
    assert times.update_s == pytest.approx((3 * 280 + 140) / 2 / 1e4)
    shared = with_shared_root(problem, (0,), stage.blocks, times)
    assert shared.ready_s == pytest.approx(times.ready_s + 1 + 0.01)
    assert shared.after_s == pytest.approx(times.after_s + 2 + 0.01)


def test_what_crosses_takes_the_slowest_link_of_two_groups():
    problem = problem_of(TWO, TWO, between=10.0)
    assert problem.crossing((0,), (1,), 5 * 2).wave_s == pytest.approx(5 * 2 / 10)
    assert problem.crossing((0,), (1,), 5 * 2).latency_s == 0.01


def test_updates_are_shared_by_memory_and_the_slowest_rank_counts():
    problem = problem_of([rank(1, 3000)], [rank(1, 1000)])
    assert problem.update_s((0, 1), 1e4) == pytest.approx(0.75)
    endless = problem_of([rank(1, math.inf)], [rank(1, 1000)])
    assert endless.update_s((0, 1), 1e4) == pytest.approx(1.0)
    assert problem.update_s((0, 1), 0.0) == 0.0


def test_blocks_have_the_ranks_of_the_whole_problem():
    problem = problem_of(TWO, TWO)
    words = "expected the 4 ranks of the whole problem in blocks, but got 3"
    with pytest.raises(PlanError, match=words):
        second = dataclasses.replace(problem.blocks[1], ranks=TWO[:1])
        dataclasses.replace(problem, blocks=(problem.blocks[0], second))
