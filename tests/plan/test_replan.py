"""When another plan is worth its cost: made-up series of times, and the solver."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from lightning_cephalo.plan import (
    Links,
    Plan,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
    predict,
    solve,
)
from lightning_cephalo.plan.replan import HOLD_STEPS, ReplanPolicy, at_paces


def _profile(name: str, second: float) -> RankProfile:
    curve = [second * size for size in range(1, 17)]
    return RankProfile(name, curve, [2 * s for s in curve], curve, [0.0] * 16, 1e9)


PROBLEM = Problem(
    [_profile("one", 0.01), _profile("two", 0.01)],
    units=4,
    links=Links(0.004, 0.004),
    state=StateBytes(100),
    global_batch_size=16,
    step_overhead_s=0.01,
)
PLAN = solve(PROBLEM)
STEPS = 1000


def _work_s(plan: Plan) -> list[float]:
    return [4 * (r.forward_s + r.backward_s) + r.tail_s for r in predict(PROBLEM, plan).ranks]


def _run(pace_of, steps=STEPS, answer=solve):
    """Train by the policy; ``pace_of(step, rank)`` is what is measured. Returns its changes."""
    policy, trial, changes = ReplanPolicy(PROBLEM, PLAN), None, []
    work_s = _work_s(PLAN)
    for step in range(1, steps + 1):
        policy.observe(step, [pace_of(step, rank) * own for rank, own in enumerate(work_s)])
        if step < policy.next_look:
            continue
        if trial is None:
            trial = policy.look(step)
            continue
        change, trial = policy.judge(step, steps - step, answer(trial)), None
        if change is not None:
            changes.append(change)
            policy.follow(step, change)
            work_s = _work_s(change.plan)
    return changes


def test_a_drift_and_its_end_are_two_changes_and_steps_are_those_of_a_fresh_plan():
    noise = random.Random(1)

    def pace(step, rank):
        slow = 3.0 if rank == 1 and 200 <= step < 600 else 1.0
        return slow * noise.uniform(0.95, 1.05)

    slow, back = _run(pace)
    assert (slow.rank, slow.since_step) == (1, 200) and slow.factor == pytest.approx(3, rel=0.05)
    assert 205 <= slow.step <= 230 and 605 <= back.step <= 630
    assert (back.rank, back.since_step) == (1, 600) and back.factor == pytest.approx(1 / 3, 0.05)
    real = at_paces(PROBLEM, (1.0, 3.0))
    assert predict(real, slow.plan).step_s <= 1.05 * solve(real).step_s
    assert slow.old_step_s > 1.3 * slow.plan.step_s
    assert [rank.batch_size for rank in back.plan.ranks] == [8, 8]


@pytest.mark.parametrize("seed", range(2))
def test_noise_of_a_tenth_changes_nothing(seed):
    noise = random.Random(seed)
    draw = (lambda: noise.gauss(1.0, 0.1)) if seed % 2 else (lambda: noise.uniform(0.9, 1.1))
    assert _run(lambda step, rank: draw(), steps=2000, answer=_not_often()) == []


def _not_often():
    """Solves; noise must not keep a solver busy either."""
    asked = [0]

    def answer(problem):
        asked[0] += 1
        assert asked[0] < 40, "noise asks for a solution at one look of five"
        return solve(problem)

    return answer


def test_all_ranks_slower_alike_change_nothing():
    assert _run(lambda step, rank: 1.0 + (step > 100)) == []


def test_a_rank_that_changes_all_the_time_is_given_up_step_by_step():
    changes = _run(lambda step, rank: 3.0 if rank and step % 120 >= 60 else 1.0, steps=3000)
    gaps = [b.step - a.step for a, b in pairwise(changes)]
    assert len(changes) < 12 and max(gaps) > 10 * HOLD_STEPS


def test_single_slow_steps_and_untimed_steps_count_for_nothing():
    def pace(step, rank):
        if step % 50 == 0:
            return math.nan
        return 10.0 if rank and step % 9 == 0 else 1.0

    assert _run(pace) == []


def _looked(pace=3.0):
    """Return a policy that has looked at step 20, where rank 1 was slower, and the problem."""
    policy = ReplanPolicy(PROBLEM, PLAN)
    _train(policy, range(1, 21), pace)
    return policy, policy.look(20)


def _train(policy, steps, pace):
    one, two = _work_s(PLAN)
    for step in steps:
        policy.observe(step, [one, pace * two])


def test_near_the_end_a_change_does_not_pay():
    for steps_left, pays in ((3, False), (30, True)):
        policy, problem = _looked()
        assert policy.next_look == 30
        _train(policy, range(21, 31), 3.0)
        assert (policy.judge(30, steps_left, solve(problem)) is not None) == pays


def test_a_refused_plan_is_asked_for_again_much_later():
    policy, problem = _looked()
    steps = []
    for step in range(21, 200):
        _train(policy, [step], 3.0)
        if step >= policy.next_look:
            if problem is None:
                problem = policy.look(step)
            elif policy.judge(step, 1000, solve(problem)) is not None:
                steps.append(step)
                policy.keep(step)
                problem = None
    assert steps[0] == 30 and steps[1] - steps[0] > 2 * HOLD_STEPS and len(steps) == 3


def test_an_answer_that_comes_too_late_changes_nothing():
    policy, problem = _looked()
    _train(policy, range(21, 29), 1.0)  # the rank has recovered while the problem was solved
    assert policy.judge(30, 1000, solve(problem)) is None
    assert policy.next_look == 40 and policy.look(40) is None


def test_while_paces_still_move_no_plan_is_followed():
    policy, problem = _looked(pace=3.0)
    _train(policy, range(21, 31), 2.4)
    assert policy.judge(30, 1000, solve(problem)) is None
    _train(policy, range(31, 51), 2.4)
    assert policy.judge(50, 1000, solve(policy.look(40))) is not None


def test_a_trial_without_a_solution_changes_nothing():
    assert _run(lambda step, rank: 1.0 + 2 * rank, answer=lambda problem: None) == []


def test_a_rank_without_work_keeps_its_pace():
    plan = Plan((RankPlan((16,), 0.5), RankPlan((), 0.5)))
    policy = ReplanPolicy(PROBLEM, plan)
    for step in range(1, 30):
        policy.observe(step, [3.0 * (4 * 3 * 0.16 + 0.16), 0.0])
    slower = policy.look(30)
    assert slower.ranks[0].forward_s[0] == pytest.approx(0.03)
    assert slower.ranks[1] == PROBLEM.ranks[1]
