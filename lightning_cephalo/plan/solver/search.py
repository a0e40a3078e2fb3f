"""Searches for the fastest choice of columns, of which memory decides between equally fast ones."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.cost import DEVICE_NEEDS
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.bounds import (
    TimeBounds,
    column_bounds,
    least_rates,
    most_samples,
)
from lightning_cephalo.plan.solver.columns import (
    Columns,
    Limits,
    RankType,
    build_columns,
    shared_limits,
    step_parts,
)
from lightning_cephalo.plan.solver.milp import Needs, choose
from lightning_cephalo.plan.solver.state import Room

# Plans whose step is longer by at most this fraction count as equally fast: times have more noise.
EQUAL = 1e-3
# Parts of it: for room, for times that count as the same, and for what the solver leaves open.
_FOR_ROOM, _SAME, _OPEN = 0.4 * EQUAL, 0.2 * EQUAL, 0.4 * EQUAL
# Up to so many columns the solver leaves nothing open, so that room decides between equal times.
_FEW_COLUMNS = 600
# Successive limits on the step of a column: of all columns, as multiples of the bound without
# memory; of those in a program, as multiples of the bound with it.
_WIDEST = (1.03, 1.1, 1.3, 2.0, 5.0, math.inf)
_SLACKS = (1 + 2 * EQUAL, 1.01, 1.05, 1.2, math.inf)
# Seconds for a first plan, and for its columns, even if time is up.
_ANY_S, _COLUMNS_S = 1.0, 5.0
# Price of long work: among equal plans it selects the one that spreads the samples.
_BALANCE = 1e-2
_EXACT = 1e-9


@dataclass(frozen=True)
class Found:
    """The columns of a plan, how many ranks run each, the step, and a bound of all plans'.

    Plans with a slowest time below ``floors_s`` take longer than ``covers_s``.
    """

    columns: Columns
    chosen: np.ndarray
    step_s: float
    bound_s: float
    floors_s: tuple[float, ...] = ()
    covers_s: float = math.inf


@dataclass(frozen=True)
class Search:
    """Search of one problem until ``deadline`` (of time.perf_counter).

    No slowest time is below its floor in ``bounds``. Steps are without their fixed time.
    """

    problem: Problem
    types: Sequence[RankType]
    deadline: float
    room: Room
    bounds: TimeBounds

    def run(self) -> Found | None:
        """Return the roomiest of the fastest plans found in time; None when there is no plan.

        Raises SolverError when time is up without any plan.
        """
        bound_s = self.bounds.step_s
        for slack in _WIDEST if math.isfinite(bound_s) else ():
            widest_s = bound_s * slack if bound_s > 0 else math.inf
            columns = self._columns(widest_s)
            found = self._best_of(columns, widest_s) if columns is not None else None
            if found is not None or math.isinf(widest_s):
                return found
        return None

    def _best_of(self, columns: Columns, widest_s: float) -> Found | None:
        """Return the fastest choice of the columns; None if none is within ``widest_s``."""
        ranks, batch = np.array([kind.count for kind in self.types]), self.problem.global_batch_size
        if len(np.unique(columns.kind)) < len(ranks):
            return None  # ranks of some type could not even be idle
        worst = np.full((len(ranks), columns.used.shape[1]), -np.inf)
        np.maximum.at(worst, columns.kind, columns.used)
        limits = shared_limits(self.problem)
        needs = Needs(ranks, batch, np.where(ranks @ worst > limits, limits, math.inf))
        binding = np.flatnonzero(np.isfinite(needs.limits))

        def most(inside: np.ndarray) -> float:
            few = columns.take(inside)
            rows = [(few.used[:, row], needs.limits[row]) for row in binding]
            rows = rows or [(np.zeros(len(few)), math.inf)]
            return min(most_samples(few, ranks, used, limit) for used, limit in rows)

        bounds = column_bounds(self.problem, columns.times_s, self.bounds.floors_s, most)
        if bounds is None or bounds.step_s > widest_s:
            return None
        least_s, floors_s = bounds.step_s, step_parts(self.problem, np.array(bounds.floors_s))
        parts_s = step_parts(self.problem, np.maximum(columns.times_s, bounds.floors_s))
        best = None
        for slack in _SLACKS if least_s > 0 else (math.inf,):
            limit_s = min(least_s * slack, widest_s) if math.isfinite(slack) else widest_s
            best = self._chosen(columns, parts_s, floors_s, needs, limit_s)
            if best is not None or limit_s == widest_s:
                break
        is_open = best is not None and best.step_s > best.bound_s * (1 + EQUAL)
        if best is not None and is_open and time.perf_counter() < self.deadline:
            # a faster plan lies within the step of the known one
            best = self._chosen(columns, parts_s, floors_s, needs, best.step_s) or best
        if best is None:
            return None
        bound_s = min(max(best.bound_s, least_s), best.step_s)
        return dataclasses.replace(
            best, bound_s=bound_s, floors_s=bounds.floors_s, covers_s=widest_s
        )

    def _chosen(
        self,
        columns: Columns,
        parts_s: np.ndarray,
        floors_s: np.ndarray,
        needs: Needs,
        limit_s: float,
    ) -> Found | None:
        """Return the best choice of columns within a step of ``limit_s``; None: there is none.

        Raises SolverError when time is up before that is known.
        """
        floor_s = float(floors_s.sum())
        inside = parts_s.sum(axis=1) <= limit_s * (1 + _EXACT)
        columns, parts_s = columns.take(inside), parts_s[inside]
        above_s, same_s = parts_s - floors_s, _SAME / 3 * floor_s
        if same_s:
            above_s = np.floor(above_s / same_s) * same_s
        price, unit = self._price(columns), floor_s or 1.0
        few = columns.unbeaten(columns.used[:, np.isfinite(needs.limits)], above_s, price)
        columns = columns.take(few)
        outcome = choose(
            columns,
            needs,
            cost=_FOR_ROOM * price[few],
            ladders=list(above_s[few].T / unit),
            gap=_OPEN if len(columns) > _FEW_COLUMNS else _EXACT,
            time_limit_s=max(self.deadline - time.perf_counter(), _ANY_S),
        )
        if outcome.values is None:
            if outcome.is_proven:
                return None
            raise SolverError(
                "No plan was found within the time limit. Raise time_limit_s, or describe equal"
                " ranks by equal profiles."
            )
        used = np.flatnonzero(outcome.values)
        step_s = float(parts_s[few][used].max(axis=0).sum())
        bound_s = min(floor_s + unit * (outcome.bound - _FOR_ROOM), limit_s)
        return Found(columns.take(used), outcome.values[used], step_s, bound_s)

    def _columns(self, limit_s: float) -> Columns | None:
        """Return the columns that fit into a step of ``limit_s``; None: they hold too few."""
        batch = self.problem.global_batch_size
        rates_s = np.array([least_rates(self.problem, kind.profile)[3] for kind in self.types])
        with np.errstate(divide="ignore", invalid="ignore"):
            held = limit_s / rates_s * (1 + _EXACT)
        # with neither limit nor time any batch fits, and without sizes none
        held = np.where(np.isinf(rates_s), 0.0, np.where(np.isnan(held), batch, held))
        most = np.minimum(held, batch).astype(int).tolist()
        # A rank takes at least what all others leave when each takes its largest batch.
        rest = batch - sum(kind.count * own for kind, own in zip(self.types, most, strict=True))
        if rest > 0:
            return None
        limits = []
        for kind, own in zip(self.types, most, strict=True):
            batches = range(max(rest + own, 0), own + 1)
            if kind.batch is not None:
                batches = range(kind.batch, kind.batch + 1)
            limits.append(Limits(batches, limit_s, self.bounds.floors_s))
        deadline = self.deadline + _COLUMNS_S
        return build_columns(self.problem, self.types, limits, self.room, deadline)

    def _price(self, columns: Columns) -> np.ndarray:
        """Return the price of each column, which decides between plans that are as fast.

        That of a plan is 1 at most. Offloading costs more than the room that it makes.
        """
        ranks = np.array([kind.count for kind in self.types])
        capacities = np.array([kind.profile.capacity_bytes for kind in self.types])
        full = columns.device_bytes / capacities[columns.kind]
        on_host, most = columns.needed[:, len(DEVICE_NEEDS)], np.zeros(len(ranks))
        np.maximum.at(most, columns.kind, on_host)
        work = columns.times_s @ np.array([self.problem.units, self.problem.units, 1.0])
        long = work / (work.max(initial=0.0) or 1.0)
        each = ((full + full**2) / 2 + _BALANCE * long**2) / ranks.sum()
        dearest = 1 + bool(most.any()) + _BALANCE
        return (each + on_host / (float(ranks @ most) or 1.0)) / dearest
