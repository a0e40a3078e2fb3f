"""Searches for the fastest choice of columns, then for the one with the most room."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.cost import idle_bytes
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.bounds import (
    TimeBounds,
    first_largest,
    raised_floors,
    time_bounds,
)
from lightning_cephalo.plan.solver.columns import (
    DEVICE,
    HOST,
    ColumnLimits,
    Columns,
    RankType,
    batch_groups,
    build_columns,
    shared_by_all,
    step_parts,
    step_seconds,
)
from lightning_cephalo.plan.solver.milp import Maximum, Needs, choose
from lightning_cephalo.plan.solver.room import Room
from lightning_cephalo.plan.solver.unbeaten import unbeaten
from lightning_cephalo.plan.windows import backward_collectives_s

_EXACT = 1e-9
# Plans whose step is longer by at most this fraction count as equally fast.
EQUAL = 1e-3
# Room that differs by less than this fraction of a rank's capacity counts as equal.
ROOMIER = 1e-3
# With at least this many types of ranks, a step is proven the shortest only to within EQUAL:
# times have a per cent of noise, and telling the last plans apart takes minutes.
_MANY_TYPES = 16
# Above so many columns a first plan comes before the best one. Where collectives set the pace, a
# small part of the step is left to choose, and many columns differ in little.
_FEW_COLUMNS, _FEW_WHERE_COLLECTIVES_PACE = 2000, 300
# Successive limits on the step of a column, as multiples of the bound.
_SLACKS = (1.03, 1.3, 2.0, 5.0, math.inf)
# Factors by which all slowest times of a first plan may exceed their floors.
_SCALES = (1.0, *(1 + 2.0**power for power in range(-11, 3)))
# Fraction of the time that the shortest step may take; the rest is for the room.
_SHARE = 0.7
_PARTS = 20
_ROOM_GAP = 1e-4
# Seconds for a first plan, even if time is up.
_ANY_S = 1.0
_ANY_GAP = 0.1
# Seconds for the columns of a first plan, even if time is up.
_COLUMNS_S = 1.0
# Offloading costs more than the room that it makes, on one rank and over all ranks.
_OFFLOAD = 3.0
# Price of long work: among equal plans it selects the one that spreads the samples.
_BALANCE = 1e-2


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    columns: Columns
    chosen: np.ndarray
    step_s: float
    bound_s: float


@dataclass(frozen=True)
class Search:
    """Search of one problem until ``deadline`` (of time.perf_counter).

    With ``room``, optimizer state may move within its limits. Backwards of a unit that take less
    than ``least_backward_s`` count as much.
    """

    problem: Problem
    types: Sequence[RankType]
    deadline: float
    room: Room | None = None
    least_backward_s: float = 0.0

    @property
    def bound_s(self) -> float:
        """Lower bound of the step of all plans, without any search."""
        return self._bounds.step_s

    @property
    def floors_s(self) -> tuple[float, float, float]:
        """Lower bounds of a unit's forward and backward, and of tails, on the slowest ranks."""
        return self._bounds.floors_s

    @cached_property
    def _bounds(self) -> TimeBounds:
        return self._bounds_up_to(first_largest(self.problem, self.types))

    @property
    def _gap(self) -> float:
        return EQUAL if len(self.types) >= _MANY_TYPES else _EXACT

    @property
    def _few_columns(self) -> int:
        forward_s, backward_s, _ = self.floors_s
        problem = self.problem
        is_paced = forward_s < problem.gather_s or backward_s < backward_collectives_s(problem)
        return _FEW_WHERE_COLLECTIVES_PACE if is_paced else _FEW_COLUMNS

    def run(self) -> Found | None:
        """Return the roomiest of the fastest plans found in time; None when there is no plan.

        Raises SolverError when time is up without any plan.
        """
        found = self.fastest()
        return found if found is None or self._left_s() <= 0 else self.roomiest(found)

    def fastest(self) -> Found | None:
        """Return the fastest choice of columns.

        A limit on the step rises from just above the bound until the optimum lies within it: what
        it cuts off is provably slower.
        """
        bounds = self._bounds
        if math.isinf(bounds.step_s):
            bounds = self._covering(bounds, math.inf)
        if math.isinf(bounds.step_s):
            return None
        slacks = iter(_SLACKS)
        limit_s = bounds.step_s * next(slacks)
        best: Found | None = None
        while True:
            bounds = self._covering(bounds, limit_s)
            if math.isinf(bounds.step_s):
                return best  # larger batches were looked at, and no plan has room for them
            try:
                found = self._fastest_within(bounds, limit_s)
            except SolverError:
                if best is None:
                    raise
                return best
            if found is not None:
                best = dataclasses.replace(found, bound_s=min(found.bound_s, limit_s))
                if found.step_s <= limit_s * (1 + self._gap) or self._left_s() <= 0:
                    return best
                # Every faster plan lies within the step of the known one.
                limit_s = found.step_s
            elif math.isinf(limit_s):
                return None
            else:
                slack = next(slacks)
                limit_s = bounds.step_s * slack if math.isfinite(slack) else math.inf

    def _fastest_within(self, bounds: TimeBounds, limit_s: float) -> Found | None:
        """Return the fastest choice of the columns that fit into a step of ``limit_s`` each.

        None when they hold no plan. The step of that choice may be longer than ``limit_s``.
        """
        columns = self._columns(bounds, limit_s)
        if len(np.unique(columns.kind)) < len(self.types):
            return None  # ranks of some type could not even be idle
        needs = self._needs(columns)
        floors_s = raised_floors(
            columns, needs.ranks, needs.batch, needs.shared, np.array(bounds.floors_s)
        )
        if floors_s is None:
            return None
        known = None
        if len(columns) > self._few_columns:
            known = self._first_plan(columns, needs, floors_s)
            if known is None or known.step_s <= known.bound_s * (1 + self._gap):
                return known
            # A faster plan has only these columns.
            steps_s = step_seconds(self.problem, columns.times_s, floors_s)
            columns = columns.take(steps_s <= known.step_s * (1 + _EXACT))
        paid = [maximum.above for maximum in self._slowest(columns, floors_s)]
        columns = self._unbeaten(columns, [*paid, *_shared(columns, needs)])
        outcome = choose(
            columns,
            needs,
            maxima=self._slowest(columns, floors_s),
            gap=self._gap / 2,
            time_limit_s=self._left_s() * _SHARE,
        )
        if outcome.values is not None:
            found = self._found(columns, outcome.values, floors_s, outcome.bound)
            if known is None or found.step_s < known.step_s:
                known = found
        elif known is None and outcome.status == "limit":
            known = self._first_plan(columns, needs, floors_s)
        if known is None:
            return None
        exact = outcome.status == "optimal" and self._gap <= _EXACT
        bound_s = known.step_s if exact else min(max(outcome.bound, known.bound_s), known.step_s)
        return dataclasses.replace(known, bound_s=bound_s)

    def _first_plan(self, columns: Columns, needs: Needs, floors_s: np.ndarray) -> Found | None:
        """Return a plan whose parts of a step exceed their floors by one small factor at most.

        None when the columns hold no plan. It saves the next program far more time than it costs.
        """
        floors = step_parts(self.problem, floors_s)
        parts_s = step_parts(self.problem, np.maximum(columns.times_s, floors_s))
        floor_s = float(floors.sum())
        best: Found | None = None
        infeasible, feasible = -1, len(_SCALES)  # len(_SCALES): all columns
        while feasible - infeasible > 1 or best is None:
            if best is not None and self._left_s() <= 0:
                break
            tried = (infeasible + feasible) // 2
            if best is None:
                tried = min(2 * infeasible + 2, len(_SCALES))
            few = columns
            if tried < len(_SCALES):
                most_s = floors * _SCALES[tried] * (1 + 1e-12)
                few = columns.take(np.all(parts_s <= most_s, axis=1))
            few = self._unbeaten(few, [self._price(few), *_shared(few, needs)])
            left_s = self._left_s(_ANY_S if best is None else 0.0)
            outcome = choose(few, needs, cost=self._price(few), gap=_ANY_GAP, time_limit_s=left_s)
            if outcome.values is not None:
                best, feasible = self._found(few, outcome.values, floors_s, floor_s), tried
            elif tried < len(_SCALES):
                infeasible = tried
            elif outcome.status == "infeasible":
                return None
            else:
                raise SolverError(
                    f"No plan was found within the time limit (HiGHS: {outcome.reason}). "
                    f"Raise time_limit_s, or describe equal ranks by equal profiles."
                )
        return best

    def roomiest(self, fastest: Found) -> Found:
        """Return the plan with the most room among those within a thousandth of the fastest.

        The slowest times share the thousandth, in small parts. If the state filled all ranks to one
        level, the fullest rank would be as full as all ranks together, or as its samples alone make
        it: the larger of the two is the price.
        """
        limit_s = fastest.step_s * (1 + EQUAL)
        bounds = self._covering(self._bounds, limit_s)
        try:
            columns = self._columns(bounds, limit_s)
        except SolverError:  # time is up
            return fastest
        slowest_s = np.maximum(fastest.columns.times_s.max(axis=0), bounds.floors_s)
        slowest_s = step_parts(self.problem, slowest_s)
        longer_s = step_parts(self.problem, columns.times_s) - slowest_s * (1 + 1e-12)
        parts = _PARTS * longer_s / (EQUAL * fastest.step_s or 1.0)
        parts = np.ceil(np.maximum(parts, 0.0))
        within = parts.sum(axis=1) <= _PARTS
        columns, parts = columns.take(within), parts[within]
        needs = self._needs(columns)
        costs = [self._fullness(columns), self._price(columns), *parts.T, *_shared(columns, needs)]
        rows = unbeaten(batch_groups(columns), np.column_stack(costs))
        columns, parts = columns.take(rows), parts[rows]
        together = self._together(fastest)
        outcome = choose(
            columns,
            needs,
            maxima=[Maximum(self._fullness(columns), together, ROOMIER)],
            cost=self._price(columns),
            limited=[Maximum(each) for each in parts.T],
            most=_PARTS,
            gap=max(_ROOM_GAP, self._gap),
            time_limit_s=self._left_s(),
        )
        if outcome.values is None:
            return fastest
        rows = np.flatnonzero(outcome.values)
        return dataclasses.replace(fastest, columns=columns.take(rows), chosen=outcome.values[rows])

    def _found(
        self, columns: Columns, chosen: np.ndarray, floors_s: np.ndarray, bound_s: float
    ) -> Found:
        rows = np.flatnonzero(chosen)
        columns = columns.take(rows)
        step_s = float(step_seconds(self.problem, columns.times_s.max(axis=0), floors_s))
        return Found(columns, chosen[rows], step_s, min(bound_s, step_s))

    def _columns(self, bounds: TimeBounds, limit_s: float) -> Columns:
        """Return the columns that fit into a step of ``limit_s``."""
        largest = bounds.largest_batches(self.problem, limit_s)
        total = sum(kind.count * batch for kind, batch in zip(self.types, largest, strict=True))
        # A rank takes at least what all others leave when each takes its largest batch.
        rest = self.problem.global_batch_size - total
        limits = [ColumnLimits(limit_s, bounds.floors_s, batch, rest + batch) for batch in largest]
        deadline = self.deadline + _COLUMNS_S
        columns = build_columns(self.problem, self.types, limits, self.room, deadline)
        return columns.take(columns.count > 0) if self.problem.every_rank_runs else columns

    def _unbeaten(self, columns: Columns, costs: Sequence[np.ndarray]) -> Columns:
        """Return the columns that no other one with as many samples beats in all costs."""
        rows = unbeaten(batch_groups(columns), np.column_stack(costs))
        return columns.take(rows)

    def _needs(self, columns: Columns) -> Needs:
        """Return the constraints of a plan, with shared resources only where they can bind."""
        ranks = np.array([kind.count for kind in self.types])
        worst = np.zeros((len(ranks), columns.used.shape[1]))
        np.maximum.at(worst, columns.kind, columns.used)
        shared = shared_by_all(self.problem)
        if self.room is not None:
            shared[DEVICE] = self.room.shared(self.problem.ranks)
        return Needs(
            ranks=ranks,
            batch=self.problem.global_batch_size,
            shared=np.where(ranks @ worst > shared, shared, math.inf),
        )

    def _slowest(self, columns: Columns, floors_s: np.ndarray) -> list[Maximum]:
        """Return the three parts of a step, each of which has its slowest rank."""
        floors = step_parts(self.problem, floors_s)
        # Half of the gap goes to merged levels of the three ladders, half to the solver.
        closest_s = self._gap / 2 / 3 * float(floors.sum()) if self._gap > _EXACT else 0.0
        parts_s = step_parts(self.problem, np.maximum(columns.times_s, floors_s))
        return [
            Maximum(own_s, floor_s, closest_s)
            for own_s, floor_s in zip(parts_s.T, floors.tolist(), strict=True)
        ]

    def _together(self, fastest: Found) -> float:
        """Return how full all ranks together are, or those of the fullest group."""
        shared = 0.0 if self.problem.has_even_state else self.problem.full_state_bytes
        used = fastest.chosen @ fastest.columns.used
        groups = self.problem.groups
        if len(groups) == 1:
            return (float(used[DEVICE]) + shared) / self._capacity
        fullest = zip(used[-len(groups) :], groups, strict=True)
        return max((float(own) + shared) / self._capacity_of(members) for own, members in fullest)

    def _fullness(self, columns: Columns) -> np.ndarray:
        """Return the fraction of a rank's capacity that each column fills, without state."""
        return columns.used[:, DEVICE] / self._capacities[columns.kind]

    def _price(self, columns: Columns) -> np.ndarray:
        """Return the price of each column, which decides between plans that are fast enough."""
        capacity = self._capacities[columns.kind]
        used, on_host = columns.used[:, DEVICE], columns.used[:, HOST]
        # without a limit on the device, offloading gains nothing: it must keep a price
        on_host = on_host / np.minimum(capacity, on_host.max(initial=0.0) or 1.0)
        work_s = columns.times_s @ np.array([self.problem.units, self.problem.units, 1.0])
        work = work_s / (work_s.max(initial=0.0) or 1.0)
        ranks = len(self.problem.ranks)
        return used / self._capacity + _OFFLOAD * on_host + _BALANCE * work**2 / ranks

    @property
    def _capacities(self) -> np.ndarray:
        """Capacity of a rank of each type, in bytes."""
        return np.array([self._capacity_of(kind.members[:1]) for kind in self.types])

    @property
    def _capacity(self) -> float:
        """Capacity of all ranks together, in bytes."""
        return self._capacity_of(range(len(self.problem.ranks)))

    def _capacity_of(self, members: Sequence[int]) -> float:
        ranks = [self.problem.ranks[rank] for rank in members]
        if self.room is not None:
            return math.fsum(map(self.room.capacity, ranks))
        return math.fsum(rank.capacity_bytes for rank in ranks)

    def _covering(self, bounds: TimeBounds, step_s: float) -> TimeBounds:
        """Return bounds over every batch of a rank that may be part of a step of ``step_s``."""
        batch = self.problem.global_batch_size
        while bounds.largest < batch and not bounds.covers(step_s):
            bounds = self._bounds_up_to(min(batch, 2 * bounds.largest))
        return bounds

    def _bounds_up_to(self, largest: int) -> TimeBounds:
        return time_bounds(self.problem, self.types, largest, self.least_backward_s)

    def _left_s(self, grace_s: float = 0.0) -> float:
        return max(self.deadline + grace_s - time.perf_counter(), 0.0)


def variants(problem: Problem, *, has_even_state: bool) -> Iterator[tuple[Problem, bool]]:
    """Yield a problem for each choice for all ranks together, and whether shares are even in it.

    Even shares count if they travel faster, as bytes of every rank or as state that is shared.
    """
    has_even_state |= problem.has_even_state
    for reshard in problem.reshard_choices:
        asked = problem.resharding(reshard)
        even = asked.with_even_shares()
        found = [(asked, False)]
        if even.collectives_s != asked.collectives_s:
            found.append((dataclasses.replace(even, has_even_state=has_even_state), True))
        for variant, is_even in found:
            # a rank without samples holds these bytes too, and no column says so
            if min(rank.capacity_bytes for rank in variant.ranks) >= idle_bytes(variant):
                yield variant, is_even


def _shared(columns: Columns, needs: Needs) -> list[np.ndarray]:
    """Return what the columns take of each resource that all ranks share and that is limited."""
    return list(columns.used.T[np.isfinite(needs.shared)])
