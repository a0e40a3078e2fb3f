"""Columns: the ways in which one rank of a type can run a batch, without dominated ones.

A column is a multiset of microbatch sizes and a mode (recompute, offload). It has a batch, three
times, and an amount of everything that a rank needs. Among the columns of one batch, only those
remain that no other one beats in all times and all amounts.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.cost import (
    DEVICE_NEEDS,
    NEEDS,
    Mode,
    Need,
    copy_time,
    modes,
    time_curves,
)
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.state import Room
from lightning_cephalo.plan.windows import backward_windows, forward_windows, pass_s

_FEW_COMBINATIONS = 256
_FEW_COLUMNS = 600
# Sums of the same numbers in another order differ by rounding: without a tolerance every order
# would remain.
_SAME = 1e-11


@dataclass(frozen=True)
class RankType:
    """Ranks that differ in name only: ``members`` are their indices in the problem.

    ``batch`` is what each of them must run; None: the plan decides.
    """

    profile: RankProfile
    members: tuple[int, ...]
    batch: int | None = None

    @property
    def count(self) -> int:
        """Number of ranks of this type."""
        return len(self.members)


def group_types(problem: Problem, batches: Sequence[int] | None = None) -> tuple[RankType, ...]:
    """Group equal ranks, in order of first appearance; the name does not count.

    Ranks of two groups that each hold the whole state are of different types, and those with
    different given ``batches``.
    """
    group_of = {rank: number for number, own in enumerate(problem.members) for rank in own}
    given: Sequence[int | None] = batches or [None] * len(problem.ranks)
    members: dict[tuple, list[int]] = {}
    for index, rank in enumerate(problem.ranks):
        key = (group_of[index], given[index], *without_name(rank))
        members.setdefault(key, []).append(index)
    return tuple(
        RankType(problem.ranks[own[0]], tuple(own), given[own[0]]) for own in members.values()
    )


def without_name(profile: RankProfile) -> tuple[Any, ...]:
    """Return what is the same in equal profiles, whatever their names."""
    return tuple([getattr(profile, name) for name in _BESIDE_NAME])


_BESIDE_NAME = [field.name for field in dataclasses.fields(RankProfile) if field.name != "name"]


@dataclass(frozen=True)
class Limits:
    """Limits of a type's columns: no plan worth having has one beyond them."""

    batches: Sequence[int]
    step_s: float = math.inf
    floors_s: tuple[float, ...] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Columns:
    """Columns of all types, row by row; ``copies`` counts the microbatches of each size.

    ``needed`` has the amount of each of ``NEEDS``, and ``used`` what a column takes of each of
    :func:`shared_limits`.
    """

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

    @property
    def device_bytes(self) -> np.ndarray:
        """The most that each column needs on its device beside a share of the state."""
        return self.needed[:, : len(DEVICE_NEEDS)].max(axis=1)

    def take(self, rows: np.ndarray) -> Columns:
        """Return the columns of these rows (indices or mask), in that order."""
        return Columns(*(getattr(self, name)[rows] for name in _FIELDS))

    def unbeaten(self, used: np.ndarray, *costs: np.ndarray) -> np.ndarray:
        """Return a mask of those that no other of a type and batch beats in uses and costs."""
        of_batch = self.kind * (int(self.batch.max(initial=0)) + 1) + self.batch
        more = used - used.min(axis=0, initial=0.0)  # of the state, less than none is used
        return _unbeaten(of_batch, np.column_stack([more, *costs]))

    def sizes(self, row: int) -> tuple[int, ...]:
        """Return the microbatch sizes of one column, the largest first."""
        uses = self.copies[row]
        descending = range(len(uses), 0, -1)
        return tuple(size for size in descending for _ in range(int(uses[size - 1])))


_FIELDS = tuple(field.name for field in dataclasses.fields(Columns))


