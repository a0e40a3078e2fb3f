"""Finds the fastest choice for all ranks, also where a rank's share of the state takes time.

How much state a rank can hold depends on the seconds that its share may add to a step, and on the
backward that hides moves, and lets collectives hide fewer updates. For given limits on both, the
search is that of a problem whose shares take no time, with other rooms (``room``). So all limits
are searched: boxes of seconds and backwards are halved where the bound is the least, until no box
can hold a faster plan. Where shares take no time, one box holds all plans.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.cost import DEVICE_NEEDS, fixed_time, idle_bytes, step_time
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.columns import RankType, group_types
from lightning_cephalo.plan.solver.room import Room
from lightning_cephalo.plan.solver.search import EQUAL, Found, Search
from lightning_cephalo.plan.windows import backward_collectives_s, backward_windows

_MOST_BOXES = 48
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Box:
    """Limits: shares of plans in it add ``exposed_s``, a unit's backward takes ``backward_s``."""

    exposed_s: tuple[float, float] = (0.0, math.inf)
    backward_s: tuple[float, float] = (0.0, math.inf)


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


def fastest(
    problem: Problem, deadline: float, batches: Sequence[int] | None = None
) -> tuple[Choice | None, float]:
    """Return the fastest choice, and a lower bound of the step of all plans with these batches.

    Raises SolverError when time is up without any plan, and when none is found nor excluded.
    """
    count, best = itertools.count(), None
    queue: list[tuple[float, int, _Variant, _Box]] = []
    for variant in _variants(problem, deadline, batches):
        if math.isfinite(variant.bound_s):
            box = _Box((variant.least_exposed_s, math.inf), (variant.least_backward_s, math.inf))
            least_s = variant.bound_s + variant.least_exposed_s
            heapq.heappush(queue, (least_s, next(count), variant, box))
    bound_s, failure = math.inf, None
    for _ in range(_MOST_BOXES):
        # a plan that is slower than this by less is as good
        enough_s = math.inf if best is None else best.step_s * (1 - EQUAL)
        while queue and queue[0][0] >= enough_s:
            bound_s = min(bound_s, heapq.heappop(queue)[0])
        if not queue or (best is not None and time.perf_counter() > deadline):
            break
        least_s, _, variant, box = heapq.heappop(queue)
        try:
            found = variant.search(box).run()
        except SolverError as error:
            bound_s, failure = min(bound_s, least_s), error
            continue
        if found is None:
            continue
        least_s = max(least_s, found.bound_s + fixed_time(variant.problem) + box.exposed_s[0])
        plan = variant.priced(found)
        # of plans that are as fast the first one: later boxes leave less room
        if plan is not None and (best is None or plan.step_s < best.step_s * (1 - EQUAL / 10)):
            best = plan
        halves = variant.halves(box, least_s, best.step_s if best else math.inf)
        for half in halves:
            heapq.heappush(queue, (least_s, next(count), variant, half))
        if not halves:
            bound_s = min(bound_s, least_s)
    bound_s = min([bound_s, *(each[0] for each in queue)])
    if best is None and (failure is not None or queue):
        raise failure or SolverError("No plan was found, and none is excluded.")
    return best, bound_s if best is None else min(bound_s, best.step_s)


def _variants(
    problem: Problem, deadline: float, batches: Sequence[int] | None
) -> Iterator[_Variant]:
    """Yield a variant for each choice for all ranks together.

    Even shares count if they travel faster.
    """
    for reshard in problem.reshard_choices:
        asked = problem.resharding(reshard)
        even = asked.with_even_shares()
        found = [(asked, False)]
        if even.links != asked.links:
            takes_time = even.shares_take_time or even.can_move_state
            has_even_state = even.has_even_state or not takes_time
            found.append((dataclasses.replace(even, has_even_state=has_even_state), True))
        for each, is_even in found:
            # a rank without samples holds these bytes too, and no column says so
            if min(rank.capacity_bytes for rank in each.ranks) < idle_bytes(each):
                continue
            variant = _Variant(each, is_even, deadline, batches)
            # if every plan's backward hides the gathers too, keeping units gathered gains nothing
            is_second = reshard != problem.reshard_choices[0]
            if not is_second or variant.floors_s[1] < _longest_with_gathers_s(each):
                yield variant


def _longest_with_gathers_s(problem: Problem) -> float:
    """Return the longest window of the backward that gathers make longer; 0 for none."""
    with_gathers, without = (backward_windows(problem.resharding(each)) for each in (True, False))
    pairs = zip(with_gathers, without, strict=True)
    longer = (own_s for (own_s, count), (less_s, _) in pairs if count and own_s > less_s)
    return max(longer, default=0.0)


