"""Optimizer state in host memory: its price by hand, and the solver against every plan."""

from __future__ import annotations

import doctest
import math
import random
from dataclasses import replace

import pytest
from moving_brute_force import checked_plan, least_moving_step, random_problem

from lightning_cephalo.common.lanes import Lane
from lightning_cephalo.plan import (
    InfeasibleError,
    KeptCurves,
    Plan,
    PlanError,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
    moving,
    predict,
    solve,
)
from lightning_cephalo.plan.moving import most_taken

RANK = RankProfile(
    "a",
    [1.0],
    [2.0],
    [0.5],
    [10.0],
    10_000.0,
    host_capacity_bytes=10_000.0,
    updated_parameters_per_s=math.inf,
    host_updated_parameters_per_s=10.0,
    to_device_bytes_per_s=100.0,
    to_host_bytes_per_s=50.0,
)
# a root unit of 10 parameters and four of 25
PROBLEM = Problem(
    [RANK, RANK],
    units=4,
    state=StateBytes(1600),
    early_state=StateBytes(1200),
    global_batch_size=2,
    gathered_bytes=7.0,
    update_overhead_s=0.0,
    optimizer_offload="auto",
    unit_parameters=(10, 25, 25, 25, 25),
    moment_bytes=8.0,
)


def halves(**changes) -> Plan:
    return Plan((RankPlan((1,), 0.5, **changes), RankPlan((1,), 0.5)))


def test_the_examples_of_the_documentation_hold():
    assert doctest.testmod(moving).failed == 0


def test_streamed_state_leaves_the_device_and_takes_the_links():
    # the last two of the four units: 50 of 110 parameters
    plan = halves(resident_fraction=0.6)
    late, early = predict(PROBLEM, plan), predict(PROBLEM.with_early_update(), plan)
    before = predict(PROBLEM, halves()).ranks[0]
    assert late.ranks[0].memory_bytes == before.memory_bytes - 0.5 * 8 * (50 - 2 * 25)
    assert late.ranks[0].state_host_bytes == 0.5 * 8 * 50
    # the slower direction takes 400 bytes / 2 / 50; one unit's way there and back comes behind
    assert late.ranks[0].exposed_s == 200 / 50 + 0.5 * 200 * (1 / 100 + 1 / 50)
    assert late.step_s == predict(PROBLEM, halves()).step_s + late.ranks[0].exposed_s
    assert late.ranks[1].exposed_s == 0
    # inside the backward two units hide 2 s each; one more hides the last unit's way
    assert early.ranks[0].exposed_s == pytest.approx(max(0, 4 - 2 * 2) + max(0, 3 - 1 * 2))
    root = predict(PROBLEM.with_early_update(), halves(resident_fraction=0.0)).ranks[0]
    assert root.exposed_s == pytest.approx((8 - 4 * 2) + 3 + 0.5 * 80 * (1 / 100 + 1 / 50))
    assert root.memory_bytes == 0.5 * (1200 - 8 * 110 + 16 * 25) + 7 + 10


def test_pinned_memory_counts_with_the_ends_of_its_pieces():
    plan = halves(resident_fraction=0.6, host_update_fraction=0.2)  # one unit each
    case = replace(PROBLEM, pins_host_memory=True)
    needed, largest = 0.5 * (8 + 16) * 25, 0.5 * 16 * 25
    taken = predict(case, plan).ranks[0].state_host_bytes
    assert predict(PROBLEM, plan).ranks[0].state_host_bytes == needed
    assert taken == needed * most_taken(needed / largest) > 1.5 * needed


