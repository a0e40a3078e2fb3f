"""Columns: the ways in which one rank of a type can run a batch, without dominated ones.

A column is a multiset of microbatch sizes and a mode (recompute, offload). It has a batch, three
times, and an amount of every resource that it takes. Among the columns of one batch, only those
remain that no other one beats in all times and all resources.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.cost import (
    DEVICE_NEEDS,
    Mode,
    Need,
    copy_time,
    host_need,
    modes,
    time_curves,
)
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.room import Room
from lightning_cephalo.plan.solver.state import kept_from_state
from lightning_cephalo.plan.solver.unbeaten import unbeaten
from lightning_cephalo.plan.windows import backward_windows, forward_windows, pass_s

_FEW_COMBINATIONS = 256
_FEW_COLUMNS = 600


@dataclass(frozen=True)
class Resource:
    """A resource that columns take and ranks have."""

    needs: tuple[Callable[[Problem, RankProfile, Mode], Need], ...]
    shared: Callable[[Problem], float]
    use: Callable[..., Any] = lambda problem, capacity, amount: amount

    def of(self, problem: Problem, profile: RankProfile, mode: Mode) -> list[Need]:
        """Return the needs of one rank."""
        return [need(problem, profile, mode) for need in self.needs]


def _beside_state(problem: Problem, members: Sequence[int] | None = None) -> float:
    """Return the capacity of some ranks, or of all, beside the state that they share."""
    shared = 0.0 if problem.has_even_state else problem.full_state_bytes
    ranks = range(len(problem.ranks)) if members is None else members
    return math.fsum(problem.ranks[rank].capacity_bytes for rank in ranks) - shared


def _unshared(problem: Problem) -> float:
    return math.inf


# In the order of the second axis of ``Columns.used``.
RESOURCES = (
    Resource(DEVICE_NEEDS, _beside_state, kept_from_state),
    Resource((host_need,), _unshared),
)
DEVICE, HOST = range(len(RESOURCES))


@dataclass(frozen=True)
class RankType:
    """Ranks that differ in name only: ``members`` are their indices in the problem."""

    profile: RankProfile
    members: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of ranks of this type."""
        return len(self.members)


def group_types(problem: Problem) -> tuple[RankType, ...]:
    """Group equal ranks, in order of first appearance; the name does not count.

    Ranks of two groups that each hold the whole state are of different types.
    """
    group_of = {rank: number for number, own in enumerate(problem.groups) for rank in own}
    members: dict[tuple, list[int]] = {}
    for index, rank in enumerate(problem.ranks):
        members.setdefault((group_of[index], *without_name(rank)), []).append(index)
    return tuple(
        RankType(problem.ranks[indices[0]], tuple(indices)) for indices in members.values()
    )


def without_name(profile: RankProfile) -> tuple[Any, ...]:
    """Return what is the same in equal profiles, whatever their names."""
    return tuple([getattr(profile, name) for name in _BESIDE_NAME])


_BESIDE_NAME = [field.name for field in dataclasses.fields(RankProfile) if field.name != "name"]


@dataclass(frozen=True)
class ColumnLimits:
    """Limits of a column; a column beyond them cannot be part of a plan worth having."""

    step_s: float
    floors_s: tuple[float, float, float]
    largest_batch: int
    smallest_batch: int = 0
    batches: np.ndarray | None = None

    @property
    def values(self) -> tuple[Any, ...]:
        """What is the same in equal limits."""
        batches = None if self.batches is None else self.batches.tobytes()
        step = (self.step_s, self.floors_s)
        return (*step, self.largest_batch, self.smallest_batch, batches)


@dataclass(frozen=True)
class Columns:
    """Columns of all types, row by row."""

    kind: np.ndarray
    mode: np.ndarray
    batch: np.ndarray
    count: np.ndarray
    times_s: np.ndarray
    needed: np.ndarray
    used: np.ndarray
    copies: np.ndarray

    def __len__(self) -> int:
        return len(self.batch)

    def take(self, rows: np.ndarray) -> Columns:
        """Return the columns of these rows (indices or mask), in that order."""
        return Columns(*(getattr(self, name)[rows] for name in _FIELDS))

    def sizes(self, row: int) -> tuple[int, ...]:
        """Return the microbatch sizes of one column, the largest first."""
        uses = self.copies[row]
        descending = range(len(uses), 0, -1)
        return tuple(size for size in descending for _ in range(int(uses[size - 1])))


_FIELDS = tuple(field.name for field in dataclasses.fields(Columns))


