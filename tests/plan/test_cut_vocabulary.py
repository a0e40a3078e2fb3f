"""A vocabulary that stays cut: its price in the closed form, and the plans that it leads to."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from plan_brute_force import partitions

from lightning_cephalo.common.errors import InfeasibleError
from lightning_cephalo.observe.report import plan_table
from lightning_cephalo.plan import Plan, PlanError, Problem, RankPlan, RankProfile, cost, solve
from lightning_cephalo.plan.cost import predict

FAST = RankProfile("fast", [1, 2], [2, 4], [1, 2], [10, 20], 1000, columns_s=4)
SLOW = RankProfile("slow", [2, 4], [4, 8], [2, 4], [10, 20], 1000, columns_s=12)
CUT = Problem(
    [FAST, SLOW],
    2,
    state_bytes=100,
    global_batch_size=4,
    boundary_bytes=1,
    vocabulary_sharding=True,
    meeting_forward_s=0.25,
    meeting_backward_s=0.5,
    hidden_bytes=30,
    meeting_bytes=15,
)
OF_MEETINGS = {"meeting_forward_s": 0, "meeting_backward_s": 0, "hidden_bytes": 0}
WHOLE = replace(
    CUT,
    ranks=tuple(replace(rank, columns_s=0) for rank in CUT.ranks),
    vocabulary_sharding=False,
    meeting_bytes=0,
    **OF_MEETINGS,
)


def test_time_and_memory_by_hand():
    ranks = [RankPlan((2,), 0.75), RankPlan((2,), 0.25)]
    cut, whole = predict(CUT, ranks), predict(WHOLE, ranks)
    assert [rank.columns_s for rank in cut.ranks] == [3, 3]
    assert cut.step_s == whole.step_s + 3 + 0.25 + 0.5
    # a microbatch of 20 bytes reuses what a meeting takes
    assert [rank.memory_bytes for rank in cut.ranks] == [
        rank.memory_bytes + 30 for rank in whole.ranks
    ]
    idle = predict(CUT, [RankPlan((2, 2), 1.0), RankPlan((), 0.0)])
    assert idle.ranks[0].columns_s == 4 and idle.ranks[1].memory_bytes == 30 + 15


def test_shares_of_the_state_follow_the_columns_and_break_no_cap():
    plan = solve(CUT)
    shares = [rank.state_fraction for rank in plan.ranks]
    assert shares == pytest.approx([0.75, 0.25], rel=1e-6) and plan.vocabulary_sharding is True
    assert [rank.columns_s for rank in plan.ranks] == pytest.approx([3, 3], rel=1e-6)
    assert "columns take 3 s" in str(plan_table(plan).caption)
    # with less room on the fast rank, which is the first one, each is at its limit
    small = replace(CUT, ranks=(replace(FAST, capacity_bytes=100), SLOW))
    held = predict(small, solve(small)).ranks
    assert held[0].memory_bytes <= 100
    assert solve(small).step_s > plan.step_s


def test_files_say_nothing_of_a_vocabulary_that_is_whole(tmp_path):
    assert not [name for name in WHOLE.to_dict() if "meeting" in name or "vocab" in name]
    assert "columns_s" not in WHOLE.to_yaml()
    CUT.save(tmp_path / "problem.yaml")
    assert Problem.load(tmp_path / "problem.yaml") == CUT
    assert Plan.from_json(solve(CUT).to_json()).vocabulary_sharding is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: replace(CUT, vocabulary_sharding=False), "meeting_forward_s: it is 0.25"),
        (lambda: replace(WHOLE, ranks=[FAST]), "columns_s: it is 4"),
        (lambda: replace(CUT, optimizer_offload=True), "expected False with vocabulary_sharding"),
        (lambda: predict(WHOLE, solve(CUT)), "measured with vocabulary_sharding=False"),
        (
            lambda: predict(CUT, replace(solve(WHOLE), vocabulary_sharding=False)),
            "measured with vocabulary_sharding=True",
        ),
    ],
)
def test_what_does_not_go_together_is_named(change, message):
    with pytest.raises(PlanError, match=message):
        change()


def test_what_does_not_fit_says_so():
    small = [replace(rank, capacity_bytes=60) for rank in CUT.ranks]
    # as measured: the optimizer has state, and the host has memory that a cut vocabulary cannot use
    small = [replace(rank, host_capacity_bytes=1000) for rank in small]
    measured = replace(CUT, ranks=small, unit_parameters=(2, 2, 2), moment_bytes=8)
    with pytest.raises(InfeasibleError, match="Memory binds") as refused:
        solve(measured)
    assert "optimizer_offload" not in str(refused.value)
    # a meeting is counted for the largest microbatches: smaller ones may fit, and so may none
    for change in ({}, {"meeting_bytes": 50}, {"global_batch_size": 40}):
        with pytest.raises(InfeasibleError, match="hidden states of all samples") as refused:
            solve(replace(measured, **change))
        said = str(refused.value)
        assert "30 bytes for hidden states" in said
        assert "A plan= with smaller microbatches" in said and "vocabulary_sharding=False" in said


# -- against every plan ---------------------------------------------------------------------------


def random_problem(seed: int) -> Problem:
    draw = random.Random(seed)

    def profile() -> RankProfile:
        longest = draw.randint(1, 2)
        curves = [[draw.uniform(0, 3) for _ in range(longest)] for _ in range(4)]
        columns_s = draw.choice([0.0, draw.uniform(0.1, 9)])
        return RankProfile("r", *curves, draw.uniform(8, 60), columns_s=columns_s)

    state = draw.choice([0.0, 20.0, 40.0])
    problem = Problem(
        [profile() for _ in range(draw.randint(1, 3))],
        draw.randint(1, 3),
        gather_s=draw.choice([0.0, 2.0]),
        reduce_s=draw.choice([0.0, 1.0]),
        state_bytes=state,
        updating_state_bytes=draw.choice([0.0, 4.0]),
        global_batch_size=draw.randint(1, 4),
        boundary_bytes=draw.choice([0.0, 1.0]),
        gathered_bytes=draw.choice([0.0, 2.0]),
        update_overhead_s=1.0,
        unit_update_s=0.1,
        even_gather_s=draw.choice([None, 0.5]),
        vocabulary_sharding=True,
        meeting_forward_s=0.3,
        hidden_bytes=draw.choice([0.0, 3.0]),
        meeting_bytes=draw.choice([0.0, 1.5]),
    )
    return problem.with_early_update() if draw.random() < 0.5 else problem


def least_step(problem: Problem) -> float | None:
    """The shortest step of all batches and shares."""
    even = problem.with_even_shares()
    steps = [_least(problem, 1.0), _least(even, 1 / len(problem.ranks))]
    return min((step for step in steps if step is not None), default=None)


def _least(problem: Problem, most_share: float) -> float | None:
    ways = [
        [
            (own, run)
            for own in range(problem.global_batch_size + 1)
            for run in partitions(own, list(range(1, profile.largest_microbatch_size + 1)))
        ]
        for profile in problem.ranks
    ]
    best = None
    for choice in itertools.product(*ways):
        if sum(own for own, _ in choice) != problem.global_batch_size:
            continue
        pairs = [(profile, run) for profile, (_, run) in zip(problem.ranks, choice, strict=True)]
        work = [cost.rank_work(problem, *pair) for pair in pairs]
        step_s = cost.step_time(problem, *(max(part) for part in zip(*work, strict=True)))
        rooms = [min(most_share, _room(problem, *pair)) for pair in pairs]
        if min(rooms) < 0 or math.fsum(rooms) < 1 - 1e-9:
            continue
        step_s += _columns_s([profile.columns_s for profile in problem.ranks], rooms)
        best = min(step_s, math.inf if best is None else best)
    return best


def _room(problem: Problem, profile: RankProfile, run: tuple[int, ...]) -> float:
    """The largest share that a rank can hold beside what it runs; negative: it cannot run it."""
    room = 1.0
    for need in (each(problem, profile) for each in cost.DEVICE_NEEDS):
        left = profile.capacity_bytes - need.of(run)
        room = min(room, left / need.state if need.state else math.copysign(1, left))
    return room


def _columns_s(columns_s: list[float], rooms: list[float]) -> float:
    """The least time in which all shares together are the whole state."""
    low, high = 0.0, max(columns_s)
    for _ in range(60):
        middle = (low + high) / 2
        shares = [
            min(room, middle / own if own else 1.0)
            for own, room in zip(columns_s, rooms, strict=True)
        ]
        low, high = (low, middle) if math.fsum(shares) >= 1 - 1e-9 else (middle, high)
    return high


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 120), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_plan_is_faster_and_none_breaks_a_cap(seeds):
    found = 0
    for seed in seeds:
        problem = random_problem(seed)
        expected = least_step(problem)
        if expected is None:
            with pytest.raises(InfeasibleError):
                solve(problem)
            continue
        plan = solve(problem)
        prediction = predict(problem, plan)
        assert plan.step_s == prediction.step_s and plan.bound_s is not None
        assert plan.bound_s <= expected * (1 + 1e-8), seed
        assert expected * (1 - 1e-8) <= plan.step_s <= expected * (1.003 + 1e-8), seed
        for part, profile in zip(prediction.ranks, problem.ranks, strict=True):
            assert part.memory_bytes <= profile.capacity_bytes
        found += 1
    assert found > len(seeds) / 2
