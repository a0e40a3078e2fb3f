"""From a model, a loader and ranks to a plan: measured and solved, or given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.host import processes_on_this_host
from lightning_cephalo.adapters import supported
from lightning_cephalo.common.errors import InfeasibleError, PlanError
from lightning_cephalo.common.quantities import format_bytes
from lightning_cephalo.data import BatchLayout, global_batch_size, learn_layout
from lightning_cephalo.data.cutting import BatchCutter
from lightning_cephalo.execution.offload import HostRing
from lightning_cephalo.execution.sharded_model import Engine
from lightning_cephalo.observe import report
from lightning_cephalo.observe.memory_account import RankMemory
from lightning_cephalo.plan import Plan, Problem, RankPlan, solve
from lightning_cephalo.preparation.host_memory import (
    HostMemory,
    describe_host_memory,
    make_ring,
    with_host_memory,
)
from lightning_cephalo.preparation.memory_cap import (
    MemoryCap,
    capped,
    check_plan,
    named_where_nothing_fits,
)
from lightning_cephalo.profiling import job_cache
from lightning_cephalo.profiling.measure import ProfileOptions, measure, read_batch
from lightning_cephalo.profiling.memory_model import check_capacities
from lightning_cephalo.profiling.memory_model import predicted as predicted_memory
from lightning_cephalo.profiling.progress import Progress
from lightning_cephalo.ranks.control import Agreement

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True)
class PlanningOptions:
    """What the user said about batches and planning; see :class:`CephaloStrategy`."""

    global_batch_size: int | None = None
    collate_per_microbatch: bool = False
    split_batch: Callable[[Any, Sequence[int]], list[Any]] | None = None
    equal_microbatches: bool = False
    profile_budget_s: float = 20.0
    remeasure: bool = False
    verbose: bool = True
    host_memory_cap: float | int | None = None
    choose_recompute: bool = False
    reshard_after_forward: bool | Literal["auto"] = "auto"
    memory_cap: MemoryCap | None = None


@dataclass(frozen=True)
class Loaders:
    """The user's training dataloaders.

    Attributes:
        flat: All of them.
        spec: How they are nested; None for a single one.
    """

    flat: tuple[Any, ...]
    spec: Any


@dataclass(frozen=True)
class Preparation:
    """A model ready to train.

    Attributes:
        engine: The model, sharded by the plan.
        plan: The plan.
        cutter: Cuts this rank's batches.
        memory: What the plan predicts that every rank holds; a given plan tells the peak at most.
    """

    engine: Engine
    plan: Plan
    cutter: BatchCutter
    memory: tuple[RankMemory, ...]

    def report_measured(
        self, step_s: float | None, memory: tuple[RankMemory, ...] | None = None
    ) -> None:
        """Print predicted against measured step time and memory."""
        if step_s is not None:
            report.show(report.prediction_table({"step_s": self.plan.step_s}, {"step_s": step_s}))
        if memory is not None:
            report.show(report.memory_table(self.memory, memory))


def prepare(
    *,
    trainer: Trainer,
    agreement: Agreement,
    accelerator: Accelerator,
    plan: Plan | str | PathLike[str] | None,
    options: PlanningOptions,
    make_engine: Callable[..., Engine],
    step: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    num_processes: int,
    enforce: Callable[[float], None],
) -> Preparation:
    """Shard the model by the given plan, or by one measured and solved; collective.

    Args:
        trainer: The trainer that is fitting.
        agreement: Exchanges between ranks.
        accelerator: This rank's device.
        plan: A plan or its path; None to measure.
        options: The user's options.
        make_engine: Shards the model by given fractions.
        step: The user's training step on one batch.
        context: The precision plugin's context of a training step.
        num_processes: Ranks that Lightning started on this host.
        enforce: Told the bytes that this rank may use, before anything runs on it.

    Raises:
        PlanError: If the plan, or the memory cap, does not fit the run.
        InfeasibleError: If there is no plan.
        RemoteRankError: If any of this failed on another rank.
    """
    loaders = supported.together(
        agreement, "reading the training dataloader", partial(_training_loaders, trainer)
    )
    batch_size = supported.together(
        agreement,
        "finding the global batch size",
        partial(_global_batch_size, loaders, plan, options, agreement.world_size),
    )
    layouts = supported.together(
        agreement, "finding how batches can be split", partial(_layouts, loaders, options)
    )
    processes = processes_on_this_host(num_processes)
    device = accelerator.describe(processes)
    device = capped(device, options.memory_cap, agreement)
    caps_bytes = [row[0] for row in agreement.exchange([device.cap_bytes])]
    host = supported.together(
        agreement,
        "reading host_memory_cap",
        partial(describe_host_memory, accelerator, processes, options.host_memory_cap),
    )
    if plan is not None:
        given = supported.together(
            agreement,
            "reading the plan",
            partial(_given_plan, plan, agreement.world_size, batch_size, caps_bytes),
        )
        given = agreement.broadcast(given)
        engine = make_engine(fractions=[rank.state_fraction for rank in given.ranks])
        with named_where_nothing_fits(caps_bytes):
            check_capacities(
                engine, device.cap_bytes, reshard_after_forward=_reshards(given, options)
            )
        enforce(device.cap_bytes)
        _show(given, options, agreement)
        predicted = tuple(RankMemory(peak_bytes=rank.memory_bytes) for rank in given.ranks)
        _obey(given, options, engine, host)
        cutter = _cutter(given.ranks[agreement.rank], layouts, loaders)
        return Preparation(engine, given, cutter, predicted)

    supported.together(
        agreement,
        "checking the number of ranks",
        partial(_check_ranks, agreement.world_size, batch_size),
    )
    engine = make_engine(fractions=_fractions_by_memory(agreement, device.capacity_bytes))
    with named_where_nothing_fits(caps_bytes):
        check_capacities(engine, device.capacity_bytes)
    enforce(device.cap_bytes)
    loader = loaders.flat[0] if loaders.spec is None else loaders
    smallest = supported.smallest_microbatch(engine.module)
    found = job_cache.look_up(
        agreement,
        device,
        lambda: job_cache.describe(
            engine, trainer, partial(read_batch, loader, smallest), batch_size, options
        ),
        remeasure=options.remeasure,
    )
    with Progress(options.verbose and agreement.rank == 0) as progress:
        if found.said is not None:
            progress.warn(found.said)
    problem = found.problem
    if problem is None:
        with named_where_nothing_fits(caps_bytes):
            problem = measure(
                engine=engine,
                trainer=trainer,
                device=device,
                loader=loader,
                layouts=layouts,
                step=step,
                context=context,
                global_batch_size=batch_size,
                options=ProfileOptions(
                    budget_s=options.profile_budget_s,
                    minimum_microbatch_size=smallest,
                    equal_microbatches=options.equal_microbatches,
                    choose_recompute=options.choose_recompute,
                    verbose=options.verbose,
                ),
            )
        _keep(problem, found, options, agreement)
    problem = replace(problem, reshard_after_forward=options.reshard_after_forward)
    if engine.executor.recompute:
        problem = with_host_memory(problem, agreement.exchange_objects(host))
    with Progress(options.verbose and agreement.rank == 0) as progress:
        progress.say("solving for the plan")
        solved = supported.together(
            agreement,
            "solving for the plan",
            partial(_solved, problem, engine.executor.recompute, caps_bytes, agreement.rank),
        )
    solved = agreement.broadcast(solved)
    predicted = predicted_memory(problem, solved, engine)
    engine.change_fractions([rank.state_fraction for rank in solved.ranks])
    _show(solved, options, agreement)
    _obey(solved, options, engine, host)
    cutter = _cutter(solved.ranks[agreement.rank], layouts, loaders)
    return Preparation(engine, solved, cutter, predicted)


def _keep(
    problem: Problem, found: job_cache.Found, options: PlanningOptions, agreement: Agreement
) -> None:
    if agreement.rank == 0 and found.path is not None:
        lost = job_cache.keep(found.path, problem)
        if lost is not None and options.verbose:
            Progress(True).warn(f"The next start of this job will measure again: {lost}")


def _solved(
    problem: Problem, recompute: bool, caps_bytes: Sequence[float], rank: int
) -> Plan | None:
    """The plan, on rank 0."""
    if rank != 0:
        return None
    with named_where_nothing_fits(caps_bytes):
        try:
            return solve(problem)
        except InfeasibleError as error:
            if recompute:
                raise
            hint = "Recomputation is off: CephaloStrategy(recompute=True) takes less memory."
            raise InfeasibleError(f"{error} {hint}") from None


def _obey(plan: Plan, options: PlanningOptions, engine: Engine, host: HostMemory) -> None:
    """Have this rank's steps treat units and activations as the plan says; collective.

    Raises:
        PlanError: If the plan wants boundaries moved that kept activations hold.
        HostMemoryError: If the host has less memory than the plan needs.
    """
    executor, rank = engine.executor, plan.ranks[engine.agreement.rank]
    executor.reshard_after_forward = _reshards(plan, options)
    # at least: with tokens as weights what profiling has left is nearer
    executor.expect_weight(plan.global_batch_size)
    if rank.recompute is not None:
        executor.recompute = rank.recompute
    executor.failure.planned_memory = _planned_memory(rank)

    def ring() -> HostRing | None:
        if rank.offload and not executor.recompute:
            raise PlanError(
                "The plan says offload: true, but recomputation is off, so that activations are"
                " kept and hold what enters them. Use CephaloStrategy(recompute=True), or say"
                " recompute: true in the plan."
            )
        return make_ring(engine.accelerator, host, rank)

    executor.ring = supported.together(engine.agreement, "allocating host memory", ring)


def _reshards(plan: Plan, options: PlanningOptions) -> bool:
    said = plan.reshard_after_forward
    return options.reshard_after_forward is not False if said is None else said


def _cutter(rank: RankPlan, layouts: Sequence[BatchLayout], loaders: Loaders) -> BatchCutter:
    return BatchCutter(tuple(layouts), loaders.spec, rank.microbatch_sizes)


def _planned_memory(rank: RankPlan) -> str:
    if rank.memory_bytes is None:
        return ""
    capacity = ""
    if rank.capacity_bytes is not None and math.isfinite(rank.capacity_bytes):
        capacity = f" of the {format_bytes(rank.capacity_bytes)} that it may use"
    return f"The plan counts on {format_bytes(rank.memory_bytes)}{capacity}."


def _show(plan: Plan, options: PlanningOptions, agreement: Agreement) -> None:
    if options.verbose and agreement.rank == 0:
        report.show(report.plan_table(plan))


def _training_loaders(trainer: Trainer) -> Loaders:
    """Ask the user's hook for the training dataloaders, as DeepSpeed's strategy does.

    Private API: the loaders are needed before Lightning's loop asks for them (its ``setup_data``
    must not be called early, or a resumed loader would start anew).
    """
    from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from torch.utils import _pytree as pytree

    source = trainer.fit_loop._data_source
    if not source.is_defined():
        raise PlanError("fit() was given no training dataloader, which planning needs.")
    found = _request_dataloader(source)
    nested = found.iterables if isinstance(found, CombinedLoader) else found
    flat, spec = pytree.tree_flatten(nested)
    if not flat:
        raise PlanError("train_dataloader() returned no dataloader.")
    single = len(flat) == 1 and nested is flat[0]
    return Loaders(tuple(flat), None if single else spec)


def _global_batch_size(
    loaders: Loaders, plan: Any, options: PlanningOptions, world_size: int
) -> int | None:
    if options.global_batch_size is not None:
        if options.global_batch_size < 1:
            raise PlanError(
                f"global_batch_size: expected 1 or more samples, got {options.global_batch_size}."
            )
        return options.global_batch_size
    size = global_batch_size(loaders.flat[0], world_size)
    if size is None and plan is None:
        raise PlanError(
            "The training dataloader does not say how many samples a batch has (batch_size=None,"
            " or not a DataLoader). Say it with CephaloStrategy(global_batch_size=...)."
        )
    return size


def _layouts(loaders: Loaders, options: PlanningOptions) -> list[BatchLayout]:
    if options.collate_per_microbatch:
        return [BatchLayout() for _ in loaders.flat]
    return [learn_layout(loader, splitter=options.split_batch) for loader in loaders.flat]


def _given_plan(
    plan: Plan | str | PathLike[str],
    world_size: int,
    batch_size: int | None,
    caps_bytes: Sequence[float],
) -> Plan:
    found = plan if isinstance(plan, Plan) else Plan.load(plan)
    found.check(world_size=world_size, global_batch_size=batch_size)
    check_plan(found, caps_bytes)
    return found


def _check_ranks(world_size: int, batch_size: int) -> None:
    if world_size == 1:
        raise PlanError(
            "strategy='cephalo' shares work between ranks, but there is one (world size 1)."
            " Expected two or more: Trainer(devices=2) or more, or use strategy='auto'. To train"
            " one rank by a plan all the same, give it: CephaloStrategy(plan=...)."
        )
    if batch_size < world_size:
        raise PlanError(
            f"There are more ranks than samples: a global batch of {batch_size} for {world_size}"
            " ranks. Raise the DataLoader's batch_size or global_batch_size, use fewer ranks, or"
            " give a plan that leaves some ranks without samples."
        )


def _fractions_by_memory(agreement: Agreement, capacity_bytes: float) -> list[float]:
    """Shares to profile with: a model that fits no even share must still be profiled."""
    capacities = [row[0] for row in agreement.exchange([capacity_bytes])]
    even = [1.0 / agreement.world_size] * agreement.world_size
    if math.isinf(max(capacities)) or min(capacities) > 0.9 * max(capacities):
        return even  # equal slices travel faster
    return [capacity / sum(capacities) for capacity in capacities]
