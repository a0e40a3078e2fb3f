"""Columns of all types in one pool, and which of them are worth a variable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_cephalo.plan.solver.columns import Columns, RankType, unbeaten


@dataclass(frozen=True)
class Pool:
    """Columns of all types, one after the other; ``kind`` (columns,) is the type of each, ``ranks``
    (types,) how many ranks there are of each, ``row`` (columns,) where it lies among the columns of
    its type.
    """

    kind: np.ndarray
    row: np.ndarray
    batch: np.ndarray
    count: np.ndarray
    times_s: np.ndarray
    used_bytes: np.ndarray
    ranks: np.ndarray

    def take(self, rows: np.ndarray) -> Pool:
        """The columns of these rows (indices or mask); the types stay."""
        return Pool(
            self.kind[rows],
            self.row[rows],
            self.batch[rows],
            self.count[rows],
            self.times_s[rows],
            self.used_bytes[rows],
            self.ranks,
        )


@dataclass(frozen=True)
class Needs:
    """What a choice of columns must meet: samples, exactly or at least; bytes beside the state over
    all ranks at most (infinite for no limit); the same count of microbatches everywhere.
    """

    batch: int
    exact: bool
    used_bytes: float
    equal_counts: bool


def pooled(types: Sequence[RankType], columns: Sequence[Columns]) -> Pool:
    return Pool(
        kind=np.repeat(np.arange(len(types)), [len(part) for part in columns]),
        row=np.concatenate([np.arange(len(part)) for part in columns]),
        batch=np.concatenate([part.batch for part in columns]),
        count=np.concatenate([part.count for part in columns]),
        times_s=np.concatenate([part.times_s for part in columns]),
        used_bytes=np.concatenate([part.used_bytes for part in columns]),
        ranks=np.array([kind.count for kind in types]),
    )


def best_rows(pool: Pool, score: np.ndarray, *, by_count: bool) -> np.ndarray:
    """Of every type and batch (and count of microbatches) the row of the lowest ``score``
    (columns,).
    """
    keys = np.column_stack([pool.kind, pool.batch, pool.count * by_count])
    order = np.lexsort((score, *keys.T))
    _, first = np.unique(keys[order], axis=0, return_index=True)
    return order[first]


def useful(pool: Pool, needs: Needs, floors_s: np.ndarray) -> Pool:
    """The columns that no other of their type beats, once times below the floors count as the
    floors.

    With "at least" the batch, one with more samples beats one with fewer.
    """
    costs = np.maximum(pool.times_s, floors_s)
    if math.isfinite(needs.used_bytes):
        costs = np.column_stack([costs, pool.used_bytes])
    group = pool.kind
    if needs.equal_counts:
        group = group * (int(pool.count.max(initial=0)) + 1) + pool.count
    same = group * (int(pool.batch.max(initial=0)) + 1) + pool.batch
    first = np.flatnonzero(unbeaten(same, costs))
    if needs.exact:
        return pool.take(first)
    kept: list[int] = []
    order = first[np.lexsort((-pool.batch[first], group[first]))]
    for same_group in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        own = np.empty((len(same_group), costs.shape[1]))
        size = 0
        for row in same_group:
            if not (own[:size] <= costs[row] * (1 + 1e-12)).all(axis=1).any():
                own[size] = costs[row]
                size += 1
                kept.append(int(row))
    return pool.take(np.array(kept, dtype=int))


def all_types_in(pool: Pool) -> bool:
    """Whether every type has a column, without which its ranks could not even be idle."""
    return bool((np.bincount(pool.kind, minlength=len(pool.ranks)) > 0).all())
