"""Shares the training state among ranks in proportion to their free memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def share_state(
    state_bytes: float, used_bytes: Sequence[float], capacity_bytes: Sequence[float]
) -> tuple[float, ...]:
    """Return the state fraction of each rank, from its other memory use and its capacity.

    Every rank gives the same part of its free memory to state. So a state that fits in total fits
    on each rank, and headroom shrinks equally on all ranks. A state that is small compared with the
    memory still spreads over all ranks. (Filling all ranks to one level would put such a state on
    the one rank with the most room, which makes every gather a broadcast.) Ranks without a limit
    share all of the state evenly.

    No rank exceeds its capacity, even by rounding, so the fractions may sum to 1 within rounding
    only.

    The caller ensures that the state fits: ``sum(capacity - used) >= state_bytes``, and no rank
    uses more than its own capacity.
    """
    used = np.asarray(used_bytes, dtype=float)
    capacity = np.asarray(capacity_bytes, dtype=float)
    ranks = len(used)
    if state_bytes == 0:
        return (1.0 / ranks,) * ranks
    unlimited = np.isinf(capacity)
    if unlimited.any():
        return tuple((unlimited / unlimited.sum()).tolist())
    free = np.maximum(capacity - used, 0.0)
    total = float(free.sum())
    if total == 0:
        return (1.0 / ranks,) * ranks
    fractions = (free / total).tolist()
    return tuple(
        _within(fraction, state_bytes, rank_used, limit)
        for fraction, rank_used, limit in zip(
            fractions, used.tolist(), capacity.tolist(), strict=True
        )
    )


def _within(fraction: float, state_bytes: float, used: float, capacity: float) -> float:
    fraction = min(fraction, 1.0)
    for _ in range(64):
        excess = fraction * state_bytes + used - capacity
        if excess <= 0:
            return fraction
        fraction = max(0.0, min(math.nextafter(fraction, 0.0), fraction - excess / state_bytes))
    return 0.0
