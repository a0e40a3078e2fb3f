"""Lower bounds on the step time of all plans, without a solver.

:func:`time_bounds` ignores the state, which all ranks share. For every type and batch, it computes
the least forward, backward, tail and combined time over all mixtures of microbatches (unbounded
knapsacks). For each of these times, it then finds the least value for the slowest rank with which
all ranks can place the global batch.

:func:`column_bounds` also counts the resources that all ranks share. Suppose that ranks could mix
their columns in any proportion. To get the most samples within a budget of bytes, they would buy
samples where they cost the fewest bytes first: along the concave hull of (bytes, samples) of each
type. If even that does not place the batch within a slowest time, no plan can.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_cephalo.plan.cost import Mode, modes, time_curves
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.columns import (
    Columns,
    RankType,
    knapsack,
    needs_of,
    step_parts,
    usable_sizes,
)

_ROUNDING = 1e-9


@dataclass(frozen=True)
class TimeBounds:
    """Lower bounds that hold for every plan; ``rates_s``: the least time of a sample, by type."""

    rates_s: np.ndarray
    floors_s: tuple[float, float, float]
    step_s: float


def time_bounds(
    problem: Problem, types: Sequence[RankType], least_backward_s: float = 0.0
) -> TimeBounds:
    """Return bounds of the slowest times, and of a step without its fixed time."""
    batch = problem.global_batch_size
    counts = np.array([kind.count for kind in types])
    ways = [
        [_single_times(problem, kind.profile, mode) for mode in modes(problem, kind.profile)]
        for kind in types
    ]
    rates_s = np.array([np.min([_rates(single) for single, _ in own], axis=0) for own in ways])
    combined_s = rates_s[:, 3]
    largest = batch
    if np.isfinite(combined_s).any() and combined_s.min() > 0:
        longest = max(kind.profile.largest_microbatch_size for kind in types)
        share = batch / combined_s.min() / (counts / combined_s).sum()
        largest = min(batch, int(1.3 * share) + longest + 2)
    largest = max([largest, *(kind.batch for kind in types if kind.batch is not None)])
    least = np.array([np.min([_least(*way, largest) for way in own], axis=0) for own in ways])
    slowest = [_least_slowest(least[:, part], rates_s[:, part], counts, batch) for part in range(4)]
    floors_s = slowest[0], max(slowest[1], least_backward_s), slowest[2]
    apart_s = float(step_parts(problem, np.array(floors_s)).sum())
    return TimeBounds(combined_s, floors_s, max(apart_s, slowest[3]))


def _single_times(
    problem: Problem, profile: RankProfile, mode: Mode
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return the times of one microbatch of each size (4, sizes), and which batches have room."""
    sizes = np.array(usable_sizes(problem, profile, mode), dtype=int)
    # without copies of offloaded boundaries, so that the result stays a lower bound
    single = np.full((4, profile.largest_microbatch_size), np.inf)
    if len(sizes):
        times = np.array(time_curves(profile, mode))[:, sizes - 1]
        single[:3, sizes - 1] = times
        single[3, sizes - 1] = problem.units * (times[0] + times[1]) + times[2]

    def have_room(batches: np.ndarray) -> np.ndarray:
        fits = np.full(len(batches), bool(len(sizes)))
        for need in needs_of(problem, profile, mode) if len(sizes) else ():
            # a lower bound: one microbatch, and the smallest peak
            peak = min(need.peaks[size - 1] for size in sizes)
            fits &= need.total(peak, batches, 1) <= need.capacity
        return fits | (batches == 0)

    return single, have_room


def _rates(single: np.ndarray) -> np.ndarray:
    sizes = np.arange(1, single.shape[1] + 1)
    return (single / sizes).min(axis=1, initial=np.inf)


def _least(
    single: np.ndarray, have_room: Callable[[np.ndarray], np.ndarray], largest: int
) -> np.ndarray:
    """Return the least times of every batch over all multisets of sizes, (4, largest + 1)."""
    batches = np.arange(largest + 1)
    least = np.where(batches == 0, 0.0, np.full((4, 1), np.inf))
    for part, size in np.argwhere(np.isfinite(single)):
        least[part], _ = knapsack(least[part], size + 1, single[part, size])
    least[:, ~have_room(batches)] = np.inf
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


def column_bounds(
    parts_s: np.ndarray, floors_s: np.ndarray, most: Callable[[np.ndarray], float], batch: int
) -> tuple[np.ndarray, float] | None:
    """Return raised floors of the parts of a step, and a bound of their sum; None: no room.

    Args:
        parts_s: Parts of a step with each column's times, at least ``floors_s``.
        most: Returns the samples for which some columns (a mask) have room.
    """

    def least(values: np.ndarray) -> float:
        """Return the least value that the slowest column must have."""
        levels = np.unique(values)
        low, high = 0, len(levels) - 1
        while low < high:
            middle = (low + high) // 2
            if most(values <= levels[middle]) >= batch * (1 - _ROUNDING):
                high = middle
            else:
                low = middle + 1
        return float(levels[low])

    if most(np.ones(len(parts_s), dtype=bool)) < batch * (1 - _ROUNDING):
        return None
    raised = np.maximum(floors_s, [least(own) for own in parts_s.T])
    step_s = least(np.maximum(parts_s, raised).sum(axis=1))
    return raised, max(step_s, float(raised.sum()))


def most_samples(columns: Columns, ranks: np.ndarray, used: np.ndarray, budget: float) -> float:
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
