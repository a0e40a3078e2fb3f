"""Decides from the times of steps whether a running training should follow another plan. Pure.

A rank's *pace* is the time of its work divided by what its plan predicts, as a median of 8 steps.
If the paces of ranks have moved apart since the present plan was chosen, the problem is solved
again, with every rank's times multiplied by its pace. The new plan is taken if all of this holds:

- Its step is at least a twentieth shorter than that of the present plan, at the same paces.
- What it gains until the horizon is twice what the change costs. The horizon is the steps that are
  left, but at most those since the last change, or 50: a pace that has lasted long will last.
- Two looks in a row say so. Looks are 10 steps apart, so they share no steps.

After a change there is no look for 20 steps. If a change is taken back, this number doubles, up to
2000: a rank that changes its pace all the time would cost more than it gains. Noise of single steps
disappears in the median, and what is left of it gains too little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from lightning_cephalo.plan.cost import predict, work_s
from lightning_cephalo.plan.plan import Plan
from lightning_cephalo.plan.problem import TIME_CURVES, Problem, RankProfile
from lightning_cephalo.plan.state_groups import members_of

WINDOW_STEPS = 8
LOOK_EVERY_STEPS = 10
WARM_UP_STEPS = 3
HOLD_STEPS, LONGEST_HOLD_STEPS = 20, 2000
_SHORTEST_HORIZON_STEPS = 50
# paces that are closer than this cannot gain a twentieth
_APART = 1.15
_LEAST_GAIN = 0.05
_GAIN_PER_COST = 2.0
_LOOKS = 2
_REMEMBERED_STEPS = 4096
# master parameters and two moments
_COPIES_MOVED = 3


@dataclass(frozen=True)
class Trial:
    """A problem to solve beside training, at the present paces of ranks.

    Attributes:
        present_s: Seconds of a step by the present plan at these paces.
        horizon_steps: Steps for which a gain counts.
        answer: The solution of the look before, at nearly the same paces; None: solve the problem.
    """

    step: int
    problem: Problem
    paces: tuple[float, ...]
    present_s: float
    horizon_steps: float
    answer: Plan | None = None


@dataclass(frozen=True)
class Replan:
    """A change of plan, and why.

    Attributes:
        step: Updates behind which the new plan takes effect.
        plan: The new plan; its ``step_s`` is at the present paces, as is ``old_step_s``.
        rank: The rank whose pace has changed most, or that has run out of memory.
        factor: How many times longer its work takes than when the old plan was chosen.
        since_step: Approximately the first step at this pace.
        moved_s: Seconds that the change took; 0 before it has taken effect.
        cause: Why the plan changes. "pace": ranks are slower or faster. "memory": a rank ran out of
            memory, and the step is repeated. "loaded": batches follow such a change, behind those
            that were loaded before it.
    """

    step: int
    plan: Plan
    old_plan: Plan
    old_step_s: float
    rank: int
    factor: float
    since_step: int
    moved_s: float = 0.0
    cause: Literal["pace", "memory", "loaded"] = "pace"


class ReplanPolicy:
    """Watches the paces of ranks, and says when another plan is worth its cost.

    ::

        policy = ReplanPolicy(problem, plan)
        policy.observe(step, busy_s_of_ranks)          # every step
        trial = policy.look(step, steps_left)          # a problem to solve, or None
        change = policy.judge(trial, trial.answer or solve(trial.problem))
        policy.follow(step, change)                    # if there is one, once it has taken effect

    ``problem`` is the measured one, to which the present plan is a solution.
    """

    def __init__(self, problem: Problem, plan: Plan, step: int = 0) -> None:
        self._problem = problem
        self._paces = (1.0,) * len(problem.ranks)  # for which the present plan was chosen
        self._hold_steps = HOLD_STEPS
        self._before: Plan | None = None
        self._begin(plan, step, hold_steps=0)

    def _begin(self, plan: Plan, step: int, hold_steps: int) -> None:
        self.plan = plan
        predicted = predict(self._problem, plan).ranks
        works = [(each.forward_s, each.backward_s, each.tail_s) for each in predicted]
        self._predicted_s = [work_s(self._problem, *work) for work in works]
        self._seen: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_REMEMBERED_STEPS)
        self._answered: tuple[tuple[float, ...], Plan] | None = None
        self._changed_at = step
        self._next_look = step + hold_steps
        self._looks = 0

    def observe(self, step: int, busy_s: Sequence[float]) -> None:
        """Take in the seconds of every rank's own work in a step, which counts if none is NaN."""
        if step > self._changed_at + WARM_UP_STEPS and not any(map(math.isnan, busy_s)):
            self._seen.append((step, tuple(busy_s)))

    def look(self, step: int, steps_left: float) -> Trial | None:
        """Return the problem at the present paces if ranks' paces have moved apart; else None.

        ``steps_left`` is infinite if unknown.
        """
        if step < self._next_look or len(self._seen) < WINDOW_STEPS:
            return None
        self._next_look = step + LOOK_EVERY_STEPS
        paces = self._present_paces()
        factors = [new / old for new, old in zip(paces, self._paces, strict=True)]
        if not _are_apart(factors):
            self._looks, self._answered = 0, None
            return None
        answer = None
        if self._answered is not None:
            then, plan = self._answered
            answer = plan if _are_near(paces, then) else None
        problem = at_paces(self._problem, paces)
        lasted = max(_SHORTEST_HORIZON_STEPS, step - self._changed_at)
        present_s = predict(problem, self.plan).step_s
        return Trial(step, problem, paces, present_s, min(steps_left, lasted), answer)

    def _present_paces(self) -> tuple[float, ...]:
        recent = [busy_s for _, busy_s in self._seen][-WINDOW_STEPS:]
        paces = []
        for rank, predicted_s in enumerate(self._predicted_s):
            busy_s = median(each[rank] for each in recent)
            # a rank without work shows no pace: it keeps the last one
            is_known = busy_s > 0.0 and predicted_s > 0.0
            paces.append(busy_s / predicted_s if is_known else self._paces[rank])
        return tuple(paces)

    def judge(self, trial: Trial, plan: Plan | None) -> Replan | None:
        """Return the change to make now that a trial is solved; None: keep the plan."""
        gain_s = 0.0
        if not _are_near(self._present_paces(), trial.paces):
            plan = None  # it took so long to solve that ranks have changed their pace again
        if plan is not None:
            gain_s = trial.present_s - predict(trial.problem, plan).step_s
            gained_s = gain_s * trial.horizon_steps
        is_better = plan is not None and gain_s >= _LEAST_GAIN * trial.present_s
        if plan is None or not is_better or gained_s < _GAIN_PER_COST * self._cost_s(trial, plan):
            self._looks, self._answered = 0, None
            return None
        self._looks, self._answered = self._looks + 1, (trial.paces, plan)
        if self._looks < _LOOKS:
            return None
        return self._change(trial, plan)

    def _cost_s(self, trial: Trial, plan: Plan) -> float:
        """Seconds of a change: rows travel as in gathers, and one step is traced anew."""
        problem = self._problem
        ends_s = problem.root_links.gather_s + problem.last_links.gather_s
        gathers_s = problem.units * problem.links.gather_s + ends_s
        return _COPIES_MOVED * gathers_s * moved_share(self.plan, plan) + trial.present_s

    def _change(self, trial: Trial, plan: Plan) -> Replan:
        factors = [new / old for new, old in zip(trial.paces, self._paces, strict=True)]
        rank = max(range(len(factors)), key=lambda rank: abs(math.log(factors[rank])))
        return Replan(
            step=trial.step,
            plan=replace(plan, step_s=predict(trial.problem, plan).step_s),
            old_plan=self.plan,
            old_step_s=trial.present_s,
            rank=rank,
            factor=factors[rank],
            since_step=self._since(rank, trial.paces[rank]),
        )

    def _since(self, rank: int, pace: float) -> int:
        """Return the first of the last steps that were nearer to a pace than to the one before."""
        between_s = self._predicted_s[rank] * math.sqrt(pace * self._paces[rank])
        is_slower = pace > self._paces[rank]
        seen = list(self._seen)
        first = seen[-1][0]
        misses = 0
        for step, busy_s in reversed(seen):
            is_new = (busy_s[rank] > between_s) == is_slower
            misses = 0 if is_new else misses + 1
            if misses == 3:  # single steps may differ
                break
            first = step if is_new else first
        return first

    def follow(self, step: int, change: Replan, paces: Sequence[float]) -> None:
        """Follow the plan of a change from a step on, chosen for the paces of its trial."""
        taken_back = self._before is not None and _work_of(change.plan) == _work_of(self._before)
        twice = min(2 * self._hold_steps, LONGEST_HOLD_STEPS)
        self._hold_steps = twice if taken_back else HOLD_STEPS
        self._before, self._paces = self.plan, tuple(paces)
        self._begin(change.plan, step, self._hold_steps)

    def keep(self, step: int) -> None:
        """Keep the present plan, as ranks have refused the new one, and look again much later."""
        self._hold_steps = min(2 * self._hold_steps, LONGEST_HOLD_STEPS)
        self._next_look, self._looks = step + self._hold_steps, 0
        self._answered = None


