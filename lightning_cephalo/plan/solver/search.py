"""Searches for the fastest choice of columns, of which memory decides between equally fast ones."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.cost import DEVICE_NEEDS
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.bounds import (
    TimeBounds,
    column_bounds,
    most_samples,
    time_bounds,
)
from lightning_cephalo.plan.solver.columns import (
    DEVICE,
    HOST,
    Columns,
    Limits,
    RankType,
    build_columns,
    shared_by_all,
    step_parts,
)
from lightning_cephalo.plan.solver.milp import Needs, choose
from lightning_cephalo.plan.solver.room import Room

# Plans whose step is longer by at most this fraction count as equally fast: times have more noise.
EQUAL = 1e-3
# Parts of it: for room, for times that count as the same, and for what the solver leaves open.
_FOR_ROOM, _SAME, _OPEN = 0.4 * EQUAL, 0.2 * EQUAL, 0.4 * EQUAL
# Up to so many columns the solver leaves nothing open, so that room decides between equal times.
_FEW_COLUMNS = 600
# Successive limits on the step of a column: of all columns, as multiples of the bound without
# memory; of those in a program, as multiples of the bound with it.
_WIDEST = (1.03, 1.3, 2.0, 5.0, math.inf)
_SLACKS = (1 + 2 * EQUAL, 1.01, 1.05, math.inf)
# Seconds for a first plan, and for its columns, even if time is up.
_ANY_S, _COLUMNS_S = 1.0, 2.0
# Price of long work: among equal plans it selects the one that spreads the samples.
_BALANCE = 1e-2
_EXACT = 1e-9


@dataclass(frozen=True)
class Found:
    """The columns of a plan, how many ranks run each, the step, and a bound of all plans'."""

    columns: Columns
    chosen: np.ndarray
    step_s: float
    bound_s: float


