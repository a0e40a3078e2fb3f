"""This rank's host: which it is, the number of ranks on it, and the memory of each."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_cephalo.accelerator.cgroup import MemoryLimit, memory_limit
from lightning_cephalo.common.quantities import USABLE_SHARE, format_bytes


def kernel_of_host() -> str:
    """Return what is equal for all processes under one kernel, and differs between hosts.

    Hosts may have equal names, such as "localhost". Where there is no number of the kernel's start,
    it is the host's name.
    """
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def processes_on_this_host(fallback: int) -> int:
    """Return the number of ranks on this host by the launcher's variables, else ``fallback``."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit():
        return int(local)
    tasks, node = tasks_per_node(), os.environ.get("SLURM_NODEID", "")
    if tasks is not None and node.isdigit() and int(node) < len(tasks):
        return tasks[int(node)]
    return fallback


def tasks_per_node() -> list[int] | None:
    """Return the tasks on each node of this job step, in node order; None outside of srun.

    Source: srun's manual page, ``SLURM_TASKS_PER_NODE``: ``"2(x3),1"`` is 2, 2, 2, 1.
    """
    said = os.environ.get("SLURM_STEP_TASKS_PER_NODE", os.environ.get("SLURM_TASKS_PER_NODE"))
    if said is None or not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", said):
        return None
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", said)
    return [int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1))]


@dataclass(frozen=True)
class HostShare:
    """A rank's part of its host's memory."""

    free_bytes: float
    total_bytes: float
    limited_by: str = ""


def host_share(
    processes_on_host: int, limit_of: Callable[[], MemoryLimit | None] = memory_limit
) -> HostShare:
    """Return a rank's part of the host's memory.

    Free and total memory are divided evenly among the ranks of the host. Both are those of the
    control group where it allows less.

    Args:
        limit_of: Returns the limit of the control group; None: there is none.
    """
    ranks = max(processes_on_host, 1)
    free = total = math.inf
    with suppress(ValueError, OSError):
        page = float(os.sysconf("SC_PAGE_SIZE"))
        free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    limit, limited_by = limit_of(), ""
    if limit is not None and limit.total_bytes < total:
        total = limit.total_bytes
        limited_by = f"its control group ({limit.file}: {format_bytes(total)})"
    if limit is not None:
        free = min(free, limit.free_bytes)
    return HostShare(free * USABLE_SHARE / ranks, total / ranks, limited_by)
