"""Host memory for boundary activations: how much a rank may use, how fast it is, who gives it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.host import host_share_bytes
from lightning_cephalo.common.errors import HostMemoryError, PlanError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.offload import HostRing
from lightning_cephalo.plan import Problem, RankPlan
from lightning_cephalo.preparation.memory_cap import amount

# Part of the host's free memory that ranks take unasked; the rest is the data loaders'.
_FREE_SHARE = 0.5
_PLANNED_SHARE = 0.9
_COPIED_BYTES, _REPEATS = 2**24, 3


@dataclass(frozen=True)
class HostMemory:
    """One rank's part of its host.

    Attributes:
        capacity_bytes: What offloaded boundaries may take.
        copy_bytes_per_s: Rate of copies from and to the device.
        is_apart: Whether it is other memory than the device's. Not so on the CPU: moving anything
            there would free nothing.
        is_pinned: Whether it comes in pieces, whose ends may stay empty.
    """

    capacity_bytes: float
    copy_bytes_per_s: float = math.inf
    is_apart: bool = True
    is_pinned: bool = False

    @property
    def planned_bytes(self) -> float:
        """What a plan may count on."""
        return self.capacity_bytes * (_PLANNED_SHARE if self.is_pinned else 1.0)


def parse_cap(value: float | int | str | None) -> float | int | None:
    """Read what was given as ``host_memory_cap``: as a memory cap, or 0.

    Raises:
        PlanError: If it is none of these; says what was expected.
    """
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0:
        return 0
    return amount("host_memory_cap", value)


def describe_host_memory(
    accelerator: Accelerator, processes_on_host: int, cap: float | int | None
) -> HostMemory:
    """Read how much this rank may use.

    Args:
        accelerator: The rank's device.
        processes_on_host: Ranks that share the host.
        cap: From :func:`parse_cap`; a float is a fraction of the rank's part of the host, an int
            are bytes; None: half of what is free.

    Raises:
        PlanError: If the cap is above the rank's part of the host.
    """
    free, total = host_share_bytes(processes_on_host)
    if cap is None:
        capacity = free * _FREE_SHARE
    else:
        capacity = float(cap) if isinstance(cap, int) else cap * total
        if capacity > total * max(processes_on_host, 1):
            raise PlanError(
                f"host_memory_cap allows {format_mib(capacity)} for a rank, but its host has"
                f" {format_mib(total * max(processes_on_host, 1))}. Lower the cap to that, or"
                " leave it out."
            )
    is_apart = accelerator.host_is_apart
    rate = _copy_rate(accelerator) if capacity and is_apart else math.inf
    return HostMemory(capacity, rate, is_apart, is_pinned=accelerator.pins_host_memory)


def _copy_rate(accelerator: Accelerator) -> float:
    """Bytes per second of a copy from the device; the other way is about as fast."""
    host = accelerator.allocate_host(_COPIED_BYTES)
    best_s = math.inf
    with accelerator.on_host():  # an emulated device may be smaller than this
        values = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=accelerator.device)
        for _ in range(1 + _REPEATS):
            start_s = accelerator.now_s()
            host.copy_(values)
            best_s = min(best_s, accelerator.now_s() - start_s)
    return _COPIED_BYTES / max(best_s, 1e-9)


def with_host_memory(problem: Problem, hosts: Sequence[HostMemory]) -> Problem:
    """Let the plan move boundaries where a rank has other memory for them.

    Args:
        problem: What was measured, with recomputation.
        hosts: Of every rank.
    """
    ranks = tuple(
        replace(
            rank,
            host_capacity_bytes=host.planned_bytes,
            offload_bytes_per_s=host.copy_bytes_per_s,
        )
        if host.is_apart
        else rank
        for rank, host in zip(problem.ranks, _pooled(problem, hosts), strict=True)
    )
    return replace(problem, ranks=ranks)


def _pooled(problem: Problem, hosts: Sequence[HostMemory]) -> list[HostMemory]:
    """Ranks that are planned as equal have equal hosts: the smallest and slowest of theirs."""
    found = []
    for profile in problem.ranks:
        group = [h for r, h in zip(problem.ranks, hosts, strict=True) if r == profile]
        found.append(
            HostMemory(
                min(host.capacity_bytes for host in group),
                min(host.copy_bytes_per_s for host in group),
                all(host.is_apart for host in group),
                any(host.is_pinned for host in group),
            )
        )
    return found


def make_ring(accelerator: Accelerator, host: HostMemory, plan: RankPlan) -> HostRing | None:
    """Return this rank's ring, allocated as far as the plan says how much it needs.

    Raises:
        HostMemoryError: If the host has less than the plan needs.
    """
    if not plan.offload:
        return None
    ring = HostRing(accelerator, host.capacity_bytes)
    needed = plan.host_bytes or 0.0
    if needed > host.capacity_bytes:
        raise HostMemoryError(
            f"The plan offloads {format_mib(needed)}, but this rank may use"
            f" {format_mib(host.capacity_bytes)} of its host's memory. Raise host_memory_cap=,"
            " or leave the plan out (plan=None) to have one made that fits."
        )
    ring.reserve(math.ceil(needed))
    return ring