def joined(parts: Sequence[Columns]) -> Columns:
    """Return the columns of all parts, one part after the other."""
    return Columns(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


def shared_limits(problem: Problem) -> np.ndarray:
    """Return what all ranks have together.

    First the state of each group, which its ranks hold: they use less than none of it. Then each of
    ``NEEDS`` that they share.
    """
    state = [-Room(problem).whole_bytes] * len(problem.members)
    return np.array([*state, *(total for _, total in _shared_needs(problem))])


def _shared_needs(problem: Problem) -> list[tuple[int, float]]:
    totals = [need(problem, problem.ranks[0], Mode()).shared for need in NEEDS]
    return [(index, total) for index, total in enumerate(totals) if math.isfinite(total)]


def build_columns(
    problem: Problem,
    types: Sequence[RankType],
    limits: Sequence[Limits],
    room: Room | None = None,
    deadline: float = math.inf,
) -> Columns:
    """Return the columns of all types that no other column of the same batch beats.

    While they are few, all multisets of microbatch sizes are tried. Otherwise, for every batch and
    largest size, those remain that take the least time, or the fewest microbatches.
    """
    longest = max(kind.profile.largest_microbatch_size for kind in types)
    room, parts = room or Room(problem), []
    # equal ranks of hundreds of nodes are of different types where each node holds the whole state
    made: dict[tuple[Any, ...], Columns] = {}
    for index, (kind, limit) in enumerate(zip(types, limits, strict=True)):
        key = (without_name(kind.profile), limit)
        if key not in made:
            if time.perf_counter() > deadline:
                raise SolverError(
                    f"No plan was found within the time limit: it was up behind {index} of"
                    f" {len(types)} types of ranks. Raise time_limit_s, or describe equal ranks by"
                    " equal profiles."
                )
            found = joined([
                _Builder(problem, kind.profile, limit, place, mode, longest, room).columns()
                for place, mode in enumerate(modes(problem, kind.profile))
            ])  # fmt: skip
            device, host = found.device_bytes, found.needed[:, len(DEVICE_NEEDS) :]
            made[key] = found.take(found.unbeaten(found.used, found.times_s, device, host))
        own = made[key]
        in_group = [kind.members[0] in members for members in problem.members]
        used = np.column_stack([np.outer(own.used[:, 0], in_group), own.used[:, 1:]])
        parts.append(dataclasses.replace(own, kind=np.full(len(own), index), used=used))
    columns = joined(parts)
    return columns.take(columns.count > 0) if problem.every_rank_runs else columns


def _unbeaten(group: np.ndarray, costs: np.ndarray) -> np.ndarray:
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


def usable_sizes(problem: Problem, profile: RankProfile, mode: Mode) -> list[int]:
    """Return the microbatch sizes that this rank can run in this mode, by increasing peak."""
    needs = [need(problem, profile, mode) for need in NEEDS]
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


def _knapsack(least: np.ndarray, size: int, cost: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the least costs of all batches, if microbatches of one more size may be added.

    Also returns how many of them each batch has.
    """
    rows = -(-len(least) // size)
    step = np.arange(rows)[:, None]
    table = np.full(rows * size, np.inf)
    table[: len(least)] = least
    table = table.reshape(rows, size) - step * cost
    lowest = np.minimum.accumulate(table, axis=0)
    begun = np.maximum.accumulate(np.where(table <= lowest, step, 0), axis=0)
    found, copies = lowest + step * cost, step - begun
    return found.ravel()[: len(least)], copies.ravel()[: len(least)]


@dataclass(frozen=True)
class _Builder:
    """Builds the columns of one rank in one mode; see :func:`build_columns`."""

    problem: Problem
    profile: RankProfile
    limits: Limits
    mode_index: int
    mode: Mode
    longest: int
    room: Room

    @cached_property
    def sizes(self) -> list[int]:
        return usable_sizes(self.problem, self.profile, self.mode)

    @cached_property
    def needs(self) -> list[Need]:
        return [need(self.problem, self.profile, self.mode) for need in NEEDS]

    @cached_property
    def curves(self) -> np.ndarray:
        """Times of a microbatch of each size, of shape (sizes, 3)."""
        return np.array(time_curves(self.profile, self.mode)).T.reshape(-1, 3)

    def columns(self) -> Columns:
        none, found = np.zeros((1, self.longest), dtype=np.int32), None
        if self.problem.single_microbatch:
            copies = np.eye(self.longest, dtype=np.int32)[np.array(self.sizes, dtype=int) - 1]
            found = self._of(np.vstack([none, copies]))
        elif len(self.sizes) * self.limits.batches[-1] <= _FEW_COMBINATIONS:
            found = self._all_mixtures(self._of(none))
        if found is None:
            found = self._of(np.vstack([none, self._least_mixtures()]))
        if self.mode.offload:
            # Copies count only now: earlier they would hide times that microbatches add to.
            copies_s = copy_time(self.problem, self.profile, 1, self.mode) * found.batch
            times_s = found.times_s.copy()
            times_s[:, :2] = np.maximum(times_s[:, :2], copies_s[:, None])
            found = dataclasses.replace(found, times_s=times_s)
        return found.take(self._within(found) & np.isin(found.batch, self.limits.batches))

    def _all_mixtures(self, columns: Columns) -> Columns | None:
        """Return every multiset of the sizes that is not beaten, or None when they are too many.

        Sizes come by increasing peak, 1, 2, 4, ... times. Beaten columns drop out at each round:
        the same microbatch in addition does not change which of two is better.
        """
        for size in self.sizes:
            doubled = 1
            while doubled * size <= self.limits.batches[-1]:
                copies = columns.copies.copy()
                copies[:, size - 1] += doubled
                grown = self._of(copies)
                grown = grown.take(self._within(grown))
                before = len(columns)
                columns = joined([columns, grown])
                keep = self._unbeaten_however_grown(columns)
                columns = columns.take(keep)
                # No new column survived: by induction none with more copies would.
                if not keep[before:].any():
                    break
                if len(columns) > _FEW_COLUMNS:
                    return None
                doubled *= 2
        return columns

    def _unbeaten_however_grown(self, columns: Columns) -> np.ndarray:
        """Return a mask of the columns that stay unbeaten when all get the same microbatches."""
        # a larger peak may hide smaller ones, but not what microbatches retain, and may change
        # which moment needs more
        costs = [columns.times_s, columns.needed]
        if any(need.per_microbatch for need in self.needs):
            costs.append(columns.count[:, None])
        return _unbeaten(columns.batch, np.hstack(costs))

    def _least_mixtures(self) -> np.ndarray:
        """Return, for every batch and largest peak, the multisets of the least of some costs."""
        units, found = self.problem.units, [np.zeros((0, self.longest), dtype=np.int32)]
        batches = np.arange(self.limits.batches[-1] + 1)
        wanted = np.isin(batches, self.limits.batches)
        weights = [(units, units, 1, 0), (0, units, 1, 0), (units, 0, 1, 0), (0, 0, 0, 1)]
        for *of_times, of_count in weights if self.curves.any() else weights[-1:]:
            least = np.where(batches == 0, 0.0, np.inf)
            copies = np.zeros((len(batches), self.longest), dtype=np.int32)
            for size in self.sizes:
                cost = float(self.curves[size - 1] @ of_times) + of_count
                least, more = _knapsack(least, size, cost)
                copies = copies[batches - more * size]
                copies[:, size - 1] += more
                found.append(copies[wanted & (more > 0) & np.isfinite(least)])
        return np.unique(np.concatenate(found), axis=0)

    def _of(self, copies: np.ndarray) -> Columns:
        """Return columns of so many microbatches of each size, of shape (columns, longest)."""
        uses = copies[:, : self.profile.largest_microbatch_size]
        batch, count = uses @ np.arange(1, uses.shape[1] + 1), uses.sum(axis=1)
        needed = np.column_stack([
            need.total(np.where(uses > 0, need.peaks, 0.0).max(axis=1, initial=0.0), batch, count)
            for need in self.needs
        ])  # fmt: skip
        shared = [needed[:, index] for index, _ in _shared_needs(self.problem)]
        return Columns(
            kind=np.zeros(len(copies), dtype=int),
            mode=np.full(len(copies), self.mode_index),
            batch=batch,
            count=count,
            times_s=uses @ self.curves,
            needed=needed,
            used=np.column_stack([-self.room.held_bytes(self.profile, needed), *shared]),
            copies=copies,
        )

    def _within(self, columns: Columns) -> np.ndarray:
        capacities = np.array([need.capacity for need in self.needs])
        times_s = np.maximum(columns.times_s, self.limits.floors_s)
        steps_s = step_parts(self.problem, times_s).sum(axis=1)
        fits = (columns.needed <= capacities).all(axis=1) & (steps_s <= self.limits.step_s)
        return fits & (columns.batch <= self.limits.batches[-1])
