"""Of plans that are equally fast, the one that leaves the fullest rank the most room."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.columns import RankType, step_seconds
from lightning_cephalo.plan.solver.milp import cheapest
from lightning_cephalo.plan.solver.pool import Needs, Pool, all_types_in, best_rows

_EXACT = 1e-9
_CLOSE = 1e-2
_TRIES = 5
_GAP = 1e-4
_BALANCE = 1e-2


@dataclass(frozen=True)
class Headroom:
    """Chooses among columns for their memory; gives up improving at ``deadline`` (of
    time.perf_counter).
    """

    problem: Problem
    types: Sequence[RankType]
    deadline: float

    @property
    def capacity_bytes(self) -> float:
        """Of all ranks together."""
        return math.fsum(rank.capacity_bytes for rank in self.problem.ranks)

    def least(self, pool: Pool, chosen: np.ndarray) -> float:
        """The part of its capacity that the fullest rank keeps free once the state is shared."""
        capacity = np.array([kind.profile.capacity_bytes for kind in self.types])[pool.kind]
        free = capacity - pool.used_bytes
        total = float((chosen * free).sum())
        left = 1 - self.problem.state_bytes / total if total > 0 else 0.0
        return left * float((free / capacity)[chosen > 0].min())

    def most_even(self, pool: Pool, needs: Needs) -> tuple[np.ndarray, Pool] | None:
        """How many ranks run each column of the returned pool (a part of ``pool``); None when
        ``needs`` cannot be met.

        With the state shared evenly the fullest rank is as full as all ranks together, unless its
        samples alone fill it more: so first the least bytes in all, then less for the ranks that
        stand out.
        """
        total = self.capacity_bytes
        capacity = np.array([kind.profile.capacity_bytes for kind in self.types])[pool.kind]
        part = pool.used_bytes / capacity
        cost = pool.used_bytes / total + self._unbalance(pool)
        by_count = needs.equal_counts
        rows = np.union1d(
            best_rows(pool, pool.used_bytes, by_count=by_count),
            best_rows(pool, cost, by_count=by_count),
        )
        pool, part, cost = pool.take(rows), part[rows], cost[rows]
        best = self._cheapest_that_fits(pool, needs, cost)
        if best is None:
            return None
        used = float((best * pool.used_bytes).sum())
        together = (used + self.problem.state_bytes) / total
        low, high = max(together, self._least_full(pool, part)), float(part[best > 0].max())
        level = low
        for _ in range(_TRIES):
            if high <= low * (1 + _CLOSE) or time.perf_counter() > self.deadline:
                break
            inside = np.flatnonzero(part <= level * (1 + _EXACT))
            budget = needs.used_bytes
            if math.isfinite(total):
                budget = min(budget, level * total - self.problem.state_bytes)
            tighter = dataclasses.replace(needs, used_bytes=budget)
            trial = self._cheapest_that_fits(pool.take(inside), tighter, cost[inside])
            if trial is None:
                low = level
            else:
                best = np.zeros_like(best)
                best[inside] = trial
                high = level
            level = (low + high) / 2
        return best, pool

    def _cheapest_that_fits(self, pool: Pool, needs: Needs, cost: np.ndarray) -> np.ndarray | None:
        if not all_types_in(pool) or needs.used_bytes < 0:
            return None
        allowed = needs.used_bytes
        for _ in range(_TRIES):
            outcome = cheapest(
                pool,
                dataclasses.replace(needs, used_bytes=allowed),
                cost=cost,
                gap=_GAP,
                time_limit_s=max(self.deadline - time.perf_counter(), 0.0),
            )
            if outcome.chosen is None:
                return None
            excess = float((outcome.chosen * pool.used_bytes).sum()) - needs.used_bytes
            if excess <= 0:
                return outcome.chosen
            # The solver meets a row within its tolerance, which is many bytes of a large cluster.
            allowed -= 2 * excess
        return None

    def _least_full(self, pool: Pool, part: np.ndarray) -> float:
        """How full, at least, the fullest rank is when all samples have a place."""
        best = np.zeros(len(self.types), dtype=np.int64)
        placed = 0
        for row in np.argsort(part, kind="stable"):
            kind = pool.kind[row]
            placed += self.types[kind].count * max(0, int(pool.batch[row]) - int(best[kind]))
            best[kind] = max(best[kind], pool.batch[row])
            if placed >= self.problem.global_batch_size:
                return float(part[row])
        return math.inf

    def _unbalance(self, pool: Pool) -> np.ndarray:
        """A small price of long work, growing with its square: of equal plans the one that spreads
        the samples.
        """
        combined = step_seconds(self.problem, pool.times_s, (0.0, 0.0, 0.0))
        longest = float(combined.max(initial=0.0))
        part = combined / longest if longest > 0 else np.zeros(len(combined))
        return _BALANCE * part**2 / len(self.problem.ranks)
