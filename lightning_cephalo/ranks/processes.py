"""How ranks are started, find one another and talk: the part of a strategy that all share."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _suggested_max_num_threads,
)
from lightning.fabric.utilities.distributed import group as _group
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed import distributed_c10d

from lightning_cephalo.ranks.crash_report import CrashReport
from lightning_cephalo.ranks.groups import Groups

_FAREWELL_S = 0.02
_ABORT_S = 10.0


class RanksStrategy(ParallelStrategy):
    """One process per device; nodes may have different numbers of devices.

    Args:
        accelerator: Given by Lightning, like the next four.
        parallel_devices: Devices of this node.
        cluster_environment: Says which rank this is.
        checkpoint_io: Writes checkpoints.
        precision_plugin: Casts.
        process_group_backend: "gloo", "nccl"; None: by the device.
        timeout: Of collectives.
        start_method: How Lightning starts the ranks.
    """

    def __init__(
        self,
        *,
        accelerator: Any,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: Any,
        precision_plugin: Precision | None,
        process_group_backend: str | None,
        timeout: timedelta | None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"],
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._process_group_backend = process_group_backend
        self._timeout = timeout or timedelta(minutes=30)
        self._start_method = start_method
        self._num_nodes = 1
        self._groups: Groups | None = None
        self._crash_report: CrashReport | None = None

    @property
    def is_distributed(self) -> bool:
        """Lightning looks for this name on strategies that it does not know."""
        return True

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this node; nodes may differ."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method != "popen":
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)
        elif not self.cluster_environment.creates_processes_externally:
            # with an external launcher Lightning's own would insist on equally large nodes
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def set_world_ranks(self) -> None:
        """Ranks and world size come from the cluster environment: nodes may differ in size."""
        assert self.cluster_environment is not None
        # environments of external launchers ignore these and say what the launcher said
        self.cluster_environment.set_global_rank(
            self.node_rank * self.num_processes + self.local_rank
        )
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        # Lightning's launchers do this, but children of "popen" have none: without it every rank
        # would use every core. Lightning also writes the variable, which would outlive this run.
        if self._start_method == "fork":
            # OpenMP's threads do not survive a fork: where the script (a notebook) has computed on
            # several before, a rank that wanted them would wait for ever
            torch.set_num_threads(1)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(_suggested_max_num_threads(self.num_processes))
        self.set_world_ranks()
        self._process_group_backend = (
            self._process_group_backend
            or _get_default_process_group_backend_for_device(self.root_device)
        )
        assert self.cluster_environment is not None
        device = self.root_device if self.root_device.type != "cpu" else None
        if self._process_group_backend == "nccl":
            # gathers and reduces run at once on communicators of their own, issued in one order on
            # all ranks: from 2.26 on NCCL keeps to that order if asked to ("Using multiple NCCL
            # communicators concurrently" in its documentation)
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device,
        )
        # Lightning does this for NCCL only. A thread of gloo that lets go of a tensor while the
        # interpreter ends aborts the process (pytorch #190489): its threads must end before.
        atexit.register(_leave, weakref.ref(self))
        if self._groups is None:
            self._groups = Groups.create(self._timeout, self.root_device)
            self._crash_report = CrashReport.create(self._groups.control)

    def forget_groups(self) -> None:
        """Let go of everything that refers to a process group; nothing can be run after it."""
        self._groups = None
        self._crash_report = None

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._crash_report is not None:
            self._crash_report.on_exception(exception)
            known = self._crash_report.is_common(exception)
            if self._process_group_backend == "nccl" and not known:
                abort_groups()
                self.forget_groups()  # another fit makes new ones

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not _distributed_is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not _distributed_is_initialized():
            return obj
        values = [obj]
        dist.broadcast_object_list(values, src, group=_group.WORLD)
        return values[0]


def abort_groups() -> None:
    """End all process groups without waiting for what is under way, which may never end.

    A rank that fails alone leaves others in a collective. To destroy NCCL's groups, or to empty
    CUDA's cache, as Lightning does next, would wait for kernels that wait for that rank
    (pytorch/torchtitan#1342); and NCCL's communicators must be aborted together (pytorch#119797).

    Private: nothing public aborts all groups. In a thread, as that may itself wait for ever.
    """
    if _distributed_is_initialized():
        thread = threading.Thread(target=distributed_c10d._abort_process_group, daemon=True)
        thread.start()
        thread.join(_ABORT_S)


def _leave(strategy: weakref.ref[RanksStrategy]) -> None:
    known = strategy()
    if known is not None:
        known.forget_groups()
    if _distributed_is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a group's threads end with the last reference to it
    # The default group outlives this in the caches of torch's DTensor: let its threads finish.
    time.sleep(_FAREWELL_S)
