"""Drops choices that another one beats in everything that counts."""

from __future__ import annotations

import numpy as np

# Sums of the same numbers in another order differ by rounding: without a tolerance every order
# would remain.
_SAME = 1e-11


def unbeaten(group: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return a mask of the rows that no other row of the same group beats in all costs.

    ``group`` has shape (rows,), ``costs`` has shape (rows, kinds). Of equal rows the first
    survives.
    """
    scale = costs.max(axis=0, initial=0.0)
    total = (costs / np.where(scale > 0, scale, 1.0)).sum(axis=1)
    # Only a row with a lower total, or an earlier one with an equal total, can beat a row.
    order = np.lexsort((total, group))
    ordered = group[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    lengths = np.diff(np.r_[starts, len(order)])
    place = np.arange(len(order)) - np.repeat(starts, lengths)
    member = np.repeat(np.arange(len(starts)), lengths)

    table = np.full((costs.shape[1], len(starts), int(lengths.max(initial=0))), np.inf)
    table[:, member, place] = costs[order].T
    beaten = np.zeros(table.shape[1:], dtype=bool)
    for rival in range(table.shape[2] - 1):
        rows = np.flatnonzero(~beaten[:, rival] & np.isfinite(table[0, :, rival]))
        if len(rows):
            later = table[:, rows, rival + 1 :]
            own = table[:, rows, rival, None]
            beaten[rows, rival + 1 :] |= (own <= later * (1 + _SAME)).all(axis=0)
    mask = np.zeros(len(order), dtype=bool)
    mask[order] = ~beaten[member, place]
    return mask