def at_paces(problem: Problem, paces: Sequence[float]) -> Problem:
    """Return a problem whose ranks take so many times as long as they were measured."""

    def slower(rank: RankProfile, pace: float) -> RankProfile:
        return rank.changed(TIME_CURVES, lambda curve: [pace * seconds for seconds in curve])

    return replace(problem, ranks=tuple(map(slower, problem.ranks, paces)))


def moved_share(old: Plan, new: Plan) -> float:
    """Return the share of the state that changes its rank, 0 to 1."""
    groups = members_of(new.groups, new.world_size)
    kept = 0.0
    for members in groups:
        old_end = new_end = 0.0
        for rank in members:
            old_start, old_end = old_end, old_end + old.ranks[rank].state_fraction
            new_start, new_end = new_end, new_end + new.ranks[rank].state_fraction
            kept += max(0.0, min(old_end, new_end) - max(old_start, new_start))
    return max(0.0, 1.0 - kept / len(groups))


def _are_near(paces: Sequence[float], others: Sequence[float]) -> bool:
    changed = [max(a / b, b / a) for a, b in zip(paces, others, strict=True)]
    return not _are_apart([1.0, *changed])


def _are_apart(factors: Sequence[float]) -> bool:
    return max(factors) >= _APART * min(factors)


def _work_of(plan: Plan) -> list[int]:
    return [rank.batch_size for rank in plan.ranks]
