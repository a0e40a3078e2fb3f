"""Limits the memory that each rank may use, of its device and of its host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lightning_cephalo.accelerator import Accelerator, Device
from lightning_cephalo.accelerator.host import HostShare, host_share
from lightning_cephalo.common.errors import TooLittleMemoryError
from lightning_cephalo.common.quantities import BYTES, format_mib
from lightning_cephalo.execution.offload import HostArena, HostMemoryError
from lightning_cephalo.plan import InfeasibleError, Plan, PlanError, Problem, RankPlan

if TYPE_CHECKING:
    from lightning_cephalo.preparation.options import Options

Cap: TypeAlias = float | int | str | Mapping[int, float | int | str] | None
"""A fraction of the memory (a float up to 1.0), bytes (an int, or "8 GB"), or these by rank."""

# Part of the host's free memory that ranks use without a cap; the rest is for the data loaders.
_FREE_SHARE = 0.5
# Part of pinned host memory that a plan may use: it comes in pieces whose ends may stay empty.
_PLANNED_SHARE = 0.9
# The same of any host memory where optimizer state moves: rows are cut and aligned.
_STATE_SHARE = 0.95
_COPIED_BYTES, _REPEATS = 2**24, 3


def check_cap(name: str, cap: Any, world_size: float = math.inf) -> None:
    """Raise PlanError if an option is no amount of memory, or is for ranks that do not exist."""
    for rank in cap if isinstance(cap, Mapping) else (0,):
        is_rank = isinstance(rank, Integral) and not isinstance(rank, bool)
        if not is_rank or not 0 <= rank < world_size:
            known = "0, 1, ..." if math.isinf(world_size) else f"0 to {world_size - 1}"
            raise PlanError(f"{name}: expected ranks ({known}) as keys, but got {rank!r}.")
        _amount(name, cap, rank)


def _amount(name: str, cap: Any, rank: int) -> float | int | None:
    """Return what a cap allows a rank: a fraction (a float), bytes (an int), or None: all."""
    if isinstance(cap, Mapping):
        name, cap = f"{name}[{rank}]", cap.get(rank)
    if cap is None:
        return None
    if isinstance(cap, str):
        return math.floor(BYTES.parse(name, cap))
    if isinstance(cap, Integral):
        if int(cap) > 1:  # 1 may mean all of the device, or True
            return int(cap)
    elif isinstance(cap, Real) and 0 < float(cap) <= 1:
        return float(cap)
    raise PlanError(
        f"{name}: expected a fraction of the memory (0.5; 1.0 for all of it), bytes (8_000_000_000"
        f" or '8 GB'), or one of these per rank ({{0: '8 GB', 1: 0.5}}), but got {cap!r}."
    )


def _allowed_bytes(
    name: str, cap: Cap, rank: int, memory: Device | HostShare, sharers: int = 1
) -> float:
    """Return the bytes that a cap allows a rank, which has a part of a memory; infinite: all."""
    amount, total_bytes = _amount(name, cap, rank), memory.total_bytes
    if amount is None:
        return math.inf
    if isinstance(amount, float) and math.isinf(total_bytes):
        raise PlanError(
            f"{name} of rank {rank}: {amount} of a device that does not tell its memory. Give"
            " bytes, such as '8 GB'."
        )
    allowed = amount * total_bytes if isinstance(amount, float) else float(amount)
    if allowed > total_bytes * sharers:
        raise PlanError(
            f"{name} of rank {rank} is {format_mib(allowed)}, but it has"
            f" {format_mib(total_bytes * sharers)}{_by(memory.limited_by)}. Lower the cap to that,"
            " or leave it out."
        )
    return allowed


def _by(limited_by: str) -> str:
    return f", by {limited_by}" if limited_by else ""


@dataclass(frozen=True)
class HostMemory:
    """One rank's part of its host's memory."""

    capacity_bytes: float = math.inf
    copy_bytes_per_s: float = math.inf
    is_apart: bool = True
    is_pinned: bool = False
    limited_by: str = ""


@dataclass(frozen=True)
class Limits:
    """The memory that one rank may use; without arguments all, for a run that makes no plan."""

    device: Device = field(default_factory=lambda: Device("", math.inf))
    host: HostMemory = field(default_factory=HostMemory)


def read_limits(
    accelerator: Accelerator, processes_on_host: int, rank: int, options: Options
) -> Limits:
    """Read the memory of this rank's device and host, and apply the user's caps."""
    device, host = accelerator.describe(processes_on_host), host_share(processes_on_host)
    cap_bytes = _allowed_bytes("memory_cap", options.memory_cap, rank, device)
    device = replace(
        device, capacity_bytes=min(device.capacity_bytes, cap_bytes), cap_bytes=cap_bytes
    )
    cap, sharers = options.planner.host_memory_cap, max(processes_on_host, 1)
    capacity_bytes = _allowed_bytes("host_memory_cap", cap or None, rank, host, sharers)
    if math.isinf(capacity_bytes):
        capacity_bytes = 0.0 if cap == 0 else host.free_bytes * _FREE_SHARE
    capacity_bytes = max(capacity_bytes - options.kept_bytes, 0.0)
    is_apart = accelerator.host_is_apart
    rate = _copy_rate(accelerator) if capacity_bytes and is_apart else math.inf
    limited_by = "" if isinstance(cap, (int, str)) else host.limited_by
    pins = accelerator.pins_host_memory
    return Limits(device, HostMemory(capacity_bytes, rate, is_apart, pins, limited_by))


def _copy_rate(accelerator: Accelerator) -> float:
    """Return the bytes per second of a copy from the device; the other way is about as fast."""
    host = accelerator.allocate_host(_COPIED_BYTES)
    best_s = math.inf
    with accelerator.on_host():  # an emulated device may be smaller than this
        values = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=accelerator.device)
        for _ in range(1 + _REPEATS):
            start_s = accelerator.now_s()
            host.copy_(values)
            best_s = min(best_s, accelerator.now_s() - start_s)
    return _COPIED_BYTES / max(best_s, 1e-9)


def check_plan(plan: Plan, limits: Sequence[Limits], global_batch_size: int | None) -> None:
    """Raise if a given plan is not for this run, or states a memory need above the caps."""
    if plan.has_stages:
        raise PlanError(
            "The plan says units: its groups hold some of the units each, as stages of a pipeline,"
            " but training does not run stages yet. Leave units out, and let each group hold all."
        )
    plan.check(world_size=len(limits), global_batch_size=global_batch_size)
    for rank, (part, own) in enumerate(zip(plan.ranks, limits, strict=True)):
        cap_bytes = own.device.cap_bytes
        if part.memory_bytes is not None and part.memory_bytes > cap_bytes:
            raise PlanError(
                f"The plan needs {format_mib(part.memory_bytes)} on rank {rank}, but memory_cap"
                f" allows {format_mib(cap_bytes)}. Raise the cap, or leave the plan out"
                " (plan=None) to have one made that obeys it."
            )


@contextmanager
def named_where_nothing_fits(limits: Sequence[Limits]) -> Iterator[None]:
    """Add the ranks' limits to an error about too little memory."""
    try:
        yield
    except (TooLittleMemoryError, InfeasibleError) as error:
        # only a solver counts on memory of hosts that is apart
        note = limit_note(limits, uses_host=isinstance(error, InfeasibleError))
        if not note:
            raise
        raise type(error)(f"{error} {note} A larger limit may do.") from error


