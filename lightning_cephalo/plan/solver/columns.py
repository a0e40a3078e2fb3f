"""Columns: the ways in which one rank of a type can run a batch, with all that can never be best
left out.

A column is a multiset of microbatch sizes and a mode (recompute, offload) with its batch, its three
times and its bytes. For every batch size the columns kept are those that no other column of that
batch beats in forward, backward, tail and bytes at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_cephalo.plan.cost import (
    Mode,
    copy_time,
    host_bytes,
    modes,
    peak_curve,
    sample_bytes,
    time_curves,
    working_bytes,
)
from lightning_cephalo.plan.problem import Problem, RankProfile

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
    step, ``used_bytes`` beside the state of shape (columns,), ``copies`` of each microbatch size,
    of shape (columns, largest microbatch size), and ``mode`` of shape (columns,), which counts
    along :func:`~lightning_cephalo.plan.cost.modes`.
    """

    batch: np.ndarray
    count: np.ndarray
    times_s: np.ndarray
    used_bytes: np.ndarray
    copies: np.ndarray
    mode: np.ndarray

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
            self.mode[rows],
        )

    def sizes(self, row: int) -> tuple[int, ...]:
        """Microbatch sizes of one column, the largest first."""
        uses = self.copies[row]
        descending = range(len(uses), 0, -1)
        return tuple(size for size in descending for _ in range(int(uses[size - 1])))


def group_types(problem: Problem) -> tuple[RankType, ...]:
    """Group equal ranks, in order of first appearance; the name does not count."""
    names = [field.name for field in dataclasses.fields(RankProfile) if field.name != "name"]
    members: dict[tuple, list[int]] = {}
    for index, rank in enumerate(problem.ranks):
        members.setdefault(tuple(getattr(rank, name) for name in names), []).append(index)
    return tuple(
        RankType(problem.ranks[indices[0]], tuple(indices)) for indices in members.values()
    )


def usable_sizes(problem: Problem, profile: RankProfile, mode: Mode) -> list[int]:
    """Microbatch sizes that this rank could run at all in this mode, by increasing peak."""
    curve = peak_curve(profile, mode)
    sizes = [
        size
        for size in range(problem.minimum_microbatch_size, profile.largest_microbatch_size + 1)
        if working_bytes(problem, profile, (size,), mode) <= profile.capacity_bytes
        and host_bytes(problem, size, mode) <= profile.host_capacity_bytes
    ]
    return sorted(sizes, key=lambda size: (curve[size - 1], size))


def step_seconds(
    problem: Problem, times_s: np.ndarray, floors_s: tuple[float, float, float]
) -> np.ndarray:
    """Step seconds without optimizer and overhead if these times (columns, 3) were the slowest;
    shape (columns,).
    """
    raised = np.maximum(times_s, np.asarray(floors_s))
    return problem.units * (raised[:, 0] + raised[:, 1]) + raised[:, 2]


def build_columns(problem: Problem, profile: RankProfile, limits: Limits) -> Columns:
    """The ways of one rank to run every batch within ``limits`` and its own capacities that no
    other one beats.

    Row 0 is the empty column (no samples) unless ``limits`` want some. While they are few, all
    multisets of microbatch sizes are tried. Where there are too many (measured curves are noisy,
    and thousands of mixtures differ by less than the noise), those of one size with a ragged last
    one, as in (4, 4, 2), and the even splits, as in (4, 3, 3).
    """
    found = None
    for index, mode in enumerate(modes(problem, profile)):
        columns = _Builder(problem, profile, limits, mode, index).columns()
        found = columns if found is None else _joined(found, columns)
    assert found is not None
    if len(found) and found.mode.any():
        found = found.take(_unbeaten_columns(problem, found))
    return found


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


