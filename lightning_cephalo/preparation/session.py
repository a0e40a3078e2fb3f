"""Holds the state of a Trainer run from ``setup`` to ``teardown``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.backends import backend_of
from lightning_cephalo.adapters.averaged_weights import AveragedWeights
from lightning_cephalo.adapters.checkpoint import release_optimizer
from lightning_cephalo.adapters.early_update import EarlyUpdater, may_send_gradients
from lightning_cephalo.adapters.held_state import OptimizerFacts
from lightning_cephalo.adapters.logging import StepLogs
from lightning_cephalo.adapters.module_copies import ModuleCopies
from lightning_cephalo.adapters.moved_state import MovedState, StateAway
from lightning_cephalo.adapters.rows_of_state import RowsOfState
from lightning_cephalo.adapters.torchmetrics import synchronise_lists
from lightning_cephalo.adapters.updates import OptimizerUpdates
from lightning_cephalo.adapters.user_collectives import UserCollectives
from lightning_cephalo.adapters.user_gathers import UserGathers
from lightning_cephalo.adapters.user_module import SwitchedOffCaches
from lightning_cephalo.common.errors import TooLittleMemoryError, UnsupportedError
from lightning_cephalo.common.lasting_objects import LastingObjects
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.common.texts import printable
from lightning_cephalo.data.batch_layout import BatchLayout
from lightning_cephalo.data.cutting import (
    BatchCutter,
    EmptyPredictions,
    shown,
)
from lightning_cephalo.data.dealing import Dealing
from lightning_cephalo.data.loaders import dealt_loader
from lightning_cephalo.data.reading import agreed_seed, original_of
from lightning_cephalo.data.shares import deal
from lightning_cephalo.data.streams import own_part
from lightning_cephalo.execution.memory_errors import is_out_of_memory
from lightning_cephalo.execution.offload import HostArena
from lightning_cephalo.execution.sharded_model import Dtypes, ShardedModel
from lightning_cephalo.features.install import install
from lightning_cephalo.features.manual_step import PhasedSteps
from lightning_cephalo.observe import report
from lightning_cephalo.observe.memory import RankMemory, TrainingMemory
from lightning_cephalo.observe.run_record import RankRecord, RunRecord
from lightning_cephalo.plan import Plan, PlanError, RankPlan
from lightning_cephalo.plan.memory_pressure import lower_capacity
from lightning_cephalo.plan.replan import Replan
from lightning_cephalo.plan.state_groups import members_of
from lightning_cephalo.preparation.first_shares import first_shares
from lightning_cephalo.preparation.host_state import HostState
from lightning_cephalo.preparation.job import Job, read_layouts
from lightning_cephalo.preparation.limits import (
    check_plan,
    limit_note,
    named_where_nothing_fits,
    reserve_host_memory,
)
from lightning_cephalo.profiling.memory_model import check_capacities, state_bytes
from lightning_cephalo.ranks.control import not_connected
from lightning_cephalo.ranks.groups import Groups
from lightning_cephalo.sharding.blocks import type_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Session:
    """A sharded model, the plan that it follows, and the objects that serve its steps.

    ::

        session = Session(job, module, groups, accelerator, dtype)       # shards the model
        session.apply(plan)                                              # may be called again
        ...
        session.close()                                                  # restores the full module

    Creating a session is collective, and so are most of its methods.

    Args:
        job: The training to run, or :meth:`Job.of_evaluation`.
        module: The user's module; the values of rank 0 are used.
        compute_dtype: Dtype of gathered parameters; None: their own.

    Attributes:
        plan: The plan in use. Before :meth:`apply`, and in evaluation, it only holds the fractions
            of the model.
        dealt_plan: The plan whose sizes dataloaders deal that are made from now on.
        lacks: Of each loader, whether this rank has no samples of it in the present step.
        user_gathers: Rejects collectives of the user's step that would hang.
        predictions: Serves prediction steps in which this rank has no samples.
        lasting: Keeps the garbage collector away from what lives as long as training.
        notes: Sentences below the plan's table: why it divides the work so.
        late: Why updates follow the backward, in a few words; empty: they run inside of it.
    """

    memory: TrainingMemory

    def __init__(
        self,
        job: Job,
        module: LightningModule,
        groups: Groups,
        accelerator: Accelerator,
        compute_dtype: torch.dtype | None,
    ) -> None:
        options = job.options
        if job.state_groups and backend_of(groups.gather).runs_on_device:
            raise UnsupportedError(
                "Hybrid sharding adds up gradients across nodes over gloo only so far, but these"
                " ranks communicate by a backend of their devices. Use"
                " CephaloStrategy(process_group_backend='gloo'), or leave hybrid_sharding and"
                " state_groups out."
            )
        self.job = job
        self._at_end = ExitStack()
        self.lasting = LastingObjects()
        self._at_end.callback(self.lasting.end)
        self.control = groups.control
        self.model = ShardedModel(
            module,
            groups,
            accelerator,
            fractions=partial(first_shares, job, compute_dtype=compute_dtype),
            units=options.units,
            dtypes=Dtypes(compute_dtype, options.reduce_dtype),
            state_groups=job.state_groups,
        )
        install(self.model.executor)
        self.model.executor.recompute = options.recompute.default
        self.model.executor.overlay.buffers.sum_up(options.summed_buffers)
        self._at_end.callback(ModuleCopies(self.model, self._ranks_run_one_step).remove)
        if job.trains:
            self._at_end.callback(SwitchedOffCaches(module).restore)
        self.plan = self.dealt_plan = _plan_before(job, self.model.fractions)
        self.cutter = BatchCutter((), None, ())
        self._layouts = itertools.cycle(job.layouts)
        self.logs = StepLogs(module, groups, accelerator)
        if groups.control.world_size > 1:
            executor = self.model.executor
            end = synchronise_lists(groups.control, lambda: executor.inside_microbatch)
            self._at_end.callback(end)
        self.user_gathers = UserGathers(groups.control, options.planner.single_microbatch)
        self.manual: PhasedSteps | None = None
        if job.trains and not module.automatic_optimization:
            self.manual = PhasedSteps(self.model.executor)
        elif groups.control.world_size > 1:
            collectives = UserCollectives(self._on_user_collective)
            self._at_end.callback(collectives.close)
            self.model.executor.hooks.watch = collectives.watched
        self.predictions = EmptyPredictions()
        self.lacks: tuple[bool, ...] = (False,)
        self.optimizers: list[Optimizer] = []
        self.updates = OptimizerUpdates(self.model, options.planner.elementwise)
        self.predicted_memory: tuple[RankMemory, ...] = ()
        self._averages: AveragedWeights | None = None
        self.notes: tuple[str, ...] = ()
        self.late = job.late
        self._updater: EarlyUpdater | None = None
        self._may_send: Callable[[Optimizer], bool] = lambda _: False
        host = job.limits[groups.control.rank].host
        self._host_state = HostState(
            self.model, host.capacity_bytes, groups.control, host.limited_by
        )
        self._at_end.callback(self._host_state.close)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Make None of a copy: users copy callbacks, and with them trainer and strategy."""
        return not_connected, ()

    def _ranks_run_one_step(self) -> bool:
        if self.manual is None:
            return False
        # some only communicate while one is measured
        return self.control.world_size == 1 or not self.manual.is_measured

    def _on_user_collective(self, name: str, takes_all: bool) -> None:
        module: Any = self.model.module
        self.user_gathers.called(module.trainer.training, name, takes_all=takes_all)

    @property
    def own_plan(self) -> RankPlan:
        """This rank's part of the plan."""
        return self.plan.ranks[self.control.rank]

    @property
    def moved(self) -> MovedState | None:
        """Optimizer state that lives in host memory; None: all of it is on the device."""
        return self._host_state.moved

    @property
    def state_away(self) -> StateAway:
        """Which parameters have their state in host memory, by the plan."""
        return self._host_state.away(self.plan)

    @property
    def inside_microbatch(self) -> bool:
        """Whether a microbatch of the user's step is running right now."""
        return self.model.executor.inside_microbatch

    # -- training -----------------------------------------------------------------------------

    def count_on(self, optimizers: Sequence[Optimizer], trainer: Trainer) -> Job:
        """Let plans count on what the optimizers hold, and when they may update; collective."""
        facts = OptimizerFacts.of(optimizers, self.model, trainer)
        self.late = self.job.late or facts.late
        self.job = replace(self.job, late=self.late, optimizers=facts)
        return self.job

    def use_optimizers(self, optimizers: Sequence[Optimizer], trainer: Trainer) -> None:
        """Let the optimizers update by the plan; collective.

        Raises:
            UnsupportedError: On every rank, if an optimizer cannot train as on one device.
            PlanError: On every rank, if updates must be late, and a rank lacks the memory.
        """
        self.optimizers = list(optimizers)
        for optimizer in optimizers:
            self.updates.of(optimizer)
        self._host_state.begin(optimizers, trainer, self.plan, self.job.optimizers.stays)
        self._predict_host_memory()
        is_planned = self.plan.early_update is True
        more_bytes = state_bytes(self.model) - state_bytes(self.model, early=True)
        if self.late:
            self._may_send = lambda own: may_send_gradients(self.late, own, trainer)
            if is_planned:
                self._count_on_late_updates(more_bytes)
            return
        most = format_mib(more_bytes * max(self.model.fractions))
        consequence = f" The plan counts on early ones: ranks hold up to {most} more." * is_planned
        self._updater = EarlyUpdater(optimizers[0], trainer, consequence, self.moved)
        self.model.executor.updates.updater = self._updater

    def _predict_host_memory(self) -> None:
        memory = self._host_state.predicted(self.plan, self.predicted_memory, self.optimizers)
        self.predicted_memory = memory

    def _count_on_late_updates(self, more_bytes: float) -> None:
        """Add the gradients that late updates hold to the plan's predictions."""
        ranks, memory = [], []
        for index, (rank, kinds) in enumerate(
            zip(self.plan.ranks, self.predicted_memory, strict=True)
        ):
            more = rank.state_fraction * more_bytes
            if rank.memory_bytes is not None:
                needed, capacity = rank.memory_bytes + more, rank.capacity_bytes or math.inf
                if needed > capacity:
                    raise PlanError(
                        "The plan counts on updates inside the backward, but they have to follow"
                        f" it: {self.late}. Rank {index} would need {format_mib(needed)} of its"
                        f" {format_mib(capacity)}. Have a plan made for late updates:"
                        " CephaloStrategy(planner=Planner(early_update=False))."
                    )
                rank = replace(rank, memory_bytes=needed)
            if kinds.state_bytes is not None:
                kinds = replace(kinds, state_bytes=kinds.state_bytes + more)
            if kinds.peak_bytes is not None:
                kinds = replace(kinds, peak_bytes=kinds.peak_bytes + more)
            ranks.append(rank)
            memory.append(kinds)
        self.plan = replace(self.plan, ranks=tuple(ranks), early_update=None)
        self.predicted_memory = tuple(memory)
        self.model.executor.failure.planned_memory = _planned_memory(self.own_plan)

    def look_for_early_update(self, optimizer: Optimizer) -> None:
        """Look whether the next step may update units early; called on every rank before it."""
        if self.moved is not None:
            self.moved.begin(optimizer)
            self.model.executor.updates.sends_gradients = self._may_send(optimizer)
        if self._updater is not None:
            self._updater.look(optimizer)

    def enforce_limits(self) -> None:
        """Enforce every rank's limits; if any is too small, raise TooLittleMemoryError on all."""
        job = self.job
        device, given = job.limits[self.control.rank].device, job.plan
        with named_where_nothing_fits(job.limits):
            if given is None:
                check_capacities(self.model, device.capacity_bytes, job.keeps_gradients)
            else:  # a given plan must obey the cap; the device's free memory is the user's concern
                reshards = job.options.reshard_after_forward.of_plan(given.reshard_after_forward)
                check_capacities(self.model, device.cap_bytes, reshard_after_forward=reshards)
        self._at_end.callback(self.model.accelerator.limit_memory(device.cap_bytes))

    def apply(self, plan: Plan, memory: Sequence[RankMemory] = ()) -> None:
        """Follow a plan from the next step on; collective.

        Moves the shards, and what optimizers and averages hold of their rows. If shards move,
        gradients are forgotten, except with manual optimization: call it between two steps.
        Dataloaders that are dealt after this call yield batches of the plan's sizes.

        Args:
            memory: The predicted memory of every rank, by kind; empty: the peaks of the plan.

        Raises:
            UnsupportedError: If shards must move, but state that goes with them cannot.
            PlanError: If the plan offloads boundaries that retained activations hold.
            HostMemoryError: If the host has less memory than the plan needs.
        """
        self.check_modes(plan)
        arena = self.control.together("allocating host memory", partial(self.host_memory_of, plan))
        self.follow(plan, memory, arena)

    def follow(
        self,
        plan: Plan,
        memory: Sequence[RankMemory] = (),
        arena: HostArena | None = None,
        keeps_gradients: bool = False,
        in_step: bool = False,
    ) -> None:
        """Follow a plan that is checked, with its host memory; collective. See :meth:`apply`."""
        self.model.release_buffers()  # modes decide which of them are needed
        self._move_shards(plan, keeps_gradients)
        for owned in () if in_step else map(self.updates.of, self.optimizers):
            if owned is not None:
                owned.follow(self.model.fractions)
        self.plan = self.dealt_plan = plan
        self._host_state.follow(plan, self.optimizers)
        if self._updater is not None:  # it may have begun with all state on the device
            self._updater.moved = self.moved
        peaks = (RankMemory(peak_bytes=rank.memory_bytes) for rank in plan.ranks)
        self.predicted_memory = tuple(memory) or tuple(peaks)
        self._predict_host_memory()
        self.user_gathers.expect([len(rank.microbatch_sizes) for rank in plan.ranks])
        job, own, executor = self.job, self.own_plan, self.model.executor
        executor.reshard_after_forward = job.options.reshard_after_forward.of_plan(
            plan.reshard_after_forward
        )
        self.model.padding.is_on = plan.shares_are_even and plan.padded is not False
        # a lower bound: where weights are tokens, the total that measuring left is closer
        executor.weighing.whole_batch = float(plan.global_batch_size)
        executor.recompute = job.options.recompute.of_plan(own.recompute)
        executor.failure.planned_memory = _planned_memory(own)
        executor.arena = arena
        # with one microbatch on each rank a batch stays whole
        sizes = own.microbatch_sizes if self.manual is None else ()
        whole = job.leaves_batches_whole and len(own.microbatch_sizes) == 1
        layouts = job.layouts if whole else job.layouts or read_layouts(job.loaders, job.options)
        self.cutter = BatchCutter(layouts, job.loaders.spec, sizes, whole)

    def check(self, plan: Plan) -> None:
        """Raise if this training cannot follow a plan.

        Raises:
            PlanError: If it is for other ranks, another batch, or more memory than there is.
            UnsupportedError: If its numbers of microbatches differ where the step communicates.
        """
        job = self.job
        plan.check(world_size=self.control.world_size, global_batch_size=job.global_batch_size)
        if members_of(plan.state_groups, plan.world_size) != self.model.members:
            raise PlanError(
                f"The plan says state_groups: {list(plan.state_groups) or 'none'}, but this"
                f" training has begun with {list(self.model.state_groups) or 'none'}. A plan"
                " cannot change them while training: begin with such a plan."
            )
        check_plan(plan, job.limits)
        self.check_modes(plan)
        self._host_state.check(plan)
        if plan.early_update and self.late:
            raise PlanError(
                "The plan says early_update: true, so that its memory lacks gradients, but updates"
                f" follow the backward: {self.late}. Leave early_update out of the plan."
            )
        self.user_gathers.check([len(rank.microbatch_sizes) for rank in plan.ranks])

    def check_modes(self, plan: Plan) -> None:
        """Raise if the way to train allows no such plan, on any rank."""
        if self.manual is not None:
            _refuse_with_manual_optimization(plan)
        recompute = self.job.options.recompute
        if any(rank.offload and not recompute.of_plan(rank.recompute) for rank in plan.ranks):
            raise PlanError(
                "The plan says offload: true, but recomputation is off, so that activations are"
                " kept and hold what enters them. Use CephaloStrategy(recompute=True), or say"
                " recompute: true in the plan."
            )

    def check_move(self, plan: Plan, keeps_gradients: bool = False) -> None:
        """Raise on every rank if shards must move to follow a plan, but cannot; collective."""
        if self._fractions_of(plan) == self.model.fractions:
            return
        state = self._rows_of_state(keeps_gradients)
        state.check(self.model.flats, self.control)
        needed = self.model.bytes_to_move(self._fractions_of(plan), state.of)
        # pools are empty by then
        needed -= sum(pool.held_bytes for pool in self.model.buffer_pools)
        room = partial(self._check_room, max(needed, 0))
        self.control.together("looking for memory to move rows in", room)

    def _check_room(self, nbytes: int) -> None:
        try:
            torch.empty(nbytes, dtype=torch.uint8, device=self.model.device)
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
            raise TooLittleMemoryError(
                f"Rank {self.control.rank} needs {format_mib(nbytes)} more to move rows to other"
                " ranks, and has less. Use a plan whose shares of the model are nearer to the"
                " present ones."
            ) from failure

    def host_memory_of(self, plan: Plan) -> HostArena | None:
        """Return this rank's host memory for a plan; that of the present plan if it is enough."""
        own, arena = plan.ranks[self.control.rank], self.model.executor.arena
        self._host_state.check_room(own, self.optimizers)
        if own.offload and arena is not None and (own.host_bytes or 0.0) <= arena.held_bytes:
            return arena
        host = self.job.limits[self.control.rank].host
        return reserve_host_memory(self.model.accelerator, host, own)

    @staticmethod
    def _fractions_of(plan: Plan) -> tuple[float, ...]:
        return tuple(rank.state_fraction for rank in plan.ranks)

    def _rows_of_state(self, keeps_gradients: bool = False) -> RowsOfState:
        by_rows = [one for one in self.optimizers if self.updates.of(one) is None]
        averages = () if self._averages is None else self._averages.pairs()
        # with manual optimization, only the user's code knows which gradients are needed still
        kept = self.model.flats if self.manual is not None or keeps_gradients else ()
        return RowsOfState(by_rows, averages, kept)

    def _move_shards(self, plan: Plan, keeps_gradients: bool) -> None:
        fractions = self._fractions_of(plan)
        if fractions == self.model.fractions:
            return
        state = self._rows_of_state(keeps_gradients)
        state.check(self.model.flats, self.control)
        self.model.change_fractions(fractions, state.of)

    def shard_averages(self, callbacks: Sequence[Any]) -> None:
        """Shard the averages that callbacks hold, now and as plans change; collective."""
        self._averages = AveragedWeights(self.model.module, callbacks)

    def shown(self, batch: Any, trains: bool) -> Any:
        """Return what hooks see of a batch: without samples a repeated one that counts nowhere."""
        seen, self.lacks = self.cutter.shown(batch) if trains else shown(batch)
        return seen

    @property
    def lacks_samples(self) -> bool:
        """Whether this rank has no samples in the present step, of any loader."""
        return all(self.lacks)

    def cut(self, batch: Any) -> tuple[list[tuple[Any, int]], Exception | None]:
        """Return the microbatches of a batch with their samples, or none and the error."""
        try:
            return self.cutter.cut(batch, self.lacks), None
        except Exception as failure:
            return [], failure

    def start_training(self, optimizers: Sequence[Optimizer]) -> None:
        """Measure this rank's memory from now on, its optimizers' included."""
        self.optimizers = list(optimizers)
        self.lasting.begin()
        self.memory = TrainingMemory(
            self.model, self.optimizers, self.moved, keeps_looks=self.job.options.record is not None
        )

    def measured_memory(self) -> tuple[RankMemory, ...] | None:
        """Return the memory of every rank in training; None before two steps; collective."""
        rows = self.control.gather(self.memory.measured())
        return tuple(rows) if all(rank is not None for rank in rows) else None

    def unit_sizes(self) -> list[report.UnitSize]:
        """Return the units as tables name them, the root unit first."""
        return [
            report.UnitSize(
                unit.name,
                type_of(unit.module).__name__,
                sum(flat.contents.numel for flat in unit.flats),
            )
            for unit in self.model.units
        ]

    @property
    def _updates(self) -> str:
        """When updates run, in a few words; empty if nobody has asked for another way."""
        if not self.job.options.planner.early_update:
            return ""
        return f"after the backward: {self.late}" if self.late else "inside the backward"

    def plan_table(self, details: bool) -> Any:
        """Return the plan as a table that also says when updates run, and by details how solved."""
        return report.plan_table(
            self.plan,
            model=self.unit_sizes(),
            updates=self._updates,
            notes=self._all_notes(),
            details=details,
        )

    def _all_notes(self) -> tuple[str, ...]:
        uses_host = self.plan.moves_state or any(rank.offload for rank in self.plan.ranks)
        return tuple(filter(None, (*self.notes, limit_note(self.job.limits, uses_host))))

    def record(self, measured: Sequence[RankMemory] | None, changes: Sequence[Replan]) -> RunRecord:
        """Return the run's record; ``measured`` is None while the run has not ended."""
        predicted = self.predicted_memory or tuple(RankMemory() for _ in self.plan.ranks)
        found = tuple(measured or ()) or (None,) * self.plan.world_size
        ranks = tuple(
            RankRecord(rank, part.name, predicted_memory=before, measured_memory=after)
            for rank, (part, before, after) in enumerate(
                zip(self.plan.ranks, predicted, found, strict=True)
            )
        )
        return RunRecord(
            plan=self.plan,
            ranks=ranks,
            model=printable(report.units_text(self.unit_sizes())),
            updates=self._updates,
            notes=self._all_notes(),
            changes=tuple(
                f"behind step {change.step}: {change.cause}, rank {change.rank}"
                for change in changes
            ),
        )

    def report(self, step_s: float | None, memory: Sequence[RankMemory] | None) -> None:
        """Print predicted against measured step time and memory."""
        if step_s is not None:
            report.show(report.prediction_table({"step_s": self.plan.step_s}, {"step_s": step_s}))
        if memory is not None:
            report.show(report.memory_table(self.predicted_memory, memory))

    # -- dataloaders --------------------------------------------------------------------------

    def dealt(
        self,
        loader: Any,
        *,
        training: bool,
        epoch: int,
        is_divided: bool = False,
        seed: int | None = None,
        before_reading: Callable[[], None] = lambda: None,
    ) -> Any:
        """Return a loader that yields this rank's share of each global batch; collective.

        Evaluation is dealt evenly. ``is_divided``: the user deals, and ranks only end together.
        ``seed`` None: that which ranks agree on. ``before_reading`` is called before ranks agree
        on a batch of a stream; it may communicate.
        """
        ranks = self.control.world_size
        if ranks == 1 and (is_divided or not training):
            return original_of(loader)
        options = self.job.options
        agreed = agreed_seed(self.control.broadcast)
        layout = BatchLayout(splitter=options.split_batch)
        if training:
            # Lightning passes all training dataloaders each time, in the order of their tree
            layout = next(self._layouts, layout)
        dealing = Dealing(
            self.control.rank,
            tuple(rank.batch_size for rank in self.dealt_plan.ranks) if training else (1,) * ranks,
            agreed if seed is None else seed,
            self.control.broadcast,
            _behind(before_reading, self.control.gather),
            epoch=epoch,
            trains=training,
            every_rank=training and self.manual is not None,
            global_batch_size=options.global_batch_size if training else None,
            layout=layout,
        )
        return (own_part if is_divided else dealt_loader)(loader, dealing)

    # -- the whole model ----------------------------------------------------------------------

    def close(self) -> None:
        """Restore the full module on the CPU, and leave nothing behind; collective."""
        names = self.model.sharded_parameters()
        with self._at_end, self.model.accelerator.on_host():
            if self._averages is not None:
                self._averages.restore_full()
            self.model.restore_full()
        restored = dict(self.model.module.named_parameters(remove_duplicate=False))
        plain = {key: restored[name] for key, name in names.items() if name in restored}
        for optimizer in self.optimizers:
            release_optimizer(optimizer, plain, alone=self.control.world_size == 1)

    def close_after_failure(self) -> None:
        """Restore the full module if every rank can, where all have raised; collective."""
        try:
            self.control.together("restoring the model", self._try_to_gather)
        except Exception:
            # the user sees the error that ended the run; the next run refuses the shards by name
            self.abandon()
        else:
            self.close()

    def _try_to_gather(self) -> None:
        """Raise if this rank's device cannot take part in gathers of full parameters."""
        model = self.model
        model.release_buffers()
        model.accelerator.synchronize()
        most = max((flat.contents.master_bytes for flat in model.flats), default=0)
        torch.empty(most, dtype=torch.uint8, device=model.device)

    def abandon(self) -> None:
        """Leave without communicating after a failure, as other ranks may be gone."""
        with self._at_end:
            self.model.abandon()


