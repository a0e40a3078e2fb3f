"""What there is: this rank's device, and a clock that waits for it."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_cephalo.emulation import active_device

# Part of a device that a plan may fill: the rest is for what no profile sees (fragmentation,
# libraries' workspaces, other processes).
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class Device:
    """One rank's device.

    Attributes:
        name: For tables; ranks with equal names and times are planned alike.
        capacity_bytes: What a plan may fill.
    """

    name: str
    capacity_bytes: float


def describe_device(device: torch.device, processes_on_host: int) -> Device:
    """Read this rank's device.

    Args:
        device: The rank's device.
        processes_on_host: Ranks that share this host's memory (CPU ranks).
    """
    emulated = active_device()
    if emulated is not None:
        given = emulated.capacity_bytes
        shared = _host_share_bytes(processes_on_host)
        return Device(emulated.name, shared if given is None else float(given))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        used_by_us = torch.cuda.memory_reserved(device)
        name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
        return Device(name, (free + used_by_us) * USABLE_SHARE)
    return Device("cpu", _host_share_bytes(processes_on_host))


def synchronized_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock (seconds) that first waits for all work issued to the device."""

    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        emulated = active_device()
        if emulated is not None:
            emulated.synchronize()
        return time.perf_counter()

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


def _host_share_bytes(processes_on_host: int) -> float:
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return math.inf
    return pages * USABLE_SHARE / max(processes_on_host, 1)