class _Variant:
    """A problem in which all choices for all ranks together are made."""

    def __init__(
        self, problem: Problem, even: bool, deadline: float, batches: Sequence[int] | None
    ) -> None:
        self.problem, self.even, self.deadline = problem, even, deadline
        self.types = group_types(problem, batches)
        self._takes_time = problem.shares_take_time or problem.can_move_state
        bounds = Search(problem, self.types, deadline).bounds
        self.floors_s = bounds.floors_s
        self.bound_s = bounds.step_s + fixed_time(problem)
        # where nothing hides behind collectives, only what exceeds them counts
        self._ignored_s = 0.0 if problem.shares_take_time else backward_collectives_s(problem)
        self.least_backward_s = max(bounds.floors_s[1], self._ignored_s)
        self._floor_s = step_time(problem, *bounds.floors_s)

    @cached_property
    def least_exposed_s(self) -> float:
        """Lower bound of what shares add: that of ranks without samples, in any backward."""
        if not self._takes_time:
            return 0.0
        any_room = self.room(math.inf, (self.least_backward_s, math.inf))
        idle = [self.problem.fixed_bytes] * len(DEVICE_NEEDS)

        def holds(exposed_s: float) -> bool:
            room = any_room.exposing(exposed_s)
            shares = [
                (kind, kind.count * float(room.most(kind.profile, idle, 0.0)))
                for kind in self.types
            ]
            return self._least_held(shares) >= 1.0 - _ROUNDING

        # not a bound if rounding alone excludes all plans: a search finds that out
        return self._least(holds)[0] if holds(math.inf) else 0.0

    def _least_held(self, shares: Sequence[tuple[RankType, float]]) -> float:
        """Return what the group holds that holds the least, of all of the state."""
        return min(
            math.fsum(share for kind, share in shares if kind.members[0] in members)
            for members in self.problem.members
        )

    def room(self, exposed_s: float, backward_s: tuple[float, float]) -> Room:
        most_share = (1 + _ROUNDING) / len(self.problem.ranks) if self.even else 1.0
        return Room(self.problem, exposed_s, backward_s, most_share)

    def search(self, box: _Box) -> Search:
        """Return the search whose plans are no slower than any in the box."""
        if not self._takes_time:
            return Search(self.problem, self.types, self.deadline)
        room = self.room(box.exposed_s[1], box.backward_s)
        slow = box.backward_s[0]
        least_s = slow if slow > self._ignored_s else 0.0
        return Search(self.problem, self.types, self.deadline, room, least_s)

    def halves(self, box: _Box, least_s: float, limit_s: float) -> list[_Box]:
        """Return the two halves of a box, without what is slower than a limit for certain."""
        if not self._takes_time:
            return []
        (least, most), (slow, slowest) = box.exposed_s, box.backward_s
        units = self.problem.units
        most = min(most, least + limit_s - least_s)
        # only the floors say what a slower backward adds: other bounds contain one already
        more_s = limit_s - self._floor_s - least
        longest_s = max(own_s for own_s, _ in backward_windows(self.problem))
        slowest = min(slowest, max(self.least_backward_s, longest_s) + more_s / units)
        if most < least or slowest < slow:
            return []
        wide_s, long_s = most - least, units * (slowest - slow)
        # nothing else hides behind the backward, or behind its collectives
        if self.problem.early_update and long_s > 0 and long_s >= wide_s:
            paced_s = backward_collectives_s(self.problem)
            middle = self._middle(slow, slowest, units)
            middle = paced_s if slow < paced_s < slowest else middle
            return [_Box((least, most), pair) for pair in ((slow, middle), (middle, slowest))]
        if wide_s <= 0:
            return []
        middle = self._middle(least, most, 1)
        return [_Box(pair, (slow, slowest)) for pair in ((least, middle), (middle, most))]

    def _middle(self, low: float, high: float, units: int) -> float:
        if math.isfinite(high):
            return (low + high) / 2
        return low + max(low, (4 * self.bound_s or 1.0) / units)

    def priced(self, found: Found) -> Choice | None:
        """Return the plan of these columns that exposes the least; None if it cannot be."""
        times_s = [float(each) for each in found.columns.times_s.max(axis=0)]
        exposed_s: float | None = 0.0
        if self._takes_time:
            exposed_s = self._least_exposed_s(found, times_s[1])
        if exposed_s is None:
            return None
        step_s = step_time(self.problem, *times_s) + exposed_s
        return Choice(self.problem, self.even, self.types, found, exposed_s, step_s)

    def _least_exposed_s(self, found: Found, backward_s: float) -> float | None:
        columns, rows = found.columns, np.flatnonzero(found.chosen)
        any_room = self.room(math.inf, (backward_s, backward_s))

        def holds(exposed_s: float) -> bool:
            room, shares = any_room.exposing(exposed_s), []
            for row in rows:
                needed, kind = columns.needed[row], self.types[int(columns.kind[row])]
                on_device, on_host = needed[: len(DEVICE_NEEDS)], needed[len(DEVICE_NEEDS)]
                share = float(room.most(kind.profile, on_device, on_host))
                shares.append((kind, int(found.chosen[row]) * share))
            return self._least_held(shares) >= 1.0

        return self._least(holds)[1] if holds(math.inf) else None

    def _least(self, holds: Callable[[float], bool]) -> tuple[float, float]:
        """Return seconds that do not hold, and the least that do, which are a little more."""
        if holds(0.0):
            return 0.0, 0.0
        low, high = 0.0, self.bound_s or 1.0
        while not holds(high):
            low, high = high, 4 * high
        while high - low > _ROUNDING * max(high, self.bound_s):
            middle = (low + high) / 2
            if holds(middle):
                high = middle
            else:
                low = middle
        return low, high