def joined(parts: Sequence[Columns]) -> Columns:
    """Return the columns of all parts, one part after the other."""
    return Columns(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


def build_columns(
    problem: Problem,
    types: Sequence[RankType],
    limits: Sequence[ColumnLimits],
    room: Room | None = None,
    deadline: float = math.inf,
) -> Columns:
    """Return the columns of all types that no other column of the same batch beats.

    While they are few, all multisets of microbatch sizes are tried. Measured curves are noisy, and
    thousands of mixtures may differ by less than the noise. Then two forms remain: one size with a
    smaller last one, as in (4, 4, 2), and even splits, as in (4, 3, 3).
    """
    longest = max(kind.profile.largest_microbatch_size for kind in types)
    parts = []
    # equal ranks of hundreds of nodes are of different types where each node holds the whole state
    made: dict[tuple[Any, ...], Columns] = {}
    for index, (kind, limit) in enumerate(zip(types, limits, strict=True)):
        key = (without_name(kind.profile), *limit.values)
        if key in made:
            same = made[key]
            same = dataclasses.replace(same, kind=np.full(len(same), index))
            parts.append(_with_groups(problem, kind, same))
            continue
        if time.perf_counter() > deadline:
            raise SolverError(
                f"No plan was found within the time limit: it was up behind {index} of {len(types)}"
                " types of ranks. Raise time_limit_s, or describe equal ranks by equal profiles."
            )
        known = modes(problem, kind.profile)
        found = joined(
            [
                _Builder(problem, kind.profile, limit, index, place, mode, longest, room).columns()
                for place, mode in enumerate(known)
            ]
        )
        grown = len(known) > 1 or min(problem.states_bytes) < problem.full_state_bytes
        if (grown or room is not None) and len(found):
            found = found.take(_unbeaten_columns(problem, found))
        made[key] = found
        parts.append(_with_groups(problem, kind, found))
    return joined(parts)


def shared_by_all(problem: Problem) -> np.ndarray:
    """Return what ranks together have of each column of :attr:`Columns.used`."""
    shared = [resource.shared(problem) for resource in RESOURCES]
    if len(problem.groups) > 1:
        shared[DEVICE] = math.inf  # each group has its own limit
        shared += [_beside_state(problem, members) for members in problem.groups]
    return np.array(shared)


def _with_groups(problem: Problem, kind: RankType, columns: Columns) -> Columns:
    """Return a type's columns with what they use of each group's devices."""
    if len(problem.groups) == 1:
        return columns
    on_device = columns.used[:, DEVICE]
    of_groups = [
        on_device if kind.members[0] in members else np.zeros_like(on_device)
        for members in problem.groups
    ]
    used = np.column_stack([columns.used, *of_groups])
    return dataclasses.replace(columns, used=used)


def needs_of(problem: Problem, profile: RankProfile, mode: Mode) -> list[Need]:
    """Return the needs of all ``RESOURCES``, those of the device first."""
    return [need for resource in RESOURCES for need in resource.of(problem, profile, mode)]


def usable_sizes(problem: Problem, profile: RankProfile, mode: Mode) -> list[int]:
    """Return the microbatch sizes that this rank can run in this mode, by increasing peak."""
    needs = needs_of(problem, profile, mode)
    sizes = [
        size
        for size in range(problem.minimum_microbatch_size, profile.largest_microbatch_size + 1)
        if all(need.of((size,)) <= need.capacity for need in needs)
    ]
    return sorted(sizes, key=lambda size: (needs[0].peaks[size - 1], size))


def step_parts(problem: Problem, times_s: np.ndarray) -> np.ndarray:
    """Return the seconds of forward, backward and tails in a step with these slowest times.

    Their sum is the step without its fixed time (``cost.fixed_time``).
    """
    forward_s = pass_s(forward_windows(problem), times_s[..., 0])
    backward_s = pass_s(backward_windows(problem), times_s[..., 1])
    return np.stack([forward_s, backward_s, times_s[..., 2]], axis=-1)


def step_seconds(
    problem: Problem, times_s: np.ndarray, floors_s: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Return the seconds of a step without its fixed time, if these times (..., 3) were slowest."""
    return step_parts(problem, np.maximum(times_s, np.asarray(floors_s))).sum(axis=-1)


def batch_groups(columns: Columns) -> np.ndarray:
    """Return group numbers, of shape (columns,).

    They are equal for two columns of a type with as many samples.
    """
    return columns.kind * (int(columns.batch.max(initial=0)) + 1) + columns.batch


def _unbeaten_columns(problem: Problem, columns: Columns) -> np.ndarray:
    costs = np.column_stack([columns.times_s, columns.used])
    return unbeaten(batch_groups(columns), costs)


@dataclass(frozen=True)
class _Builder:
    """Builds the columns of one rank of type ``kind`` in one mode; see :func:`build_columns`."""

    problem: Problem
    profile: RankProfile
    limits: ColumnLimits
    kind: int
    mode_index: int
    mode: Mode
    longest: int
    room: Room | None = None

    @cached_property
    def sizes(self) -> list[int]:
        return usable_sizes(self.problem, self.profile, self.mode)

    @cached_property
    def needs(self) -> list[Need]:
        return needs_of(self.problem, self.profile, self.mode)

    @cached_property
    def curves(self) -> np.ndarray:
        """Times of a microbatch of each size from 0 up, of shape (sizes, 3)."""
        times_s = np.array(time_curves(self.profile, self.mode)).T.reshape(-1, 3)
        return np.vstack([np.zeros(3), times_s])

    @cached_property
    def peaks(self) -> np.ndarray:
        """Peaks of each need and size from 0 up, of shape (needs, sizes)."""
        return np.array([[0.0, *need.peaks] for need in self.needs])

    def columns(self) -> Columns:
        found = self._single() if self.problem.single_microbatch else None
        if found is None and len(self.sizes) * self.limits.largest_batch <= _FEW_COMBINATIONS:
            found = self._all_mixtures()
        if found is None:
            found = self._ragged_and_even()
        found = found.take(found.batch >= self.limits.smallest_batch)
        if not self.mode.offload:
            return found
        # Copy times count only now: earlier they would hide times that later microbatches add to.
        copies_s = copy_time(self.problem, self.profile, 1, self.mode) * found.batch
        times_s = found.times_s.copy()
        times_s[:, :2] = np.maximum(times_s[:, :2], copies_s[:, None])
        found = dataclasses.replace(found, times_s=times_s)
        return found.take(self._within(found))

    def _single(self) -> Columns:
        """Return a column for each size, and the empty one."""
        sizes = np.array(sorted(self.sizes), dtype=np.int64)
        pairs = np.column_stack([sizes, 1 + 0 * sizes, 0 * sizes, 0 * sizes])
        pairs = self._usable_pairs(pairs[sizes <= self.limits.largest_batch])
        return joined([self._empty_column(), self._with_copies(self._of_pairs(pairs), pairs)])

    def _all_mixtures(self) -> Columns | None:
        """Return every multiset of the sizes that is not beaten, or None when they are too many.

        Sizes come by increasing peak, 1, 2, 4, ... times. Beaten columns drop out at each round:
        the same microbatch in addition does not change which of two is better.
        """
        columns = self._empty_column()
        for size in self.sizes:
            doubled = 1
            while doubled * size <= self.limits.largest_batch:
                fitting = columns.batch + doubled * size <= self.limits.largest_batch
                grown = self._with_more(columns.take(fitting), size, doubled)
                grown = grown.take(self._within(grown))
                if not len(grown):
                    break
                merged = joined([columns, grown])
                keep = self._unbeaten_however_grown(merged)
                # No new column survived: by induction none with more copies would.
                if not keep[len(columns) :].any():
                    break
                columns = merged.take(keep)
                if len(columns) > _FEW_COLUMNS:
                    return None
                doubled *= 2
        return columns

    def _with_more(self, columns: Columns, size: int, doubled: int) -> Columns:
        """Return these columns, each with ``doubled`` more microbatches of ``size``."""
        batch, count = columns.batch + doubled * size, columns.count + doubled
        copies = columns.copies.copy()
        copies[:, size - 1] += doubled
        present = copies[:, None, : self.profile.largest_microbatch_size] > 0
        peaks = (present * self.peaks[:, 1:]).max(axis=2)
        return dataclasses.replace(
            columns,
            batch=batch,
            count=count,
            times_s=columns.times_s + doubled * self.curves[size],
            **self._amounts(peaks, batch, count),
            copies=copies,
        )

    def _unbeaten_however_grown(self, columns: Columns) -> np.ndarray:
        """Return a mask of the columns that stay unbeaten when all get the same microbatches."""
        # a larger peak may hide smaller ones, but not what microbatches retain, and may change
        # which moment needs more
        costs = [columns.times_s, columns.needed]
        if any(need.per_microbatch for need in self.needs):
            costs.append(columns.count[:, None])
        return unbeaten(batch_groups(columns), np.hstack(costs))

    def _ragged_and_even(self) -> Columns:
        """Return columns of one size with a smaller last one, and even splits, for every batch."""
        limits = self.limits
        batches = np.arange(1, limits.largest_batch + 1)
        if limits.batches is not None:
            batches = limits.batches[(limits.batches > 0) & (limits.batches <= batches.size)]
        batches = batches[batches >= limits.smallest_batch]
        # Rows of (first size, its copies, second size, its copies). Each part is cut to the limits
        # separately: rows for all counts of microbatches together would number the square of the
        # batch.
        kept = [np.zeros((0, 4), dtype=np.int64)]
        for size in self.sizes:
            rest = batches % size
            pairs = np.column_stack([size + 0 * batches, batches // size, rest, rest > 0])
            kept.append(self._usable_pairs(pairs))
        for size in self.sizes:
            count = -(-batches // size)
            floor, larger = batches // count, batches % count
            pairs = np.column_stack([floor + 1, larger, floor, count - larger])
            kept.append(self._usable_pairs(pairs))
        pairs = np.concatenate(kept)
        columns = self._of_pairs(pairs)
        rows = np.flatnonzero(_unbeaten_columns(self.problem, columns))
        return joined([self._empty_column(), self._with_copies(columns.take(rows), pairs[rows])])

    def _with_copies(self, columns: Columns, pairs: np.ndarray) -> Columns:
        copies = np.zeros((len(columns), self.longest + 1), dtype=np.int32)
        every = np.arange(len(columns))
        np.add.at(copies, (every, pairs[:, 0]), pairs[:, 1])
        np.add.at(copies, (every, pairs[:, 2]), pairs[:, 3])
        return dataclasses.replace(columns, copies=copies[:, 1:])

    def _usable_pairs(self, pairs: np.ndarray) -> np.ndarray:
        """Return the rows of ``pairs`` (rows, 4) that fit this rank and the limits."""
        usable = np.zeros(self.profile.largest_microbatch_size + 1, dtype=bool)
        usable[[0, *self.sizes]] = True
        # A size without copies counts as size 0.
        pairs = pairs * np.repeat(pairs[:, 1::2] > 0, 2, axis=1)
        pairs = pairs[pairs[:, ::2].max(axis=1, initial=0) < len(usable)]
        pairs = pairs[usable[pairs[:, 0]] & usable[pairs[:, 2]]]
        return pairs[self._within(self._of_pairs(pairs))]

    def _empty_column(self) -> Columns:
        empty = self._of_pairs(np.zeros((1, 4), dtype=np.int64))
        return dataclasses.replace(empty, copies=np.zeros((1, self.longest), dtype=np.int32))

    def _of_pairs(self, pairs: np.ndarray) -> Columns:
        """Return columns whose ``copies`` are not filled in yet."""
        first, first_copies, second, second_copies = pairs.T
        batch = first * first_copies + second * second_copies
        count = first_copies + second_copies
        curves = self.curves
        return Columns(
            kind=np.full(len(pairs), self.kind),
            mode=np.full(len(pairs), self.mode_index),
            batch=batch,
            count=count,
            times_s=first_copies[:, None] * curves[first] + second_copies[:, None] * curves[second],
            **self._amounts(
                np.maximum(self.peaks[:, first], self.peaks[:, second]).T, batch, count
            ),
            copies=np.zeros((len(pairs), 0), dtype=np.int32),
        )

    def _amounts(
        self, peaks: np.ndarray, batch: np.ndarray, count: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return ``needed`` and ``used`` of columns, for peaks of shape (columns, needs)."""
        totals = [need.total(peaks[:, n], batch, count) for n, need in enumerate(self.needs)]
        used, rest = [], iter(zip(totals, self.needs, strict=True))
        for resource in RESOURCES:
            own = list(itertools.islice(rest, len(resource.needs)))
            amounts = [total for total, _ in own]
            used.append(resource.use(self.problem, own[0][1].capacity, *amounts))
        if self.room is not None:
            on_device, on_host = totals[: len(DEVICE_NEEDS)], totals[len(DEVICE_NEEDS)]
            used[DEVICE] = self.room.used(self.profile, on_device, on_host)
        return {"needed": np.column_stack(totals), "used": np.column_stack(used)}

    def _within(self, columns: Columns) -> np.ndarray:
        capacities = np.array([need.capacity for need in self.needs])
        fits = (columns.needed <= capacities).all(axis=1)
        steps = step_seconds(self.problem, columns.times_s, self.limits.floors_s)
        return fits & (steps <= self.limits.step_s)
