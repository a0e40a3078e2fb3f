"""The search for the fastest choice of columns: which program is solved when, and what is proven by
it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.bounds import TimeBounds, first_largest, time_bounds
from lightning_cephalo.plan.solver.columns import (
    Columns,
    Limits,
    RankType,
    build_columns,
    step_seconds,
)
from lightning_cephalo.plan.solver.headroom import Headroom
from lightning_cephalo.plan.solver.milp import fastest
from lightning_cephalo.plan.solver.pool import Needs, Pool, all_types_in, pooled, useful
from lightning_cephalo.plan.solver.relaxed import raised_floors

_SLACKS = (1.03, 1.3, 2.0, 5.0, math.inf)
_SCALES = (1.0, 1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0, 5.0)
_HALVINGS = 3
_SHARE = 0.7
_EXACT = 1e-9
# Plans whose step is longer by no more than this count as equally fast ...
EQUAL = 1e-3
# ... where they leave the fullest rank at least this part of its capacity more.
ROOMIER = 1e-3


@dataclass(frozen=True)
class Found:
    """How many ranks run each column of ``pool``; the shortest step found and the bound below all
    steps, what no plan changes left out. The step of the columns chosen may be longer by a
    thousandth, for headroom.

    ``columns`` are those that ``pool`` refers to, per type.
    """

    pool: Pool
    chosen: np.ndarray
    step_s: float
    bound_s: float
    columns: Sequence[Columns]


@dataclass(frozen=True)
class Search:
    """One problem and how long to try (``deadline`` of time.perf_counter)."""

    problem: Problem
    types: Sequence[RankType]
    deadline: float

    @cached_property
    def _bounds(self) -> TimeBounds:
        return time_bounds(self.problem, self.types, first_largest(self.problem, self.types))

    @property
    def bound_s(self) -> float:
        """What no plan can beat, without any search."""
        return self._bounds.step_s

    @property
    def backward_floor_s(self) -> float:
        """Seconds of a unit's backward, or of its collectives, that no plan can beat."""
        return self._bounds.floors_s[1]

    def run(self) -> Found | None:
        """The optimum, or the best found in time, with the most headroom among its equals; None
        when there is no plan.

        Raises SolverError when time is up without any plan.
        """
        found = self._fastest()
        if found is None or found.step_s > found.bound_s * (1 + _EXACT):
            return found
        return self._roomiest(found)

    def _roomiest(self, fastest: Found) -> Found:
        """Of the plans within a thousandth of the fastest, the one that leaves the fullest rank the
        most room. The thousandth is spent on all phases alike, or on one of them.
        """
        headroom = Headroom(self.problem, self.types, self.deadline)
        if math.isinf(headroom.capacity_bytes):
            return fastest
        limit_s = fastest.step_s * (1 + EQUAL)
        bounds = self._wider(self._bounds, limit_s)
        equals = _Round(self, bounds, limit_s)
        used = fastest.pool.take(fastest.chosen > 0)
        slowest = np.maximum(used.times_s.max(axis=0), bounds.floors_s)
        scales = np.array([self.problem.units, self.problem.units, 1.0])
        alone = np.diag(fastest.step_s * EQUAL / scales)
        seen = {len(equals.inside(slowest))}
        best, room = fastest, headroom.least(fastest.pool, fastest.chosen)
        for extra in (slowest * EQUAL, *alone):
            rows = equals.inside(slowest + extra)
            if len(rows) in seen or time.perf_counter() > self.deadline:
                continue
            seen.add(len(rows))
            even = headroom.most_even(equals.pool.take(rows), equals.strict)
            if even is None:
                continue
            chosen, reached = even
            if headroom.least(reached, chosen) > room + ROOMIER:
                room = headroom.least(reached, chosen)
                best = dataclasses.replace(
                    fastest, pool=reached, chosen=chosen, columns=equals.columns
                )
        return best

    def _fastest(self) -> Found | None:
        bounds = self._bounds
        if math.isinf(bounds.step_s):
            bounds = self._wider(bounds, math.inf)
        best: Found | None = None
        slacks = iter(_SLACKS)
        limit_s = bounds.step_s * next(slacks)
        while math.isfinite(bounds.step_s):
            try:
                found = _Round(self, bounds, limit_s).optimum()
            except SolverError:
                if best is None:
                    raise
                return dataclasses.replace(best, bound_s=min(bounds.step_s, best.step_s))
            if found is None:
                if math.isinf(limit_s):
                    return None
                slack = next(slacks)
                limit_s = bounds.step_s * slack if math.isfinite(slack) else math.inf
            elif found.step_s <= bounds.step_s * (1 + _EXACT) or (
                found.step_s <= limit_s and self._covered(bounds, found.step_s)
            ):
                return found
            else:
                # What is faster than a known plan lies within its step.
                best = found
                limit_s = found.step_s * (1 + _EXACT)
            bounds = self._wider(bounds, limit_s)
        return None

    def _covered(self, bounds: TimeBounds, step_s: float) -> bool:
        return bounds.largest >= self.problem.global_batch_size or bounds.covers(step_s)

    def _wider(self, bounds: TimeBounds, step_s: float) -> TimeBounds:
        """Bounds that look at every batch of a rank that may be part of a step of ``step_s``."""
        while not self._covered(bounds, step_s):
            largest = min(self.problem.global_batch_size, 2 * bounds.largest)
            bounds = time_bounds(self.problem, self.types, largest)
        return bounds


