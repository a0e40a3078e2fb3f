"""Which rank a process is, how ranks are started and connected, and how they communicate."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from typing_extensions import override

from lightning_cephalo.accelerator.backends import backend_named
from lightning_cephalo.adapters.ending import Ending
from lightning_cephalo.adapters.user_collectives import require_equal_shapes
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.preparation.options import check
from lightning_cephalo.preparation.session import Session
from lightning_cephalo.ranks import launch
from lightning_cephalo.ranks.aborting import abort_groups
from lightning_cephalo.ranks.connection import Ranks
from lightning_cephalo.sharding.collectives import all_gather_rows, communicates

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class ConnectedStrategy(ParallelStrategy):
    """A strategy whose ranks are connected, and share a session from ``setup`` to ``teardown``."""

    def __init__(
        self, process_group_backend: str | None, timeout: timedelta, start_method: str
    ) -> None:
        check(
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method
        )
        super().__init__()
        self._process_group_backend = process_group_backend
        self._timeout, self._start_method = timeout, start_method
        self._num_nodes = 1
        self._ending = Ending(self._is_half_updated, self._abort_groups)
        # from setup_environment() until the process ends, or until this rank fails alone on a
        # backend that must be aborted
        self._ranks: Ranks | None = None
        # from setup() to teardown()
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        """The sharded model and the objects for its steps, between ``setup`` and ``teardown``."""
        if self._session is None:
            raise RuntimeError("The model is not sharded now: this works only while training runs.")
        return self._session

    # -- which rank this is -------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether ranks train or evaluate a model together now.

        Lightning looks for this name on strategies that it does not know. Where it is True, values
        are logged over all ranks.
        """
        return self._session is not None

    @property
    @override
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
        """Number of ranks on this node; nodes may differ."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    @property
    def _environment(self) -> ClusterEnvironment:
        if self.cluster_environment is None:
            raise RuntimeError("The strategy has no cluster environment: it works in a Trainer.")
        return self.cluster_environment

    @property
    def _connection(self) -> Ranks:
        if self._ranks is None:
            raise RuntimeError("The ranks are not connected: this works in a Trainer that runs.")
        return self._ranks

    @property
    def _view(self) -> TrainerView:
        return TrainerView.of_module(self._module)

    @property
    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("The strategy has no module: it works in a Trainer that runs one.")
        return self.lightning_module

    # -- the processes ------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        self._launcher = launch.make_launcher(self, self._start_method, self._environment)

    def set_world_ranks(self) -> None:
        """Make rank and world size known; Lightning's connector calls this method if it exists."""
        launch.set_world_ranks(self._environment, self.num_nodes, self.num_processes)

    def _connect(self) -> Ranks:
        """Connect the ranks, which can end together from now on; collective."""
        self._ending.begin(self._view)
        super().setup_environment()
        launch.limit_threads(self._start_method, self.num_processes)
        self.set_world_ranks()
        self._process_group_backend = launch.connect(
            self._environment,
            self._process_group_backend,
            self._timeout,
            self.root_device,
            launch.started_by(self._launcher),
        )
        # of one rank it does not matter, and not every environment knows it
        node_rank = self._environment.node_rank() if self.world_size > 1 else 0
        self._ranks = launch.ranks_for(self, self._timeout, node_rank)
        watch = launch.watch_for_losses(self._ranks, self._process_group_backend)
        self._ending.connect(self._ranks, watch)
        return self._ranks

    # -- communication for users and Lightning ------------------------------------------------

    @property
    def _inside_microbatch(self) -> bool:
        session = self._session
        return session is not None and session.model.executor.inside_microbatch

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        self._ending.refuse_alone("a barrier")
        name = name or ""
        # Lightning's own, before it reads what another rank may not be about to read
        reads = name.endswith("_dataloader()")
        purpose = f"about to call {name}" if reads else "waiting in a barrier"
        remedy = "Call strategy.barrier() on every rank, or on none."
        self._ending.meet(purpose, remedy)
        launch.barrier(self.root_device)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        self._ending.refuse_alone("a broadcast")
        return launch.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or self._inside_microbatch:
            return tensor  # metrics are combined over microbatches and ranks after the step
        if self._session is not None and self._session.logs.are_combining:
            return tensor
        self._ending.refuse_alone("a reduction over ranks")
        self._ending.leave_loop()
        if not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.double()  # Lightning #21859: the mean of integers would be truncated
        sent = tensor if communicates(tensor, group) else tensor.cpu()
        return _sync_ddp_if_available(sent, group, reduce_op=reduce_op).to(tensor.device)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self._ending.refuse_alone("a gather over ranks")
        if group is None or group is torch.distributed.group.WORLD:
            require_equal_shapes(tensor, self._connection.control)
        if sync_grads:
            return super().all_gather(tensor, group=group, sync_grads=True)
        return all_gather_rows(tensor.detach()[None], [1] * self.world_size, group)

    @contextmanager
    def full_parameters(self) -> Generator[None, None, None]:
        """Hold the whole model on every rank in a ``with`` block, so that one may call it alone.

        ::

            def on_train_epoch_end(self):
                with strategy.full_parameters():
                    if strategy.is_global_zero:
                        print(self.model.generate(self.prompt))

        Every rank enters the block, in a hook, not in a step. Parameters are in the dtype of
        computing, for reading.

        Raises:
            UnsupportedError: Inside of a step, or on the ranks that have come if others do not.
        """
        if self._inside_microbatch:
            raise UnsupportedError(
                "full_parameters() inside of a step, of which ranks may run different numbers. Use"
                " it in a hook, such as on_train_batch_end()."
            )
        with self.session.model.full_parameters():
            yield

    def _is_half_updated(self) -> bool:
        session = self._session
        return session is not None and session.model.executor.updates.left_half_updated

    def _abort_groups(self) -> None:
        if backend_named(self._process_group_backend).must_be_aborted:
            abort_groups()
            self.forget_groups()  # another fit creates new ones
        else:
            launch.close_groups()

    @property
    def failed_alone(self) -> bool:
        """Whether the run has failed on this rank and not on all together."""
        return self._ending.failed_alone

    def _take_session(self) -> Session | None:
        """Return the session, and hold it no longer."""
        session, self._session = self._session, None
        return session

    def forget_groups(self) -> None:
        """Drop everything that refers to a process group; nothing can run afterwards."""
        session = self._take_session()
        self._ranks = None
        self._ending.forget()
        if session is not None:
            session.abandon()
