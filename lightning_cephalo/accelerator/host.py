"""This rank's share of its host: the number of ranks on the host, and the memory of each."""

from __future__ import annotations

import math
import os
import re

from lightning_cephalo.common.quantities import USABLE_SHARE


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


def host_share_bytes(processes_on_host: int) -> tuple[float, float]:
    """Return a rank's part of the host's memory in bytes: what a plan may fill, and the total.

    Free and total memory are divided evenly among the ranks of the host.
    """
    try:
        page = os.sysconf("SC_PAGE_SIZE") / max(processes_on_host, 1)
        free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (ValueError, OSError):
        return math.inf, math.inf
    return free * USABLE_SHARE, total
