"""Columns: the ways in which one rank of a type can run a batch, with all that can never be best
left out.

A column is a multiset of microbatch sizes with its batch, its three times and its bytes. For every
batch size the columns kept are those that no other column of that batch beats in forward, backward,
tail and bytes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .cost import working_bytes
from .problem import Problem, RankProfile

# Sums of the same numbers in another order differ by rounding: without a tolerance every order
# would be kept.
_SAME = 1e-11
_FEW_COMBINATIONS = 256
_FEW_COLUMNS = 600


@dataclass(frozen=True)
class RankType:
    """Ranks that differ in name only: ``members`` are their indices in the problem."""

    profile: RankProfile
    members: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many ranks are of this type."""
        return len(self.members)


@dataclass(frozen=True)
class Limits:
    """What a column may cost: whatever exceeds it cannot be part of a plan worth having.

    ``floors_s`` are bounds below the three maxima (forward, backward, tail) of any plan, gather and
    reduce included; ``step_s`` is the longest step of interest, without optimizer and overhead.
    Any ``smallest_batch`` below 1 allows no samples at all.
    """

    step_s: float
    floors_s: tuple[float, float, float]
    smallest_batch: int
    largest_batch: int


@dataclass(frozen=True)
class Columns:
    """Columns of one type, row by row: ``batch`` and ``count`` (of microbatches) of shape
    (columns,), ``times_s`` of shape (columns, 3) with forward and backward per unit and tail per
    step, ``used_bytes`` beside the state of shape (columns,), and ``copies`` of each microbatch
    size, of shape (columns, largest microbatch size).
    """

    batch: np.ndarray
    count: np.ndarray
    times_s: np.ndarray
    used_bytes: np.ndarray
    copies: np.ndarray

    def __len__(self) -> int:
        return len(self.batch)

    def take(self, rows: np.ndarray) -> Columns:
        """The columns of these rows (indices or mask), in that order."""
        return Columns(
            self.batch[rows],
            self.count[rows],
            self.times_s[rows],
            self.used_bytes[rows],
            self.copies[rows],
        )

    def sizes(self, row: int) -> tuple[int, ...]:
        """Microbatch sizes of one column, the largest first."""
        uses = self.copies[row]
        descending = range(len(uses), 0, -1)
        return tuple(size for size in descending for _ in range(int(uses[size - 1])))


def group_types(problem: Problem) -> tuple[RankType, ...]:
    """Group equal ranks, in order of first appearance; the name does not count."""
    members: dict[tuple, list[int]] = {}
    for index, rank in enumerate(problem.ranks):
        curves = (rank.forward_s, rank.backward_s, rank.tail_s, rank.compute_bytes)
        members.setdefault((*curves, rank.capacity_bytes), []).append(index)
    return tuple(
        RankType(problem.ranks[indices[0]], tuple(indices)) for indices in members.values()
    )


def usable_sizes(problem: Problem, profile: RankProfile) -> list[int]:
    """Microbatch sizes that this rank could run at all, by increasing peak."""
    sizes = [
        size
        for size in range(problem.minimum_microbatch_size, profile.largest_microbatch_size + 1)
        if working_bytes(problem, profile, (size,)) <= profile.capacity_bytes
    ]
    return sorted(sizes, key=lambda size: (profile.compute_bytes[size - 1], size))


def step_seconds(
    problem: Problem, times_s: np.ndarray, floors_s: tuple[float, float, float]
) -> np.ndarray:
    """Step seconds without optimizer and overhead if these times (columns, 3) were the slowest;
    shape (columns,).
    """
    raised = np.maximum(times_s, np.asarray(floors_s))
    return problem.units * (raised[:, 0] + raised[:, 1]) + raised[:, 2]


def build_columns(problem: Problem, profile: RankProfile, limits: Limits) -> Columns:
    """The ways of one rank to run every batch within ``limits`` and its own capacity that no other
    one beats.

    Row 0 is the empty column (no samples) unless ``limits`` want some. While they are few, all
    multisets of microbatch sizes are tried. Where there are too many (measured curves are noisy,
    and thousands of mixtures differ by less than the noise), those of one size with a ragged last
    one, as in (4, 4, 2), and the even splits, as in (4, 3, 3).
    """
    sizes = usable_sizes(problem, profile)
    if len(sizes) * limits.largest_batch <= _FEW_COMBINATIONS:
        columns = _all_mixtures(problem, profile, limits, sizes)
        if columns is not None:
            return columns.take(columns.batch >= limits.smallest_batch)
    return _ragged_and_even(problem, profile, limits, sizes)


