"""Holds the state of a Trainer run from ``setup`` to ``teardown``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.adapters.averaged_weights import AveragedWeights
from lightning_cephalo.adapters.batch_norm import warn_of_microbatches
from lightning_cephalo.adapters.checkpoint import load_full_optimizer_state
from lightning_cephalo.adapters.early_update import late_by_optimizer, late_by_options
from lightning_cephalo.adapters.held_state import OptimizerFacts, RowsOfState
from lightning_cephalo.adapters.logging import StepLogs
from lightning_cephalo.adapters.precision import compute_dtype, loss_scaler
from lightning_cephalo.adapters.torchmetrics import metrics_within, synchronise_lists
from lightning_cephalo.adapters.updates import OptimizerUpdates
from lightning_cephalo.adapters.user_collectives import CollectiveWatch
from lightning_cephalo.adapters.user_module import refuse_copies, switch_off_caches
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import TooLittleMemoryError
from lightning_cephalo.common.lasting_objects import LastingObjects
from lightning_cephalo.common.quantities import format_bytes, format_mib
from lightning_cephalo.data.shares import deal
from lightning_cephalo.execution.memory_errors import is_out_of_memory
from lightning_cephalo.execution.offload import HostArena
from lightning_cephalo.execution.sharded_model import Dtypes, ShardedModel
from lightning_cephalo.features.install import install
from lightning_cephalo.features.manual_step import PhasedSteps
from lightning_cephalo.observe.memory import RankMemory, TrainingMemory
from lightning_cephalo.plan import Plan, PlanError, RankPlan
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
from lightning_cephalo.profiling.memory_model import check_capacities
from lightning_cephalo.ranks.control import NotCopied
from lightning_cephalo.ranks.groups import Groups


@dataclass(frozen=True)
class Adoption:
    """A plan that all ranks have accepted."""

    plan: Plan
    arena: HostArena | None  # this rank's, for boundaries


class Session(NotCopied):
    """A sharded model, the plan that it follows, and the objects that serve its steps.

    ::

        session = Session(job, view, groups)            # shards the model
        session.adopt(session.accept(plan))             # again between two steps
        session.close()                                 # restores the full module

    Creating a session is collective, and so are most of its methods. ``plan`` is that in use.
    Before the first one, and in evaluation, it only holds the fractions of the model.
    """

    memory: TrainingMemory

    def __init__(self, job: Job, view: TrainerView, groups: Groups) -> None:
        accelerator = accelerator_of(view.strategy.root_device)
        options, module, dtype = job.options, view.module, compute_dtype(view.precision)
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
        self.plan = _plan_before(job, self.model.fractions)
        executor, control = self.model.executor, self.control
        install(executor)
        executor.recompute = bool(options.recompute)
        executor.overlay.buffers.sum_up(options.summed_buffers)
        refuse_copies(module, self._at_end)
        if job.trains:
            switch_off_caches(module, self._at_end)
        self.logs = StepLogs(view, groups, lambda: self.batches.are_lacking)
        if control.world_size > 1:
            metrics = metrics_within(module, view.callbacks)
            synchronise_lists(metrics, control, lambda: executor.inside_microbatch, self._at_end)
        self.manual: PhasedSteps | None = None
        if job.trains and not module.automatic_optimization:
            self.manual = PhasedSteps(executor)
        if control.world_size > 1:
            watch, manual = CollectiveWatch(), self.manual  # whose steps run once on every rank
            self._at_end.callback(watch.close)
            executor.hooks.watch = partial(watch.watched, lambda: bool(manual and manual.running))
        self.batches = Batches(job, control, is_manual=self.manual is not None)
        self.optimizers: list[Optimizer] = []
        self.updates = OptimizerUpdates(self.model, options.planner.elementwise)
        self._averages = AveragedWeights(module, ())
        self._late = ""  # why steps update behind the backward, of what may change between them
        self._host_state = HostState(self.model, job.limits[control.rank].host, control.rank)
        self.moved = self._host_state.moved
        self._at_end.callback(self.moved.close)

    # -- training -----------------------------------------------------------------------------

    def count_on(self, optimizers: Sequence[Optimizer]) -> None:
        """Let plans count on what the optimizers hold, and when they may update; collective."""
        for optimizer in optimizers:
            self.updates.are_by_rows(optimizer)  # or raise
        facts = OptimizerFacts.of(optimizers, self.model, self.view)
        self.job = replace(self.job, late=self.job.late or facts.late, optimizers=facts)

    def use_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the optimizers update their rows by the plan; collective."""

        def place() -> None:
            self._host_state.check_room(self.plan.ranks[self.control.rank], optimizers)
            self._host_state.follow(self.plan, optimizers)

        self.hold(optimizers)
        for optimizer in optimizers:
            self.updates.of(optimizer)
        self.control.together("allocating host memory", place)
        if optimizers:
            self.model.executor.updates.mover = self.moved

    def load_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load an optimizer state of full tensors, to where the plan has it; collective."""
        owned = self.updates.of(optimizer)
        placed = self.moved.placed if owned is None else owned.placed
        load_full_optimizer_state(optimizer, state, placed)
        self.moved.settle(optimizer)

    @property
    def predicted_memory(self) -> tuple[RankMemory, ...]:
        """The peak and the host memory of every rank under the plan."""
        memory = [
            RankMemory(
                peak_bytes=rank.memory_bytes,
                host_bytes=(rank.host_bytes or 0.0) + (rank.state_host_bytes or 0.0),
            )
            for rank in self.plan.ranks
        ]
        return self._host_state.predicted(self.plan, memory, self.optimizers)

    def look_for_early_update(self, optimizer: Optimizer) -> None:
        """Look whether the next step may update units early; called on every rank before it."""
        before = self.job.late or self._late
        late = before or late_by_optimizer(optimizer) or late_by_options(self.view)
        if late != before:
            self._late = late
            warnings.warn(
                f"Updates of this step and later ones follow the backward: {late}. So ranks hold"
                " all gradients, which the plan may not count.",
                stacklevel=2,
            )
        self.moved.begin(optimizer)
        self.model.executor.updates.are_exact = not late

    def enforce_limits(self) -> None:
        """Enforce every rank's limits; if any is too small, raise TooLittleMemoryError on all."""
        job = self.job
        device, given = job.limits[self.control.rank].device, job.plan
        option = job.options.reshard_after_forward
        reshards = given is None or chosen(option, given.reshard_after_forward)
        # a given plan must obey the cap; the device's free memory is the user's concern
        most = device.capacity_bytes if given is None else device.cap_bytes
        keeps = given is not None or job.keeps_gradients
        with named_where_nothing_fits(job.limits):
            check_capacities(self.model, most, keeps, reshard_after_forward=reshards)
        self._at_end.callback(self.model.accelerator.limit_memory(device.cap_bytes))

    # -- plans --------------------------------------------------------------------------------

    def accept(self, plan: Plan, *, keeps_gradients: bool = False) -> Adoption:
        """Check a plan, and allocate what it needs; collective."""
        together = self.control.together
        together("checking the plan", partial(self.check, plan))
        self.check_move(plan, keeps_gradients)
        arena = together("allocating host memory", partial(self._host_memory_of, plan))
        return Adoption(plan, arena)

    def adopt(self, adoption: Adoption, *, keeps_gradients: bool = False) -> None:
        """Follow a plan from the next step on; collective.

        If shards move, gradients are forgotten, except with manual optimization.
        """
        plan, own = adoption.plan, adoption.plan.ranks[self.control.rank]
        self.model.release_buffers()  # modes decide which of them are needed
        if _shares(plan) != self.model.fractions:
            state = self._rows_of_state(keeps_gradients)
            self.model.change_fractions(_shares(plan), state.of)
        self.plan = plan
        if self.model.executor.updates.mover is not None:  # else the optimizers are not in use yet
            self._host_state.follow(plan, self.optimizers)
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
        job, is_manual = self.job, self.manual is not None
        counts = [len(rank.microbatch_sizes) for rank in plan.ranks]
        offloads = [rank for rank in plan.ranks if rank.offload]
        check_plan(plan, job.limits, job.global_batch_size)
        check_homes(plan, job.optimizers.stays, loss_scaler(self.view.precision) is not None)
        refusals = (
            (
                members_of(plan.groups, plan.world_size) != self.model.members,
                f"The plan says groups: {list(plan.groups) or 'none'}, but this"
                f" training has begun with {list(self.model.state_groups) or 'none'}. A plan"
                " cannot change them while training: begin with such a plan.",
            ),
            (
                is_manual and set(counts) != {1},
                f"The plan gives ranks {counts} microbatches, but with manual optimization"
                " training_step runs once on every rank, as it updates the optimizers. Give each"
                " rank one microbatch in the plan, or leave plan= out.",
            ),
            (
                is_manual and bool(offloads),
                "The plan says offload: true, which manual optimization does not support. Say"
                " offload: false.",
            ),
            (
                not all(chosen(job.options.recompute, rank.recompute) for rank in offloads),
                "The plan says offload: true, but recomputation is off, so that activations are"
                " kept and hold what enters them. Use CephaloStrategy(recompute=True), or say"
                " recompute: true in the plan.",
            ),
            (
                bool(plan.early_update and job.late),
                "The plan says early_update: true, so that its memory lacks gradients, but updates"
                f" follow the backward: {job.late}. Leave early_update out of the plan.",
            ),
        )
        for is_wrong, why in refusals:
            if is_wrong:
                raise PlanError(why)

    def check_move(self, plan: Plan, keeps_gradients: bool = False) -> None:
        """Raise on every rank if shards must move to follow a plan, but cannot; collective."""
        model, shares = self.model, _shares(plan)
        if shares == model.fractions:
            return
        state = self._rows_of_state(keeps_gradients)
        state.check(model.flats, self.control)
        needed = model.bytes_to_move(shares, state.of)
        # pools are empty by then
        needed = max(0, needed - sum(pool.held_bytes for pool in model.buffer_pools))

        def allocate() -> None:
            try:
                torch.empty(needed, dtype=torch.uint8, device=model.device)
            except Exception as failure:
                if not is_out_of_memory(failure):
                    raise
                raise TooLittleMemoryError(
                    f"Rank {self.control.rank} needs {format_mib(needed)} more to move rows to"
                    " other ranks, and has less. Use a plan whose shares of the model are nearer to"
                    " the present ones."
                ) from failure

        self.control.together("looking for memory to move rows in", allocate)

    def _host_memory_of(self, plan: Plan) -> HostArena | None:
        """Return this rank's host memory for a plan; that of the present plan if it is enough."""
        own, arena = plan.ranks[self.control.rank], self.model.executor.arena
        self._host_state.check_room(own, self.optimizers)
        if own.offload and arena is not None and (own.host_bytes or 0.0) <= arena.held_bytes:
            return arena
        host = self.job.limits[self.control.rank].host
        return reserve_host_memory(self.model.accelerator, host, own)

    def _rows_of_state(self, keeps_gradients: bool = False) -> RowsOfState:
        by_rows = [one for one in self.optimizers if self.updates.of(one) is None]
        # with manual optimization, only the user's code knows which gradients are needed still
        kept = self.model.flats if self.manual is not None or keeps_gradients else ()
        return RowsOfState(by_rows, self._averages.pairs(), kept)

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
        with self._at_end, self.model.accelerator.on_host():
            self._averages.restore_full()
            self.model.restore_full()

    def close_after_failure(self) -> None:
        """Restore the full module if every rank can, where all have raised; collective."""
        model = self.model

        def try_to_gather() -> None:
            model.release_buffers()
            model.accelerator.synchronize()
            most = max((flat.contents.master_bytes for flat in model.flats), default=0)
            torch.empty(most, dtype=torch.uint8, device=model.device)

        try:
            self.control.together("restoring the model", try_to_gather)
        except Exception:
            # the user sees the error that ended the run; the next run refuses the shards by name
            self.abandon()
        else:
            self.close()

    def abandon(self) -> None:
        """Leave without communicating after a failure, as other ranks may be gone."""
        with self._at_end:
            self.model.abandon()


def _shares(plan: Plan) -> tuple[float, ...]:
    return tuple(rank.state_fraction for rank in plan.ranks)


def _plan_before(job: Job, fractions: Sequence[float]) -> Plan:
    """Return the plan until one is applied: an even batch, which counts the steps of an epoch."""
    even = deal(max(job.global_batch_size, len(fractions)), [1] * len(fractions))
    ranks = tuple(RankPlan((n,), f) for n, f in zip(even, fractions, strict=True))
    return Plan(ranks, groups=job.state_groups)


def _planned_memory(rank: RankPlan) -> str:
    if rank.memory_bytes is None:
        return ""
    lower = lower_capacity(rank.memory_bytes, rank.capacity_bytes or math.inf)
    return (
        f"The plan counts on {format_bytes(rank.memory_bytes)}. One for {format_bytes(lower)} on"
        " this rank would leave room."
    )
