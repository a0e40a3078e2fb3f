"""The worked example of docs/planning.md, number by number."""

from __future__ import annotations

import pytest

from lightning_cephalo.offline.baselines import even
from lightning_cephalo.plan import Links, Problem, RankPlan, RankProfile, StateBytes, predict, solve

GIB = 2**30
SIZES = range(1, 5)
FAST = RankProfile(
    "fast",
    forward_s=[0.001 * (1 + size) for size in SIZES],
    backward_s=[0.002 * (1 + size) for size in SIZES],
    tail_s=[0.001 * size for size in SIZES],
    compute_bytes=[size * GIB for size in SIZES],
    capacity_bytes=10 * GIB,
)
SLOW = RankProfile(
    "slow",
    forward_s=[0.001 * (1 + 3 * size) for size in SIZES],
    backward_s=[0.002 * (1 + 3 * size) for size in SIZES],
    tail_s=[0.003 * size for size in SIZES],
    compute_bytes=[size * GIB for size in SIZES],
    capacity_bytes=12 * GIB,
)
EXAMPLE = Problem(
    [FAST, SLOW],
    units=10,
    links=Links(0.006, 0.006),
    state=StateBytes(12 * GIB),
    gathered_bytes=GIB,
    global_batch_size=8,
)


@pytest.mark.parametrize(
    ("fast", "slow", "step_s"),
    [
        ((4, 3), (1,), 0.277),
        ((3, 3), (2,), 0.246),
        ((3, 3), (1, 1), 0.246),
        ((4, 2), (2,), 0.246),
        ((3, 2), (3,), 0.309),
        ((4,), (4,), 0.402),
    ],
)
def test_the_candidates(fast, slow, step_s):
    found = predict(EXAMPLE, [RankPlan(fast, 0.4), RankPlan(slow, 0.6)])
    assert found.step_s == pytest.approx(step_s)


def test_the_plan():
    plan = solve(EXAMPLE)
    fast, slow = plan.ranks
    assert (fast.microbatch_sizes, slow.microbatch_sizes) == ((3, 3), (1, 1))
    assert plan.step_s == plan.bound_s == pytest.approx(0.246)
    assert (fast.state_fraction, slow.state_fraction) == pytest.approx((0.375, 0.625))
    assert fast.memory_bytes == pytest.approx(8.5 * GIB)
    assert slow.memory_bytes == pytest.approx(9.5 * GIB)


def test_even_sharding():
    plan = even(EXAMPLE)
    assert [rank.batch_size for rank in plan.ranks] == [4, 4]
    assert max(plan.ranks[0].microbatch_sizes) < 4
    assert plan.step_s == pytest.approx(0.402)
