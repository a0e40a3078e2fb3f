"""Bounds below the three slowest times that know of the memory that all ranks share.

If ranks could mix their columns in any proportion, the most samples within a budget of bytes would
be had by buying samples where they cost the fewest bytes first: along the concave hull of (bytes,
samples) of each type. What even that cannot do within a slowest time, no plan can.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from lightning_cephalo.plan.solver.pool import Needs, Pool


def raised_floors(pool: Pool, needs: Needs, floors_s: np.ndarray) -> np.ndarray | None:
    """``floors_s`` (3,), each raised to the least slowest time that leaves room for the batch; None
    when none does.
    """
    raised = np.maximum(pool.times_s, floors_s)
    everything = np.ones(len(pool.batch), dtype=bool)
    if most_samples(pool, everything, needs.used_bytes) < needs.batch * (1 - 1e-9):
        return None
    result = np.array(floors_s, dtype=float)
    for kind in range(3):
        levels = np.unique(np.r_[floors_s[kind], raised[:, kind]])
        low, high = 0, len(levels) - 1
        while low < high:
            middle = (low + high) // 2
            inside = raised[:, kind] <= levels[middle]
            if most_samples(pool, inside, needs.used_bytes) >= needs.batch * (1 - 1e-9):
                high = middle
            else:
                low = middle + 1
        result[kind] = levels[low]
    return result


def most_samples(pool: Pool, inside: np.ndarray, used_bytes: float) -> float:
    """The most samples that mixtures of the columns ``inside`` (mask) hold within ``used_bytes``
    over all ranks.

    -inf when even the least bytes of every rank are too many.
    """
    least = np.full((len(pool.ranks), int(pool.batch.max(initial=0)) + 1), np.inf)
    np.minimum.at(least, (pool.kind[inside], pool.batch[inside]), pool.used_bytes[inside])
    left, samples = used_bytes, 0.0
    steps: list[tuple[float, float, float]] = []
    for kind, ranks in enumerate(pool.ranks.tolist()):
        hull = _hull(least[kind])
        if not hull:
            return -math.inf
        left -= ranks * hull[0][0]
        samples += ranks * hull[0][1]
        for (bytes_0, batch_0), (bytes_1, batch_1) in itertools.pairwise(hull):
            price = (bytes_1 - bytes_0) / (batch_1 - batch_0)
            steps.append((price, ranks * (bytes_1 - bytes_0), ranks * (batch_1 - batch_0)))
    if left < 0:
        return -math.inf
    for _, cost, gain in sorted(steps):
        if cost > left:
            return samples + gain * left / cost
        left -= cost
        samples += gain
    return samples


def _hull(least: np.ndarray) -> list[tuple[float, float]]:
    """Corners (bytes, samples) of the upper hull, from the least bytes to the most samples."""
    hull: list[tuple[float, float]] = []
    for batch in np.flatnonzero(np.isfinite(least)).tolist():
        point = (float(least[batch]), float(batch))
        # More samples for no more bytes: the corner before is of no use.
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
