"""Finds the fastest plan where a rank's share of the state takes time.

How much state a rank can hold depends on the seconds that its share may add to a step, and on the
backward that hides moves, and lets collectives hide fewer updates. For given limits on both, the
search is that of a problem whose shares take no time, with other rooms (``room``). So all limits
are searched: boxes of seconds and backwards are halved where the bound is the least, until no box
can hold a faster plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.cost import (
    DEVICE_NEEDS,
    Mode,
    fixed_time,
    host_need,
    step_time,
)
from lightning_cephalo.plan.plan import RankPlan
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.columns import RankType, group_types
from lightning_cephalo.plan.solver.room import Room
from lightning_cephalo.plan.solver.search import EQUAL, Found, Search, variants
from lightning_cephalo.plan.solver.state import filled_up, to_the_byte
from lightning_cephalo.plan.windows import backward_collectives_s, backward_windows

_MOST_BOXES = 48
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Box:
    """Limits: shares of plans in it add ``exposed_s``, a unit's backward takes ``backward_s``."""

    exposed_s: tuple[float, float]
    backward_s: tuple[float, float]


@dataclass(frozen=True)
class MovingPlan:
    """What ranks run and hold, where their shares of the state take time."""

    problem: Problem
    even: bool
    types: Sequence[RankType]
    found: Found
    exposed_s: float
    step_s: float

    @property
    def backward_s(self) -> float:
        """Seconds of the slowest rank's backward of one unit."""
        return float(self.found.columns.times_s[:, 1].max(initial=0.0))


def least_step_s(problem: Problem) -> float:
    """Return a lower bound of the step of all plans whose shares take time, without a search."""
    found = (_Variant(*each, 0.0) for each in variants(problem, has_even_state=False))
    return min((each.bound_s + each.least_exposed_s for each in found), default=math.inf)


def fastest_moving(
    problem: Problem, deadline: float, limit_s: float
) -> tuple[MovingPlan | None, float]:
    """Return the fastest plan where shares take time, and a lower bound of all of them."""
    count, best = itertools.count(), None
    queue: list[tuple[float, int, _Variant, _Box]] = []
    for each, even in variants(problem, has_even_state=False):
        variant = _Variant(each, even, deadline)
        if math.isfinite(variant.bound_s):
            box = _Box((variant.least_exposed_s, math.inf), (variant.least_backward_s, math.inf))
            least_s = variant.bound_s + variant.least_exposed_s
            heapq.heappush(queue, (least_s, next(count), variant, box))
    bound_s, failure = math.inf, None
    for _ in range(_MOST_BOXES):
        # a plan that is slower than this by less is as good
        enough_s = limit_s if best is None else min(limit_s, best.step_s * (1 - EQUAL / 2))
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
        if plan is not None and (best is None or plan.step_s < best.step_s):
            best = plan
        for half in variant.halves(box, least_s, best.step_s if best else limit_s):
            heapq.heappush(queue, (least_s, next(count), variant, half))
    bound_s = min([bound_s, *(each[0] for each in queue)])
    if best is None:
        if failure is not None:
            raise failure
        if math.isinf(limit_s) and queue:
            raise SolverError("No plan with state in host memory was found, and none is excluded.")
        return None, bound_s
    return best, min(bound_s, best.step_s)


