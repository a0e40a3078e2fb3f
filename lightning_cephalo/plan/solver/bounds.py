"""Lower bounds on the step time of all plans, without a solver.

:func:`time_bounds` counts times only. A rank with n samples takes n times its least seconds of a
sample, or longer, and the slowest rank takes the least if all take equally long.

:func:`column_bounds` also counts what all ranks share. Suppose that ranks could mix their columns
in any proportion. If even the mixture of the most samples within a budget of bytes does not place
the batch within a slowest time, no plan can.
"""

from __future__ import annotations

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

    ``used`` (columns,) is the amount that each column takes of the budget of all ranks. At a price
    of it, each rank takes the column of the most samples less their price. The price rises from
    none until the budget is enough: between the last two choices lies the best mixture.
    """
    batches = np.arange(int(columns.batch.max(initial=0)) + 1)
    least = np.full((len(ranks), len(batches)), np.inf)
    np.minimum.at(least, (columns.kind, columns.batch), used)
    exists, least = np.isfinite(least), np.where(np.isfinite(least), least, 0.0)
    if not exists.any(axis=1).all():
        return -math.inf

    def taken(worth: np.ndarray) -> tuple[float, float]:
        at = np.where(exists, worth, -np.inf).argmax(axis=1)
        return float(ranks @ at), float(ranks @ least[np.arange(len(ranks)), at])

    most, most_used = taken(batches)
    if most_used <= budget:
        return most
    fewest, least_used = taken(-least)
    if least_used > budget + _ROUNDING * abs(budget):
        return -math.inf
    while True:
        price = (most - fewest) / (most_used - least_used)
        samples, own = taken(batches - price * least)
        if samples - price * own <= (most - price * most_used) + _ROUNDING * most:
            return most - price * (most_used - budget)
        if own > budget:
            most, most_used = samples, own
        else:
            fewest, least_used = samples, own
