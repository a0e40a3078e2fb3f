"""Starts the processes of a run, connects them, and ends what connects them."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _init_dist_connection,
    _suggested_max_num_threads,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed import distributed_c10d

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.accelerator.backends import backend_named, backend_of
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.ranks.crash_report import CrashReport
from lightning_cephalo.ranks.groups import Groups

# [Note: private names of Lightning] The launchers, the connection and the number of threads are
# those of Lightning's own strategies, which has no public names for them. They are used in this
# file only; tests/lightning/test_launchers.py fails when they change.

_LEAVING_S = 0.02
_ABORT_S = 10.0


class HoldsGroups(Protocol):
    """What refers to process groups, and can let go of them."""

    def forget_groups(self) -> None:
        """Let go of everything that refers to a process group."""


@dataclass(frozen=True)
class Ranks:
    """This process's connection to those of the other ranks.

    Attributes:
        groups: The process groups.
        crash_report: Publishes this rank's failure outside of a step.
    """

    groups: Groups
    crash_report: CrashReport

    @property
    def control(self) -> ControlGroup:
        """Messages between ranks."""
        return self.groups.control

    @classmethod
    def create(cls, timeout: timedelta) -> Ranks:
        """Make the groups over processes that are connected; collective."""
        groups = Groups.create(timeout)
        return cls(groups, CrashReport.create(groups.control))


# -- starting -------------------------------------------------------------------------------------


def make_launcher(
    strategy: Any, start_method: str, environment: ClusterEnvironment
) -> _Launcher | None:
    """Return what starts the other ranks; None where an external launcher does.

    Args:
        strategy: The strategy of the ranks.
        start_method: "popen", "spawn", "fork" or "forkserver".
        environment: Tells which rank this is.
    """
    if start_method != "popen":
        return _MultiProcessingLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]
    if environment.creates_processes_externally:
        return None  # Lightning's own launcher would insist on equally large nodes
    return _SubprocessScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)


def limit_threads(start_method: str, processes_on_host: int) -> None:
    """Share the cores among the ranks of this host.

    Lightning's launchers do this, but children of "popen" have none: without it every rank would
    use every core. Lightning also writes an environment variable, which would outlive this run.
    """
    if start_method == "fork":
        # OpenMP's threads do not survive a fork: where the script (a notebook) has computed on
        # several before, a rank that wanted them would wait forever
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_suggested_max_num_threads(processes_on_host))


def set_world_ranks(environment: ClusterEnvironment, num_nodes: int, num_processes: int) -> None:
    """Tell a cluster environment, and what acts on rank 0 only, which rank this is.

    Environments of external launchers ignore it and keep the launcher's numbers, as nodes may
    differ in size.
    """
    first = environment.node_rank() * num_processes
    environment.set_global_rank(first + environment.local_rank())
    environment.set_world_size(num_nodes * num_processes)
    rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]
    fabric_rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]


def connect(
    environment: ClusterEnvironment,
    backend: str | None,
    timeout: timedelta,
    device: torch.device,
) -> str:
    """Connect this process to the others; collective.

    Args:
        environment: Tells which rank this is, and where the others are.
        backend: Of collectives; None: by the device.
        timeout: Of collectives.
        device: This rank's device.

    Returns:
        The backend.
    """
    reset_seed()
    accelerator = accelerator_of(device)
    backend = backend or accelerator.default_backend
    for name, value in backend_named(backend).environment.items():
        os.environ.setdefault(name, value)
    _init_dist_connection(
        environment,
        backend,
        timeout=timeout,
        device_id=None if accelerator.computes_on_host else device,
    )
    return backend


# -- waiting --------------------------------------------------------------------------------------


def barrier(device: torch.device) -> None:
    """Return when every rank has come here; immediately where there are no others."""
    if not _distributed_is_initialized():
        return
    if backend_of().barrier_names_device:
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def broadcast(value: Any, source: int) -> Any:
    """Return the object of rank ``source``; the same where there are no other ranks."""
    if not _distributed_is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, source)
    return values[0]


# -- ending ---------------------------------------------------------------------------------------


def abort_groups() -> None:
    """End all process groups without waiting for what is under way, which may never end.

    A rank that fails alone leaves others in a collective. To destroy groups that run on the device,
    or to empty its cache, as Lightning does next, would wait for kernels that wait for that rank
    (pytorch/torchtitan#1342). All communicators must be aborted together (pytorch#119797).

    Private: nothing public aborts all groups. In a thread, as that may itself wait forever.
    """
    if _distributed_is_initialized():
        thread = threading.Thread(target=distributed_c10d._abort_process_group, daemon=True)
        thread.start()
        thread.join(_ABORT_S)


def leave_at_exit(holder: HoldsGroups) -> None:
    """Destroy the process groups before the interpreter ends.

    Lightning does not do this for gloo. A thread of gloo that lets go of a tensor while the
    interpreter ends aborts the process (pytorch #190489): its threads must end before.
    """
    atexit.register(_leave, weakref.ref(holder))


def _leave(holder: weakref.ref[HoldsGroups]) -> None:
    known = holder()
    if known is not None:
        known.forget_groups()
    if _distributed_is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a group's threads end with the last reference to it
    # The default group outlives this in the caches of torch's DTensor: let its threads finish.
    time.sleep(_LEAVING_S)