class _Variant:
    """A problem in which all choices for all ranks together are made."""

    def __init__(self, problem: Problem, even: bool, deadline: float) -> None:
        self.problem, self.even, self.deadline = problem, even, deadline
        self.types = group_types(problem)
        bounds = Search(problem, self.types, deadline).bounds
        self.bound_s = bounds.step_s + fixed_time(problem)
        # where nothing hides behind collectives, only what exceeds them counts
        self._ignored_s = 0.0 if problem.shares_take_time else backward_collectives_s(problem)
        self.least_backward_s = max(bounds.floors_s[1], self._ignored_s)
        self._floor_s = step_time(problem, *bounds.floors_s)

    @cached_property
    def least_exposed_s(self) -> float:
        """Lower bound of what shares add: that of ranks without samples, in any backward."""
        any_room = self.room(math.inf, (self.least_backward_s, math.inf))
        idle = [self.problem.fixed_bytes] * len(DEVICE_NEEDS)

        def holds(exposed_s: float) -> bool:
            room = any_room.exposing(exposed_s)
            shares = (kind.count * float(room.most(kind.profile, idle, 0.0)) for kind in self.types)
            return math.fsum(shares) >= 1.0 - _ROUNDING

        # not a bound if rounding alone excludes all plans: a search finds that out
        return self._least(holds)[0] if holds(math.inf) else 0.0

    @property
    def _most_share(self) -> float:
        return (1 + _ROUNDING) / len(self.problem.ranks) if self.even else 1.0

    def room(self, exposed_s: float, backward_s: tuple[float, float]) -> Room:
        return Room(self.problem, exposed_s, backward_s, self._most_share)

    def search(self, box: _Box) -> Search:
        """Return the search whose plans are no slower than any in the box."""
        room = self.room(box.exposed_s[1], box.backward_s)
        slow = box.backward_s[0]
        least_s = slow if slow > self._ignored_s else 0.0
        return Search(self.problem, self.types, self.deadline, room, least_s)

    def halves(self, box: _Box, least_s: float, limit_s: float) -> list[_Box]:
        """Return the two halves of a box, without what is slower than a limit for certain."""
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
        takes_time = self.problem.can_move_state or self.problem.shares_take_time
        hides = takes_time and self.problem.early_update
        if hides and long_s > 0 and long_s >= wide_s:
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

    def priced(self, found: Found) -> MovingPlan | None:
        """Return the plan of these columns that exposes the least; None if it cannot be."""
        times_s = found.columns.times_s.max(axis=0)
        exposed_s = self._least_exposed_s(found, float(times_s[1]))
        if exposed_s is None:
            return None
        step_s = step_time(self.problem, *map(float, times_s)) + exposed_s
        return MovingPlan(self.problem, self.even, self.types, found, exposed_s, step_s)

    def _least_exposed_s(self, found: Found, backward_s: float) -> float | None:
        columns, rows = found.columns, np.flatnonzero(found.chosen)
        any_room = self.room(math.inf, (backward_s, backward_s))

        def holds(exposed_s: float) -> bool:
            room, shares = any_room.exposing(exposed_s), []
            for row in rows:
                needed = columns.needed[row]
                profile = self.types[int(columns.kind[row])].profile
                on_device, on_host = needed[: len(DEVICE_NEEDS)], needed[len(DEVICE_NEEDS)]
                share = float(room.most(profile, on_device, on_host))
                shares.append(int(found.chosen[row]) * share)
            return math.fsum(shares) >= 1.0

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


def with_moved_state(plan: MovingPlan, runs: Sequence[RankPlan]) -> list[RankPlan]:
    """Return what ranks run, each with its share of the state, and where that lives.

    Devices are filled first; each rank moves as little as its share allows.
    """
    problem = plan.problem
    backward_s = (plan.backward_s, plan.backward_s)
    most_share = (1 + _ROUNDING) / len(runs) if plan.even else 1.0
    room = Room(problem, plan.exposed_s, backward_s, most_share)
    resident = Room(replace(problem, optimizer_offload=False), plan.exposed_s, backward_s)
    least, most, needs = [], [], []
    for profile, run in zip(problem.ranks, runs, strict=True):
        mode = Mode.of(run)
        on_device = [need(problem, profile, mode).of(run.microbatch_sizes) for need in DEVICE_NEEDS]
        on_host = host_need(problem, profile, mode).of(run.microbatch_sizes)
        needs.append((on_device, on_host))
        most.append(float(room.most(profile, on_device, on_host)))
        stays = problem.optimizer_offload is not True
        least.append(float(resident.most(profile, on_device, on_host)) if stays else 0.0)
    held = math.fsum(least)
    if plan.even:
        shares = [1 / len(runs)] * len(runs)
    else:
        shares = filled_up(least, most) if held < 1 else [share / held for share in least]
    found = []
    for profile, run, share, needed in zip(problem.ranks, runs, shares, needs, strict=True):
        moved = room.least_moved(profile, *needed, share)
        more = moved.device_bytes(problem)
        share = to_the_byte(problem, profile, run, share, profile.capacity_bytes, more)
        found.append(
            replace(
                run,
                state_fraction=share,
                resident_fraction=moved.resident_fraction,
                host_update_fraction=moved.host_update_fraction,
            )
        )
    return found