@dataclass(frozen=True)
class _Builder:
    """Builds the columns of one rank in one mode; see :func:`build_columns`."""

    problem: Problem
    profile: RankProfile
    limits: Limits
    mode: Mode
    mode_index: int

    @cached_property
    def sizes(self) -> list[int]:
        return usable_sizes(self.problem, self.profile, self.mode)

    @cached_property
    def curves(self) -> np.ndarray:
        return np.array(time_curves(self.profile, self.mode)).T

    @cached_property
    def peaks(self) -> np.ndarray:
        return np.array(peak_curve(self.profile, self.mode), dtype=float)

    def columns(self) -> Columns:
        found = None
        if len(self.sizes) * self.limits.largest_batch <= _FEW_COMBINATIONS:
            found = self._all_mixtures()
        if found is None:
            found = self._ragged_and_even()
        found = found.take(found.batch >= self.limits.smallest_batch)
        if not self.mode.offload:
            return found
        # Only now: what is added to two columns of one batch must not hide behind their copies.
        copies_s = copy_time(self.problem, self.profile, 1, self.mode) * found.batch
        times_s = found.times_s.copy()
        times_s[:, :2] = np.maximum(times_s[:, :2], copies_s[:, None])
        found = dataclasses.replace(found, times_s=times_s)
        return found.take(self._within(found))

    def _empty_column(self) -> Columns:
        return Columns(
            batch=np.zeros(1, dtype=np.int64),
            count=np.zeros(1, dtype=np.int64),
            times_s=np.zeros((1, 3)),
            used_bytes=np.full(1, float(self.problem.fixed_bytes)),
            copies=np.zeros((1, self.profile.largest_microbatch_size), dtype=np.int32),
            mode=np.full(1, self.mode_index),
        )

    def _used_bytes(
        self, peaks: np.ndarray | float, batch: np.ndarray, count: np.ndarray
    ) -> np.ndarray:
        kept = sample_bytes(self.problem, self.mode) * batch + self.problem.microbatch_bytes * count
        return self.problem.fixed_bytes + peaks + kept

    def _all_mixtures(self) -> Columns | None:
        """Every multiset of the sizes that is not beaten, or None when they are too many.

        Sizes come by increasing peak and are added 1, 2, 4, ... times, so that any number of copies
        is reached in a few rounds, and what was beaten before can be dropped: adding the same
        microbatch to both cannot turn the tables.
        """
        columns = self._empty_column()
        for size in self.sizes:
            doubled = 1
            while doubled * size <= self.limits.largest_batch:
                fitting = columns.batch + doubled * size <= self.limits.largest_batch
                grown = columns.take(fitting)
                batch = grown.batch + doubled * size
                copies = grown.copies.copy()
                copies[:, size - 1] += doubled
                grown = Columns(
                    batch,
                    grown.count + doubled,
                    grown.times_s + doubled * self.curves[size - 1],
                    self._used_bytes(self.peaks[size - 1], batch, grown.count + doubled),
                    copies,
                    grown.mode,
                )
                grown = grown.take(self._within(grown))
                if not len(grown):
                    break
                merged = _joined(columns, grown)
                keep = _unbeaten_columns(self.problem, merged)
                # No new one is of use: by induction no larger number of copies is either.
                if not keep[len(columns) :].any():
                    break
                columns = merged.take(keep)
                if len(columns) > _FEW_COLUMNS:
                    return None
                doubled *= 2
        return columns

    def _ragged_and_even(self) -> Columns:
        """One size and a ragged rest, and even splits, of every batch."""
        limits = self.limits
        batches = np.arange(max(1, limits.smallest_batch), limits.largest_batch + 1)
        # Rows of (first size, its copies, second size, its copies), kept only within the limits:
        # with every count of microbatches at once they would be as many as the square of the batch.
        kept = []
        for size in self.sizes:
            rest = batches % size
            pairs = np.column_stack([size + 0 * batches, batches // size, rest, rest > 0])
            kept.append(self._usable_pairs(pairs))
        counts: list[tuple[np.ndarray, Any]]
        if self.problem.equal_microbatches:
            every_count = range(1, limits.largest_batch + 1)
            counts = [(batches[batches >= count], count) for count in every_count]
        else:
            counts = [(batches, -(-batches // size)) for size in self.sizes]
        for split, count in counts:
            floor, larger = split // count, split % count
            pairs = np.column_stack([floor + 1, larger, floor, count - larger])
            kept.append(self._usable_pairs(pairs))
        pairs = np.concatenate([np.zeros((0, 4), dtype=np.int64), *kept])
        columns = self._columns_of_pairs(pairs)
        if len(columns):
            rows = np.flatnonzero(_unbeaten_columns(self.problem, columns))
            columns, pairs = columns.take(rows), pairs[rows]
        copies = np.zeros((len(columns), self.profile.largest_microbatch_size + 1), dtype=np.int32)
        every = np.arange(len(columns))
        np.add.at(copies, (every, pairs[:, 0]), pairs[:, 1])
        np.add.at(copies, (every, pairs[:, 2]), pairs[:, 3])
        columns = dataclasses.replace(columns, copies=copies[:, 1:])
        if limits.smallest_batch > 0:
            return columns
        return _joined(self._empty_column(), columns)

    def _usable_pairs(self, pairs: np.ndarray) -> np.ndarray:
        """The rows of ``pairs`` (rows, 4) that this rank can run within the limits."""
        usable = np.zeros(self.profile.largest_microbatch_size + 1, dtype=bool)
        usable[[0, *self.sizes]] = True
        # A size without copies counts as size 0.
        pairs = pairs * np.repeat(pairs[:, 1::2] > 0, 2, axis=1)
        pairs = pairs[pairs[:, ::2].max(axis=1, initial=0) < len(usable)]
        pairs = pairs[usable[pairs[:, 0]] & usable[pairs[:, 2]]]
        return pairs[self._within(self._columns_of_pairs(pairs))]

    def _columns_of_pairs(self, pairs: np.ndarray) -> Columns:
        """Columns whose ``copies`` are still the pairs."""
        first, first_copies, second, second_copies = pairs.T
        curves = np.vstack([np.zeros(3), self.curves.reshape(-1, 3)])
        peaks = np.r_[0.0, self.peaks]
        batch = first * first_copies + second * second_copies
        count = first_copies + second_copies
        return Columns(
            batch,
            count,
            first_copies[:, None] * curves[first] + second_copies[:, None] * curves[second],
            self._used_bytes(np.maximum(peaks[first], peaks[second]), batch, count),
            pairs,
            np.full(len(pairs), self.mode_index),
        )

    def _within(self, columns: Columns) -> np.ndarray:
        fits = columns.used_bytes <= self.profile.capacity_bytes
        if self.mode.offload:
            host = host_bytes(self.problem, 1, self.mode) * columns.batch
            fits &= host <= self.profile.host_capacity_bytes
        steps = step_seconds(self.problem, columns.times_s, self.limits.floors_s)
        return fits & (steps <= self.limits.step_s)


def _unbeaten_columns(problem: Problem, columns: Columns) -> np.ndarray:
    group = columns.batch
    if problem.equal_microbatches:
        group = group * (int(columns.count.max()) + 1) + columns.count
    return unbeaten(group, np.column_stack([columns.times_s, columns.used_bytes]))


def _joined(first: Columns, second: Columns) -> Columns:
    return Columns(
        *(
            np.concatenate([getattr(first, field.name), getattr(second, field.name)])
            for field in dataclasses.fields(Columns)
        )
    )
