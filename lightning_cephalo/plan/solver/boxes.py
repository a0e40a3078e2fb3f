"""Finds the fastest choice for all ranks, also where a rank's share of the state takes time.

How much state a rank can hold depends on the seconds that its share may add to a step, and on the
backward that hides moves, and lets collectives hide fewer updates. For given limits on both, the
search is that of a problem whose shares take no time, with other rooms (``state``). So all limits
are searched: boxes of seconds and backwards are halved where the bound is the least, until no box
can hold a faster plan. Where shares take no time, one box holds all plans.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.cost import fixed_time, idle_bytes, step_time
from lightning_cephalo.plan.plan import RankPlan
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.bounds import TimeBounds, time_bounds
from lightning_cephalo.plan.solver.columns import RankType, group_types
from lightning_cephalo.plan.solver.search import EQUAL, Found, Search
from lightning_cephalo.plan.solver.state import Room, needed_by
from lightning_cephalo.plan.windows import backward_windows

_MOST_BOXES = 48
_ROUNDING = 1e-9
_Range = tuple[float, float]


def fastest(
    problem: Problem, deadline: float, batches: Sequence[int] | None = None
) -> tuple[Choice | None, float]:
    """Return the fastest choice, and a lower bound of the step of all plans with these batches.

    Raises SolverError when time is up without any plan, and when none is found nor excluded.
    """
    count, best = itertools.count(), None
    queue = [(box.bound_s, next(count), box) for box in _whole_boxes(problem, batches)]
    heapq.heapify(queue)
    bound_s, failure = math.inf, None
    for _ in range(_MOST_BOXES):
        # a plan that is slower than this by less is as good
        enough_s = math.inf if best is None else best.step_s * (1 - EQUAL)
        while queue and queue[0][0] >= enough_s:
            bound_s = min(bound_s, heapq.heappop(queue)[0])
        if not queue or (best is not None and time.perf_counter() > deadline):
            break
        least_s, _, box = heapq.heappop(queue)
        try:
            found = Search(box.problem, box.types, deadline, box.room, box.bounds).run()
        except SolverError as error:
            bound_s, failure = min(bound_s, least_s), error
            continue
        if found is None:
            continue
        choice = box.priced(found)
        # of plans that are as fast the first one: later boxes leave less room
        if choice and (best is None or choice.step_s < best.step_s * (1 - EQUAL / 10)):
            best = choice
        left = box.narrowed(found, best.step_s if best else math.inf)
        if left is None:
            continue
        least_s = max(least_s, found.bound_s + fixed_time(box.problem) + left.exposed_s[0])
        halves = left.halves()
        for half in halves:
            heapq.heappush(queue, (least_s, next(count), half))
        if not halves:
            bound_s = min(bound_s, least_s)
    bound_s = min([bound_s, *(each[0] for each in queue)])
    if best is None and (failure is not None or queue):
        raise failure or SolverError("No plan was found, and none is excluded.")
    return best, bound_s if best is None else min(bound_s, best.step_s)


def _whole_boxes(problem: Problem, batches: Sequence[int] | None) -> Iterator[_Box]:
    """Yield a box of all plans for each choice for all ranks together.

    Even shares count if they travel faster.
    """
    for reshard in problem.reshard_choices:
        asked = problem.resharding(reshard)
        even = asked.with_even_shares()
        found = [(asked, asked.has_even_state)]
        if even.links != asked.links:
            takes_time = even.shares_take_time or even.can_move_state
            found.append((replace(even, has_even_state=not takes_time), True))
        for each, is_even in found:
            # a rank without samples holds these bytes too, and no column says so
            if min(rank.capacity_bytes for rank in each.ranks) < idle_bytes(each):
                continue
            box = _Box(each, is_even, group_types(each, batches))
            # if every plan's backward hides the gathers too, keeping units gathered gains nothing
            is_first = reshard == problem.reshard_choices[0]
            is_faster = is_first or box.bounds.floors_s[1] < _longest_with_gathers_s(each)
            if is_faster and math.isfinite(box.bound_s):
                yield box


def _longest_with_gathers_s(problem: Problem) -> float:
    """Return the longest window of the backward that gathers make longer; 0 for none."""
    with_gathers, without = (backward_windows(problem.resharding(each)) for each in (True, False))
    pairs = zip(with_gathers, without, strict=True)
    longer = (own_s for (own_s, count), (less_s, _) in pairs if count and own_s > less_s)
    return max(longer, default=0.0)


@dataclass(frozen=True)
class _Box:
    """Plans whose shares add ``exposed_s``, and in which a unit's backward takes ``backward_s``.

    All choices for all ranks together are made; with ``even`` all ranks hold equal shares.
    """

    problem: Problem
    even: bool
    types: Sequence[RankType]
    exposed_s: _Range = (0.0, math.inf)
    backward_s: _Range = (0.0, math.inf)

    @property
    def takes_time(self) -> bool:
        return self.problem.shares_take_time or self.problem.can_move_state

    @cached_property
    def bounds(self) -> TimeBounds:
        return time_bounds(self.problem, self.types, self.backward_s[0])

    @property
    def bound_s(self) -> float:
        """Lower bound of the step, without what shares add."""
        return self.bounds.step_s + fixed_time(self.problem)

    @property
    def room(self) -> Room:
        """The most room that any plan in the box has."""
        smallest = min(map(len, self.problem.members))
        most_share = (1 + _ROUNDING) / smallest if self.even else 1.0
        return Room(self.problem, self.exposed_s[1], self.backward_s, most_share)

    def priced(self, found: Found) -> Choice | None:
        """Return the plan of these columns that exposes the least; None if it cannot be."""
        times_s = found.columns.times_s.max(axis=0).tolist()
        rows = zip(found.columns.kind, found.chosen, found.columns.needed, strict=True)
        runs = [(self.types[int(kind)], int(count), needed) for kind, count, needed in rows]
        exposed_s = self._least_exposed_s(runs, (times_s[1], times_s[1]))
        if exposed_s is None:
            return None
        step_s = step_time(self.problem, *times_s) + exposed_s[1]
        return Choice(self.problem, self.even, self.types, found, exposed_s[1], step_s)

    def _least_exposed_s(
        self, runs: Sequence[tuple[RankType, int, np.ndarray]], backward_s: _Range
    ) -> _Range | None:
        """Return the least seconds in which ranks hold the state, from below and from above.

        None: they never do. ``runs`` are types, numbers of ranks, and amounts of ``NEEDS``.
        """
        if not self.takes_time:
            return 0.0, 0.0
        any_room = replace(self, exposed_s=(0.0, math.inf), backward_s=backward_s).room
        enough = any_room.whole_bytes * (1 - _ROUNDING)

        def holds(exposed_s: float) -> bool:
            room = any_room.exposing(exposed_s)
            held = [(k.members[0], n * room.held_bytes(k.profile, own)) for k, n, own in runs]
            groups = self.problem.members
            return all(sum(own for rank, own in held if rank in g) >= enough for g in groups)

        if holds(0.0):
            return 0.0, 0.0
        if not holds(math.inf):
            return None
        low, high = 0.0, self.bound_s or 1.0
        while not holds(high):
            low, high = high, 4 * high
        while high - low > _ROUNDING * max(high, self.bound_s):
            middle = (low + high) / 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return low, high

    def narrowed(self, found: Found, limit_s: float) -> _Box | None:
        """Return the part of a box that may have a plan within a limit; None: it is empty."""
        if not self.takes_time:
            return self
        (least, most), (slow, slowest) = self.exposed_s, self.backward_s
        limit_s *= 1 + EQUAL**2  # a box that ends at the known plan may lack it by rounding
        fixed_s, floors_s = fixed_time(self.problem), self.bounds.floors_s
        if found.covers_s + fixed_s + least >= limit_s:
            floors_s = found.floors_s
        slow = max(slow, floors_s[1])
        # ranks without samples hold the most
        idle = RankPlan((), 0.0)
        runs = [(k, k.count, needed_by(self.problem, k.profile, idle)) for k in self.types]
        # no bound if rounding alone excludes all plans: a search finds that out
        idle_s = self._least_exposed_s(runs, (slow, slowest)) or (0.0, 0.0)
        least = max(least, min(most, idle_s[0]))
        most = min(most, limit_s - found.bound_s - fixed_s)
        # only the floors say what a slower backward adds: other bounds contain one already
        more_s = limit_s - step_time(self.problem, *floors_s) - least
        longest_s = max(own_s for own_s, _ in backward_windows(self.problem))
        slowest = min(slowest, max(slow, longest_s) + more_s / self.problem.units)
        if most < least or slowest < slow:
            return None
        return replace(self, exposed_s=(least, most), backward_s=(slow, slowest))

    def halves(self) -> list[_Box]:
        """Return the two halves of a box along its longer side; none of a point."""
        (least, most), (slow, slowest), units = self.exposed_s, self.backward_s, self.problem.units
        wide_s, long_s = most - least, units * (slowest - slow)
        if not self.takes_time or wide_s <= 0:
            return []
        # only early updates and moves beside them hide behind the backward
        if self.problem.early_update and long_s >= wide_s:
            middle = self._middle(slow, slowest, units)
            return [replace(self, backward_s=own) for own in ((slow, middle), (middle, slowest))]
        middle = self._middle(least, most, 1)
        return [replace(self, exposed_s=own) for own in ((least, middle), (middle, most))]

    def _middle(self, low: float, high: float, units: int) -> float:
        return (low + min(high, 3 * low + 8 * (self.bound_s or 1.0) / units)) / 2


@dataclass(frozen=True)
class Choice:
    """What ranks run, how long the step is, and how much of it shares of the state add.

    ``problem`` has every choice for all ranks together; with ``even`` their shares are equal.
    """

    problem: Problem
    even: bool
    types: Sequence[RankType]
    found: Found
    exposed_s: float
    step_s: float
