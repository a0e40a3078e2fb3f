"""The baselines by their definitions."""

from __future__ import annotations

import math

import pytest

from lightning_cephalo.offline.baselines import BASELINES, even, proportional
from lightning_cephalo.plan import (
    InfeasibleError,
    KeptCurves,
    Links,
    Plan,
    Problem,
    RankProfile,
    StateBytes,
    predict,
    solve,
)


def rank(name="a", speed=1.0, sizes=8, capacity=math.inf, **more) -> RankProfile:
    """One second per sample and pass at speed 1, one byte per sample of a microbatch."""
    forward = [size / speed for size in range(1, sizes + 1)]
    return RankProfile(
        name,
        forward_s=forward,
        backward_s=[2 * own for own in forward],
        tail_s=[0.0] * sizes,
        compute_bytes=range(1, sizes + 1),
        capacity_bytes=capacity,
        **more,
    )


def problem(ranks, batch, state=0.0, units=1, **more) -> Problem:
    return Problem(ranks, units=units, state=StateBytes(state), global_batch_size=batch, **more)


def batches(plan: Plan) -> list[int]:
    return [part.batch_size for part in plan.ranks]


def fractions(plan: Plan) -> list[float]:
    return [part.state_fraction for part in plan.ranks]


def counts(plan: Plan) -> list[int]:
    return [len(part.microbatch_sizes) for part in plan.ranks]


# -- even ------------------------------------------------------------------------------------------


def test_even_deals_the_remainder_to_the_first_ranks():
    plan = even(problem([rank()] * 4, 10, state=8))
    assert batches(plan) == [3, 3, 2, 2]
    assert fractions(plan) == [0.25] * 4
    assert plan.step_s == predict(problem([rank()] * 4, 10, state=8), plan.ranks).step_s == 9


def test_even_shards_stay_gathered_where_cephalo_may_have_them_stay():
    """FSDP2 has the same option: a comparison must not count it as the planner's."""
    slow = {"units": 2, "links": Links(20, 20), "unresharded_bytes": 5}
    for baseline in (even, proportional):
        plans = [
            baseline(problem([rank(capacity=capacity)] * 2, 4, reshard_after_forward=asked, **slow))
            for capacity in (20, 5)
            for asked in ("auto", True)
        ]
        assert [plan.reshard_after_forward for plan in plans] == [False, True, True, True]
        # forwards 20 and 2; backwards 4 and 20, or 20 and 20
        assert [plan.step_s for plan in plans] == [46, 62, 62, 62]


def test_even_accumulates_until_the_smallest_rank_fits():
    # 4 of 8 bytes of state and at most 2 of compute
    plan = even(problem([rank(), rank("small", capacity=6)], 8, state=8))
    assert batches(plan) == [4, 4] and max(plan.ranks[1].microbatch_sizes) <= 2


def test_even_takes_the_fastest_microbatches_not_the_largest():
    slow_at_four = RankProfile("a", [1, 2, 3, 9], [1, 2, 3, 9], [0] * 4, [1] * 4, math.inf)
    plan = even(problem([slow_at_four], 4))
    assert max(plan.ranks[0].microbatch_sizes) < 4 and plan.step_s == 8


def test_even_uses_no_size_beyond_the_curves():
    plan = even(problem([rank(sizes=3), rank()], 8))
    assert batches(plan) == [4, 4] and max(plan.ranks[0].microbatch_sizes) <= 3
    with pytest.raises(
        InfeasibleError, match=r"Rank 1 \('none'\) .* cannot run 4 samples \(0 at most"
    ):
        even(problem([rank(), rank("none", sizes=0)], 8))


def test_even_leaves_ranks_without_samples_when_there_are_too_few():
    assert batches(even(problem([rank()] * 3, 2))) == [1, 1, 0]


def test_even_names_the_rank_that_does_not_fit():
    with pytest.raises(
        InfeasibleError, match=r"Rank 1 \('small'\) .* cannot run 1 samples \(0 at most"
    ):
        even(problem([rank(capacity=100), rank("small", capacity=3)], 2, state=8))


def test_even_keeps_activations_where_that_fits():
    keeps = rank(capacity=10, kept=KeptCurves([1.0] * 8, [5.0] * 8))
    for state, recomputes in ((8, False), (14, True)):
        plan = even(problem([keeps, keeps], 2, state=state))
        assert [part.recompute for part in plan.ranks] == [recomputes] * 2


# -- batch by speed --------------------------------------------------------------------------------


def test_proportional_batches_follow_speed_and_state_stays_even():
    plan = proportional(problem([rank(speed=3), rank()], 8, state=4))
    assert batches(plan) == [6, 2]
    assert fractions(plan) == [0.5, 0.5]


def test_proportional_rounds_by_largest_remainder():
    # shares of 10: 1.43, 2.86, 5.71
    plan = proportional(problem([rank(), rank(speed=2), rank(speed=4)], 10))
    assert batches(plan) == [1, 3, 6]


def test_proportional_gives_nothing_to_a_rank_that_can_take_none():
    assert batches(proportional(problem([rank(), rank(sizes=0)], 4))) == [4, 0]


def test_proportional_needs_room_for_even_state():
    asked = problem([rank(capacity=100), rank("small", capacity=3)], 4, state=8)
    with pytest.raises(InfeasibleError, match=r"Rank 1 \('small'\) .* even share of the state"):
        proportional(asked)
    assert solve(asked).global_batch_size == 4


def test_proportional_runs_one_microbatch_where_asked():
    asked = problem([rank(speed=3, sizes=8), rank()], 8, single_microbatch=True)
    assert counts(proportional(asked)) == [1, 1]


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=list(BASELINES))
def test_no_baseline_beats_the_solver(baseline):
    ranks = [rank(capacity=40), rank("b", speed=2.3, capacity=25), rank("c", speed=5, capacity=30)]
    for batch in (3, 7, 16):
        asked = problem(ranks, batch, state=30, gathered_bytes=1)
        try:
            plan = baseline(asked)
        except InfeasibleError:
            continue
        plan.check(world_size=3, global_batch_size=batch)
        assert plan.step_s >= solve(asked).bound_s * (1 - 1e-9)
        assert plan.backend and plan.solve_s is not None