def test_what_the_host_updates_takes_its_processors_and_more_of_its_memory():
    plan = halves(resident_fraction=0.6, host_update_fraction=0.4)
    late = predict(PROBLEM, plan).ranks[0]
    assert late.state_host_bytes == 0.5 * 16 * 50
    assert late.memory_bytes == predict(PROBLEM, halves()).ranks[0].memory_bytes - 0.5 * 8 * 50
    way_s = 0.5 * 25 * (4 / 100 + 4 / 50 + 1 / 10)
    assert late.exposed_s == pytest.approx(0.5 * 50 / 10 + way_s)
    # updates come two units into the backward, and one unit's gradient is on its way
    early = predict(PROBLEM.with_early_update(), plan).ranks[0]
    hidden = 0.5 * 50 / 10 + way_s - 2 * 2
    assert early.exposed_s == pytest.approx(max(0.0, hidden) + max(0.0, way_s - 2))
    slow = replace(RANK, updated_parameters_per_s=50.0)
    uneven = replace(PROBLEM, ranks=[slow, slow], update_overhead_s=2.0)
    moved = Plan((RankPlan((1,), 0.75), RankPlan((1,), 0.25, resident_fraction=0.6)))
    found = predict(uneven, moved).ranks
    assert found[0].update_s == pytest.approx(0.75 * 110 / 50) and found[0].exposed_s == 0
    assert found[1].update_s == pytest.approx(0.25 * 110 / 50)  # streamed state comes to it
    by_host = replace(moved.ranks[1], host_update_fraction=0.4)
    found = predict(uneven, Plan((moved.ranks[0], by_host))).ranks
    assert found[1].update_s == pytest.approx(0.25 * 60 / 50)


def test_what_the_problem_does_not_say_is_refused_by_name():
    with pytest.raises(PlanError, match=r"rank 0 \('a'\): .*no unit_parameters"):
        predict(replace(PROBLEM, unit_parameters=()), halves(resident_fraction=0.5))
    ranks = [replace(RANK, host_updated_parameters_per_s=0.0)] * 2
    with pytest.raises(PlanError, match="no host_updated_parameters_per_s"):
        plan = halves(resident_fraction=0.5, host_update_fraction=0.5)
        predict(replace(PROBLEM, ranks=ranks), plan)


def test_a_job_takes_the_first_gap_that_holds_it():
    lane = Lane()
    assert [lane.place(2, 1), lane.place(0, 1.5), lane.place(0, 1), lane.place(0, 0.5)] == [
        3,
        1.5,
        4,
        2,
    ]
    assert lane.busy_s == 4 and lane.done_s == 4
    lane.forget(2)
    assert lane.place(0, 0.25) == 0.25 and Lane().done_s == -math.inf


MORE = ((21, 31), (60, 79))
# -- the solver -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seeds", [range(11, 21), *(pytest.param(range(*e), marks=pytest.mark.slow) for e in MORE)]
)
def test_no_plan_is_faster_and_none_is_missed(seeds):
    moved = 0
    for seed in seeds:
        problem = random_problem(seed)
        plan = checked_plan(problem)
        if plan is None:
            continue
        prediction = predict(problem, plan)
        for rank, part, profile in zip(plan.ranks, prediction.ranks, problem.ranks, strict=True):
            assert part.memory_bytes <= profile.capacity_bytes
            held = part.host_bytes + part.state_host_bytes
            assert held <= profile.host_capacity_bytes * (1 + 1e-9)
            assert rank.state_host_bytes == (part.state_host_bytes if rank.moves_state else None)
        moved += plan.moves_state
    assert moved > 1


def _tight_problem(seed: int) -> Problem:
    """A rank that holds no state by its shortest backward, which keeps activations."""
    draw = random.Random(seed)
    units = draw.randint(6, 10)
    sizes = (draw.choice([2, 10, 20]), *[10] * units)
    capacity = 4 * sum(sizes) + draw.uniform(180, 12 * sum(sizes) * 0.8)
    least = draw.uniform(5, 60)
    rank = RankProfile(
        "r",
        [0.01, 0.015],
        [draw.uniform(3, 5), draw.uniform(5, 7)],
        [0.1, 0.1],
        [least, least + draw.uniform(20, 300)],
        capacity,
        kept=KeptCurves([0.5, 0.8], [capacity - 20, capacity - 10]),
        host_capacity_bytes=1e9,
        to_device_bytes_per_s=draw.uniform(2, 40),
        to_host_bytes_per_s=40.0,
        host_updated_parameters_per_s=draw.choice([0.0, 0.0, 3.0]),
    )
    problem = Problem(
        [rank],
        units,
        state=StateBytes(16 * sum(sizes)),
        early_state=StateBytes(12 * sum(sizes)),
        global_batch_size=2,
        gathered_bytes=2.0,
        optimizer_offload="auto",
        unit_parameters=sizes,
        moment_bytes=8.0,
    )
    return problem.with_early_update()