@dataclass(frozen=True)
class Search:
    """Search of one problem until ``deadline`` (of time.perf_counter).

    With ``room``, optimizer state may move within its limits. Backwards of a unit that take less
    than ``least_backward_s`` count as much. Steps are without their fixed time.
    """

    problem: Problem
    types: Sequence[RankType]
    deadline: float
    room: Room | None = None
    least_backward_s: float = 0.0

    @cached_property
    def bounds(self) -> TimeBounds:
        """Lower bounds of all plans, without memory that ranks share."""
        return time_bounds(self.problem, self.types, self.least_backward_s)

    def run(self) -> Found | None:
        """Return the roomiest of the fastest plans found in time; None when there is no plan.

        Raises SolverError when time is up without any plan.
        """
        bound_s = self.bounds.step_s
        for slack in _WIDEST if math.isfinite(bound_s) else ():
            widest_s = bound_s * slack if bound_s > 0 else math.inf
            columns = self._columns(widest_s)
            found = self._best_of(columns, widest_s) if len(columns) else None
            if found is not None or math.isinf(widest_s):
                return found
        return None

    def _best_of(self, columns: Columns, widest_s: float) -> Found | None:
        """Return the fastest choice of the columns; None if none is within ``widest_s``."""
        if len(np.unique(columns.kind)) < len(self.types):
            return None  # ranks of some type could not even be idle
        needs, problem = self._needs(columns), self.problem
        floors_s = step_parts(problem, np.array(self.bounds.floors_s))
        parts_s = step_parts(problem, np.maximum(columns.times_s, self.bounds.floors_s))
        bounded = [row for row, limit in enumerate(needs.shared) if math.isfinite(limit)]

        def most(inside: np.ndarray) -> float:
            few = columns.take(inside)
            none = np.zeros(len(few))
            return min(
                [most_samples(few, needs.ranks, none, math.inf)]
                + [
                    most_samples(few, needs.ranks, few.used[:, row], needs.shared[row])
                    for row in bounded
                ]
            )

        bounds = column_bounds(parts_s, floors_s, most, needs.batch)
        if bounds is None or bounds[1] > widest_s:
            return None
        floors_s, least_s = bounds
        steps_s = np.maximum(parts_s, floors_s).sum(axis=1)
        best, limit_s = None, least_s
        for slack in _SLACKS if least_s > 0 else (math.inf,):
            limit_s = min(least_s * slack, widest_s) if math.isfinite(slack) else widest_s
            best = self._chosen(columns, steps_s, parts_s, floors_s, needs, limit_s)
            if best is not None or limit_s == widest_s:
                break
        if best is not None and best.step_s > best.bound_s * (1 + EQUAL) and self._left_s() > 0:
            # a faster plan lies within the step of the known one
            best = self._chosen(columns, steps_s, parts_s, floors_s, needs, best.step_s) or best
        if best is None:
            return None
        return dataclasses.replace(best, bound_s=min(max(best.bound_s, least_s), best.step_s))

    def _chosen(
        self,
        columns: Columns,
        steps_s: np.ndarray,
        parts_s: np.ndarray,
        floors_s: np.ndarray,
        needs: Needs,
        limit_s: float,
    ) -> Found | None:
        """Return the best choice of columns within a step of ``limit_s``; None: there is none.

        Raises SolverError when time is up before that is known.
        """
        floor_s = float(floors_s.sum())
        inside = steps_s <= limit_s * (1 + _EXACT)
        columns, parts_s = columns.take(inside), parts_s[inside]
        above_s, same_s = np.maximum(parts_s - floors_s, 0.0), _SAME / 3 * floor_s
        if same_s:
            above_s = np.floor(above_s / same_s) * same_s
        price, unit = self._price(columns), floor_s or 1.0
        few = columns.unbeaten(above_s, price, columns.used[:, np.isfinite(needs.shared)])
        columns, parts_s = columns.take(few), parts_s[few]
        outcome = choose(
            columns,
            needs,
            cost=_FOR_ROOM * price[few],
            ladders=list(above_s[few].T / unit),
            gap=_OPEN if len(columns) > _FEW_COLUMNS else _EXACT,
            time_limit_s=max(self._left_s(), _ANY_S),
        )
        if outcome.values is None:
            if outcome.is_proven:
                return None
            raise SolverError(
                "No plan was found within the time limit. Raise time_limit_s, or describe equal"
                " ranks by equal profiles."
            )
        used = np.flatnonzero(outcome.values)
        step_s = float(np.maximum(parts_s[used].max(axis=0), floors_s).sum())
        bound_s = min(floor_s + unit * (outcome.bound - _FOR_ROOM), limit_s)
        return Found(columns.take(used), outcome.values[used], step_s, bound_s)

    def _columns(self, limit_s: float) -> Columns:
        """Return the columns that fit into a step of ``limit_s``."""
        batch = self.problem.global_batch_size
        rates_s = self.bounds.rates_s
        most = np.full(len(rates_s), float(batch))
        with np.errstate(divide="ignore", invalid="ignore"):
            held = np.where(np.isfinite(rates_s), limit_s / rates_s * (1 + _EXACT), 0.0)
        most = np.where(np.isnan(held), most, np.minimum(held, most)).astype(int)
        # A rank takes at least what all others leave when each takes its largest batch.
        rest = batch - sum(kind.count * own for kind, own in zip(self.types, most, strict=True))
        floors_s = self.bounds.floors_s
        limits = [
            Limits(limit_s, floors_s, int(own), int(rest + own))
            if kind.batch is None
            else Limits(limit_s, floors_s, kind.batch, kind.batch)
            for kind, own in zip(self.types, most, strict=True)
        ]
        deadline = self.deadline + _COLUMNS_S
        return build_columns(self.problem, self.types, limits, self.room, deadline)

    def _needs(self, columns: Columns) -> Needs:
        """Return the constraints of a plan, with shared resources only where they can bind."""
        ranks = np.array([kind.count for kind in self.types])
        worst = np.zeros((len(ranks), columns.used.shape[1]))
        np.maximum.at(worst, columns.kind, columns.used)
        shared = shared_by_all(self.problem)
        if self.room is not None:  # several groups have the last entries
            groups, everyone = self.problem.members, self.problem.ranks
            rooms = [self.room.shared([everyone[rank] for rank in own]) for own in groups]
            shared[slice(DEVICE, 1) if len(groups) == 1 else slice(-len(groups), None)] = rooms
        shared = np.where(ranks @ worst > shared, shared, math.inf)
        return Needs(ranks, self.problem.global_batch_size, shared)

    def _price(self, columns: Columns) -> np.ndarray:
        """Return the price of each column, which decides between plans that are as fast.

        That of a plan is 1 at most. Offloading costs more than the room that it makes.
        """
        ranks = np.array([kind.count for kind in self.types])
        capacities = np.array([kind.profile.capacity_bytes for kind in self.types])
        is_limited = np.isfinite(capacities).all()
        parts = (
            capacities / (ranks @ capacities)
            if is_limited
            else np.full(len(ranks), 1 / ranks.sum())
        )
        full = columns.needed[:, : len(DEVICE_NEEDS)].max(axis=1) / capacities[columns.kind]
        most = np.zeros(len(ranks))
        np.maximum.at(most, columns.kind, columns.used[:, HOST])
        on_host = columns.used[:, HOST] / (float(ranks @ most) or 1.0)
        work_s = columns.times_s @ np.array([self.problem.units, self.problem.units, 1.0])
        work = work_s / (work_s.max(initial=0.0) or 1.0)
        room = parts[columns.kind] * (full + full**2) / 2
        dearest = 1 + bool(most.any()) + _BALANCE
        return (room + on_host + _BALANCE * work**2 / ranks.sum()) / dearest

    def _left_s(self) -> float:
        return self.deadline - time.perf_counter()
