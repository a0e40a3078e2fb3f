"""Implements ``Trainer(strategy="cephalo")``.

The hooks of Lightning come in the order in which the Trainer calls them. Each is a few lines that
call the packages below.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.adapters import batch_norm, precision
from lightning_cephalo.adapters.dealt_loaders import SamplerTakeover, refuse_combined_evaluation
from lightning_cephalo.adapters.refusals import Situation, When, refuse
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.observe.watch import RunReport, Watch
from lightning_cephalo.plan import Plan
from lightning_cephalo.preparation import tables
from lightning_cephalo.preparation.job import Job, read_job
from lightning_cephalo.preparation.limits import Cap, Limits
from lightning_cephalo.preparation.options import Automatic, Options, Planner
from lightning_cephalo.preparation.session import Session
from lightning_cephalo.preparation.training import Training
from lightning_cephalo.profiling.isolation import no_loaders_left
from lightning_cephalo.recovery.options import Recovery, Wish
from lightning_cephalo.saving import SavingStrategy
from lightning_cephalo.steps import Arguments, AutomaticSteps, ManualSteps, Steps, evaluate

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class CephaloStrategy(SavingStrategy):
    """Trains on unequal devices with uneven batches, uneven shards and layered accumulation.

    ::

        trainer = Trainer(
            strategy=CephaloStrategy(global_batch_size=128, memory_cap={0: "8 GB"}),
            accelerator="gpu",
            devices=4,
        )
        trainer.fit(module, loader)       # module and loader as for one device

    Before training, every rank is measured on the real model, and a plan is solved. For each rank,
    the plan sets the sizes of its microbatches, its share of parameters, gradients and optimizer
    state, and whether its activations are recomputed, retained or offloaded. The model is sharded
    by the plan, unit by unit. Each global batch is dealt by the plan. Each rank's share is cut into
    microbatches, which pass the units layer by layer. Gradients, loss and checkpoints are those of
    the global batch on one device.

    Args:
        plan: A :class:`~lightning_cephalo.Plan`, or the path of one. Training follows it exactly,
            without profiling. None: every rank is measured and the plan solved.
        global_batch_size: Samples per step over all ranks; None: the loader's batch size times
            the number of ranks, as under DDP.
        units: What is gathered together: a list of full names of modules, and of classes, or names
            of classes, whose instances are units. An empty list makes the whole model one unit.
            None: repeated blocks and large ends.
        memory_cap: How much of its device's memory each rank may use: a fraction (a float up to
            1.0), bytes (an int, or "8 GB"), or a mapping from ranks to these. The plan obeys the
            cap; an emulated device enforces it.
        optimizer_offload: Keep optimizer state in host memory. "auto": the part that does not fit
            on the devices, or whose room makes steps shorter. True: all of it. Only torch's
            element-wise optimizers, and devices with memory apart from the host's.
        recompute: Retain only the inputs of a unit, and recompute its inside in the backward.
            "auto": the plan chooses for each rank, which takes more measuring. With SyncBatchNorm
            only a given plan recomputes.
        reshard_after_forward: Reshard units after the forward, and gather them again in the
            backward. False communicates a third less, but needs memory for the whole model's
            parameters on every rank. "auto": the plan chooses.
        reduce_dtype: Dtype that gradients travel in between ranks: ``torch.bfloat16`` halves their
            bytes. Each rank's gradient is rounded once. None: their own dtype.
        split_batch: ``split_batch(batch, sizes)`` returns one batch per size. It replaces cutting
            every tensor along its first dimension, for graphs and objects of your own.
        summed_buffers: Full names of buffers to which ``training_step`` adds sums over samples,
            such as counts of codes; ``"*.count"`` names those of all modules. All other buffers
            get the mean over the samples.
        planner: How ranks are measured and plans are made, a :class:`~lightning_cephalo.Planner`.
        replan: Follow another plan where ranks change their pace while they train, if that pays:
            "auto" where the plan was solved. True also measures where ``plan`` is given, and then
            replaces it.
        recover: Keep the state of training in the hosts' memory after each step, and go on from
            there when an agent has restarted the ranks. "auto": where an agent may restart them,
            after so many steps that it takes a fiftieth of the time. A
            :class:`~lightning_cephalo.Recovery` says how.
        record: A folder for the record of the run, which ``cephalo report FOLDER`` shows, and for
            ``trace.json``, the fifth step of up to 64 ranks for Perfetto.
        process_group_backend: Backend of ``torch.distributed``, such as "gloo"; None: chosen by
            the device.
        timeout: Timeout of collectives.
        start_method: How Lightning starts the ranks: "popen", "spawn", "fork", "forkserver".

    A plan that does not say whether to recompute or reshard follows these options; "auto" is True.

    Raises:
        ValueError: For other values than those above; for memory caps it is a PlanError.
        RecoveryError: For another value of ``recover``.
    """

    strategy_name = "cephalo"

    def __init__(
        self,
        plan: Plan | str | PathLike[str] | None = None,
        *,
        global_batch_size: int | None = None,
        units: Sequence[type[nn.Module] | str] | None = None,
        memory_cap: Cap = None,
        optimizer_offload: Automatic = False,
        recompute: Automatic = True,
        reshard_after_forward: Automatic = "auto",
        reduce_dtype: torch.dtype | str | None = None,
        split_batch: Callable[[Any, Sequence[int]], list[Any]] | None = None,
        summed_buffers: Sequence[str] = (),
        planner: Planner = Planner(),
        replan: Automatic = "auto",
        recover: Automatic | Recovery = "auto",
        record: str | PathLike[str] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        self._options = Options(
            plan=plan,
            global_batch_size=global_batch_size,
            units=units,
            memory_cap=memory_cap,
            optimizer_offload=optimizer_offload,
            recompute=recompute,
            reshard_after_forward=reshard_after_forward,
            reduce_dtype=reduce_dtype,
            split_batch=split_batch,
            summed_buffers=summed_buffers,
            planner=planner,
            replan=replan,
            record=record,
        )
        super().__init__(process_group_backend, timeout, start_method, Wish.parse(recover))
        self._samplers = SamplerTakeover()
        self._watch = Watch(record)
        # from setup() to teardown() of a training
        self._training: Training | None = None
        self._steps: Steps | None = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        from lightning_cephalo._autoload import register

        register()

    # -- results for users --------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the running or last training, known after ``setup``."""
        return self._watch.report.plan

    @property
    def report(self) -> RunReport:
        """Times, memory and changes of plan of the running or last training."""
        return self._watch.report

    def change_plan(self, plan: Plan | str | PathLike[str]) -> None:
        """Train by another plan, from between two of the next steps on; collective.

        ::

            def on_train_epoch_end(self):
                self.trainer.strategy.change_plan("other.yaml")     # on every rank

        Call it on every rank in a hook, not in a step. Samples and their order stay those of one
        device, so batches that workers have loaded already are trained by the old plan first. With
        ``accumulate_grad_batches`` the change waits for the update. If it raises, the old plan
        stays.

        Args:
            plan: A plan for the same ranks and the same global batch, or its path.

        Raises:
            PlanError: On every rank, if the plan does not fit the run.
            UnsupportedError: On every rank, if what the message names cannot change.
            HostMemoryError: On the ranks whose hosts lack memory for it.
            RemoteRankError: If any of these happened on another rank.
            RuntimeError: Outside of ``fit``.
        """
        if self._training is None or self.plan is None:
            raise RuntimeError("change_plan() works only while fit() runs, after setup.")
        self._ending.meet("changing the plan", "Call strategy.change_plan() on every rank.")
        self.session.hold(self.optimizers)
        self._training.changes.request(plan)

    @property
    def _running(self) -> tuple[Training, Steps]:
        if self._training is None or self._steps is None:
            raise RuntimeError("This works only while fit() runs, after setup.")
        return self._training, self._steps

    # -- setup --------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        control = self._connect().control
        self._refuse(When.CONNECTED)
        self._samplers.take(self._view)
        self._recovering.look_up(self._view, control)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # models are created and sharded on the CPU: no device ever needs to hold a whole one
        device = torch.device("meta") if empty_init else torch.device("cpu")
        with _EmptyInit(enabled=False), device, self.precision_plugin.tensor_init_context():
            yield

    @property
    @override
    def precision_plugin(self) -> Precision:
        plugin = self._precision_plugin
        return plugin if plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            precision.adapt(precision_plugin, self._before_norm, self._shown)
        self._precision_plugin = precision_plugin

    @override
    def setup(self, trainer: Trainer) -> None:
        self._resumption, view = None, TrainerView(trainer)
        trainer.accelerator.setup(trainer)
        self._recovering.check_begin()
        self._refuse(When.TRAINING_SETUP if view.is_fitting else When.EVALUATION_SETUP)
        if view.is_fitting and self._layer_sync is not None:
            self._layer_sync.apply(self._module)
        if precision.compute_dtype(self.precision_plugin) is None:
            self.precision_plugin.convert_module(self._module)
        # as FSDPStrategy does: sets `self.device` of a module that is never moved as a whole
        self._module._device = self.root_device
        self.model = self._module
        if view.is_fitting:
            try:
                self._set_up_training(view)
            except Exception as error:  # a restart may have too few hosts
                self._recovering.wait_for_hosts(error)
                raise
        else:
            job = Job(self._options, (Limits(),) * self.world_size)
            self._session = Session(job, view, self._connection.groups)
        self.setup_precision_plugin()

    def _refuse(self, when: When) -> None:
        """Raise on all ranks if something that is there now cannot work; collective."""
        optimizers = self.optimizers if when is When.OPTIMIZERS else ()
        model = None if self._session is None else self._session.model
        situation = Situation(self._view, self._module, optimizers, model)
        refuse(when, situation, self._connection.control)

    def _set_up_training(self, view: TrainerView) -> None:
        """Shard the model, make the optimizers, and follow a plan; collective."""
        control = self._connection.control
        start = partial(self._watch.start, self.is_global_zero)
        control.together("checking where to write the record", start)
        job = read_job(view, self._connection.groups, self._options_now(), self._samplers.deals)
        # steps that are measured already use it
        session = self._session = Session(job, view, self._connection.groups)
        session.enforce_limits()
        training = self._training = Training(session, self._watch, self._recovering)
        run, manual = (training, self._recovering, self._ending.termination), session.manual
        # measured steps use them already
        self._steps = AutomaticSteps(*run) if manual is None else ManualSteps(manual, *run)

        def make_optimizers() -> None:
            with no_loaders_left(view):
                self.setup_optimizers(view.of)

        control.together("making the optimizers", make_optimizers)
        self._refuse(When.OPTIMIZERS)  # before ranks are measured for nothing
        training.begin(self.optimizers)
        if self._options.verbose and self.is_global_zero:
            tables.show_plan(training)

    def _options_now(self) -> Options:
        """Return the options with what a restart and the module add to them."""
        given, recovering = self._options, self._recovering
        # such units cannot be recomputed one microbatch at a time
        whole = given.plan is None and batch_norm.synchronised(self._module)
        return replace(
            given,
            global_batch_size=given.global_batch_size or recovering.global_batch_size,
            kept_bytes=recovering.kept_bytes(self._module),
            recompute=False if whole else given.recompute,
        )

    @override
    def model_to_device(self) -> None:
        """Do nothing: shards and buffers are created on the device."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        session, view = self._session, self._view
        if session is None:
            return dataloader  # outside of a run its batches are only counted
        plan = self._running[0].changes.dealt_plan if view.is_training else None
        begin_reading = partial(self._ending.leave_loop, "reading the first batch of an epoch")
        deal = partial(session.batches.dealt, dataloader, plan, begin_reading)
        if not self._samplers.deals:
            return deal(epoch=view.epoch, is_divided=True)
        self._ending.leave_loop()
        if plan is not None:
            self._recovering.before_pass(accelerator_of(self.root_device))
        resumption = None if plan is None else self._resumption
        seed = None if resumption is None else resumption.seed
        dealt = deal(epoch=view.epoch, seed=seed, is_divided=False)
        if resumption is not None:
            resumption.continue_with(dealt)
        return dealt

    # -- training -----------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        self._refuse(When.TRAINING_START)
        session, resumption = self.session, self._resumption
        session.hold(self.optimizers)
        session.start_training()
        session.logs.watch(self._view.epoch_loop._results)
        self._record(is_finished=False)
        if resumption is not None:
            resumption.announce()
        size, is_resumed = session.plan.global_batch_size, resumption is not None
        self._recovering.start(accelerator_of(self.root_device), size, is_resumed=is_resumed)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._ending.begin_batch(self._view, trains=True)
        self._running[0].begin_batch(self.optimizers)

    @override
    def training_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        if self._resumption is not None:
            self._resumption.end()
        return self._running[1].training_step(batch, (rest, kwargs))

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        return self._running[1].backward(closure_loss, optimizer, (args, kwargs))

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        return self._running[1].optimizer_step(optimizer, closure, kwargs)

    def _shown(self, batch: Any) -> Any:
        """Return what hooks see of a batch that has come from the loaders."""
        if self._session is None:
            return batch
        return self._session.batches.shown(batch, self._module.trainer.training)

    def _before_norm(self) -> bool:
        """Let all ranks come before gradients are clipped; return whether to clip at all."""
        return self._steps is None or self._steps.before_norm()

    @override
    def on_train_end(self) -> None:
        session, verbose = self.session, self._options.verbose
        executor = session.model.executor
        session.logs.unwatch(self._view.epoch_loop._results)
        self._ending.meet("ending training")
        session.control.together("checking the last step's buffers", executor.overlay.merge.check)
        executor.reshard()
        measured, looks = session.measured_memory(), session.memory.looks()
        self._watch.end(measured, looks)
        if verbose and self.is_global_zero:
            tables.show_predictions(session, self.report)
        self._record(is_finished=True)

    def _record(self, is_finished: bool) -> None:
        if self.is_global_zero and self._watch.writes_record:
            record = partial(tables.record_of, self._running[0], is_finished=is_finished)
            self._watch.write_record(record)

    # -- evaluation ---------------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", (args, kwargs))[0]

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", (args, kwargs))[0]

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            result, samples = self._evaluate("predict_step", (args, kwargs))
        return self.session.batches.predictions.of_step(result, samples, args[2:])

    def _evaluate(self, name: str, arguments: Arguments) -> tuple[Any, int]:
        """Run a step without gradients; return its result and this rank's samples in it."""
        self._ending.begin_batch(self._view, trains=False)
        return evaluate(self.session, name, arguments, self._ending.termination)

    @override
    def on_validation_start(self) -> None:
        self._ending.meet("beginning a validation")
        self.on_test_start()

    @override
    def on_test_start(self) -> None:
        loop = self._view.evaluation_loop
        self.session.logs.watch(loop._results)
        if self._samplers.deals and self.world_size > 1:
            refuse_combined_evaluation(loop._combined_loader)

    @override
    def on_validation_end(self) -> None:
        self.on_test_end()
        self._recovering.after_validation()

    @override
    def on_test_end(self) -> None:
        self.session.logs.unwatch(self._view.evaluation_loop._results)
        self.on_predict_end()

    @override
    def on_predict_end(self) -> None:
        self._ending.leave_loop()
        self.session.model.executor.reshard()

    # -- the end ------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._ending.termination.ends_with(exception):
            self._recovering.leave(self._ending.termination.is_noticed)
        self._ending.tell(exception)

    @override
    def teardown(self) -> None:
        trainer = self._module._trainer
        # an error in one of them, or in the session's end, leaves out none of the others
        with ExitStack() as at_end:
            at_end.callback(self.checkpoint_io.teardown)
            if self.accelerator is not None:
                at_end.callback(self.accelerator.teardown)
            at_end.callback(self.precision_plugin.teardown)
            at_end.callback(self._environment.teardown)
            at_end.callback(self._ending.end)
            at_end.callback(self._recovering.end)
            if trainer is not None:
                at_end.callback(self._samplers.give_back, TrainerView(trainer))
                if self._layer_sync is not None and TrainerView(trainer).is_fitting:
                    at_end.callback(self._layer_sync.revert, self._module)
            at_end.callback(self._end_session, trainer)
            self._recovering.settle()

    @override
    def _take_session(self) -> Session | None:
        training, self._training, self._steps = self._training, None, None
        if training is not None:
            training.close()
        return super()._take_session()

    def _end_session(self, trainer: Trainer | None) -> None:
        session = self._take_session()
        self._resumption = None
        if session is None:
            return
        if trainer is None or not TrainerView(trainer).is_interrupted:
            session.close()
            self._recovering.finish()
        elif self._ending.failed_together:
            session.close_after_failure()
        else:  # ranks at different places cannot communicate
            session.abandon()
