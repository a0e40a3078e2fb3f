"""Limits the memory that each rank may use, of its device and of its host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch

from lightning_cephalo.accelerator import Accelerator, Device
from lightning_cephalo.accelerator.host import host_share
from lightning_cephalo.common.errors import TooLittleMemoryError
from lightning_cephalo.common.quantities import BYTES, format_mib
from lightning_cephalo.execution.offload import HostArena, HostMemoryError
from lightning_cephalo.plan import InfeasibleError, Plan, PlanError, Problem, RankPlan

_EXPECTED = (
    "expected a fraction of the device (0.5; 1.0 for all of it), bytes (8_000_000_000 or '8 GB'),"
    " or one of these per rank ({0: '8 GB', 1: 0.5})"
)
# Part of the host's free memory that ranks use without a cap; the rest is for the data loaders.
_FREE_SHARE = 0.5
# Part of pinned host memory that a plan may use: it comes in pieces whose ends may stay empty.
_PLANNED_SHARE = 0.9
# The same of any host memory where optimizer state moves: rows are cut and aligned.
_STATE_SHARE = 0.95
_COPIED_BYTES, _REPEATS = 2**24, 3


# -- caps of the user -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cap:
    """A memory cap of the user: a float is a fraction of the existing memory, an int is bytes.

    ``everyone`` is for ranks that ``by_rank`` does not name; None: no cap.
    """

    name: str
    everyone: float | int | None = None
    by_rank: tuple[tuple[int, float | int], ...] = ()

    @classmethod
    def parse(cls, name: str, value: Any, *, by_rank: bool = False, zero: bool = False) -> Cap:
        """Read the value of an option: a fraction, bytes, text such as "8 GB", or None.

        Args:
            by_rank: Whether a mapping from ranks to these is allowed too.
            zero: Whether 0 is allowed too: no memory at all.

        Raises PlanError for other values.
        """
        if value is None:
            return cls(name)
        if by_rank and isinstance(value, Mapping):
            for rank in value:
                if isinstance(rank, bool) or not isinstance(rank, Integral) or rank < 0:
                    raise PlanError(
                        f"{name}: expected ranks (0, 1, ...) as keys, but got {rank!r}."
                    )
            amounts = {int(rank): _amount(f"{name}[{rank}]", cap) for rank, cap in value.items()}
            return cls(name, None, tuple(sorted(amounts.items())))
        if zero and isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0:
            return cls(name, 0)
        return cls(name, _amount(name, value))

    @property
    def is_empty(self) -> bool:
        """Whether the user has set no cap."""
        return self.everyone is None and not self.by_rank

    def of(self, rank: int) -> float | int | None:
        """Return a rank's fraction or bytes; None where the user has set no cap."""
        return dict(self.by_rank).get(rank, self.everyone)

    def bytes_of(self, rank: int, total_bytes: float) -> float:
        """Return the bytes that a rank may use of ``total_bytes``; infinite without a cap."""
        allowed = self.of(rank)
        if allowed is None:
            return math.inf
        if isinstance(allowed, int):
            return float(allowed)
        if math.isinf(total_bytes):
            raise PlanError(
                f"{self.name} of rank {rank}: {allowed} of a device that does not tell its memory."
                " Give bytes, such as '8 GB'."
            )
        return allowed * total_bytes

    def check_ranks(self, world_size: int) -> None:
        """Check that the named ranks exist."""
        strangers = [rank for rank, _ in self.by_rank if rank >= world_size]
        if strangers:
            raise PlanError(
                f"{self.name} names rank {', '.join(map(str, strangers))}, but this run has"
                f" {world_size} ranks: expected 0 to {world_size - 1}."
            )


def _amount(field: str, value: Any) -> float | int:
    """Read a fraction (a float) or bytes (an int)."""
    if isinstance(value, str):
        return math.floor(BYTES.parse(field, value))
    if isinstance(value, Integral):
        if int(value) > 1:  # 1 may mean all of the device, or True
            return int(value)
    elif isinstance(value, Real) and 0 < float(value) <= 1:
        return float(value)
    raise PlanError(f"{field}: {_EXPECTED}, but got {value!r}.")


# -- limits of a rank -----------------------------------------------------------------------------


@dataclass(frozen=True)
class HostMemory:
    """One rank's part of its host's memory."""

    capacity_bytes: float
    copy_bytes_per_s: float = math.inf
    is_apart: bool = True
    is_pinned: bool = False
    limited_by: str = ""

    @property
    def planned_bytes(self) -> float:
        """Bytes that a plan may use."""
        return self.capacity_bytes * (_PLANNED_SHARE if self.is_pinned else 1.0)


@dataclass(frozen=True)
class Limits:
    """The memory that one rank may use."""

    device: Device
    host: HostMemory

    @classmethod
    def read(
        cls,
        accelerator: Accelerator,
        processes_on_host: int,
        rank: int,
        world_size: int,
        memory_cap: Cap,
        host_memory_cap: Cap,
        kept_bytes: float = 0.0,
    ) -> Limits:
        """Read the memory of this rank's device and host, and apply the user's caps."""
        found = accelerator.describe(processes_on_host)
        memory_cap.check_ranks(world_size)
        cap_bytes = memory_cap.bytes_of(rank, found.total_bytes)
        capacity_bytes = min(found.capacity_bytes, cap_bytes)
        return cls(
            replace(found, capacity_bytes=capacity_bytes, cap_bytes=cap_bytes),
            _host_memory(accelerator, processes_on_host, host_memory_cap.of(rank), kept_bytes),
        )

    @classmethod
    def none(cls) -> Limits:
        """No limits, for a run that makes no plan."""
        return cls(Device("", math.inf), HostMemory(math.inf))


