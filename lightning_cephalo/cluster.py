"""What there is: this rank's device, and a clock that waits for it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from lightning_cephalo.emulation import active_device, host_now_s

# Part of a device that a plan may fill: the rest is for what no profile sees (fragmentation,
# libraries' workspaces, other processes).
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class Device:
    """One rank's device.

    Attributes:
        name: For tables; ranks with equal names and times are planned alike.
        capacity_bytes: What a plan may fill.
        total_bytes: All of its memory; of a CPU the part of the host's that is this rank's.
        cap_bytes: What the user allows; ``capacity_bytes`` is no more.
    """

    name: str
    capacity_bytes: float
    total_bytes: float = math.inf
    cap_bytes: float = math.inf


def describe_device(device: torch.device, processes_on_host: int) -> Device:
    """Read this rank's device.

    Args:
        device: The rank's device.
        processes_on_host: Ranks that share this host's memory (CPU ranks).
    """
    emulated = active_device()
    if emulated is not None:
        given = emulated.capacity_bytes
        if given is not None:
            return Device(emulated.name, float(given), float(given))
        return Device(emulated.name, *host_share_bytes(processes_on_host))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used_by_us = torch.cuda.memory_reserved(device)
        name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
        return Device(name, (free + used_by_us) * USABLE_SHARE, float(total))
    return Device("cpu", *host_share_bytes(processes_on_host))


def host_memory() -> AbstractContextManager[None]:
    """For what is made on the CPU to stay there: no part of an emulated device's memory."""
    emulated = active_device()
    return nullcontext() if emulated is None else emulated.paused()


def synchronized_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock (seconds) that first waits for all work issued to the device."""

    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        emulated = active_device()
        if emulated is not None:
            emulated.synchronize()
        return host_now_s()

    return read


def processes_on_this_host(fallback: int) -> int:
    """Ranks on this host, as the launcher says; ``fallback`` where it does not."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit():
        return int(local)
    tasks, node = tasks_per_node(), os.environ.get("SLURM_NODEID", "")
    if tasks is not None and node.isdigit() and int(node) < len(tasks):
        return tasks[int(node)]
    return fallback


def tasks_per_node() -> list[int] | None:
    """Tasks on every node of this job step, in order of the nodes; None outside of srun.

    Source: srun's manual page, ``SLURM_TASKS_PER_NODE``: ``"2(x3),1"`` is 2, 2, 2, 1.
    """
    said = os.environ.get("SLURM_STEP_TASKS_PER_NODE", os.environ.get("SLURM_TASKS_PER_NODE"))
    if said is None or not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", said):
        return None
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", said)
    return [int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1))]


def host_share_bytes(processes_on_host: int) -> tuple[float, float]:
    """A rank's part of this host's memory: what a plan may fill, and with what others use."""
    try:
        page = os.sysconf("SC_PAGE_SIZE") / max(processes_on_host, 1)
        free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (ValueError, OSError):
        return math.inf, math.inf
    return free * USABLE_SHARE, total
