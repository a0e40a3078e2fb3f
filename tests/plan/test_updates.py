"""Updates by share and device: by hand, in old files, and the solver against every plan."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moving_brute_force import checked_plan, random_problem

from lightning_cephalo.plan import Plan, Problem, RankPlan, RankProfile, StateBytes, predict, solve
from lightning_cephalo.plan.cost import step_time
from lightning_cephalo.plan.moving import device_exposure, least_update_s, moved_state, with_updates

SIZES = range(1, 9)
FAST = RankProfile(
    "fast",
    [0.1 * n for n in SIZES],
    [0.2 * n for n in SIZES],
    [0.1] * 8,
    [10.0 * n for n in SIZES],
    1000.0,
    updated_parameters_per_s=300.0,
)
SLOW = replace(FAST, name="slow", updated_parameters_per_s=100.0)
PROBLEM = Problem(
    [FAST, SLOW],
    units=4,
    state=StateBytes(400.0),
    global_batch_size=8,
    update_overhead_s=0.5,
    unit_update_s=0.05,
    unit_parameters=(100, 50, 50, 100, 100),
)


def test_a_rank_that_updates_slowly_holds_less_where_there_is_room():
    plan = solve(PROBLEM)
    fast, slow = predict(PROBLEM, plan).ranks
    # shares by free memory would be even: the slow device would take 2 s, and the other one waits
    even = predict(PROBLEM, Plan([replace(rank, state_fraction=0.5) for rank in plan.ranks]))
    assert [rank.update_s for rank in even.ranks] == pytest.approx([2 / 3, 2.0])
    assert max(fast.update_s, slow.update_s) == pytest.approx(1.0, abs=0.01)
    assert plan.step_s == pytest.approx(even.step_s - 1.0, abs=0.01)
    assert plan.gap == 0 and plan.bound_s == pytest.approx(plan.step_s, rel=1e-3)
    assert [rank.batch_size for rank in plan.ranks] == [4, 4]


def test_memory_decides_what_speed_may_not():
    tight = replace(PROBLEM, ranks=[replace(FAST, capacity_bytes=200.0), SLOW])
    plan, blind = solve(tight), solve(with_updates(tight, 0.0))
    # the fast device is full; microbatches of two leave 20 bytes more to state, which saves 0.2 s
    # of the slow one's update, and cost 0.1 s
    assert [rank.microbatch_sizes for rank in blind.ranks] == [(4,), (4,)]
    assert plan.ranks[0].microbatch_sizes == (2, 2)
    held = [rank.state_fraction for rank in plan.ranks]
    assert held == pytest.approx([0.45, 0.55], abs=2e-3)  # half of a thousandth is for room
    assert predict(tight, plan).ranks[1].update_s == pytest.approx(2.2, abs=0.008)
    assert plan.gap == 0


def test_what_takes_a_thousandth_of_the_step_leaves_shares_to_memory():
    quick = [replace(rank, updated_parameters_per_s=1e5) for rank in (FAST, SLOW)]
    quick[1] = replace(quick[1], updated_parameters_per_s=2e5)
    plan = solve(replace(PROBLEM, ranks=quick))
    assert [rank.state_fraction for rank in plan.ranks] == [0.5, 0.5]


def test_the_least_update_is_that_of_ranks_that_end_together():
    assert least_update_s(PROBLEM) == 400 / 400  # 300 and 100 parameters a second
    assert least_update_s(replace(PROBLEM, unit_parameters=())) == 0
    unknown = [FAST, replace(SLOW, updated_parameters_per_s=math.inf)]
    assert least_update_s(replace(PROBLEM, ranks=unknown)) == 0
    even = replace(PROBLEM, has_even_state=True)
    assert least_update_s(even) == 0.5 * 400 / 100
    groups = replace(
        PROBLEM,
        ranks=[FAST, FAST, SLOW],
        groups=(0, 0, 1),
    )
    assert least_update_s(groups) == 400 / 100  # the whole state on one slow device


seconds = st.floats(0, 8)


@given(seconds, seconds, seconds, seconds, st.floats(0, 2), seconds, st.integers(1, 6))
def test_an_update_is_exposed_by_what_it_makes_the_closed_form_longer(
    gather_s, reduce_s, fill_s, root_s, overhead_s, update_s, units
):
    late = replace(
        PROBLEM,
        units=units,
        links=replace(PROBLEM.links, gather_s=gather_s, reduce_s=reduce_s),
        fill_s=fill_s,
        root_links=replace(PROBLEM.root_links, reduce_s=root_s),
        unit_update_s=overhead_s / units,
        update_overhead_s=overhead_s,
    )
    for case in (late, late.with_early_update()):
        for backward_s in (0.0, 1.0, 5.0):
            before_s, after_s = (
                step_time(each, 1.0, backward_s, 1.0)
                for each in (case, with_updates(case, update_s))
            )
            # 100 parameters of the root unit, 300 of the others
            rank = replace(FAST, updated_parameters_per_s=400 / update_s if update_s else math.inf)
            moved = moved_state(case.unit_parameters, 1.0, 0.0)
            exposed_s = device_exposure(case, rank, moved, backward_s).of(1.0)
            assert after_s - before_s == pytest.approx(exposed_s, abs=1e-9)


def test_files_of_earlier_versions_keep_their_predictions():
    plan = Plan([RankPlan((4,), 0.5), RankPlan((4,), 0.5)])
    unknown = [replace(rank, updated_parameters_per_s=math.inf) for rank in (FAST, SLOW)]
    for ranks in (unknown, [FAST, SLOW]):
        data = replace(PROBLEM, ranks=ranks).to_dict()
        del data["update_overhead_s"], data["unit_update_s"]
        found = Problem.from_dict({**data, "optimizer_s": 2.25, "unit_update_s": 0.45})
        slowest_s = max(rank.update_s for rank in predict(found, plan).ranks)
        assert found.update_overhead_s + slowest_s == 2.25
        # one unit's part of an even share on the slowest device: 75 parameters of 100 a second
        rows_s = 0.5 * 75 / 100 if ranks is not unknown else 0.0
        assert found.unit_update_s == pytest.approx(0.45 - rows_s)
        assert "optimizer_s" not in found.to_dict()
        assert Problem.from_dict(found.to_dict()) == found
    with pytest.raises(Exception, match=r"update_overhead_s: .* but got 'slow'"):
        Problem.from_dict({**data, "optimizer_s": "slow"})


def resident_problem(seed: int) -> Problem:
    """A random problem whose ranks update at all kinds of speeds, and whose state cannot move."""
    draw = random.Random(seed)
    problem = random_problem(seed)
    ranks = [
        replace(rank, updated_parameters_per_s=draw.choice([math.inf, 0.5, 1.0, 4.0, 16.0]))
        for rank in problem.ranks
    ]
    return replace(
        problem,
        ranks=ranks,
        optimizer_offload=False,
        fill_s=draw.choice([0.0, 1.5]),
        root_links=replace(problem.root_links, reduce_s=draw.choice([0.0, 0.7])),
    )


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 250), marks=pytest.mark.slow)])
def test_no_plan_is_faster_and_none_is_missed(seeds):
    found, by_time = 0, 0
    for seed in seeds:
        problem = resident_problem(seed)
        plan = checked_plan(problem, slack=1e-8)
        if plan is None:
            continue
        for rank, profile in zip(plan.ranks, problem.ranks, strict=True):
            assert rank.memory_bytes <= profile.capacity_bytes
        endless = [replace(rank, updated_parameters_per_s=math.inf) for rank in problem.ranks]
        blind = solve(replace(problem, ranks=endless))
        found, by_time = found + 1, by_time + (predict(problem, blind).step_s > 1.01 * plan.step_s)
    assert found > 5 and by_time > 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_groups_that_each_hold_the_state_have_a_bound_and_shares_by_speed(seed, is_early):
    draw = np.random.default_rng(seed)
    rates = 10 ** draw.uniform(1, 3, size=4)
    ranks = [
        replace(rank, updated_parameters_per_s=rate, capacity_bytes=capacity)
        for rank, rate, capacity in zip(
            [FAST, SLOW, FAST, SLOW],
            rates.tolist(),
            draw.uniform(250, 900, size=4).tolist(),
            strict=True,
        )
    ]
    problem = replace(PROBLEM, ranks=ranks, groups=(0, 0, 1, 1))
    problem = problem.with_early_update() if is_early else problem
    plan = solve(problem)
    assert [sum(own) for own in plan.fractions_of_groups] == pytest.approx([1, 1])
    assert plan.bound_s <= plan.step_s == predict(problem, plan).step_s
    blind = solve(with_updates(problem, 0.0))
    assert plan.step_s <= predict(problem, blind).step_s * (1.001 + 1e-9)
