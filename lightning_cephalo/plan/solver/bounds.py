"""Lower bounds on the step time of all plans, without a solver.

:func:`time_bounds` ignores the state, which all ranks share. For every type and batch, it computes
the least forward, backward, tail and combined time over all mixtures of microbatches (unbounded
knapsacks). For each of these times, it then finds the least value for the slowest rank with which
all ranks can place the global batch.

:func:`raised_floors` also counts the resources that all ranks share. Suppose that ranks could mix
their columns in any proportion. To get the most samples within a budget of bytes, they would buy
samples where they cost the fewest bytes first: along the concave hull of (bytes, samples) of each
type. If even that does not place the batch within a slowest time, no plan can.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_cephalo.plan.cost import Mode, modes, time_curves
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.columns import (
    Columns,
    RankType,
    needs_of,
    step_parts,
    step_seconds,
    usable_sizes,
    without_name,
)


@dataclass(frozen=True)
class TimeBounds:
    """Lower bounds that hold for every plan."""

    least_s: np.ndarray
    rates_s: np.ndarray
    floors_s: tuple[float, float, float]
    step_s: float

    @property
    def largest(self) -> int:
        """The largest batch of one rank in ``least_s``."""
        return self.least_s.shape[2] - 1

    def covers(self, step_s: float) -> bool:
        """Return whether no batch above ``largest`` can be part of a step of ``step_s``."""
        return bool((self.rates_s[:, 3] * (self.largest + 1) > step_s).all())

    def largest_batches(self, problem: Problem, step_s: float) -> list[int]:
        """Return, per type, the largest batch in ``least_s`` that a step may contain."""
        result = []
        for least in self.least_s:
            within = step_seconds(problem, least[:3].T, self.floors_s) <= step_s
            within &= least[3] <= step_s
            result.append(int(np.flatnonzero(within).max(initial=0)))
        return result


def time_bounds(
    problem: Problem, types: Sequence[RankType], largest: int, least_backward_s: float = 0.0
) -> TimeBounds:
    """Return bounds from batches of up to ``largest`` samples per rank; they hold for all."""
    least, rates = _least_times(problem, types, largest)
    counts = np.array([kind.count for kind in types])
    slowest = [
        _least_slowest(least[:, kind], rates[:, kind], counts, problem.global_batch_size)
        for kind in range(4)
    ]
    floors_s = slowest[0], max(slowest[1], least_backward_s), slowest[2]
    apart_s = float(step_parts(problem, np.array(floors_s)).sum())
    return TimeBounds(least, rates, floors_s, max(apart_s, slowest[3]))


def first_largest(problem: Problem, types: Sequence[RankType]) -> int:
    """Return a batch per rank that the fastest rank of a good plan will hardly exceed."""
    _, rates = _least_times(problem, types, 0)
    combined = rates[:, 3]
    if not np.isfinite(combined).any() or (combined < 1e-100).any():
        return problem.global_batch_size
    counts = np.array([kind.count for kind in types])
    speeds = np.where(np.isfinite(combined), 1 / combined, 0.0)
    share = problem.global_batch_size * speeds.max() / (counts * speeds).sum()
    longest = max(kind.profile.largest_microbatch_size for kind in types)
    return min(problem.global_batch_size, int(1.3 * share) + longest + 2)


def _least_times(
    problem: Problem, types: Sequence[RankType], largest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``least_s`` and ``rates_s`` of :class:`TimeBounds`."""
    longest = max(kind.profile.largest_microbatch_size for kind in types)
    least = np.full((len(types), 4, largest + 1), np.inf)
    rates = np.full((len(types), 4), np.inf)
    rows: dict[tuple[Any, ...], int] = {}  # of equal ranks in different groups
    for row, kind in enumerate(types):
        same = rows.setdefault(without_name(kind.profile), row)
        if same != row:
            least[row], rates[row] = least[same], rates[same]
            continue
        for mode in modes(problem, kind.profile):
            single = _single_times(problem, kind.profile, mode, longest)
            held = _held(problem, kind.profile, mode, largest)
            np.minimum(least[row], _knapsack(single, held), out=least[row])
            np.minimum(rates[row], (single / np.arange(1, longest + 1)).min(axis=1), out=rates[row])
    return least, rates


def _single_times(problem: Problem, profile: RankProfile, mode: Mode, longest: int) -> np.ndarray:
    """Return times of one microbatch (4, longest), infinite where that size cannot run."""
    # without copies of offloaded boundaries, so that the result stays a lower bound
    single = np.full((4, longest), np.inf)
    sizes = np.array(usable_sizes(problem, profile, mode), dtype=int)
    if len(sizes):
        times = np.array(time_curves(profile, mode))[:, sizes - 1]
        single[:3, sizes - 1] = times
        single[3, sizes - 1] = problem.units * (times[0] + times[1]) + times[2]
    return single


