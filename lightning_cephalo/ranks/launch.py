"""Starts the processes of a run, connects them, and aborts their connections."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from subprocess import Popen
from typing import Any

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

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.accelerator.backends import backend_named, backend_of
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks import connection
from lightning_cephalo.ranks.aborting import abort_collectives
from lightning_cephalo.ranks.connecting import Watch, connect_watched
from lightning_cephalo.ranks.connection import HoldsGroups, Ranks
from lightning_cephalo.ranks.groups import place, set_timeout, while_connecting
from lightning_cephalo.ranks.loss_watch import LossWatch
from lightning_cephalo.ranks.roll_call import (
    patience,
    restarts_left,
    shares_agents_store,
    store_of_all,
    what_follows,
)
from lightning_cephalo.ranks.starter import (
    TOLD,
    look_for_ended,
    look_for_started,
    look_for_starter,
    named_to_ranks,
)
from lightning_cephalo.ranks.switchboard import Process, Switchboard

# [Note: private names of Lightning] The launchers, the connection and the number of threads are
# those of Lightning's own strategies. Lightning has no public names for them. Only this file uses
# them; tests/lightning/test_launchers.py fails when they change.

_SHARED_STORE = (
    "Your code has made the process group before fit(), in the store of torchrun's agent. After a"
    " restart ranks would find the addresses of this start there, and could not connect (pytorch"
    " #135712). Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, or let fit() make the group."
)


# -- starting -------------------------------------------------------------------------------------


def make_launcher(
    strategy: Any, start_method: str, environment: ClusterEnvironment
) -> _Launcher | None:
    """Return the launcher of the other ranks; None if there are none, or if another starts them.

    For a single rank, Lightning's own would refuse interactive sessions, and leave environment
    variables behind: the next Trainer of this process would take itself for a rank of this one.
    """
    if start_method != "popen":
        return _MultiProcessingLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]
    if environment.creates_processes_externally:
        return None  # Lightning's own launcher would insist on equally large nodes
    if strategy.num_processes * strategy.num_nodes == 1:
        return None
    return _ScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)


class _ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks of this node, which know this process's number."""

    def _call_children_scripts(self) -> None:
        with named_to_ranks():
            super()._call_children_scripts()


def started_by(launcher: _Launcher | None) -> Sequence[Popen[bytes]]:
    """Return the processes that a launcher has started from this one, by their ranks."""
    return launcher.procs if isinstance(launcher, _ScriptLauncher) else ()


def limit_threads(start_method: str, processes_on_host: int) -> None:
    """Divide the cores among the ranks of this host.

    Lightning's launchers do this, but children of "popen" have none. They also write an environment
    variable, which would outlive this run.
    """
    if start_method == "fork":
        # OpenMP's threads do not survive a fork: if the script (a notebook) has used several
        # threads before, a rank that needs them would wait forever
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_suggested_max_num_threads(processes_on_host))


def set_world_ranks(environment: ClusterEnvironment, num_nodes: int, num_processes: int) -> None:
    """Set this process's rank in the cluster environment and in Lightning's rank-zero helpers.

    Environments of external launchers keep the launcher's numbers.
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
    started: Sequence[Popen[bytes]] = (),
) -> str:
    """Connect this process to the others; collective.

    Args:
        environment: Knows this process's rank and the address of the main process.
        backend: Backend of collectives; None: the default of the device. The one in use returns.
        timeout: Timeout of collectives.
        device: This rank's device.
        started: The processes of ranks that this one has started, in the order of their ranks.

    Raises:
        RemoteRankError: If ranks do not come, on all that do.
        UnsupportedError: If ranks use different backends, or the group has other ranks; on all.
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
    earlier = connection.current()
    if earlier is not None:
        if earlier.is_of_user and restarts_left() and shares_agents_store():
            warnings.warn(_SHARED_STORE, stacklevel=2)
        if earlier.begin_run():
            return backend
        if earlier.is_of_user:
            raise UnsupportedError(
                "An earlier run over the process group of your own code has ended with an error of"
                " one rank, which has closed its connections. Call"
                " torch.distributed.destroy_process_group() and make the group again before fit()."
            )
        earlier.leave()
    rank, world_size = environment.global_rank(), environment.world_size()
    switchboard = Switchboard(rank, world_size) if world_size > 1 else None
    # of one rank it does not matter, and not every environment knows it
    own = place(environment.node_rank() if world_size > 1 else 0)
    process = Process.here(own) if switchboard is None else switchboard.process(own)
    address, port = environment.main_address, environment.main_port
    watch = None
    if switchboard is not None:
        switchboard.has_come(rank, process)
        first = rank - environment.local_rank()
        look: Callable[[], None] | None = None
        if rank != first:
            look = partial(look_for_starter, first, process.host)
        elif started:
            look = partial(look_for_started, started, first, process.host)
        if TOLD in os.environ:
            look = partial(look_for_ended, process.host)
        watch = Watch(switchboard, look) if earlier is None else earlier.watch_for(switchboard)
    store, call = store_of_all(rank, process, world_size, address, port, backend, wait, watch)
    options["store"] = dist.PrefixStore(call.prefix, store)
    connects = partial(_init_dist_connection, environment, backend, **options)
    if switchboard is None:
        connects()
    else:
        switchboard.know(call.processes)
        connect_watched(switchboard, backend, connects, wait, what_follows())
    if wait != timeout:
        store.set_timeout(timeout)
        set_timeout(None, timeout)
    # until now the earlier one has kept the server of rank 0's store, to which others may connect
    connection.note(connection.Met(store, switchboard), earlier)
    return backend


def _refuse_other_connection(environment: ClusterEnvironment) -> None:
    """Refuse a group of another number of ranks, such as one that Lightning's DDP has left."""
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


def ranks_for(holder: HoldsGroups, timeout: timedelta, node_rank: int) -> Ranks:
    """Return the groups that all runs over the default group share; collective where none has."""
    known = connection.current()
    assert known is not None, "connect() comes first"
    return known.ranks_for(holder, timeout, node_rank)


# -- ending ---------------------------------------------------------------------------------------


def close_groups() -> None:
    """Close this process's connections over the host, so that no other rank waits for it."""
    known = connection.current()
    if known is not None:
        known.close()


def watch_for_losses(ranks: Ranks, backend: str | None) -> LossWatch | None:
    """Watch for ranks that end, where this rank's device would wait for them; None elsewhere."""
    if not backend_named(backend).must_be_aborted:
        return None
    return LossWatch.begin(ranks.crash_report, abort_collectives)
