"""Holds the state of a Trainer run from ``setup`` to ``teardown``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.backends import backend_of
from lightning_cephalo.adapters.averaged_weights import AveragedWeights
from lightning_cephalo.adapters.batch_norm import warn_of_microbatches
from lightning_cephalo.adapters.checkpoint import (
    load_full_optimizer_state,
    release_optimizer,
    shard_optimizer,
)
from lightning_cephalo.adapters.early_update import EarlyUpdater
from lightning_cephalo.adapters.held_state import OptimizerFacts, RowsOfState
from lightning_cephalo.adapters.logging import StepLogs
from lightning_cephalo.adapters.module_copies import ModuleCopies
from lightning_cephalo.adapters.moved_state import MovedState
from lightning_cephalo.adapters.precision import compute_dtype, loss_scaler
from lightning_cephalo.adapters.torchmetrics import metrics_within, synchronise_lists
from lightning_cephalo.adapters.updates import OptimizerUpdates
from lightning_cephalo.adapters.user_collectives import CollectiveWatch, UserCollectives
from lightning_cephalo.adapters.user_module import switch_off_caches
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import TooLittleMemoryError, UnsupportedError
from lightning_cephalo.common.lasting_objects import LastingObjects
from lightning_cephalo.common.quantities import format_bytes, format_mib
from lightning_cephalo.data.shares import deal
from lightning_cephalo.execution.memory_errors import is_out_of_memory
from lightning_cephalo.execution.offload import HostArena
from lightning_cephalo.execution.sharded_model import Dtypes, ShardedModel
from lightning_cephalo.features.install import install
from lightning_cephalo.features.manual_step import PhasedSteps
from lightning_cephalo.observe.memory import RankMemory, TrainingMemory
from lightning_cephalo.plan import Plan, PlanError, Problem, RankPlan
from lightning_cephalo.plan.memory_pressure import lower_capacity
from lightning_cephalo.plan.state_groups import members_of
from lightning_cephalo.preparation.batches import Batches
from lightning_cephalo.preparation.first_shares import first_shares
from lightning_cephalo.preparation.host_state import HostState, check_homes
from lightning_cephalo.preparation.job import Job
from lightning_cephalo.preparation.limits import (
    check_plan,
    named_where_nothing_fits,
    reserve_host_memory,
)
from lightning_cephalo.preparation.options import chosen
from lightning_cephalo.profiling.memory_model import check_capacities, predicted, state_bytes
from lightning_cephalo.ranks.control import not_connected
from lightning_cephalo.ranks.groups import Groups


@dataclass(frozen=True)
class Adoption:
    """A plan that all ranks have accepted.

    Attributes:
        memory: The predicted memory of every rank, by kind.
        arena: This rank's host memory for boundaries, allocated; None: none is offloaded.
    """

    plan: Plan
    memory: tuple[RankMemory, ...]
    arena: HostArena | None


class Session:
    """A sharded model, the plan that it follows, and the objects that serve its steps.

    ::

        session = Session(job, view, groups, accelerator)                # shards the model
        session.adopt(session.accept(plan))                              # again between two steps
        ...
        session.close()                                                  # restores the full module

    Creating a session is collective, and so are most of its methods.

    Args:
        job: The training to run, or :meth:`Job.of_evaluation`.
        view: Of the Trainer, with the user's module; the values of rank 0 are used.

    Attributes:
        plan: The plan in use. Before the first one, and in evaluation, it only holds the fractions
            of the model.
        batches: What this rank gets of each batch.
        user_collectives: Rejects collectives of the user's step that would hang.
        lasting: Keeps the garbage collector away from what lives as long as training.
    """

    memory: TrainingMemory

    def __init__(
        self, job: Job, view: TrainerView, groups: Groups, accelerator: Accelerator
    ) -> None:
        options, module, dtype = job.options, view.module, compute_dtype(view.precision)
        if job.state_groups and backend_of(groups.gather).runs_on_device:
            raise UnsupportedError(
                "Hybrid sharding adds up gradients across nodes over gloo only so far, but these"
                " ranks communicate by a backend of their devices. Use"
                " CephaloStrategy(process_group_backend='gloo'), or leave hybrid_sharding and"
                " state_groups out."
            )
        self.job, self.view = job, view
        self._at_end = ExitStack()
        self.lasting = LastingObjects()
        self._at_end.callback(self.lasting.end)
        self.groups, self.control = groups, groups.control
        self.model = ShardedModel(
            module,
            groups,
            accelerator,
            fractions=partial(first_shares, job, compute_dtype=dtype),
            units=options.units,
            dtypes=Dtypes(dtype, options.gradient_dtype),
            state_groups=job.state_groups,
        )
        install(self.model.executor)
        self.model.executor.recompute = bool(options.recompute)
        self.model.executor.overlay.buffers.sum_up(options.summed_buffers)
        self._at_end.callback(ModuleCopies(self.model).remove)
        if job.trains:
            self._at_end.callback(switch_off_caches(module))
        self.plan = _plan_before(job, self.model.fractions)
        self._scales_loss = loss_scaler(view.precision) is not None
        self.logs = StepLogs(view, groups, accelerator.device, lambda: self.batches.are_lacking)
        if groups.control.world_size > 1:
            executor = self.model.executor
            metrics = metrics_within(module, view.callbacks)
            end = synchronise_lists(metrics, groups.control, lambda: executor.inside_microbatch)
            self._at_end.callback(end)
        measured = (1,) if options.planner.single_microbatch else None
        self.user_collectives = UserCollectives(groups.control, measured)
        self.manual: PhasedSteps | None = None
        if job.trains and not module.automatic_optimization:
            self.manual = PhasedSteps(self.model.executor)
        elif groups.control.world_size > 1:
            watch = CollectiveWatch(self.user_collectives.called)
            self._at_end.callback(watch.close)
            self.model.executor.hooks.watch = watch.watched
        self.batches = Batches(job, groups.control, is_manual=self.manual is not None)
        self.optimizers: list[Optimizer] = []
        self.updates = OptimizerUpdates(self.model, options.planner.elementwise)
        self.predicted_memory: tuple[RankMemory, ...] = ()
        self._averages: AveragedWeights | None = None
        self._updater: EarlyUpdater | None = None
        rank = groups.control.rank
        self._host_state = HostState(self.model, job.limits[rank].host, rank)
        self._at_end.callback(self.moved.close)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Make None of a copy: users copy callbacks, and with them the strategy."""
        return not_connected, ()

    @property
    def moved(self) -> MovedState:
        """Optimizer state that may live in host memory."""
        return self._host_state.moved

    # -- training -----------------------------------------------------------------------------

    @property
    def late(self) -> str:
        """Why updates follow the backward, in a few words; empty: they run inside of it."""
        return self.job.late

    def count_on(self, optimizers: Sequence[Optimizer]) -> None:
        """Let plans count on what the optimizers hold, and when they may update; collective."""
        for optimizer in optimizers:
            self.updates.scope(optimizer)  # or raise
        facts = OptimizerFacts.of(optimizers, self.model, self.view)
        self.job = replace(self.job, late=self.job.late or facts.late, optimizers=facts)

    def use_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the optimizers hold their rows, and update them by the plan; collective.

        Raises:
            UnsupportedError: On every rank, if an optimizer cannot train as on one device.
        """
        placed = self._host_state.placing(self.plan)

        def shard() -> None:
            for optimizer in optimizers:
                shard_optimizer(optimizer, self.model, placed)

        self.control.together("sharding the optimizers", shard)
        self.hold(optimizers)
        for optimizer in optimizers:
            self.updates.of(optimizer)
        place = partial(self._place_state, self.plan.ranks[self.control.rank])
        self.control.together("allocating host memory", place)
        self._predict_host_memory()
        if not optimizers:
            return
        consequence = ""
        if self.plan.early_update:
            more_bytes = state_bytes(self.model) - state_bytes(self.model, early=True)
            most = format_mib(more_bytes * max(self.model.fractions))
            consequence = f" The plan counts on early ones: ranks hold up to {most} more."
        self._updater = EarlyUpdater(optimizers[0], self.view, self.moved, self.late, consequence)
        updates = self.model.executor.updates
        updates.updater, updates.mover = self._updater, self.moved

    def _place_state(self, own: RankPlan) -> None:
        self._host_state.check_room(own, self.optimizers)
        self._host_state.follow(self.plan, self.optimizers)

    def load_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load an optimizer state of full tensors, to where the plan has it; collective."""
        owned = self.updates.of(optimizer)
        placed = self._host_state.placing(self.plan) if owned is None else owned.placed
        load_full_optimizer_state(optimizer, state, placed)
        self.moved.settle(optimizer)

    def _predict_host_memory(self) -> None:
        memory = self._host_state.predicted(self.plan, self.predicted_memory, self.optimizers)
        self.predicted_memory = memory

    def look_for_early_update(self, optimizer: Optimizer) -> None:
        """Look whether the next step may update units early; called on every rank before it."""
        if self._updater is not None:
            self.model.executor.updates.sends_gradients = self._updater.look(optimizer)

    def enforce_limits(self) -> None:
        """Enforce every rank's limits; if any is too small, raise TooLittleMemoryError on all."""
        job = self.job
        device, given = job.limits[self.control.rank].device, job.plan
        with named_where_nothing_fits(job.limits):
            if given is None:
                check_capacities(self.model, device.capacity_bytes, job.keeps_gradients)
            else:  # a given plan must obey the cap; the device's free memory is the user's concern
                reshards = chosen(job.options.reshard_after_forward, given.reshard_after_forward)
                check_capacities(self.model, device.cap_bytes, reshard_after_forward=reshards)
        self._at_end.callback(self.model.accelerator.limit_memory(device.cap_bytes))

    # -- plans --------------------------------------------------------------------------------

    def accept(
        self, plan: Plan, problem: Problem | None = None, *, keeps_gradients: bool = False
    ) -> Adoption:
        """Look whether this training can follow a plan, and allocate what it needs; collective.

        Args:
            problem: What it was made for; None: its memory is known by its own figures only.
            keeps_gradients: Whether gradients move with the rows.

        Raises:
            PlanError: On every rank, if the plan does not fit this training.
            UnsupportedError: On every rank, if shards must move, but state that goes with them
                cannot.
            HostMemoryError: If the host has less memory than the plan needs.
            TooLittleMemoryError: If a rank has too little memory to move rows.
        """
        together = self.control.together
        together("checking the plan", partial(self.check, plan))
        self.check_move(plan, keeps_gradients)
        arena = together("allocating host memory", partial(self._host_memory_of, plan))
        peaks = (RankMemory(peak_bytes=rank.memory_bytes) for rank in plan.ranks)
        memory = tuple(peaks) if problem is None else predicted(problem, plan, self.model)
        return Adoption(plan, memory, arena)

    def adopt(self, adoption: Adoption, *, keeps_gradients: bool = False) -> None:
        """Follow a plan from the next step on; collective. :meth:`check_move` has come before.

        Shards move, and what optimizers and averages hold of their rows. If shards move, gradients
        are forgotten, except with manual optimization: call it between two steps.
        """
        plan, own = adoption.plan, adoption.plan.ranks[self.control.rank]
        self.model.release_buffers()  # modes decide which of them are needed
        self._move_shards(plan, keeps_gradients)
        self.plan = plan
        if self._updater is not None:  # else the optimizers hold no rows yet
            self._host_state.follow(plan, self.optimizers)
        self.predicted_memory = adoption.memory
        self._predict_host_memory()
        self.user_collectives.expect([len(rank.microbatch_sizes) for rank in plan.ranks])
        self.batches.follow(own)
        options, executor = self.job.options, self.model.executor
        executor.reshard_after_forward = chosen(
            options.reshard_after_forward, plan.reshard_after_forward
        )
        self.model.padding.is_on = plan.shares_are_even and plan.padded is not False
        # a lower bound: where weights are tokens, the total that measuring left is closer
        executor.weighing.whole_batch = float(plan.global_batch_size)
        executor.recompute = chosen(options.recompute, own.recompute)
        executor.failure.planned_memory = _planned_memory(own)
        executor.arena = adoption.arena
        warn = partial(warn_of_microbatches, self.model.module, plan, self.control.rank)
        self.control.together("looking for batch normalisation", warn)

    def check(self, plan: Plan) -> None:
        """Raise if this training cannot follow a plan: for other ranks, or in another way."""
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
        check_homes(plan, job.optimizers.stays, self._scales_loss)
        self.user_collectives.check([len(rank.microbatch_sizes) for rank in plan.ranks])

    def check_modes(self, plan: Plan) -> None:
        """Raise if the way to train allows no such plan, on any rank."""
        if self.manual is not None:
            _refuse_with_manual_optimization(plan)
        recompute = self.job.options.recompute
        if any(rank.offload and not chosen(recompute, rank.recompute) for rank in plan.ranks):
            raise PlanError(
                "The plan says offload: true, but recomputation is off, so that activations are"
                " kept and hold what enters them. Use CephaloStrategy(recompute=True), or say"
                " recompute: true in the plan."
            )
        if plan.early_update and self.late:
            raise PlanError(
                "The plan says early_update: true, so that its memory lacks gradients, but updates"
                f" follow the backward: {self.late}. Leave early_update out of the plan."
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

    def _host_memory_of(self, plan: Plan) -> HostArena | None:
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
        self.model.change_fractions(fractions, self._rows_of_state(keeps_gradients).of)

    def shard_averages(self, callbacks: Sequence[Any]) -> None:
        """Shard the averages that callbacks hold, now and as plans change; collective."""
        self._averages = AveragedWeights(self.model.module, callbacks)

    def hold(self, optimizers: Sequence[Optimizer]) -> None:
        """Let plans move the state of these optimizers."""
        self.optimizers = list(optimizers)

    def start_training(self) -> None:
        """Measure this rank's memory from now on, its optimizers' included."""
        self.lasting.begin()
        keeps_looks = self.job.options.record is not None
        self.memory = TrainingMemory(self.model, self.optimizers, self.moved, keeps_looks)

    def measured_memory(self) -> tuple[RankMemory, ...] | None:
        """Return the memory of every rank in training; None before two steps; collective."""
        rows = self.control.gather(self.memory.measured())
        return tuple(rows) if all(rank is not None for rank in rows) else None

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
        capacity = f" of the {format_bytes(rank.capacity_bytes)} that it may use"
    lower = lower_capacity(rank.memory_bytes, rank.capacity_bytes or math.inf)
    return (
        f"The plan counts on {format_bytes(rank.memory_bytes)}{capacity}. One for"
        f" {format_bytes(lower)} on this rank would leave room."
    )