def _refuse_with_manual_optimization(plan: Plan) -> None:
    idle = [r for r, rank in enumerate(plan.ranks) if not rank.microbatch_sizes]
    if idle:
        raise PlanError(
            f"The plan gives rank {idle[0]} no samples, but with manual optimization training_step"
            " runs on every rank, as it updates the optimizers: expected one microbatch. Give each"
            " rank samples in the plan, or leave plan= out, to make such a plan."
        )
    several = [r for r, rank in enumerate(plan.ranks) if len(rank.microbatch_sizes) > 1]
    if several:
        sizes = plan.ranks[several[0]].microbatch_sizes
        raise PlanError(
            f"The plan gives rank {several[0]} {len(sizes)} microbatches ({list(sizes)}), but with"
            " manual optimization training_step runs once on each rank, as it updates the"
            f" optimizers. Give each rank one microbatch in the plan: ({sum(sizes)},) there. Or"
            " leave plan= out, to make such a plan, or use automatic optimization."
        )
    if any(rank.offload for rank in plan.ranks):
        raise PlanError(
            "The plan says offload: true, which manual optimization does not support yet. Say"
            " offload: false."
        )


def _plan_before(job: Job, fractions: Sequence[float]) -> Plan:
    """Return the plan until one is applied: an even batch, which counts the steps of an epoch."""
    even = deal(max(job.global_batch_size, len(fractions)), [1] * len(fractions))
    ranks = tuple(RankPlan((n,), f) for n, f in zip(even, fractions, strict=True))
    return Plan(ranks, state_groups=job.state_groups)


def _planned_memory(rank: RankPlan) -> str:
    if rank.memory_bytes is None:
        return ""
    capacity = ""
    if rank.capacity_bytes is not None and math.isfinite(rank.capacity_bytes):
        capacity = f" of the {report.format_bytes(rank.capacity_bytes)} that it may use"
    lower = lower_capacity(rank.memory_bytes, rank.capacity_bytes or math.inf)
    return (
        f"The plan counts on {report.format_bytes(rank.memory_bytes)}{capacity}. One for"
        f" {report.format_bytes(lower)} on this rank would leave room."
    )


def _behind(before: Callable[[], None], collective: Callable[..., Any]) -> Callable[[Any], Any]:
    def both(own: Any) -> Any:
        before()
        return collective(own)

    return both