@pytest.mark.slow
def test_plans_are_found_whose_backward_is_far_from_the_shortest():
    moved = 0
    for seed in range(12):
        problem = _tight_problem(seed)
        known = [least_moving_step(problem)]
        for offload in (False, "auto"):
            try:
                plan = solve(replace(problem, optimizer_offload=offload))
            except InfeasibleError:
                plan = None
            known.append(None if plan is None else plan.step_s)
        if plan is None:
            assert known == [None] * 3, seed
            continue
        expected_s = min(step_s for step_s in known[:2] if step_s is not None)
        assert plan.step_s <= expected_s * 1.003, seed
        assert plan.bound_s <= expected_s * (1 + 1e-9), seed
        moved += plan.moves_state
    assert moved > 2


def test_an_endless_backward_hides_all_that_moves_and_nothing_that_does_not():
    problem = PROBLEM.with_early_update()
    for moved in moving.choices(problem, RANK):
        endless = moving.exposure(problem, RANK, moved, math.inf)
        assert not any(math.isnan(hidden) for _, hidden in endless.lines)
        assert endless.of(1.0) <= moving.exposure(problem, RANK, moved, 1e6).of(1.0) < math.inf


def test_a_link_that_is_far_too_slow_ends_the_search():
    crawling = replace(RANK, to_device_bytes_per_s=1e-6, to_host_bytes_per_s=1e-6)
    idle = replace(crawling, forward_s=[0.0], backward_s=[0.0], tail_s=[0.0], capacity_bytes=600.0)
    for rank in (replace(crawling, capacity_bytes=600.0), idle):
        plan = solve(replace(PROBLEM, ranks=[rank, rank], optimizer_offload=True))
        assert plan.moves_state and math.isfinite(plan.step_s)


def test_state_moves_only_where_it_has_to_or_makes_steps_shorter():
    roomy = replace(PROBLEM.with_early_update(), optimizer_offload=False)
    wanted = solve(roomy)
    assert replace(solve(replace(roomy, optimizer_offload="auto")), solve_s=0) == replace(
        wanted, solve_s=0
    )
    everything = solve(replace(roomy, optimizer_offload=True))
    assert {rank.resident_fraction for rank in everything.ranks} == {0.0}
    small = [replace(RANK, capacity_bytes=capacity) for capacity in (500.0, 400.0)]
    tight = replace(roomy, ranks=small)
    with pytest.raises(InfeasibleError, match=r"optimizer_offload='auto'\.$"):
        solve(tight)
    plan = solve(replace(tight, optimizer_offload="auto"))
    assert plan.moves_state and Plan.from_dict(plan.to_dict()) == plan
    none = [replace(rank, host_capacity_bytes=60.0) for rank in small]
    with pytest.raises(InfeasibleError, match=r"What would do: .*more host memory"):
        solve(replace(tight, ranks=none, optimizer_offload="auto"))


def test_a_rank_whose_host_is_slow_keeps_less_state_there():
    fast = replace(RANK, capacity_bytes=900.0)
    rates = {"to_device_bytes_per_s": 20.0, "to_host_bytes_per_s": 10.0}
    slow = replace(fast, host_updated_parameters_per_s=2.0, **rates)
    for is_early in (False, True):
        case = replace(PROBLEM, ranks=[fast, slow], state=replace(PROBLEM.state, held_bytes=1600))
        case = case.with_early_update() if is_early else case
        # less room than all of the state needs on both together
        case = replace(case, ranks=[replace(r, capacity_bytes=480.0) for r in case.ranks])
        alike = replace(case, ranks=[case.ranks[0]] * 2)
        own, other = solve(case).ranks
        assert (own.state_host_bytes or 0) > (other.state_host_bytes or 0), is_early
        assert solve(case).step_s >= solve(alike).step_s
