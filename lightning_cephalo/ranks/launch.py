"""Starts the processes of a run, connects them, and ends their connections."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
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
from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup, not_connected
from lightning_cephalo.ranks.crash_report import CrashReport, is_lost_connection
from lightning_cephalo.ranks.groups import Groups, set_timeout, while_connecting
from lightning_cephalo.ranks.roll_call import patience, store_of_all

# [Note: private names of Lightning] The launchers, the connection and the number of threads are
# those of Lightning's own strategies. Lightning has no public names for them. Only this file uses
# them; tests/lightning/test_launchers.py fails when they change.

_LEAVING_S = 0.02
_ABORT_S = 10.0


class HoldsGroups(Protocol):
    """An object that refers to process groups and can drop these references."""

    @property
    def failed_alone(self) -> bool:
        """Whether a run has failed on this rank and not on all together, such as by a loss."""

    def forget_groups(self) -> None:
        """Drop every reference to a process group."""


@dataclass(frozen=True)
class Ranks:
    """The connection of this process to the processes of the other ranks.

    Attributes:
        groups: The process groups.
        crash_report: Tells other ranks this rank's failure outside of a step.
    """

    groups: Groups
    crash_report: CrashReport

    @property
    def control(self) -> ControlGroup:
        """The group for messages between ranks."""
        return self.groups.control

    @classmethod
    def create(cls, timeout: timedelta, node_rank: int) -> Ranks:
        """Create the groups over connected processes; collective."""
        groups = Groups.create(timeout, node_rank, patience(timeout))
        return cls(groups, CrashReport(groups.control, groups.meeting.switchboard))

    def close(self) -> None:
        """End this rank's servers."""
        self.groups.meeting.close()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Make None of a copy: callbacks and trainers are copied and pickled, connections not."""
        return not_connected, ()


# -- starting -------------------------------------------------------------------------------------


def make_launcher(
    strategy: Any, start_method: str, environment: ClusterEnvironment
) -> _Launcher | None:
    """Return the launcher of the other ranks; None if there are none, or if another starts them.

    A single rank needs no launcher. Lightning's own would refuse interactive sessions. It would
    also leave environment variables behind: the next Trainer of this process would then take itself
    for a rank of this one.

    Args:
        strategy: The strategy of the ranks.
        start_method: "popen", "spawn", "fork" or "forkserver".
        environment: Knows this process's rank.
    """
    if start_method != "popen":
        return _MultiProcessingLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]
    if environment.creates_processes_externally:
        return None  # Lightning's own launcher would insist on equally large nodes
    if strategy.num_processes * strategy.num_nodes == 1:
        return None
    return _SubprocessScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)


def limit_threads(start_method: str, processes_on_host: int) -> None:
    """Divide the cores among the ranks of this host.

    Lightning's launchers do this, but children of "popen" have no launcher. Without this function
    each of these ranks would use every core. Lightning also writes an environment variable, which
    would outlive this run.
    """
    if start_method == "fork":
        # OpenMP's threads do not survive a fork: if the script (a notebook) has used several
        # threads before, a rank that needs them would wait forever
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_suggested_max_num_threads(processes_on_host))


def set_world_ranks(environment: ClusterEnvironment, num_nodes: int, num_processes: int) -> None:
    """Set this process's rank in the cluster environment and in Lightning's rank-zero helpers.

    Environments of external launchers ignore the numbers and keep the launcher's, because nodes may
    differ in size.
    """
    # of one node it does not matter, and not every environment knows it (SLURM without a job step)
    first = environment.node_rank() * num_processes if num_nodes > 1 else 0
    environment.set_global_rank(first + environment.local_rank())
    environment.set_world_size(num_nodes * num_processes)
    rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]
    fabric_rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]


def connect(
    environment: ClusterEnvironment,
    backend: str | None,
    timeout: timedelta,
    device: torch.device,
    *,
    makes_groups: bool = True,
) -> str:
    """Connect this process to the others; collective.

    Args:
        environment: Knows this process's rank and the address of the main process.
        backend: Backend of collectives; None: the default of the device.
        timeout: Timeout of collectives.
        device: This rank's device.
        makes_groups: Whether other groups are made next.

    Returns:
        The backend.

    Raises:
        RemoteRankError: If ranks do not come, on all that do; or if one that an earlier Trainer of
            this process was connected to has ended.
        UnsupportedError: On every rank, if ranks would use different backends, or if this process
            is connected to another number of ranks.
    """
    _refuse_other_connection(environment)
    reset_seed()
    accelerator = accelerator_of(device)
    backend = backend or accelerator.default_backend
    for name, value in backend_named(backend).environment.items():
        os.environ.setdefault(name, value)
    wait = patience(timeout)
    options: dict[str, Any] = {"timeout": while_connecting(backend, wait, timeout)}
    # on gloo torch would send objects as tensors of that device, which not every rank has
    if not accelerator.computes_on_host and backend_named(backend).runs_on_device:
        options["device_id"] = device
    if _distributed_is_initialized():
        if makes_groups:
            _require_all(device)
        return backend
    rank, world_size = environment.global_rank(), environment.world_size()
    address, port = environment.main_address, environment.main_port
    store = store_of_all(rank, world_size, address, port, backend, wait)
    options["store"] = store
    _init_dist_connection(environment, backend, **options)
    if wait != timeout:
        store.set_timeout(timeout)
        set_timeout(None, timeout)
    return backend


def _require_all(device: torch.device) -> None:
    """Raise if a rank has ended: making a group would wait for it as long as for a slow one."""
    try:
        barrier(device)
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise RemoteRankError(
            "A rank that an earlier Trainer of this process was connected to has ended. Its own"
            " output says why. Start all ranks again, and let all of them make the same Trainers."
        ) from error


def _refuse_other_connection(environment: ClusterEnvironment) -> None:
    """Refuse a process group with another number of ranks than this Trainer.

    Lightning's own strategies leave their group behind, for example in a notebook. Each rank of
    this Trainer would then train alone.
    """
    world_size = environment.world_size()
    if _distributed_is_initialized() and dist.get_world_size() != world_size:
        raise UnsupportedError(
            f"This Trainer has {world_size} ranks, but torch.distributed is connected to"
            f" {dist.get_world_size()} in this process, probably by an earlier Trainer. Call"
            " torch.distributed.destroy_process_group() before fit()."
        )


# -- waiting --------------------------------------------------------------------------------------


def barrier(device: torch.device) -> None:
    """Wait until every rank has called this; return immediately without other ranks."""
    if not _distributed_is_initialized():
        return
    if backend_of().barrier_names_device:
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def broadcast(value: Any, source: int) -> Any:
    """Return the object of rank ``source``; without other ranks, return the value itself."""
    if not _distributed_is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, source)
    return values[0]


# -- ending ---------------------------------------------------------------------------------------


def abort_groups() -> None:
    """Abort all process groups without waiting for pending collectives, which may never end.

    A rank that fails alone leaves other ranks in a collective, whose kernels wait for that rank.
    Lightning afterwards empties the device's cache and destroys the groups. If the groups run on
    the device, both wait for these kernels (pytorch/torchtitan#1342). All communicators must be
    aborted together (pytorch#119797).

    Private API: no public function aborts all groups. It runs in a thread, because it may itself
    wait forever.
    """
    if _distributed_is_initialized():
        thread = threading.Thread(target=distributed_c10d._abort_process_group, daemon=True)
        thread.start()
        thread.join(_ABORT_S)


def leave_at_exit(holder: HoldsGroups) -> None:
    """Destroy the process groups before the interpreter ends.

    Lightning does not do this for gloo. A gloo thread that releases a tensor while the interpreter
    ends aborts the process (pytorch #190489). Its threads must therefore end earlier.
    """
    atexit.register(_leave, weakref.ref(holder))


def _leave(holder: weakref.ref[HoldsGroups]) -> None:
    known = holder()
    # the interpreter keeps the exception that ends it
    fails = known is not None and known.failed_alone and hasattr(sys, "last_value")
    if known is not None:
        known.forget_groups()
    if _distributed_is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a group's threads end with the last reference to it
    # The default group outlives this in the caches of torch's DTensor: let its threads finish.
    time.sleep(_LEAVING_S)
    if fails:
        _hurry()


def _hurry() -> None:
    """Let the interpreter end without looking through all objects for cycles.

    It does so several times, for 1.4 s of a processor with what Lightning has made: on a busy
    machine that is many seconds, in which agents wait for ranks that have told all they know. Files
    in cycles would lose what is not written yet.
    """
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase)}
    for each in objects:
        if type(each) in kinds:
            with suppress(Exception):  # such as of a closed file
                each.flush()
    gc.freeze()
