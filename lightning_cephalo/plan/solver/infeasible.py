"""Why there is no plan: which resource binds, how much is missing where, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

from lightning_cephalo.common.errors import InfeasibleError
from lightning_cephalo.common.quantities import format_bytes_exactly as _bytes
from lightning_cephalo.plan.cost import modes, peak_curve, sample_bytes, working_bytes
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.columns import RankType, usable_sizes
from lightning_cephalo.plan.solver.remedies import remedies


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
    without = f" Or drop {' or '.join(options)}." if options else ""
    left = _capacity(problem) - _buffers(problem) - problem.state_bytes
    raise InfeasibleError(
        f"Memory binds: no split of the global batch of {problem.global_batch_size} over "
        f"{len(problem.ranks)} ranks fits{under}. Beside the state "
        f"({_bytes(problem.state_bytes)}) and the gathered buffers ({_bytes(_buffers(problem))}) "
        f"all ranks together have {_bytes(left)} left, and whole samples in whole microbatches "
        f"need more, in all or on some rank. {remedies(problem, types)}{without}"
    )


def _refuse_buffers(problem: Problem, types: Sequence[RankType]) -> None:
    for kind in types:
        missing = -_room(problem, kind.profile)
        if missing > 0:
            raise InfeasibleError(
                f"Memory binds on rank {_members(kind)}: the gathered buffers that every rank "
                f"holds need {_bytes(problem.fixed_bytes)}, its capacity is "
                f"{_bytes(kind.profile.capacity_bytes)}, {_bytes(missing)} are missing. Use "
                f"smaller units, {_resharding(problem)}raise its capacity_bytes, or leave this "
                f"rank out."
            )


def _resharding(problem: Problem) -> str:
    return "reshard_after_forward=True, " if problem.reshard_after_forward is False else ""


def _refuse_idle(problem: Problem, types: Sequence[RankType]) -> None:
    if not problem.equal_microbatches:
        return
    for kind in types:
        if not _every_usable_size(problem, kind.profile):
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
    on = ", ".join(
        f"rank {_members(kind)} {samples:.0f}{' each' if kind.count > 1 else ''}"
        for kind, samples in zip(types[:8], most, strict=False)
    )
    raise InfeasibleError(
        f"Samples bind: the global batch is {asked}, but beside the gathered buffers all ranks "
        f"together have memory for {total:.0f} samples ({on}), {asked - total:.0f} too few, even "
        f"without any state. {remedies(problem, types)}"
    )


def _refuse_sizes(problem: Problem, types: Sequence[RankType]) -> None:
    sizes = sorted({size for kind in types for size in _every_usable_size(problem, kind.profile)})
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
    ranks = ", ".join(
        f"rank {_members(kind)} {_bytes(kind.profile.capacity_bytes)}"
        f"{' each' if kind.count > 1 else ''}"
        for kind in types[:8]
    )
    raise InfeasibleError(
        f"Memory binds over all {len(problem.ranks)} ranks together: the state needs "
        f"{_bytes(problem.state_bytes)}, the gathered buffers {_bytes(_buffers(problem))}, the "
        f"samples at least {_bytes(samples)}, but the capacity is {_bytes(capacity)} ({ranks}): at "
        f"least {_bytes(missing)} are missing. {remedies(problem, types)}"
    )


def _least_sample_bytes(problem: Problem, types: Sequence[RankType]) -> float:
    """A bound below what the samples need over all ranks: boundaries, and the smallest peak."""
    kinds = [
        (peak_curve(kind.profile, mode)[sizes[0] - 1], sample_bytes(problem, mode))
        for kind in types
        for mode in modes(problem, kind.profile)
        if (sizes := usable_sizes(problem, kind.profile, mode))
    ]
    least = min((kept for _, kept in kinds), default=0.0)
    return least * problem.global_batch_size + min((peak for peak, _ in kinds), default=0.0)


def _most_samples(problem: Problem, profile: RankProfile) -> float:
    """Samples that a rank without state could hold; infinite where they need no lasting memory."""
    most = 0.0
    for mode in modes(problem, profile):
        sizes = usable_sizes(problem, profile, mode)
        if not sizes:
            continue
        per_sample = sample_bytes(problem, mode)
        left = _room(problem, profile) - peak_curve(profile, mode)[sizes[0] - 1]
        held = math.inf
        if per_sample > 0 and not math.isinf(left):
            held = left / per_sample
        if mode.offload:
            held = min(held, profile.host_capacity_bytes / (problem.boundary_bytes * problem.units))
        # The rounding of a division must not refuse a batch that fits to the byte.
        most = max(most, held if math.isinf(held) else math.floor(held * (1 + 1e-12)))
    return most


def _every_usable_size(problem: Problem, profile: RankProfile) -> set[int]:
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
        working_bytes(problem, profile, (size,), mode)
        for mode in modes(problem, profile)
        for size in range(least, longest + 1)
    )
    return (
        f"one microbatch needs {_bytes(needed)}, its capacity is "
        f"{_bytes(profile.capacity_bytes)}, {_bytes(needed - profile.capacity_bytes)} are missing"
    )


def _capacity(problem: Problem) -> float:
    return math.fsum(rank.capacity_bytes for rank in problem.ranks)


def _buffers(problem: Problem) -> float:
    return problem.fixed_bytes * len(problem.ranks)


def _room(problem: Problem, profile: RankProfile) -> float:
    return profile.capacity_bytes - problem.fixed_bytes


def _members(kind: RankType) -> str:
    shown = ", ".join(str(index) for index in kind.members[:6])
    more = ", ..." if kind.count > 6 else ""
    return f"{shown}{more} ({kind.profile.name!r})"
