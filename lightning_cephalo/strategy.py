"""``Trainer(strategy="cephalo")``: Lightning's hooks, each a few lines that call a room below."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

from lightning_cephalo.accelerator.device import host_memory
from lightning_cephalo.adapters import precision, supported
from lightning_cephalo.adapters.dealing import DealingStrategy
from lightning_cephalo.adapters.logging import StepLog
from lightning_cephalo.adapters.optimizer import local_update
from lightning_cephalo.adapters.torchmetrics import metrics_of
from lightning_cephalo.adapters.user_gathers import UserGathers
from lightning_cephalo.data.cutting import joined_result, loss_and_weight
from lightning_cephalo.execution.runner import MicrobatchCall
from lightning_cephalo.execution.sharded_model import ShardedModel, UnitOptions
from lightning_cephalo.observe.memory_meter import MemoryMeter
from lightning_cephalo.observe.pace import MeasuredRank
from lightning_cephalo.observe.watch import Watch
from lightning_cephalo.plan import Plan
from lightning_cephalo.preparation.host_memory import parse_cap
from lightning_cephalo.preparation.memory_cap import CapOnDevice, MemoryCap
from lightning_cephalo.preparation.prepare import PlanningOptions, prepare

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class CephaloStrategy(DealingStrategy):
    """Trains on unequal devices with uneven batches, uneven shards and layered accumulation.

    Args:
        plan: A :class:`~lightning_cephalo.Plan`, or the path of one: trained with exactly as it
            is, without profiling. None: every rank is measured and the plan solved.
        global_batch_size: Samples per step over all ranks; None: the loader's batch size times
            the number of ranks, as under DDP.
        unit_types: Classes, or their names, whose instances are units (gathered as one).
        unit_names: Names of modules that are units.
        recompute: Keep only what enters a unit and compute its inside again in backward. "auto":
            rank by rank as the plan chooses, which takes more measuring; a given plan that does
            not say recomputes.
        reshard_after_forward: Give units back after the forward and gather them again in the
            backward. False: they stay gathered in between, for a third less to communicate and
            room for the whole model's parameters on every rank. "auto": as the plan chooses. A
            given plan decides itself; one that does not say gives them back, unless this is False.
        collate_per_microbatch: Collate each microbatch by itself; hooks then see a list of
            batches. For batches that cannot be cut along their first dimension.
        split_batch: ``split_batch(batch, sizes)`` returns one batch per size, in place of cutting
            every tensor along its first dimension.
        equal_microbatches: Every rank runs the same number of microbatches, so that code in
            ``training_step`` may use collectives of its own.
        memory_cap: How much of its device's memory each rank may use: a fraction (a float up to
            1.0), or bytes (an int, or "8 GB"), for every rank or in a mapping from ranks; ranks
            that it does not name have no cap. The plan obeys it; an emulated device enforces it.
        host_memory_cap: How much of its host's memory each rank may use for activations that the
            plan moves there, where a device is too small to keep them: as ``memory_cap``, or 0 for
            none; None: an equal part of half of what is free.
        profile_budget_s: Seconds that measuring may take, about.
        remeasure: Measure also where an earlier start of the same job on the same devices has.
        verbose: Whether rank 0 prints the plan before and the prediction after training.
        trace: Where to write a timeline of one step of every rank, the fifth: JSON for Perfetto.
        process_group_backend: "gloo", "nccl"; None: by the device.
        timeout: Of collectives.
        start_method: How Lightning starts the ranks: "popen", "spawn", "fork", "forkserver".
    """

    strategy_name = "cephalo"

    def __init__(
        self,
        plan: Plan | str | PathLike[str] | None = None,
        *,
        global_batch_size: int | None = None,
        unit_types: list[Any] | None = None,
        unit_names: list[str] | None = None,
        recompute: bool | Literal["auto"] = True,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        collate_per_microbatch: bool = False,
        split_batch: Callable[[Any, Sequence[int]], list[Any]] | None = None,
        equal_microbatches: bool = False,
        memory_cap: float | int | str | Mapping[int, float | int | str] | None = None,
        host_memory_cap: float | int | str | None = None,
        profile_budget_s: float = 20.0,
        remeasure: bool = False,
        verbose: bool = True,
        trace: str | PathLike[str] | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        for name, choice in (
            ("recompute", recompute),
            ("reshard_after_forward", reshard_after_forward),
        ):
            if not isinstance(choice, bool) and choice != "auto":
                raise ValueError(f"{name}: expected True, False or 'auto', but got {choice!r}.")
        super().__init__(
            planning=PlanningOptions(
                global_batch_size=global_batch_size,
                collate_per_microbatch=collate_per_microbatch,
                split_batch=split_batch,
                equal_microbatches=equal_microbatches,
                profile_budget_s=profile_budget_s,
                remeasure=remeasure,
                verbose=verbose,
                memory_cap=None if memory_cap is None else MemoryCap.parse(memory_cap),
                host_memory_cap=parse_cap(host_memory_cap),
                choose_recompute=recompute == "auto",
                reshard_after_forward=reshard_after_forward,
            ),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._plan_option = plan
        self._unit_options = UnitOptions(
            None if unit_types is None else tuple(unit_types),
            None if unit_names is None else tuple(unit_names),
        )
        self._recompute = bool(recompute)
        self._caches: supported.SwitchedOffCaches | None = None
        self._cap_on_device: CapOnDevice | None = None
        self._watch = Watch(trace)

    @property
    def precision_plugin(self) -> Precision:
        plugin = self._precision_plugin
        return plugin if plugin is not None else precision.Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision.adapt(precision_plugin)

    @property
    def measured_step_s(self) -> float | None:
        """Median time of a training step on this rank, without the first few; None before."""
        return self._watch.step_s

    @property
    def measured_ranks(self) -> tuple[MeasuredRank, ...]:
        """Work and waiting of every rank, known on all ranks at the end of ``fit``."""
        return self._watch.ranks

    # -- setup and teardown -------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            supported.refuse_unsupported(trainer, self.lightning_module)
        self._meter = self._measured_memory = None
        self._prepare(trainer, fitting)
        self._metrics = metrics_of(self.lightning_module)
        supported.refuse_synchronising_metrics(self._metrics)
        self.model = self.lightning_module
        if fitting:
            self.setup_optimizers(trainer)
            self._together(
                "checking the optimizers",
                partial(supported.check_optimizers, self.optimizers, self.engine),
            )
        self.setup_precision_plugin()

    def _prepare(self, trainer: Trainer, fitting: bool) -> None:
        assert self._groups is not None and self.lightning_module is not None
        dtype = precision.compute_dtype(self.precision_plugin)
        if dtype is None:
            self.precision_plugin.convert_module(self.lightning_module)
        # as FSDPStrategy does: `self.device` of a module that is never moved as a whole
        self.lightning_module._device = self.root_device
        if fitting:
            self._caches = supported.SwitchedOffCaches(self.lightning_module)

        def make_engine(fractions: list[float]) -> ShardedModel:
            assert self._groups is not None and self.lightning_module is not None
            # known at once: what the step asks of the strategy while it is profiled depends on them
            self._user_gathers = UserGathers(
                self._groups.control, self._planning.equal_microbatches
            )
            self._engine = ShardedModel(
                self.lightning_module,
                self._groups,
                self.root_device,
                fractions=fractions,
                units=self._unit_options,
                compute_dtype=dtype,
                recompute=self._recompute,
            )
            return self._engine

        if not fitting:
            make_engine([1.0 / self.world_size] * self.world_size)
            return
        self._together(
            "checking where to write the trace", partial(self._watch.check, self.is_global_zero)
        )
        self._preparation = None
        self._preparation = prepare(
            trainer=trainer,
            control=self._groups.control,
            plan=self._plan_option,
            options=self._planning,
            make_engine=make_engine,
            step=self._profiled_step,
            context=self.precision_plugin.train_step_context,
            num_processes=self.num_processes,
            enforce=self._enforce,
        )
        self._engine = self._preparation.engine
        self._watch.begin(self._engine)
        self._cutter = self._preparation.cutter

    def _enforce(self, cap_bytes: float) -> None:
        self._cap_on_device = CapOnDevice(cap_bytes)

    def _together(self, doing: str, function: Callable[[], Any]) -> Any:
        """Run something that does not communicate; if it fails anywhere, raise everywhere."""
        assert self._groups is not None
        return self._groups.control.together(doing, function)

    def model_to_device(self) -> None:
        """Nothing to move: shards and buffers are made on the device."""

    def teardown(self) -> None:
        assert self.lightning_module is not None and self.cluster_environment is not None
        trainer = self.lightning_module._trainer
        if self._engine is not None:
            if trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED:
                self._engine.abandon()  # other ranks may be gone: nothing may communicate
            else:
                with host_memory():
                    self._share_changed_buffers()
                    self._engine.restore_full()
            self._engine = None
        if self._caches is not None:
            self._caches.restore()
            self._caches = None
        if self._cap_on_device is not None:
            self._cap_on_device.lift()
        if trainer is not None:
            self._give_back_samplers(trainer)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # models are made on the CPU and cut there: no device need ever hold the whole
        device = torch.device("meta") if empty_init else torch.device("cpu")
        with _EmptyInit(enabled=False), device, self.precision_plugin.tensor_init_context():
            yield

    # -- training -----------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        self._watch.start_step()
        batch, rest = args[0], args[1:]
        self.meter.before_forward(batch)
        counts: list[int] = []  # filled when the batch has been cut
        log = StepLog(self.lightning_module.trainer._results, counts, self._metrics)
        calls: list[MicrobatchCall] = []
        try:
            assert self._cutter is not None
            pieces = self._cutter.cut(batch)
            counts.extend(count for _, count in pieces)
            calls = [
                self._call(index, piece, count, rest, kwargs, log)
                for index, (piece, count) in enumerate(pieces)
            ]
        except Exception as failure:
            # raised inside the runner, which tells the other ranks
            calls = [MicrobatchCall(partial(_raise, failure), partial(loss_and_weight, samples=1))]
            counts.clear()
        self._microbatch_count = len(counts) if counts or not calls else -1
        assert self._user_gathers is not None
        self._user_gathers.before_step("training", self._microbatch_count)
        factor = precision.loss_factor(self.precision_plugin)
        with self.precision_plugin.train_step_context():
            outcome = self.engine.runner.forward(calls, factor, log.note)
        self.meter.after_forward()
        self._finish_log(log, outcome, outcome.weights)
        return joined_result(outcome.results, outcome.weights, counts, self._no_loss)

    def _call(
        self,
        index: int,
        piece: Any,
        count: int,
        rest: tuple[Any, ...],
        kwargs: dict[str, Any],
        log: StepLog,
    ) -> MicrobatchCall:
        assert self.lightning_module is not None
        return MicrobatchCall(
            partial(self.lightning_module.training_step, piece, *rest, **kwargs),
            partial(loss_and_weight, samples=count),
            partial(log.resume, index),
            partial(log.pause, index),
        )

    def _profiled_step(self, batch: Any) -> Any:
        """The user's step on a batch that is not counted: what profiling runs."""
        assert self.lightning_module is not None
        return self.lightning_module.training_step(
            *supported.step_arguments(self.lightning_module, batch)
        )

    def _no_loss(self) -> Tensor:
        return torch.zeros((), device=self.root_device)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        trainer = self.lightning_module.trainer
        self.engine.runner.backward(divisor=float(trainer.accumulate_grad_batches))
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        with self.meter.step(), ExitStack() as after_backward, local_update(optimizer):

            def closure_and_rules() -> Any:
                outcome = closure()
                # from here on hooks and the optimizer see gradients, as DTensors
                after_backward.enter_context(supported.RowsArithmetic())
                return outcome

            with self.engine.runner.naming_place("optimizer's step"):
                result = super().optimizer_step(optimizer, closure_and_rules, model, **kwargs)
        self._watch.finish_step(counts=not self.meter.slowed)
        return result

    def on_train_start(self) -> None:
        self._meter = MemoryMeter(self.engine, self.optimizers)

    def on_train_end(self) -> None:
        self.engine.runner.reshard()
        self._exchange_measured_memory()
        if self._preparation is not None and self._planning.verbose and self.is_global_zero:
            self._preparation.report_measured(self.measured_step_s, self.measured_memory)
        self._watch.end(self.plan, self._planning.verbose)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        from lightning_cephalo._autoload import register

        register()


def _raise(failure: BaseException) -> None:
    raise failure
