"""Why there is no plan: which resource binds, how much is missing where, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

from ._columns import RankType, usable_sizes
from .cost import working_bytes
from .errors import InfeasibleError
from .problem import Problem, RankProfile


def refuse_early(problem: Problem, types: Sequence[RankType]) -> None:
    """Raise InfeasibleError for what needs no search: buffers, samples or state without a place."""
    _refuse_buffers(problem, types)
    _refuse_idle(problem, types)
    _refuse_samples(problem, types)
    _refuse_sizes(problem, types)
    _refuse_memory(problem, types)


def refuse(problem: Problem, types: Sequence[RankType]) -> NoReturn:
    """Raise InfeasibleError after a search without any plan."""
    options = []
    if problem.equal_microbatches:
        options.append("equal_microbatches=True")
    if problem.minimum_microbatch_size > 1:
        options.append(f"minimum_microbatch_size={problem.minimum_microbatch_size}")
    under = f" under {' and '.join(options)}" if options else ""
    without = f", drop {' or '.join(options)}" if options else ""
    left = _capacity(problem) - _buffers(problem) - problem.state_bytes
    roomiest = _roomiest(types)
    raise InfeasibleError(
        f"Memory binds: no split of the global batch of {problem.global_batch_size} over "
        f"{len(problem.ranks)} ranks fits{under}. Beside the state "
        f"({_bytes(problem.state_bytes)}) and the gathered buffers ({_bytes(_buffers(problem))}) "
        f"all ranks together have {_bytes(left)} left, and whole samples in whole microbatches "
        f"need more, in all or on some rank. Lower global_batch_size{without}, or add a rank: one "
        f"more {roomiest.name!r} brings {_bytes(_room(problem, roomiest))}."
    )


def _refuse_buffers(problem: Problem, types: Sequence[RankType]) -> None:
    for kind in types:
        missing = -_room(problem, kind.profile)
        if missing > 0:
            raise InfeasibleError(
                f"Memory binds on rank {_members(kind)}: the gathered buffers that every rank "
                f"holds need {_bytes(problem.gathered_bytes)}, its capacity is "
                f"{_bytes(kind.profile.capacity_bytes)}, {_bytes(missing)} are missing. Use "
                f"smaller units, raise its capacity_bytes, or leave this rank out."
            )


def _refuse_idle(problem: Problem, types: Sequence[RankType]) -> None:
    if not problem.equal_microbatches:
        return
    for kind in types:
        if not usable_sizes(problem, kind.profile):
            raise InfeasibleError(
                f"Samples bind on rank {_members(kind)}: it can take none "
                f"({_why_none(problem, kind.profile)}), but equal_microbatches=True wants as many "
                f"microbatches on every rank. Leave it out, or set equal_microbatches=False."
            )
    least = len(problem.ranks) * problem.minimum_microbatch_size
    if problem.global_batch_size < least:
        raise InfeasibleError(
            f"Samples bind: equal_microbatches=True gives each of {len(problem.ranks)} ranks at "
            f"least one microbatch of at least {problem.minimum_microbatch_size}, {least} samples, "
            f"but the global batch is {problem.global_batch_size}, "
            f"{least - problem.global_batch_size} too few. Raise global_batch_size to {least}, or "
            f"use fewer ranks."
        )


def _refuse_samples(problem: Problem, types: Sequence[RankType]) -> None:
    most = [_most_samples(problem, kind.profile) for kind in types]
    total = sum(kind.count * samples for kind, samples in zip(types, most, strict=True))
    if total >= problem.global_batch_size:
        return
    asked = problem.global_batch_size
    if not total:
        reasons = "; ".join(
            f"rank {_members(kind)}: {_why_none(problem, kind.profile)}" for kind in types[:8]
        )
        raise InfeasibleError(
            f"Samples bind: no rank can take any of the global batch of {asked} ({reasons}). "
            f"Profile a rank that can, or raise its capacity_bytes."
        )
    best = max(range(len(types)), key=most.__getitem__)
    more = math.ceil((asked - total) / most[best])
    raise InfeasibleError(
        f"Samples bind: the global batch is {asked}, but beside the gathered buffers all ranks "
        f"together have memory for {total:.0f} samples, {asked - total:.0f} too few, even without "
        f"any state. Lower global_batch_size to {total:.0f} or less, lower boundary_bytes "
        f"(offload), or add {more} more {types[best].profile.name!r}, {most[best]:.0f} samples "
        f"each."
    )


def _refuse_sizes(problem: Problem, types: Sequence[RankType]) -> None:
    sizes = sorted({size for kind in types for size in usable_sizes(problem, kind.profile)})
    batch = problem.global_batch_size
    if 1 in sizes:
        return
    reached = [True] + [False] * (2 * batch)
    for total in range(1, len(reached)):
        reached[total] = any(total >= size and reached[total - size] for size in sizes)
    if not reached[batch]:
        near = [total for total in range(1, len(reached)) if reached[total]]
        closest = min(near, key=lambda total: abs(total - batch), default=sizes[0])
        raise InfeasibleError(
            f"Samples bind: a global batch of {batch} cannot be split into microbatches of the "
            f"sizes that any rank can run ({sizes[0]} to {sizes[-1]}; minimum_microbatch_size is "
            f"{problem.minimum_microbatch_size}). The closest batch that can is {closest}: change "
            f"global_batch_size, or lower minimum_microbatch_size."
        )


def _refuse_memory(problem: Problem, types: Sequence[RankType]) -> None:
    capacity = _capacity(problem)
    samples = _least_sample_bytes(problem, types)
    missing = _buffers(problem) + samples + problem.state_bytes - capacity
    # Rounding of a sum of this size must not refuse what fits to the byte: the search decides.
    if math.isinf(capacity) or missing <= 1e-12 * capacity:
        return
    roomiest = _roomiest(types)
    room = _room(problem, roomiest)
    more = f", or add {math.ceil(missing / room)} more {roomiest.name!r}" if room > 0 else ""
    ranks = ", ".join(
        f"rank {_members(kind)} {_bytes(kind.profile.capacity_bytes)}"
        f"{' each' if kind.count > 1 else ''}"
        for kind in types[:8]
    )
    raise InfeasibleError(
        f"Memory binds over all {len(problem.ranks)} ranks together: the state needs "
        f"{_bytes(problem.state_bytes)}, the gathered buffers {_bytes(_buffers(problem))}, the "
        f"samples at least {_bytes(samples)}, but the capacity is {_bytes(capacity)} ({ranks}): at "
        f"least {_bytes(missing)} are missing. Lower global_batch_size, lower boundary_bytes "
        f"(offload), shrink the state{more}."
    )


def _least_sample_bytes(problem: Problem, types: Sequence[RankType]) -> float:
    """A bound below what the samples need over all ranks: boundaries, and the smallest peak."""
    peaks = [
        kind.profile.compute_bytes[sizes[0] - 1]
        for kind in types
        if (sizes := usable_sizes(problem, kind.profile))
    ]
    boundaries = problem.boundary_bytes * problem.units * problem.global_batch_size
    return boundaries + min(peaks, default=0.0)


def _most_samples(problem: Problem, profile: RankProfile) -> float:
    """Samples that a rank without state could hold; infinite where they need no lasting memory."""
    sizes = usable_sizes(problem, profile)
    if not sizes:
        return 0
    per_sample = problem.boundary_bytes * problem.units
    left = _room(problem, profile) - profile.compute_bytes[sizes[0] - 1]
    if math.isinf(left) or per_sample == 0:
        return math.inf
    # The rounding of a division must not refuse a batch that fits to the byte.
    return math.floor(left / per_sample * (1 + 1e-12))


def _why_none(problem: Problem, profile: RankProfile) -> str:
    longest = profile.largest_microbatch_size
    if not longest:
        return "its curves are empty"
    least = problem.minimum_microbatch_size
    if longest < least:
        return f"profiled up to size {longest}, below minimum_microbatch_size={least}"
    needed = min(working_bytes(problem, profile, (size,)) for size in range(least, longest + 1))
    return (
        f"one microbatch needs {_bytes(needed)}, its capacity is "
        f"{_bytes(profile.capacity_bytes)}, {_bytes(needed - profile.capacity_bytes)} are missing"
    )


def _capacity(problem: Problem) -> float:
    return math.fsum(rank.capacity_bytes for rank in problem.ranks)


def _buffers(problem: Problem) -> float:
    return problem.gathered_bytes * len(problem.ranks)


def _room(problem: Problem, profile: RankProfile) -> float:
    return profile.capacity_bytes - problem.gathered_bytes


def _roomiest(types: Sequence[RankType]) -> RankProfile:
    return max((kind.profile for kind in types), key=lambda profile: profile.capacity_bytes)


def _members(kind: RankType) -> str:
    shown = ", ".join(str(index) for index in kind.members[:6])
    more = ", ..." if kind.count > 6 else ""
    return f"{shown}{more} ({kind.profile.name!r})"


def _bytes(amount: float) -> str:
    if math.isinf(amount):
        return "unlimited bytes"
    exact = f"{math.ceil(amount):d} bytes"
    return exact if amount < 2**20 else f"{amount / 2**30:.3f} GiB ({exact})"