def _host_memory(
    accelerator: Accelerator, processes_on_host: int, cap: float | int | None, kept_bytes: float
) -> HostMemory:
    host = host_share(processes_on_host)
    total = host.total_bytes
    limited_by = host.limited_by if cap is None or isinstance(cap, float) else ""
    if cap is None:
        capacity = host.free_bytes * _FREE_SHARE
    else:
        capacity = float(cap) if isinstance(cap, int) else cap * total
        if capacity > total * max(processes_on_host, 1):
            raise PlanError(
                f"host_memory_cap allows {format_mib(capacity)} for a rank, but its host has"
                f" {format_mib(total * max(processes_on_host, 1))}{_by(host.limited_by)}. Lower the"
                " cap to that, or leave it out."
            )
    capacity = max(capacity - kept_bytes, 0.0)
    is_apart = accelerator.host_is_apart
    rate = _copy_rate(accelerator) if capacity and is_apart else math.inf
    return HostMemory(capacity, rate, is_apart, accelerator.pins_host_memory, limited_by)


def _by(limited_by: str) -> str:
    return f", by {limited_by}" if limited_by else ""


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


# -- use of the limits ----------------------------------------------------------------------------


def check_limits(limits: Sequence[Limits]) -> None:
    """Raise if any rank's cap is above its device's memory; all ranks raise the same error."""
    for rank, own in enumerate(limits):
        cap_bytes, total_bytes = own.device.cap_bytes, own.device.total_bytes
        if not math.isinf(cap_bytes) and cap_bytes > total_bytes:
            raise PlanError(
                f"memory_cap of rank {rank} is {format_mib(cap_bytes)}, but its device"
                f" {own.device.name!r} has {format_mib(total_bytes)}. Lower the cap to that, or"
                " leave it out."
            )


def check_plan(plan: Plan, limits: Sequence[Limits]) -> None:
    """Raise if a given plan states a memory need above the caps."""
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
    """Add the ranks' caps to an error about too little memory."""
    try:
        yield
    except (TooLittleMemoryError, InfeasibleError) as error:
        allowed = [
            f"rank {rank} {format_mib(own.device.cap_bytes)}"
            for rank, own in enumerate(limits)
            if not math.isinf(own.device.cap_bytes)
        ]
        hints = [f"memory_cap allows {', '.join(allowed)}: a larger one may do."] if allowed else []
        # only a solver counts on memory of hosts that is apart
        limited = limit_note(limits, uses_host=isinstance(error, InfeasibleError))
        if limited:
            hints.append(f"{limited} A larger limit may do.")
        if not hints:
            raise
        raise type(error)(" ".join([str(error), *hints])) from error


def limit_note(limits: Sequence[Limits], uses_host: bool = True) -> str:
    """Return a sentence on ranks whose memory is less than what their hosts have; empty if none."""
    by_limit: dict[str, list[int]] = {}
    for rank, own in enumerate(limits):
        found = own.device.limited_by if math.isinf(own.device.cap_bytes) else ""
        if not found and uses_host and own.host.is_apart:
            found = own.host.limited_by
        if found:
            by_limit.setdefault(found, []).append(rank)
    sentences = [
        f"The memory of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} on the"
        f" host is limited by {limit}."
        for limit, ranks in by_limit.items()
    ]
    return " ".join(sentences)


def with_host_memory(
    problem: Problem, hosts: Sequence[HostMemory], boundaries: bool = True
) -> Problem:
    """Let the plan use the memory of hosts that have some apart from the device."""
    moves = problem.optimizer_offload is not False

    def planned_bytes(host: HostMemory) -> float:
        return min(host.planned_bytes, _STATE_SHARE * host.capacity_bytes if moves else math.inf)

    ranks = tuple(
        replace(
            rank,
            host_capacity_bytes=planned_bytes(host),
            offload_bytes_per_s=host.copy_bytes_per_s,
        )
        if host.is_apart
        else rank
        for rank, host in zip(problem.ranks, _equal_hosts(problem, hosts), strict=True)
    )
    pins = moves and any(host.is_apart and host.is_pinned for host in hosts)
    return replace(problem, ranks=ranks, offloads_boundaries=boundaries, pins_host_memory=pins)


def _equal_hosts(problem: Problem, hosts: Sequence[HostMemory]) -> list[HostMemory]:
    """Give ranks with equal profiles equal hosts: the smallest capacity and the slowest rate."""
    found = []
    for profile in problem.ranks:
        group = [h for r, h in zip(problem.ranks, hosts, strict=True) if r == profile]
        merged = HostMemory(
            min(host.capacity_bytes for host in group),
            min(host.copy_bytes_per_s for host in group),
            all(host.is_apart for host in group),
            any(host.is_pinned for host in group),
        )
        found.append(merged)
    return found


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
            " Planner(host_memory_cap=...), or leave the plan out (plan=None) to have one made"
            " that fits."
        )
    arena.reserve(math.ceil(needed))
    return arena