def unbeaten(batch: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Mask of the rows that no other row of the same ``batch`` (rows,) beats in all ``costs``
    (rows, kinds).

    Of equal rows the first survives.
    """
    scale = costs.max(axis=0)
    total = (costs / np.where(scale > 0, scale, 1.0)).sum(axis=1)
    # A row can only be beaten by one of lower total, or of equal total that came before.
    order = np.lexsort((total, batch))
    ordered_batch = batch[order]
    starts = np.flatnonzero(np.r_[True, ordered_batch[1:] != ordered_batch[:-1]])
    lengths = np.diff(np.r_[starts, len(order)])
    place = np.arange(len(order)) - np.repeat(starts, lengths)
    group = np.repeat(np.arange(len(starts)), lengths)

    table = np.full((costs.shape[1], len(starts), int(lengths.max())), np.inf)
    table[:, group, place] = costs[order].T
    beaten = np.zeros(table.shape[1:], dtype=bool)
    for rival in range(table.shape[2] - 1):
        rows = np.flatnonzero(~beaten[:, rival] & np.isfinite(table[0, :, rival]))
        if len(rows):
            later = table[:, rows, rival + 1 :]
            own = table[:, rows, rival, None]
            beaten[rows, rival + 1 :] |= (own <= later * (1 + _SAME)).all(axis=0)
    mask = np.zeros(len(order), dtype=bool)
    mask[order] = ~beaten[group, place]
    return mask


def _empty_column(problem: Problem, profile: RankProfile) -> Columns:
    return Columns(
        batch=np.zeros(1, dtype=np.int64),
        count=np.zeros(1, dtype=np.int64),
        times_s=np.zeros((1, 3)),
        used_bytes=np.full(1, float(problem.gathered_bytes)),
        copies=np.zeros((1, profile.largest_microbatch_size), dtype=np.int32),
    )


def _all_mixtures(
    problem: Problem, profile: RankProfile, limits: Limits, sizes: list[int]
) -> Columns | None:
    """Every multiset of ``sizes`` that is not beaten, or None when they are too many.

    Sizes come by increasing peak and are added 1, 2, 4, ... times, so that any number of copies is
    reached in a few rounds, and what was beaten before can be dropped: adding the same microbatch
    to both cannot turn the tables.
    """
    curves = _curves(profile)
    per_sample = problem.boundary_bytes * problem.units
    columns = _empty_column(problem, profile)
    for size in sizes:
        doubled = 1
        while doubled * size <= limits.largest_batch:
            grown = columns.take(columns.batch + doubled * size <= limits.largest_batch)
            batch = grown.batch + doubled * size
            peak = profile.compute_bytes[size - 1]
            copies = grown.copies.copy()
            copies[:, size - 1] += doubled
            grown = Columns(
                batch,
                grown.count + doubled,
                grown.times_s + doubled * curves[size - 1],
                problem.gathered_bytes + peak + per_sample * batch,
                copies,
            )
            grown = grown.take(_within(problem, profile, limits, grown))
            if not len(grown):
                break
            merged = _joined(columns, grown)
            keep = _unbeaten_columns(problem, merged)
            # No new one is of use: by induction no larger number of copies is either.
            if not keep[len(columns) :].any():
                break
            columns = merged.take(keep)
            if len(columns) > _FEW_COLUMNS:
                return None
            doubled *= 2
    return columns


def _ragged_and_even(
    problem: Problem, profile: RankProfile, limits: Limits, sizes: list[int]
) -> Columns:
    """One size and a ragged rest, and even splits, of every batch."""
    batches = np.arange(max(1, limits.smallest_batch), limits.largest_batch + 1)
    # Rows of (first size, its copies, second size, its copies), kept only within the limits: with
    # every count of microbatches at once they would be as many as the square of the batch.
    kept = []
    for size in sizes:
        rest = batches % size
        pairs = np.column_stack([size + 0 * batches, batches // size, rest, rest > 0])
        kept.append(_usable_pairs(problem, profile, limits, sizes, pairs))
    counts: list[tuple[np.ndarray, Any]]
    if problem.equal_microbatches:
        every_count = range(1, limits.largest_batch + 1)
        counts = [(batches[batches >= count], count) for count in every_count]
    else:
        counts = [(batches, -(-batches // size)) for size in sizes]
    for split, count in counts:
        floor, larger = split // count, split % count
        pairs = np.column_stack([floor + 1, larger, floor, count - larger])
        kept.append(_usable_pairs(problem, profile, limits, sizes, pairs))
    pairs = np.concatenate(kept)
    columns = _columns_of_pairs(problem, profile, pairs)
    if len(columns):
        rows = np.flatnonzero(_unbeaten_columns(problem, columns))
        columns, pairs = columns.take(rows), pairs[rows]
    copies = np.zeros((len(columns), profile.largest_microbatch_size + 1), dtype=np.int32)
    every = np.arange(len(columns))
    np.add.at(copies, (every, pairs[:, 0]), pairs[:, 1])
    np.add.at(copies, (every, pairs[:, 2]), pairs[:, 3])
    columns = Columns(
        columns.batch, columns.count, columns.times_s, columns.used_bytes, copies[:, 1:]
    )
    if limits.smallest_batch > 0:
        return columns
    return _joined(_empty_column(problem, profile), columns)


def _usable_pairs(
    problem: Problem, profile: RankProfile, limits: Limits, sizes: list[int], pairs: np.ndarray
) -> np.ndarray:
    """The rows of ``pairs`` (rows, 4) that this rank can run within ``limits``."""
    usable = np.zeros(profile.largest_microbatch_size + 1, dtype=bool)
    usable[[0, *sizes]] = True
    # A size without copies counts as size 0.
    pairs = pairs * np.repeat(pairs[:, 1::2] > 0, 2, axis=1)
    pairs = pairs[pairs[:, ::2].max(axis=1, initial=0) < len(usable)]
    pairs = pairs[usable[pairs[:, 0]] & usable[pairs[:, 2]]]
    return pairs[_within(problem, profile, limits, _columns_of_pairs(problem, profile, pairs))]


def _columns_of_pairs(problem: Problem, profile: RankProfile, pairs: np.ndarray) -> Columns:
    """Columns whose ``copies`` are still the pairs."""
    first, first_copies, second, second_copies = pairs.T
    curves = np.vstack([np.zeros(3), _curves(profile)])
    peaks = np.r_[0.0, profile.compute_bytes]
    batch = first * first_copies + second * second_copies
    per_sample = problem.boundary_bytes * problem.units
    return Columns(
        batch,
        first_copies + second_copies,
        first_copies[:, None] * curves[first] + second_copies[:, None] * curves[second],
        problem.gathered_bytes + np.maximum(peaks[first], peaks[second]) + per_sample * batch,
        pairs,
    )


def _curves(profile: RankProfile) -> np.ndarray:
    return np.array([profile.forward_s, profile.backward_s, profile.tail_s]).T


def _within(problem: Problem, profile: RankProfile, limits: Limits, columns: Columns) -> np.ndarray:
    fits = columns.used_bytes <= profile.capacity_bytes
    return fits & (step_seconds(problem, columns.times_s, limits.floors_s) <= limits.step_s)


def _unbeaten_columns(problem: Problem, columns: Columns) -> np.ndarray:
    group = columns.batch
    if problem.equal_microbatches:
        group = group * (int(columns.count.max()) + 1) + columns.count
    return unbeaten(group, np.column_stack([columns.times_s, columns.used_bytes]))


def _joined(first: Columns, second: Columns) -> Columns:
    return Columns(
        np.concatenate([first.batch, second.batch]),
        np.concatenate([first.count, second.count]),
        np.concatenate([first.times_s, second.times_s]),
        np.concatenate([first.used_bytes, second.used_bytes]),
        np.concatenate([first.copies, second.copies]),
    )
