"""Decides from the times of steps whether a running training should follow another plan. Pure.

A rank's *pace* is the time of its work divided by what its plan predicts, as a median of 8 steps.
If the paces of ranks have moved apart since the present plan was chosen, the problem is solved
again, with every rank's times multiplied by its pace. The new plan is taken if all of this holds:

- 10 steps or more after the problem was read, at paces of other steps, the ranks have not moved
  apart again.
- Its step is then at least a twentieth shorter than that of the present plan, at the same paces.
- What it gains until the horizon is as much as a change costs at most: the time of four steps.
  The horizon is the steps that are left, but at most those since the last change, or 50: a pace
  that has lasted long will last.

After a change there is no look for 20 steps. If a change is taken back, this number doubles, up to
2000: a rank that changes its pace all the time would cost more than it gains. Noise of single steps
disappears in the median, and what is left of it gains too little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Literal

from lightning_cephalo.plan.cost import predict, work_s
from lightning_cephalo.plan.plan import Plan
from lightning_cephalo.plan.problem import TIME_CURVES, Problem, RankProfile

WINDOW_STEPS = 8
LOOK_EVERY_STEPS = 10
# steps that are not counted: caches fill, allocators grow, processors wake up
WARM_UP_STEPS = 3
HOLD_STEPS, LONGEST_HOLD_STEPS = 20, 2000
_SHORTEST_HORIZON_STEPS = 50
# paces that are closer than this cannot gain a twentieth
_APART = 1.15
_LEAST_GAIN = 0.05
# A change costs no more. Rows of parameters and two moments travel as in three gathers of all
# units, which take no longer than three steps, and one step is traced anew.
_COST_STEPS = 4.0
_REMEMBERED_STEPS = 4096


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
    """Watches the paces of ranks, and decides when another plan is worth its cost.

    ::

        policy = ReplanPolicy(problem, plan)
        policy.observe(step, busy_s_of_ranks)               # every step
        problem = policy.look(step)                         # from policy.next_look on
        change = policy.judge(later, steps_left, solution)  # if any; from the new next_look on
        policy.follow(latest, change)                       # if any, as it takes effect

    ``problem`` is the measured one, to which the present plan is a solution.

    Attributes:
        next_look: The first step for the next :meth:`look` or :meth:`judge`.
    """

    def __init__(self, problem: Problem, plan: Plan, step: int = 0) -> None:
        self._problem = problem
        self._paces = (1.0,) * len(problem.ranks)  # for which the present plan was chosen
        self._hold_steps = HOLD_STEPS
        self._before: Plan | None = None
        self._begin(plan, step)
        self.next_look = step

    def _begin(self, plan: Plan, step: int) -> None:
        self._plan, self._changed_at = plan, step
        predicted = predict(self._problem, plan).ranks
        works = [(each.forward_s, each.backward_s, each.tail_s) for each in predicted]
        self._predicted_s = [work_s(self._problem, *work) for work in works]
        self._seen: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_REMEMBERED_STEPS)
        self._tried = self._paces

    def observe(self, step: int, busy_s: Sequence[float]) -> None:
        """Take in the seconds of every rank's own work in a step, which counts if none is NaN."""
        if step > self._changed_at + WARM_UP_STEPS and not any(map(math.isnan, busy_s)):
            self._seen.append((step, tuple(busy_s)))

    def look(self, step: int) -> Problem | None:
        """Return the problem at the present paces if ranks' paces have moved apart; else None."""
        if len(self._seen) < WINDOW_STEPS:
            return None
        self.next_look = step + LOOK_EVERY_STEPS
        self._tried = self._present_paces()
        is_stale = _are_apart(self._tried, self._paces)
        return at_paces(self._problem, self._tried) if is_stale else None

    def _present_paces(self) -> tuple[float, ...]:
        recent = [busy_s for _, busy_s in self._seen][-WINDOW_STEPS:]
        busy_s = map(median, zip(*recent, strict=True))
        # a rank without work shows no pace: it keeps the last one
        return tuple(
            busy / predicted if busy > 0.0 and predicted > 0.0 else last
            for busy, predicted, last in zip(busy_s, self._predicted_s, self._paces, strict=True)
        )

    def judge(self, step: int, steps_left: float, plan: Plan | None) -> Replan | None:
        """Return the change to a plan for the last look's problem; None: keep the present plan.

        ``steps_left`` is infinite if unknown.
        """
        self.next_look = step + LOOK_EVERY_STEPS
        paces = self._present_paces()
        if plan is None or _are_apart(paces, self._tried):
            return None
        problem = at_paces(self._problem, paces)
        new_s, old_s = (predict(problem, each).step_s for each in (plan, self._plan))
        lasted_steps = max(_SHORTEST_HORIZON_STEPS, step - self._changed_at)
        gain = 1.0 - new_s / old_s
        if gain < _LEAST_GAIN or gain * min(steps_left, lasted_steps) < _COST_STEPS:
            return None
        factors = [new / old for new, old in zip(paces, self._paces, strict=True)]
        rank = max(range(len(factors)), key=lambda rank: abs(math.log(factors[rank])))
        return Replan(
            step=step,
            plan=replace(plan, step_s=new_s),
            old_plan=self._plan,
            old_step_s=old_s,
            rank=rank,
            factor=factors[rank],
            since_step=self._since(rank, paces[rank]),
        )

    def _since(self, rank: int, pace: float) -> int:
        between_s = self._predicted_s[rank] * math.sqrt(pace * self._paces[rank])
        is_slower = pace > self._paces[rank]
        is_new = [(busy_s[rank] > between_s) == is_slower for _, busy_s in self._seen]
        return self._seen[change_point(is_new)][0]

    def follow(self, step: int, change: Replan) -> None:
        """Follow the plan of a change from a step on, chosen for the paces of the last look."""
        taken_back = self._before is not None and _work_of(change.plan) == _work_of(self._before)
        self._before, self._paces = self._plan, self._tried
        self._begin(change.plan, step)
        self._hold(step, is_longer=taken_back)

    def keep(self, step: int) -> None:
        """Keep the present plan, as ranks have refused the new one, and look again much later."""
        self._hold(step, is_longer=True)

    def _hold(self, step: int, is_longer: bool) -> None:
        twice = min(2 * self._hold_steps, LONGEST_HOLD_STEPS)
        self._hold_steps = twice if is_longer else HOLD_STEPS
        self.next_look = step + self._hold_steps


def change_point(is_new: Sequence[bool]) -> int:
    """Return the index that best separates what is not new before it from what is new from it on.

    ::

        change_point([False, True, False, False, True, False, True, True])   # 4
    """
    # how many more are new than are not, before each index
    surplus = list(accumulate((1 if each else -1 for each in is_new), initial=0))
    return surplus.index(min(surplus[:-1]))


def at_paces(problem: Problem, paces: Sequence[float]) -> Problem:
    """Return a problem whose ranks take so many times as long as they were measured."""

    def slower(rank: RankProfile, pace: float) -> RankProfile:
        return rank.changed(TIME_CURVES, lambda curve: [pace * seconds for seconds in curve])

    return replace(problem, ranks=tuple(map(slower, problem.ranks, paces)))


def _are_apart(paces: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether ranks' paces have changed by different factors."""
    factors = [new / old for new, old in zip(paces, others, strict=True)]
    return max(factors) >= _APART * min(factors)


def _work_of(plan: Plan) -> list[int]:
    return [rank.batch_size for rank in plan.ranks]
