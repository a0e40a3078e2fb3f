"""Explains why there is no plan: the binding resource, the missing amount, and what would help.

Without times, the only question left of a problem is whether the samples fit. One program answers
it, and measures by how much they do not fit. It chooses columns for all ranks, with slack for the
needs that may be missed. The numbers and remedies of a message are solutions of this program.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

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


def certainly_infeasible(problem: Problem, types: Sequence[RankType]) -> bool:
    """Return whether simple bounds already prove that there is no plan, before any search."""
    if min(kind.profile.capacity_bytes for kind in types) < idle_bytes(problem):
        return True
    batch = problem.global_batch_size
    if sum(kind.count * most_samples(problem, kind.profile) for kind in types) < batch:
        return True
    # Rounding of a sum of this size must not reject a problem that fits to the byte.
    more = 1 + _ROUNDING
    capacity = math.fsum(rank.capacity_bytes for rank in problem.ranks)
    least, full = _least_used(problem, types), problem.state.most_bytes
    return (not problem.has_even_state and least + full > capacity * more) or any(
        _least_of(problem, types, need) > need(problem, problem.ranks[0]).shared * more
        for need in NEEDS
    )


def _least_used(problem: Problem, types: Sequence[RankType]) -> float:
    """Return a lower bound of the part of all devices that no state can have."""
    capacity = math.fsum(rank.capacity_bytes for rank in problem.ranks)
    used = 0.0
    for need in DEVICE_NEEDS:
        least, state = _least_of(problem, types, need), need(problem, problem.ranks[0]).state
        if state == problem.state.most_bytes or math.isinf(capacity):
            used = max(used, least)
        elif state:
            used = max(used, capacity - (capacity - least) * (problem.state.most_bytes / state))
    return used


def _least_of(problem: Problem, types: Sequence[RankType], need_of: Callable[..., Need]) -> float:
    """Return a lower bound of what all ranks use: idle, one peak, and what samples retain."""
    idle, peaks, per_sample = 0.0, [], []
    for kind in types:
        known = modes(problem, kind.profile)
        needs = [need_of(problem, kind.profile, mode) for mode in known]
        idle += kind.count * min(need.fixed for need in needs)
        for mode, need in zip(known, needs, strict=True):
            sizes = usable_sizes(problem, kind.profile, mode)
            peaks += [need.peaks[size - 1] for size in sizes]
            per_sample += [need.per_sample] * bool(sizes)
    return idle + min(peaks) + min(per_sample) * problem.global_batch_size


def refuse(
    problem: Problem, types: Sequence[RankType], fits: Callable[[Problem], bool]
) -> NoReturn:
    """Raise InfeasibleError with the reason why there is no plan.

    ``fits`` returns whether there is a plan with state on hosts, if only memory counts.
    """
    raise InfeasibleError(
        _rank_too_small(problem, types)
        or _no_rank_for_samples(problem, types)
        or f"{_too_little_for_all(problem, types)}{_state_on_hosts(problem, types, fits)}"
    )


def _state_on_hosts(
    problem: Problem, types: Sequence[RankType], fits: Callable[[Problem], bool]
) -> str:
    """Say whether optimizer state in host memory would do, or why it does not."""
    moments = problem.moment_bytes * sum(problem.unit_parameters)
    # hybrid sharding does not go together with state in host memory
    if not moments or problem.groups:
        return ""
    timeless = dataclasses.replace(problem, ranks=tuple(map(_timeless, problem.ranks)))
    if problem.optimizer_offload is False:
        has_hosts = any(rank.host_capacity_bytes for rank in problem.ranks)
        offered = dataclasses.replace(timeless, optimizer_offload="auto")
        if not has_hosts or not fits(offered):
            return ""
        return (
            f" Or keep a part of the {_bytes(moments)} of optimizer state in host memory,"
            f" optimizer_offload='auto'."
        )
    on = _each(types, [_bytes(kind.profile.host_capacity_bytes) for kind in types])
    most = math.fsum(rank.host_capacity_bytes for rank in problem.ranks)
    said = (
        f" Of the state, {_bytes(moments)} may live in host memory (optimizer_offload), of which "
        f"ranks may use {on}"
    )
    unlimited = [dataclasses.replace(rank, host_capacity_bytes=math.inf) for rank in timeless.ranks]
    if not fits(dataclasses.replace(timeless, ranks=tuple(unlimited))):
        return f"{said}: more of it would not do."
    less = max(moments - most, 0.0)
    amount = f", {_bytes(less)} in all for all of it" if less else ""
    return f"{said}. More host memory would do (host_memory_cap of Planner{amount})."


def _rank_too_small(problem: Problem, types: Sequence[RankType]) -> str | None:
    needed = idle_bytes(problem)
    for kind in types:
        missing = needed - kind.profile.capacity_bytes
        if missing > 0:
            stay = problem.reshard_after_forward is False
            return (
                f"Memory binds on rank {_members(kind)}: the gathered buffers that every "
                f"rank holds need {_bytes(needed)}, its capacity is "
                f"{_bytes(kind.profile.capacity_bytes)}, {_bytes(missing)} are missing. Use "
                f"smaller units, {'reshard_after_forward=True, ' if stay else ''}raise its "
                f"capacity_bytes, or leave this rank out."
            )
    return None


def _no_rank_for_samples(problem: Problem, types: Sequence[RankType]) -> str | None:
    """Explain if no rank can take samples, or if a rank that must take some cannot."""
    without = [kind for kind in types if not _sizes(problem, kind.profile)]
    if problem.single_microbatch and without:
        return (
            f"Samples bind on rank {_members(without[0])}: it can take none "
            f"({_why_none(problem, without[0].profile)}), but every rank runs one microbatch "
            f"(manual optimization, or Planner(single_microbatch=True)). Leave this rank out."
        )
    if len(without) < len(types):
        return None
    reasons = "; ".join(
        f"rank {_members(kind)}: {_why_none(problem, kind.profile)}" for kind in types[:8]
    )
    return (
        f"Samples bind: no rank can take any of the global batch of {problem.global_batch_size} "
        f"({reasons}). Profile a rank that can, or raise its capacity_bytes."
    )


def _too_little_for_all(problem: Problem, types: Sequence[RankType]) -> str:
    batch, ranks = problem.global_batch_size, len(problem.ranks)
    load_solver()
    room = _Room(problem, time.perf_counter() + _TIME_S)
    most = [room.most_samples(index) for index in range(len(types))]
    total = sum(kind.count * samples for kind, samples in zip(types, most, strict=True))
    if total < batch:
        on = _each(types, most)
        at_once = "in one measured microbatch each, " if problem.single_microbatch else ""
        return (
            f"Samples bind: the global batch is {batch}, but {at_once}next to the gathered "
            f"buffers all ranks together have memory for {total} samples ({on}), {batch - total} "
            f"too few, even without any state. {_remedies(room)}"
        )
    options = []
    if problem.single_microbatch:
        options.append("one microbatch on each rank")
    if problem.minimum_microbatch_size > 1:
        options.append(f"minimum_microbatch_size={problem.minimum_microbatch_size}")
    under = f" under {' and '.join(options)}" if options else ""
    nearest = room.nearest_batch(more=True, stateless=True)
    if nearest not in (0, batch):
        sizes = sorted({size for kind in types for size in _sizes(problem, kind.profile)})
        return (
            f"Samples bind: a global batch of {batch} cannot be split over {ranks} ranks into "
            f"microbatches of the sizes that they can run ({sizes[0]} to {sizes[-1]}){under}. The "
            f"closest batch that can is {nearest}, {abs(nearest - batch)} "
            f"{'more' if nearest > batch else 'fewer'}. "
            f"{_remedies(room, more=True)}"
        )
    if len(problem.members) > 1:
        return f"{_too_little_for_a_group(problem)} {_remedies(room)}"
    exact = room.least_bytes()
    used = _least_used(problem, types) if exact is None else exact
    capacity = math.fsum(rank.capacity_bytes for rank in problem.ranks)
    buffers = idle_bytes(problem) * ranks
    on = _each(types, [_bytes(kind.profile.capacity_bytes) for kind in types])
    missing = max(used + problem.state.most_bytes - capacity, 1.0)
    return (
        f"Memory binds over all {ranks} ranks together: the state needs "
        f"{_bytes(problem.state.most_bytes)}, the gathered buffers {_bytes(buffers)}, the "
        f"samples{under} at least {_bytes(max(used - buffers, 0.0))}, but the capacity is "
        f"{_bytes(capacity)} ({on}): {'at least ' if exact is None else ''}{_bytes(missing)} are "
        f"missing. "
        f"{_remedies(room)}"
    )


def _too_little_for_a_group(problem: Problem) -> str:
    capacities = [
        math.fsum(problem.ranks[rank].capacity_bytes for rank in members)
        for members in problem.members
    ]
    have = ", ".join(
        f"rank {_listed(members)} {_bytes(capacity)}"
        for members, capacity in zip(problem.members[:8], capacities, strict=False)
    )
    return (
        f"Memory binds in a group of ranks: with hybrid sharding each of {len(capacities)} groups "
        f"holds the whole state, {_bytes(problem.state.most_bytes)}, next to "
        f"the gathered buffers of {_bytes(idle_bytes(problem))} on each rank, and its samples. The "
        f"capacity of the groups is {have}. Planner(hybrid_sharding=False) holds the state once, "
        f"on all ranks together."
    )


def _remedies(room: _Room, *, more: bool = False) -> str:
    """Return sentences that name single changes after which there is a plan.

    With ``more``, a larger batch is tried, too.
    """
    problem, rooms = room.problem, [room]

    def fits(**changes: Any) -> bool:
        rooms.append(_Room(dataclasses.replace(problem, **changes), room.deadline))
        return rooms[-1].fits()

    found = []
    batch = room.nearest_batch(more=more)
    if batch:
        change = "raise" if batch > problem.global_batch_size else "lower"
        found.append(f"{change} global_batch_size to {batch}")
    if problem.reshard_after_forward is False and fits(reshard_after_forward=True):
        found.append(
            f"give units back between forward and backward, reshard_after_forward=True "
            f"({problem.unresharded_bytes / 2**30:.3f} GiB on every rank)"
        )
    unlimited = [dataclasses.replace(rank, host_capacity_bytes=math.inf) for rank in problem.ranks]
    if problem.boundary_bytes and fits(ranks=unlimited):
        host = problem.boundary_bytes * problem.units * problem.global_batch_size
        found.append(
            f"offload boundary activations to host memory, {host / 2**30:.3f} GiB in all "
            f"(host_capacity_bytes of each rank; in cluster.yaml host_memory, and --offload)"
        )
    for name, index in {kind.profile.name: index for index, kind in enumerate(room.types)}.items():
        further = room.further_ranks(index)
        if further:
            found.append(f"add {further} more {name!r}")
    least = problem.minimum_microbatch_size
    if least > 1 and fits(minimum_microbatch_size=1):
        found.append(f"drop minimum_microbatch_size={least}")
    if found:
        return f"What would do: {'; or '.join(found)}."
    remote = "use ranks with more memory, smaller units, or a smaller model"
    if all(room.settled for room in rooms):
        return f"No smaller batch, offload or further rank of these types alone would do: {remote}."
    return (
        f"Which smaller batch or how many further ranks would do was not found out within "
        f"{_TIME_S:g} s: lower global_batch_size, add ranks, or {remote}."
    )


class _Room:
    """Answers whether the samples fit, until ``deadline`` (of time.perf_counter).

    ``settled`` says whether every question so far was answered in time.
    """

    def __init__(self, problem: Problem, deadline: float) -> None:
        self.problem = problem
        self.deadline = deadline
        self.types = [
            RankType(_timeless(kind.profile), kind.members) for kind in group_types(problem)
        ]
        self.settled = True

    def fits(self) -> bool:
        """Return whether there is a plan; False if that is not known in time."""
        return self._solved(self._needs()).values is not None

    def nearest_batch(self, *, more: bool = False, stateless: bool = False) -> int:
        """Return the nearest smaller batch that fits, or 0 if none is known.

        With ``more`` it may also be larger. With ``stateless`` the state is ignored.
        """
        needs = self._unshared() if stateless else self._needs()
        outcome = self._solved(needs, Slack(fewer=True, more=more))
        return 0 if outcome.values is None else int(outcome.values @ self._columns.batch)

    def least_bytes(self) -> float | None:
        """Return the least bytes that all ranks need in addition to the state; None: not known."""
        used = self._columns.used[:, 0]
        whole = max(self.problem.state.most_bytes, 1.0)
        outcome = self._solved(self._unshared(), cost=1 + used / whole)
        if outcome.values is None or not outcome.is_proven:
            return None
        capacity = math.fsum(rank.capacity_bytes for rank in self.problem.ranks)
        return capacity + float(outcome.values @ used)

    def further_ranks(self, index: int) -> int:
        """Return the fewest additional ranks of this type that suffice, or 0 if none are known."""
        outcome = self._solved(self._needs(), Slack(further=index))
        return 0 if outcome.values is None else int(outcome.values.sum()) - len(self.problem.ranks)

    def most_samples(self, index: int) -> int:
        """Return the largest useful batch of a rank of this type, if it holds no state."""
        own = self._columns.kind == index
        return int(self._columns.batch[own].max(initial=0))

    def _solved(
        self, needs: Needs, slack: Slack = TIGHT, cost: np.ndarray | float = 0.0
    ) -> Outcome:
        outcome = Outcome(None, 0.0, is_proven=False)
        if time.perf_counter() < self.deadline:
            columns = self._columns
            left_s = self.deadline - time.perf_counter()
            outcome = choose(columns, needs, cost=cost, slack=slack, time_limit_s=left_s)
        self.settled &= outcome.is_proven
        return outcome

    def _needs(self) -> Needs:
        return dataclasses.replace(self._unshared(), limits=shared_limits(self.problem))

    def _unshared(self) -> Needs:
        return Needs(
            ranks=np.array([kind.count for kind in self.types]),
            batch=self.problem.global_batch_size,
            limits=np.full_like(shared_limits(self.problem), math.inf),
        )

    @cached_property
    def _columns(self) -> Columns:
        problem, limits = self.problem, []
        for kind in self.types:
            # one microbatch more than the global batch: the nearest batch may be larger
            most = problem.global_batch_size + kind.profile.largest_microbatch_size
            largest = int(min(most, most_samples(problem, kind.profile)))
            batches = _thinned(largest, problem.global_batch_size).tolist()
            limits.append(Limits((0, *batches)))
        return build_columns(problem, self.types, limits)


def _thinned(largest: int, batch: int) -> np.ndarray:
    """Return batches of a rank up to ``largest`` from which all ranks can sum to any ``batch``."""
    every = np.arange(1, largest + 1)
    if batch <= _FEW_SAMPLES:
        return every
    step = math.isqrt(batch)
    below = (every > largest - step) | ((every > batch - step) & (every <= batch))
    return every[(every <= step) | (every % step == 0) | below]


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


def _sizes(problem: Problem, profile: RankProfile) -> set[int]:
    """Return the microbatch sizes that this rank can run in at least one mode."""
    return {
        size for mode in modes(problem, profile) for size in usable_sizes(problem, profile, mode)
    }


def _why_none(problem: Problem, profile: RankProfile) -> str:
    longest = profile.largest_microbatch_size
    if not longest:
        return "its curves are empty"
    least = problem.minimum_microbatch_size
    if longest < least:
        return f"profiled up to size {longest}, below minimum_microbatch_size={least}"
    needed = min(
        device_bytes(problem, profile, (size,), mode)
        for mode in modes(problem, profile)
        for size in range(least, longest + 1)
    )
    return (
        f"one microbatch needs {_bytes(needed)}, its capacity is "
        f"{_bytes(profile.capacity_bytes)}, {_bytes(needed - profile.capacity_bytes)} are missing"
    )


def _each(types: Sequence[RankType], amounts: Sequence[Any]) -> str:
    """Return what ranks have, by type, as in ``rank 0, 1 ('A6000') 3 each``."""
    return ", ".join(
        f"rank {_members(kind)} {amount}{' each' if kind.count > 1 else ''}"
        for kind, amount in zip(types[:8], amounts, strict=False)
    )


def _members(kind: RankType) -> str:
    return f"{_listed(kind.members)} ({kind.profile.name!r})"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")


def _timeless(rank: RankProfile) -> RankProfile:
    """Return the rank without times, so that only the question of memory is left."""
    return dataclasses.replace(
        rank.changed(TIME_CURVES, lambda curve: (0.0,) * len(curve)),
        offload_bytes_per_s=math.inf,
        updated_parameters_per_s=math.inf,
        host_updated_parameters_per_s=0.0,
        to_device_bytes_per_s=math.inf,
        to_host_bytes_per_s=math.inf,
    )