def _held(problem: Problem, profile: RankProfile, mode: Mode, largest: int) -> np.ndarray:
    """Return a mask (largest + 1,) of the batches that the rank's own memory can hold."""
    batches = np.arange(largest + 1)
    held = batches == 0
    sizes = usable_sizes(problem, profile, mode)
    if sizes:
        fits = np.ones(len(batches), dtype=bool)
        for need in needs_of(problem, profile, mode):
            # a lower bound: one microbatch, and the smallest peak
            least = need.total(min(need.peaks[size - 1] for size in sizes), batches, 1)
            fits &= least <= need.capacity
        held |= fits
    return held


def _knapsack(single: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return the least times of every batch over all multisets of sizes, (4, largest + 1)."""
    longest, largest = single.shape[1], len(held) - 1
    least = np.full((4, largest + 1), np.inf)
    least[:, 0] = 0.0
    backwards = single[:, ::-1]
    for batch in range(1, largest + 1):
        reach = min(longest, batch)
        window = least[:, batch - reach : batch] + backwards[:, longest - reach :]
        least[:, batch] = window.min(axis=1, initial=np.inf)
    least[:, ~held] = np.inf
    return least


def _least_slowest(least: np.ndarray, rates: np.ndarray, counts: np.ndarray, batch: int) -> float:
    """Return the least time within which all ranks together can place ``batch`` samples."""
    # A rank may take fewer samples than fit, so a batch counts as reached once any larger one is.
    reached = np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1][:, 1:]
    flat = reached.ravel()
    order = np.argsort(flat, kind="stable")
    placed = np.cumsum(np.repeat(counts, reached.shape[1])[order])
    enough = np.searchsorted(placed, batch)
    found = float(flat[order[enough]]) if enough < len(order) else np.inf
    # For batches larger than these, a rank needs at least its best rate for each sample.
    largest = least.shape[1] - 1
    beyond = float((rates * (largest + 1)).min()) if largest < batch else np.inf
    return min(found, beyond)


def raised_floors(
    columns: Columns, ranks: np.ndarray, batch: int, shared: np.ndarray, floors_s: np.ndarray
) -> np.ndarray | None:
    """Raise each of ``floors_s`` (3,) to the least time with room for the batch; None: no time."""
    bound = [index for index, total in enumerate(shared) if math.isfinite(total)]

    def place(inside: np.ndarray) -> bool:
        """Return whether the columns ``inside`` (mask) have room for the batch."""
        few = columns.take(inside)
        return all(
            _most_samples(few, ranks, few.used[:, index], shared[index]) >= batch * (1 - 1e-9)
            for index in bound
        )

    raised = np.maximum(columns.times_s, floors_s)
    if not place(np.ones(len(columns), dtype=bool)):
        return None
    result = np.array(floors_s, dtype=float)
    for kind in range(3):
        levels = np.unique(np.r_[floors_s[kind], raised[:, kind]])
        low, high = 0, len(levels) - 1
        while low < high:
            middle = (low + high) // 2
            inside = raised[:, kind] <= levels[middle]
            if place(inside):
                high = middle
            else:
                low = middle + 1
        result[kind] = levels[low]
    return result


def _most_samples(columns: Columns, ranks: np.ndarray, used: np.ndarray, budget: float) -> float:
    """Return the most samples that mixtures of columns hold within a budget; -inf: not even none.

    ``used`` (columns,) is the amount that each column takes of the budget of all ranks.
    """
    least = np.full((len(ranks), int(columns.batch.max(initial=0)) + 1), np.inf)
    np.minimum.at(least, (columns.kind, columns.batch), used)
    left, samples = budget, 0.0
    steps: list[tuple[float, float, float]] = []
    for kind, members in enumerate(ranks.tolist()):
        hull = _hull(least[kind])
        if not hull:
            return -math.inf
        left -= members * hull[0][0]
        samples += members * hull[0][1]
        for (used_0, batch_0), (used_1, batch_1) in itertools.pairwise(hull):
            price = (used_1 - used_0) / (batch_1 - batch_0)
            steps.append((price, members * (used_1 - used_0), members * (batch_1 - batch_0)))
    if left < 0:
        return -math.inf
    for _, cost, gain in sorted(steps):
        if cost > left:
            return samples + gain * left / cost
        left -= cost
        samples += gain
    return samples


def _hull(least: np.ndarray) -> list[tuple[float, float]]:
    """Return corners (used, samples) of the upper hull, from the least use to the most samples."""
    hull: list[tuple[float, float]] = []
    for batch in np.flatnonzero(np.isfinite(least)).tolist():
        point = (float(least[batch]), float(batch))
        # Drop a corner that takes as much for fewer samples, or that lies below the hull.
        while hull and (
            point[0] <= hull[-1][0]
            or (
                len(hull) > 1
                and (point[1] - hull[-1][1]) * (hull[-1][0] - hull[-2][0])
                >= (hull[-1][1] - hull[-2][1]) * (point[0] - hull[-1][0])
            )
        ):
            hull.pop()
        hull.append(point)
    return hull
