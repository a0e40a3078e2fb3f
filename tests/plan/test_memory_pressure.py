"""Plans for ranks that ran out of memory, and for batches that are loaded already."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from lightning_cephalo.plan import (
    InfeasibleError,
    KeptCurves,
    PlanError,
    Problem,
    RankProfile,
    StateBytes,
    predict,
    solve,
)
from lightning_cephalo.plan.memory_pressure import with_less_memory
from lightning_cephalo.plan.solver.solve import solve_if_possible


def _problem(draw: random.Random) -> Problem:
    def rank() -> RankProfile:
        second, size = draw.uniform(0.5, 4.0), draw.uniform(1.0, 8.0)
        curve = [second * n for n in range(1, 9)]
        used = [size * n for n in range(1, 9)]
        return RankProfile(
            "made up",
            curve,
            [3 * s for s in curve],
            curve,
            used,
            draw.uniform(60.0, 160.0),
            kept=KeptCurves([2 * s for s in curve], [2 * b for b in used]),
            host_capacity_bytes=draw.choice([0.0, 1000.0]),
        )

    return Problem(
        [rank(), rank(), rank()],
        units=4,
        state=StateBytes(
            120, reducing_bytes=draw.choice([0.0, 40.0]), updating_bytes=draw.choice([0.0, 80.0])
        ),
        global_batch_size=12,
        boundary_bytes=draw.uniform(0.0, 2.0),
        kept_bytes=draw.uniform(0.0, 4.0),
        gathered_bytes=10,
        unresharded_bytes=20,
        reshard_after_forward=draw.choice([True, False, "auto"]),
        single_microbatch=draw.choice([True, False]),
    )


def test_a_rank_that_ran_out_gets_less_each_time_and_the_others_stay():
    problem = _problem(random.Random(3))
    plan = solve(problem)
    predicted = predict(problem, plan).ranks[1].memory_bytes
    less = with_less_memory(problem, plan, [None, math.inf, None])
    assert less.ranks[1].capacity_bytes == pytest.approx(0.8 * predicted)
    assert less.ranks[0] == problem.ranks[0] and less.ranks[2] == problem.ranks[2]
    again = with_less_memory(less, solve(less), [None, 0.5 * predicted, None])
    assert again.ranks[1].capacity_bytes == pytest.approx(0.4 * predicted)


def test_plans_for_other_batches_keep_them_and_fit_where_any_does():
    found = missing = 0
    for seed in range(24):
        draw = random.Random(seed)
        problem = _problem(draw)
        try:
            plan = solve(problem)
        except InfeasibleError:
            continue
        same = solve_if_possible(problem, batches=[r.batch_size for r in plan.ranks])
        assert same is not None and same.step_s == pytest.approx(plan.step_s, rel=2e-3)
        cuts = sorted(draw.randrange(13) for _ in range(2))
        batches = [cuts[0], cuts[1] - cuts[0], 12 - cuts[1]]
        other = solve_if_possible(problem, batches=batches)
        if other is None:
            missing += 1
            assert not _some_fit(problem, batches), seed
            continue
        found += 1
        assert [rank.batch_size for rank in other.ranks] == batches
        if problem.single_microbatch:
            assert [len(rank.microbatch_sizes) for rank in other.ranks] == [1, 1, 1]
        assert problem.reshard_after_forward in ("auto", other.reshard_after_forward)
        for rank, profile in zip(predict(problem, other).ranks, problem.ranks, strict=True):
            assert rank.memory_bytes <= profile.capacity_bytes * (1 + 1e-6)
    assert found > 8 and missing > 1


def _some_fit(problem: Problem, batches: list[int]) -> bool:
    """Whether ranks that hold no state leave room for all of it, with the smallest microbatches."""
    if problem.single_microbatch and not all(batches):
        return False
    count = 1 if problem.single_microbatch else None
    return any(_room(problem.resharding(r), batches, count) for r in problem.reshard_choices)


def _room(problem: Problem, batches: list[int], count: int | None) -> bool:
    room = 0.0
    for profile, batch in zip(problem.ranks, batches, strict=True):
        n = batch if count is None else count
        largest = -(-batch // n) if n else 0
        inside = profile.compute_bytes[largest - 1] if largest and largest <= 8 else 0.0
        units = 4 if not profile.host_capacity_bytes or problem.boundary_bytes == 0 else 3
        own = profile.capacity_bytes - problem.fixed_bytes - inside
        own -= problem.boundary_bytes * min(units, 4) * batch
        if own < 0 or (n and largest > 8):
            return False
        room += own
    return room >= problem.state.most_bytes


def test_shares_go_where_there_is_room():
    profile = RankProfile("a", [1.0], [1.0], [1.0], [10.0], 50.0)
    ranks = [profile, replace(profile, capacity_bytes=200.0)]
    problem = Problem(ranks, units=1, state=StateBytes(100), global_batch_size=4, boundary_bytes=8)
    other = solve_if_possible(problem, batches=[4, 0])
    assert other is not None
    assert other.ranks[0].microbatch_sizes == (1, 1, 1, 1)
    assert other.ranks[0].state_fraction <= 0.08 + 1e-6
    with pytest.raises(InfeasibleError, match=r"No plan has room for the batches \[4, 0\]"):
        solve(replace(problem, state=replace(problem.state, held_bytes=220)), batches=[4, 0])
    with pytest.raises(PlanError, match=r"batches of 2 ranks that sum to 4, but got \[6, 0\]"):
        solve(problem, batches=[6, 0])


@pytest.mark.parametrize("offload", ["auto", True])
def test_state_moves_for_batches_that_are_loaded_where_devices_lack_room(offload):
    sizes = [1.0, 1.5, 2.0, 2.5]
    rank = RankProfile(
        "r",
        sizes,
        [2 * seconds for seconds in sizes],
        [0.1] * 4,
        [10.0, 20.0, 30.0, 40.0],
        450.0,
        host_capacity_bytes=1e5,
        to_device_bytes_per_s=1e4,
        to_host_bytes_per_s=1e4,
    )
    problem = Problem(
        [rank, rank],
        units=4,
        state=StateBytes(1320.0),
        global_batch_size=4,
        early_update=True,
        optimizer_offload=offload,
        unit_parameters=(10, 25, 25, 25, 25),
        moment_bytes=8.0,
    )
    plan = solve(problem)
    others = [other for other in ([3, 1], [2, 2], [1, 3]) if other != _batches(plan)]
    assert len(others) == 2 and plan.moves_state
    for batches in others:
        found = solve_if_possible(problem, batches=batches)
        assert found is not None and _batches(found) == batches and found.moves_state
        for part in predict(problem, found).ranks:
            assert part.memory_bytes <= rank.capacity_bytes * (1 + 1e-9)
        if offload is True:
            assert {rank.resident_fraction for rank in found.ranks} == {0.0}


def _batches(plan):
    return [rank.batch_size for rank in plan.ranks]