def limit_note(limits: Sequence[Limits], uses_host: bool = True) -> str:
    """Return a sentence on ranks that may use less memory than there is; empty if none."""
    by_limit: dict[str, list[str]] = {}
    for rank, own in enumerate(limits):
        cap_bytes, limit = own.device.cap_bytes, own.device.limited_by
        if not math.isinf(cap_bytes):
            limit = f"memory_cap ({format_mib(cap_bytes)})"
        elif not limit and uses_host and own.host.is_apart:
            limit = own.host.limited_by
        if limit:
            by_limit.setdefault(limit, []).append(str(rank))
    return " ".join(
        f"The memory of rank {', '.join(ranks)} is limited by {limit}."
        for limit, ranks in by_limit.items()
    )


def with_host_memory(
    problem: Problem, hosts: Sequence[HostMemory], boundaries: bool = True
) -> Problem:
    """Let the plan use the memory of hosts that have some apart from the device.

    Ranks with equal profiles get equal hosts: the smallest capacity and the slowest rate.
    """
    moves, ranks = problem.optimizer_offload is not False, []
    for profile in problem.ranks:
        pairs = zip(problem.ranks, hosts, strict=True)
        alike = [host for other, host in pairs if other == profile]
        is_pinned = any(host.is_pinned for host in alike)
        share = _PLANNED_SHARE if is_pinned else _STATE_SHARE if moves else 1.0
        own = profile
        if all(host.is_apart for host in alike):
            own = replace(
                profile,
                host_capacity_bytes=share * min(host.capacity_bytes for host in alike),
                offload_bytes_per_s=min(host.copy_bytes_per_s for host in alike),
            )
        ranks.append(own)
    pins = moves and any(host.is_apart and host.is_pinned for host in hosts)
    return replace(
        problem, ranks=tuple(ranks), offloads_boundaries=boundaries, pins_host_memory=pins
    )


def reserve_host_memory(
    accelerator: Accelerator, host: HostMemory, plan: RankPlan
) -> HostArena | None:
    """Return this rank's host memory for boundaries, with the bytes of the plan allocated."""
    if not plan.offload:
        return None
    arena = HostArena(accelerator, host.capacity_bytes)
    needed = plan.host_bytes or 0.0
    if needed > host.capacity_bytes:
        raise HostMemoryError(
            f"The plan offloads {format_mib(needed)}, but this rank may use"
            f" {format_mib(host.capacity_bytes)} of its host's memory{_by(host.limited_by)}. Raise"
            " Planner(host_memory_cap=...), or leave the plan out (plan=None)."
        )
    arena.reserve(math.ceil(needed))
    return arena
