"""Explains why there is no plan: the binding resource, the missing amount, and what would help.

Without times, the only question left of a problem is whether the samples fit. One program answers
it, and measures by how much they do not fit. It chooses columns for all ranks, with slack for the
needs that may be missed. The numbers and remedies of a message are solutions of this program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NoReturn

import numpy as np

from lightning_cephalo.common.errors import InfeasibleError
from lightning_cephalo.common.quantities import format_bytes_exactly as _bytes
from lightning_cephalo.plan.cost import DEVICE_NEEDS, NEEDS, Need, device_bytes, idle_bytes, modes
from lightning_cephalo.plan.problem import TIME_CURVES, Problem, RankProfile
from lightning_cephalo.plan.solver.columns import (
    Columns,
    Limits,
    RankType,
    build_columns,
    group_types,
    shared_limits,
    usable_sizes,
)
from lightning_cephalo.plan.solver.milp import TIGHT, Needs, Outcome, Slack, choose, load_solver

_TIME_S = 3.0
# Up to this many samples, every batch of a rank is considered.
_FEW_SAMPLES = 512
_ROUNDING = 1e-12

Fits = Callable[[Problem, float], bool]


def certainly_infeasible(problem: Problem, types: Sequence[RankType]) -> bool:
    """Return whether simple bounds already prove that there is no plan, before any search."""
    if min(kind.profile.capacity_bytes for kind in types) < idle_bytes(problem):
        return True
    batch = problem.global_batch_size
    if sum(kind.count * most_samples(problem, kind.profile) for kind in types) < batch:
        return True
    capacity = math.fsum(rank.capacity_bytes for rank in problem.ranks)
    for need_of in NEEDS:
        need = need_of(problem, problem.ranks[0])
        total = capacity if need_of in DEVICE_NEEDS else need.shared
        # Rounding of a sum of this size must not reject a problem that fits to the byte.
        if _least_of(problem, types, need_of) + need.state > total * (1 + _ROUNDING):
            return True
    return False


def _least_of(problem: Problem, types: Sequence[RankType], need_of: Callable[..., Need]) -> float:
    """Return a lower bound of what all ranks use: idle, one peak, and what samples retain."""
    ways = [
        (need_of(problem, kind.profile, mode), usable_sizes(problem, kind.profile, mode))
        for kind in types
        for mode in modes(problem, kind.profile)
    ]
    idle = len(problem.ranks) * min(need.fixed for need, _ in ways)
    peak = min(need.peaks[size - 1] for need, sizes in ways for size in sizes)
    per_sample = min(need.per_sample for need, sizes in ways if sizes)
    return idle + peak + per_sample * problem.global_batch_size


def most_samples(problem: Problem, profile: RankProfile) -> float:
    """Return the samples that a rank without state could hold; infinite without lasting memory."""
    most = 0.0
    for mode in modes(problem, profile):
        sizes = usable_sizes(problem, profile, mode)
        held = math.inf if sizes else 0.0
        for need in [need(problem, profile, mode) for need in NEEDS] if sizes else ():
            left = need.capacity - need.fixed - min(need.peaks[size - 1] for size in sizes)
            if need.per_sample > 0 and math.isfinite(left):
                # The rounding of a division must not reject a batch that fits to the byte.
                held = min(held, math.floor(left / need.per_sample * (1 + _ROUNDING)))
        most = max(most, held)
    return most


def refuse(problem: Problem, fits: Fits) -> NoReturn:
    """Raise InfeasibleError with the reason why there is no plan, and with what would help.

    ``fits`` returns whether a problem without times has a plan, until a deadline.
    """
    types = group_types(problem)
    raise InfeasibleError(
        _too_small(problem, types)
        or _no_samples(problem, types)
        or _too_little(problem, types, fits)
    )


def _too_small(problem: Problem, types: Sequence[RankType]) -> str | None:
    """Explain if a rank has no room for what every rank holds."""
    needed = idle_bytes(problem)
    kind = min(types, key=lambda kind: kind.profile.capacity_bytes)
    if needed <= kind.profile.capacity_bytes:
        return None
    stay = "reshard_after_forward=True, " if problem.reshard_after_forward is False else ""
    return (
        f"Memory binds on rank {_members(kind)}: the gathered buffers that every rank holds need "
        f"{_short_of(needed, kind.profile)}. Use smaller units, {stay}raise its capacity_bytes, or "
        f"leave this rank out."
    )


def _no_samples(problem: Problem, types: Sequence[RankType]) -> str | None:
    """Explain if no rank can take samples, or if a rank that must take some cannot."""
    without = [kind for kind in types if not most_samples(problem, kind.profile)]
    if not without or (len(without) < len(types) and not problem.single_microbatch):
        return None
    which = "no rank can take any"
    if len(without) < len(types):
        which = "every rank runs one microbatch (single_microbatch=True), but some can take none"
    reasons = [f"rank {_members(kind)}: {_why_none(problem, kind.profile)}" for kind in without[:8]]
    return (
        f"Samples bind: {which} of the global batch of {problem.global_batch_size} "
        f"({'; '.join(reasons)}). Leave such ranks out, or raise capacity_bytes of one."
    )


def _why_none(problem: Problem, profile: RankProfile) -> str:
    least, longest = problem.minimum_microbatch_size, profile.largest_microbatch_size
    if longest < least:
        return f"profiled up to size {longest}, below minimum_microbatch_size={least}"
    needed = min(
        device_bytes(problem, profile, (size,), mode)
        for mode in modes(problem, profile)
        for size in range(least, longest + 1)
    )
    return f"one microbatch needs {_short_of(needed, profile)}"


def _short_of(needed: float, profile: RankProfile) -> str:
    capacity = profile.capacity_bytes
    missing = _bytes(needed - capacity)
    return f"{_bytes(needed)}, its capacity is {_bytes(capacity)}, {missing} are missing"


def _too_little(problem: Problem, types: Sequence[RankType], fits: Fits) -> str:
    """Explain if all ranks together have no room."""
    load_solver()
    room = _Room(problem, time.perf_counter() + _TIME_S)
    batch, ranks, groups = problem.global_batch_size, len(problem.ranks), len(problem.members)
    under = " under one microbatch on each rank" if problem.single_microbatch else ""
    if problem.minimum_microbatch_size > 1:
        under += f" under minimum_microbatch_size={problem.minimum_microbatch_size}"
    nearest = room.nearest_batch(stateless=True)
    if nearest not in (0, batch):
        off = f"{abs(nearest - batch)} {'more' if nearest > batch else 'fewer'}"
        return (
            f"Samples bind: {ranks} ranks cannot run a global batch of {batch}{under}, even "
            f"without any state. The closest that they can is {nearest}, {off}. "
            f"{_remedies(room, fits)}"
        )
    held, buffers = problem.state.most_bytes, idle_bytes(problem) * ranks
    capacity = math.fsum(rank.capacity_bytes for rank in problem.ranks)
    which = f", where each of {groups} groups holds the whole state" if groups > 1 else ""
    parts = [f"the state needs {_bytes(held)}", f"the gathered buffers {_bytes(buffers)}"]
    least, missing = room.least_bytes(), ""
    if least is not None:
        parts.append(f"the samples{under} at least {_bytes(max(least - buffers, 0.0))}")
    if least is not None and groups == 1:
        missing = f": {_bytes(max(least + held - capacity, 1.0))} are missing"
    have = ", ".join(
        f"rank {_members(kind)} {_bytes(kind.profile.capacity_bytes)}"
        f"{' each' if kind.count > 1 else ''}"
        for kind in types[:8]
    )
    return (
        f"Memory binds over all {ranks} ranks together{which}: {', '.join(parts)}, but the "
        f"capacity is {_bytes(capacity)} ({have}){missing}. {_remedies(room, fits)}"
    )


def _remedies(room: _Room, fits: Fits) -> str:
    """Return a sentence that names single changes after which there is a plan."""
    found, batch = [], room.nearest_batch()
    if batch:
        change = "raise" if batch > room.problem.global_batch_size else "lower"
        found.append(f"{change} global_batch_size to {batch}")
    for name, index in {kind.profile.name: index for index, kind in enumerate(room.types)}.items():
        if further := room.further_ranks(index):
            found.append(f"add {further} more {name!r}")
    for words, changed in _changes(room.problem):
        # the program knows no state that moves
        if changed.can_move_state:
            helps = fits(changed, room.deadline)
        else:
            helps = _Room(changed, room.deadline).choose().values is not None
        found += [words] * helps
    if found:
        return f"What would do: {'; or '.join(found)}."
    return (
        f"No smaller batch, host memory or further rank that would do alone was found within "
        f"{_TIME_S:g} s: use ranks with more memory, smaller units, or a smaller model."
    )


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield single changes of the problem that may help, with their words."""
    if problem.reshard_after_forward is False:
        words = f"reshard_after_forward=True ({_bytes(problem.unresharded_bytes)} on every rank)"
        yield words, problem.resharding(True)
    if problem.minimum_microbatch_size > 1:
        words = f"drop minimum_microbatch_size={problem.minimum_microbatch_size}"
        yield words, replace(problem, minimum_microbatch_size=1)
    if problem.groups:
        words = "hold the state once, on all ranks together, Planner(hybrid_sharding=False)"
        yield words, replace(problem, groups=())
    moments = problem.moment_bytes * problem.parameters
    most = problem.boundary_bytes * problem.units * problem.global_batch_size
    most += moments if problem.can_move_state else 0.0
    if most:
        words = f"more host memory, up to {_bytes(most)} in all (host_memory_cap of Planner; in "
        words += "cluster.yaml host_memory, and --offload)"
        ranks = tuple(replace(rank, host_capacity_bytes=math.inf) for rank in problem.ranks)
        yield words, replace(problem, ranks=ranks)
    has_hosts = any(rank.host_capacity_bytes for rank in problem.ranks)
    if moments and has_hosts and not problem.optimizer_offload and not problem.groups:
        words = f"a part of the {_bytes(moments)} of optimizer state in host memory, "
        yield f"{words}optimizer_offload='auto'", replace(problem, optimizer_offload="auto")


