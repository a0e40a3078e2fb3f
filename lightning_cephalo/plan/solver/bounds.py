"""Lower bounds on the step time of all plans, without a solver.

:func:`time_bounds` counts times only. A rank with n samples takes n times its least seconds of a
sample, or longer, and the slowest rank takes the least if all take equally long.

:func:`column_bounds` also counts what all ranks share. Suppose that ranks could mix their columns
in any proportion. To get the most samples within a budget of bytes, they would buy samples where
they cost the fewest bytes first: along the concave hull of (bytes, samples) of each type. If even
that does not place the batch within a slowest time, no plan can.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_cephalo.plan.cost import modes, time_curves
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.columns import Columns, RankType, step_parts, usable_sizes

_ROUNDING = 1e-9


@dataclass(frozen=True)
class TimeBounds:
    """Lower bounds of the slowest times, and of a step without its fixed time."""

    floors_s: tuple[float, ...]
    step_s: float


def time_bounds(
    problem: Problem, types: Sequence[RankType], least_backward_s: float = 0.0
) -> TimeBounds:
    """Return bounds that hold for every plan."""
    rates_s = np.array([least_rates(problem, kind.profile) for kind in types])
    counts = np.array([kind.count for kind in types])
    with np.errstate(divide="ignore"):
        slowest = problem.global_batch_size / (counts @ (1 / rates_s))
    for kind, own in zip(types, rates_s, strict=True):
        if kind.batch:
            slowest = np.maximum(slowest, kind.batch * own)
    floors_s = np.maximum(slowest[:3], (0.0, least_backward_s, 0.0))
    apart_s = float(step_parts(problem, floors_s).sum())
    return TimeBounds(tuple(floors_s.tolist()), max(apart_s, float(slowest[3])))


def least_rates(problem: Problem, profile: RankProfile) -> np.ndarray:
    """Return the least seconds of a sample in forward, backward, tail, and a step's work."""
    least = np.full(4, np.inf)
    for mode in modes(problem, profile):
        sizes = np.array(usable_sizes(problem, profile, mode), dtype=int)
        if len(sizes):
            times_s = np.array(time_curves(profile, mode))[:, sizes - 1]
            work_s = np.array([problem.units, problem.units, 1.0]) @ times_s
            least = np.minimum(least, (np.vstack([times_s, work_s]) / sizes).min(axis=1))
    return least


def column_bounds(
    problem: Problem,
    times_s: np.ndarray,
    floors_s: Sequence[float],
    most: Callable[[np.ndarray], float],
) -> TimeBounds | None:
    """Return the bounds of plans of columns with these times; None: there is no room.

    ``most`` returns the samples for which some columns (a mask) have room.
    """
    enough = problem.global_batch_size * (1 - _ROUNDING)

    def least(values: np.ndarray) -> float:
        """Return the least value that the slowest column must have."""
        levels = np.unique(values)
        low, high = 0, len(levels) - 1
        while low < high:
            middle = (low + high) // 2
            if most(values <= levels[middle]) >= enough:
                high = middle
            else:
                low = middle + 1
        return float(levels[low])

    if most(np.ones(len(times_s), dtype=bool)) < enough:
        return None
    raised_s = np.maximum(floors_s, [least(own) for own in times_s.T])
    step_s = least(step_parts(problem, np.maximum(times_s, raised_s)).sum(axis=1))
    apart_s = float(step_parts(problem, raised_s).sum())
    return TimeBounds(tuple(raised_s.tolist()), max(step_s, apart_s))


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
    if left < -_ROUNDING * abs(budget):
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