class _Round:
    """The search among columns that fit into a step of ``limit_s``; what it finds may itself be
    longer.
    """

    def __init__(self, search: Search, bounds: TimeBounds, limit_s: float) -> None:
        problem, types = search.problem, search.types
        self.problem = problem
        self.deadline = search.deadline
        self.bounds = bounds
        self.headroom = Headroom(problem, types, search.deadline)
        largest = bounds.largest_batches(problem, limit_s)
        total = sum(kind.count * batch for kind, batch in zip(types, largest, strict=True))
        self.columns = [
            build_columns(
                problem,
                kind.profile,
                # At the least what all others leave when each takes its largest batch.
                Limits(limit_s, bounds.floors_s, problem.global_batch_size - total + batch, batch),
            )
            for kind, batch in zip(types, largest, strict=True)
        ]
        pool = pooled(types, self.columns)
        self.pool = pool.take(pool.count > 0) if problem.equal_microbatches else pool

    def optimum(self) -> Found | None:
        """The optimum, or None when these columns hold no plan.

        From loose to strict, so that the strict programs, which are far larger, are rarely needed:
        first with at least the batch and each rank's own memory only, then with the memory that all
        share, then with the batch exactly.
        """
        pool, floors = self.pool, np.array(self.bounds.floors_s)
        if not all_types_in(pool):
            return None
        strict = self.strict
        shared = math.isfinite(strict.used_bytes)
        loose = dataclasses.replace(strict, exact=False)
        known = None
        raised = raised_floors(pool, strict, floors) if shared else floors
        if raised is None:
            return None
        if self._step_s(raised) <= self._step_s(floors) * (1 + _EXACT):
            unshared = dataclasses.replace(loose, used_bytes=math.inf)
            settled, found = self._fastest(pool, unshared, strict, floors)
            if settled:
                return found
        if shared:
            floors = raised
            known = self._scaled(pool, strict, floors)
            if known is not None:
                if known.step_s <= self._step_s(floors) * (1 + _EXACT):
                    return dataclasses.replace(known, bound_s=known.step_s)
                steps = step_seconds(self.problem, pool.times_s, tuple(floors))
                pool = pool.take(steps <= known.step_s * (1 + _EXACT))
            settled, found = self._fastest(pool, loose, strict, floors, known)
            if settled:
                return found
        return self._fastest(pool, strict, strict, floors, known)[1]

    @property
    def strict(self) -> Needs:
        """All that a plan must meet; the memory that all share only where it can bind."""
        budget = self.headroom.capacity_bytes - self.problem.state_bytes
        worst = sum(
            ranks * float(self.pool.used_bytes[self.pool.kind == kind].max())
            for kind, ranks in enumerate(self.pool.ranks.tolist())
        )
        return Needs(
            batch=self.problem.global_batch_size,
            exact=True,
            used_bytes=budget if worst > budget else math.inf,
            equal_counts=self.problem.equal_microbatches,
        )

    def inside(self, slowest_s: np.ndarray) -> np.ndarray:
        """Indices of the columns that are no slower than this in any phase."""
        return np.flatnonzero((self.pool.times_s <= slowest_s * (1 + 1e-12)).all(axis=1))

    def _fastest(
        self,
        pool: Pool,
        needs: Needs,
        strict: Needs,
        floors: np.ndarray,
        known: Found | None = None,
    ) -> tuple[bool, Found | None]:
        """Solve for ``needs``, then meet the ``strict`` ones in the same step.

        The first result says whether that settles it: no plan, or the optimum, or the best there
        was time for, ``known`` included.
        """
        left_s = max(self.deadline - time.perf_counter(), 0.0)
        outcome = fastest(
            useful(pool, needs, floors),
            needs,
            units=self.problem.units,
            floors_s=floors,
            # What is found must still be turned into a plan with the exact batch.
            time_limit_s=left_s * _SHARE,
        )
        if outcome.status == "infeasible":
            return True, None
        if outcome.slowest_s is not None:
            found = self._met(pool, strict, outcome.slowest_s, floors, outcome.bound)
            if found is not None and (known is None or found.step_s <= known.step_s):
                if outcome.status == "optimal" and found.step_s <= outcome.objective * (1 + _EXACT):
                    found = dataclasses.replace(found, bound_s=found.step_s)
                return True, found
        if outcome.status != "limit":
            return False, None
        found = known or self._scaled(pool, strict, floors)
        if found is None:
            raise SolverError(
                f"No plan was found within the time limit (HiGHS: {outcome.reason}). "
                f"Raise time_limit_s, or describe equal ranks by equal profiles."
            )
        bound = min(max(outcome.bound, found.bound_s), found.step_s)
        return True, dataclasses.replace(found, bound_s=bound)

    def _scaled(self, pool: Pool, strict: Needs, floors: np.ndarray) -> Found | None:
        """A plan whose three slowest times all exceed their floors by the same factor, as small as
        a few tries find.
        """
        low, best = 1.0, None
        for high in _SCALES:
            best = self._met(pool, strict, floors * high, floors, self._step_s(floors))
            if best is not None:
                break
            low = high
        # A nearer plan spares the program that follows far more time than it costs.
        for _ in range(_HALVINGS if best is not None and low < high else 0):
            middle = (low + high) / 2
            found = self._met(pool, strict, floors * middle, floors, self._step_s(floors))
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return best

    def _met(
        self, pool: Pool, strict: Needs, slowest_s: np.ndarray, floors: np.ndarray, bound_s: float
    ) -> Found | None:
        inside = (pool.times_s <= np.maximum(slowest_s, floors) * (1 + 1e-12)).all(axis=1)
        even = self.headroom.most_even(pool.take(inside), strict)
        if even is None:
            return None
        chosen, reached = even
        step = self._step_s(np.maximum(reached.times_s[chosen > 0].max(axis=0), floors))
        bound = min(max(bound_s, self.bounds.step_s), step)
        return Found(reached, chosen, step, bound, self.columns)

    def _step_s(self, slowest_s: np.ndarray) -> float:
        return float(step_seconds(self.problem, slowest_s[None], self.bounds.floors_s)[0])