class _Room:
    """The program of a problem without times, until ``deadline`` (of time.perf_counter)."""

    def __init__(self, problem: Problem, deadline: float) -> None:
        self.problem, self.deadline = _timeless(problem), deadline
        self.types = group_types(self.problem)

    def nearest_batch(self, *, stateless: bool = False) -> int:
        """Return the nearest batch that fits, also without state; 0 if none is known."""
        values = self.choose(Slack(fewer=True, more=True), stateless=stateless).values
        return 0 if values is None else int(values @ self._columns.batch)

    def least_bytes(self) -> float | None:
        """Return the least bytes that all ranks need in addition to the state; None: not known."""
        used = self._columns.used[:, 0]  # less than none: the state that a rank can hold
        whole = max(self.problem.state.most_bytes, 1.0)
        outcome = self.choose(cost=1 + used / whole, stateless=True)
        if outcome.values is None or not outcome.is_proven:
            return None
        capacity = math.fsum(rank.capacity_bytes for rank in self.problem.ranks)
        return capacity + float(outcome.values @ used)

    def further_ranks(self, index: int) -> int:
        """Return the fewest additional ranks of this type that suffice, or 0 if none are known."""
        values = self.choose(Slack(further=index)).values
        return 0 if values is None else int(values.sum()) - len(self.problem.ranks)

    def choose(
        self, slack: Slack = TIGHT, *, cost: np.ndarray | float = 0.0, stateless: bool = False
    ) -> Outcome:
        left_s = self.deadline - time.perf_counter()
        if left_s <= 0:
            return Outcome(None, 0.0, is_proven=False)
        limits = shared_limits(self.problem)
        needs = Needs(
            ranks=np.array([kind.count for kind in self.types]),
            batch=self.problem.global_batch_size,
            limits=np.full_like(limits, math.inf) if stateless else limits,
        )
        return choose(self._columns, needs, cost=cost, slack=slack, time_limit_s=left_s)

    @cached_property
    def _columns(self) -> Columns:
        problem, limits = self.problem, []
        for kind in self.types:
            # one microbatch more than the global batch: the nearest batch may be larger
            most = problem.global_batch_size + kind.profile.largest_microbatch_size
            largest = int(min(most, most_samples(problem, kind.profile)))
            limits.append(Limits((0, *_thinned(largest, problem.global_batch_size).tolist())))
        return build_columns(problem, self.types, limits)


def _thinned(largest: int, batch: int) -> np.ndarray:
    """Return batches of a rank up to ``largest`` from which all ranks can sum to any ``batch``."""
    every = np.arange(1, largest + 1)
    if batch <= _FEW_SAMPLES:
        return every
    step = math.isqrt(batch)
    below = (every > largest - step) | ((every > batch - step) & (every <= batch))
    return every[(every <= step) | (every % step == 0) | below]


def _members(kind: RankType) -> str:
    own = kind.members
    ranks = ", ".join(map(str, own[:6])) + (", ..." if len(own) > 6 else "")
    return f"{ranks} ({kind.profile.name!r})"


def _timeless(problem: Problem) -> Problem:
    """Return the problem without times, so that only the question of memory is left."""
    ranks = [
        replace(
            rank.changed(TIME_CURVES, lambda curve: (0.0,) * len(curve)),
            updated_parameters_per_s=math.inf,
            host_updated_parameters_per_s=0.0,
            to_device_bytes_per_s=math.inf,
            to_host_bytes_per_s=math.inf,
        )
        for rank in problem.ranks
    ]
    return replace(problem, ranks=tuple(ranks))
