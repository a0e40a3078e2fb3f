"""From a model, a loader and ranks to a plan: measured and solved, or given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from lightning_cephalo.accelerator.device import Device, describe_device, processes_on_this_host
from lightning_cephalo.adapters import supported
from lightning_cephalo.data import BatchLayout, global_batch_size, learn_layout
from lightning_cephalo.data.cutting import BatchCutter
from lightning_cephalo.execution.offload import HostRing
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.observe import report
from lightning_cephalo.observe.memory_account import RankMemory
from lightning_cephalo.plan import InfeasibleError, Plan, PlanError, Problem, RankPlan, solve
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
from lightning_cephalo.ranks.control import ControlGroup

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

    engine: ShardedModel
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
    control: ControlGroup,
    plan: Plan | str | PathLike[str] | None,
    options: PlanningOptions,
    make_engine: Callable[..., ShardedModel],
    step: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    num_processes: int,
    enforce: Callable[[float], None],
) -> Preparation:
    """Shard the model by the given plan, or by one measured and solved; collective.

    Args:
        trainer: The trainer that is fitting.
        control: Exchanges between ranks.
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
    loaders = control.together(
        "reading the training dataloader", partial(_training_loaders, trainer)
    )
    batch_size = control.together(
        "finding the global batch size",
        partial(_global_batch_size, loaders, plan, options, control.world_size),
    )
    layouts = control.together(
        "finding how batches can be split", partial(_layouts, loaders, options)
    )
    device = _device(trainer, num_processes)
    device = capped(device, options.memory_cap, control)
    caps_bytes = control.gather(device.cap_bytes)
    host = control.together(
        "reading host_memory_cap",
        partial(
            describe_host_memory,
            trainer.strategy.root_device,
            processes_on_this_host(num_processes),
            options.host_memory_cap,
        ),
    )
    if plan is not None:
        given = control.together(
            "reading the plan",
            partial(_given_plan, plan, control.world_size, batch_size, caps_bytes),
        )
        given = control.broadcast(given)
        engine = make_engine(fractions=[rank.state_fraction for rank in given.ranks])
        with named_where_nothing_fits(caps_bytes):
            check_capacities(
                engine, device.cap_bytes, reshard_after_forward=_reshards(given, options)
            )
        enforce(device.cap_bytes)
        _show(given, options, control)
        predicted = tuple(RankMemory(peak_bytes=rank.memory_bytes) for rank in given.ranks)
        _obey(given, options, engine, host)
        cutter = _cutter(given.ranks[control.rank], layouts, loaders)
        return Preparation(engine, given, cutter, predicted)

    control.together(
        "checking the number of ranks",
        partial(_check_ranks, control.world_size, batch_size),
    )
    engine = make_engine(fractions=_fractions_by_memory(control, device.capacity_bytes))
    with named_where_nothing_fits(caps_bytes):
        check_capacities(engine, device.capacity_bytes)
    enforce(device.cap_bytes)
    loader = loaders.flat[0] if loaders.spec is None else loaders
    smallest = supported.smallest_microbatch(engine.module)
    found = job_cache.look_up(
        control,
        device,
        lambda: job_cache.describe(
            engine, trainer, partial(read_batch, loader, smallest), batch_size, options
        ),
        remeasure=options.remeasure,
    )
    with Progress(options.verbose and control.rank == 0) as progress:
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
        _keep(problem, found, options, control)
    problem = replace(problem, reshard_after_forward=options.reshard_after_forward)
    if engine.runner.recompute:
        problem = with_host_memory(problem, control.gather(host))
    with Progress(options.verbose and control.rank == 0) as progress:
        progress.say("solving for the plan")
        solved = control.together(
            "solving for the plan",
            partial(_solved, problem, engine.runner.recompute, caps_bytes, control.rank),
        )
    solved = control.broadcast(solved)
    predicted = predicted_memory(problem, solved, engine)
    engine.change_fractions([rank.state_fraction for rank in solved.ranks])
    _show(solved, options, control)
    _obey(solved, options, engine, host)
    cutter = _cutter(solved.ranks[control.rank], layouts, loaders)
    return Preparation(engine, solved, cutter, predicted)


def _keep(
    problem: Problem, found: job_cache.Found, options: PlanningOptions, control: ControlGroup
) -> None:
    if control.rank == 0 and found.path is not None:
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


def _obey(plan: Plan, options: PlanningOptions, engine: ShardedModel, host: HostMemory) -> None:
    """Have this rank's steps treat units and activations as the plan says; collective.

    Raises:
        PlanError: If the plan wants boundaries moved that kept activations hold.
        HostMemoryError: If the host has less memory than the plan needs.
    """
    runner, rank = engine.runner, plan.ranks[engine.control.rank]
    runner.reshard_after_forward = _reshards(plan, options)
    # at least: with tokens as weights what profiling has left is nearer
    runner.expect_weight(plan.global_batch_size)
    if rank.recompute is not None:
        runner.recompute = rank.recompute
    runner.planned_memory = _planned_memory(rank)

    def ring() -> HostRing | None:
        if rank.offload and not runner.recompute:
            raise PlanError(
                "The plan says offload: true, but recomputation is off, so that activations are"
                " kept and hold what enters them. Use CephaloStrategy(recompute=True), or say"
                " recompute: true in the plan."
            )
        return make_ring(engine.device, host, rank)

    runner.ring = engine.control.together("allocating host memory", ring)


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
        capacity = f" of the {report.format_bytes(rank.capacity_bytes)} that it may use"
    return f"The plan counts on {report.format_bytes(rank.memory_bytes)}{capacity}."


def _show(plan: Plan, options: PlanningOptions, control: ControlGroup) -> None:
    if options.verbose and control.rank == 0:
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


def _fractions_by_memory(control: ControlGroup, capacity_bytes: float) -> list[float]:
    """Shares to profile with: a model that fits no even share must still be profiled."""
    capacities = control.gather(capacity_bytes)
    even = [1.0 / control.world_size] * control.world_size
    if math.isinf(max(capacities)) or min(capacities) > 0.9 * max(capacities):
        return even  # equal slices travel faster
    return [capacity / sum(capacities) for capacity in capacities]


def _device(trainer: Trainer, num_processes: int) -> Device:
    device = trainer.strategy.root_device
    return describe_device(device, processes_on_this_host(num_processes))
