"""Share the training state so that every rank keeps the same part of its memory free."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_LEAST = 1e-9


def share_state(
    state_bytes: float, used_bytes: Sequence[float], capacity_bytes: Sequence[float]
) -> tuple[float, ...]:
    """State fraction of each rank, from what it uses beside the state and what it may hold.

    Water fills the ranks to one common level, as a part of their capacity; ranks above that level
    already hold nothing. Ranks without a limit share all of the state evenly. No rank exceeds its
    capacity, even by rounding, so the fractions may sum to 1 within rounding only.

    The caller sees to it that the state fits: ``sum(capacity - used) >= state_bytes``, and no rank
    is over its own.
    """
    used = np.asarray(used_bytes, dtype=float)
    capacity = np.asarray(capacity_bytes, dtype=float)
    ranks = len(used)
    if state_bytes == 0:
        return (1.0 / ranks,) * ranks
    unlimited = np.isinf(capacity)
    if unlimited.any():
        return tuple((unlimited / unlimited.sum()).tolist())
    # Below rounding the level would not rise: such a state is shared as a somewhat larger one.
    least = min(_LEAST * float(capacity.sum()), float((capacity - used).sum()))
    filled = max(state_bytes, least)
    order = np.argsort(used / capacity, kind="stable")
    filled_used, filled_capacity = np.cumsum(used[order]), np.cumsum(capacity[order])
    levels = (filled + filled_used) / filled_capacity
    # Each rank that lies below the level of those before it lowers it: the least level is the
    # common one.
    level = float(levels.min())
    held = np.maximum(level * capacity - used, 0.0)
    if filled < _LEAST * float(capacity.sum()):
        held = capacity - used
    fractions = (held / held.sum()).tolist()
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
