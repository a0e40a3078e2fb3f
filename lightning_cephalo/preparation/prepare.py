"""Turns trainer, loaders and options into a plan, in stages that return values.

::

    job = read_job(trainer, control, options)              Job      the training to run
    session = Session(job, ...)                                     sharded; session.py
    job = session.count_on(optimizers, trainer)            Job      with the user's optimizers
    problem = measure_or_load(job, model, trainer)         Problem  speed and memory of the ranks
    plan = make_plan(job, problem, control)                Plan     the work of each rank
    session.apply(plan)                                             rows move

A given plan skips the two stages before the last. Every stage is collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.accelerator.host import processes_on_this_host
from lightning_cephalo.adapters.batch_norm import smallest_microbatch
from lightning_cephalo.adapters.early_update import gradients_leave, late_by_job
from lightning_cephalo.adapters.held_state import OptimizerFacts
from lightning_cephalo.adapters.precision import loss_scaler
from lightning_cephalo.adapters.user_module import step_on
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.batch_layout import BatchLayout
from lightning_cephalo.data.reading import (
    first_rows,
    global_batch_size,
    is_stream,
    learn_layout,
    refuse_one_pass,
    sample_batches,
    yields_ready_batches,
)
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.features.manual_step import PhasedSteps
from lightning_cephalo.plan import InfeasibleError, Plan, PlanError, Problem, solve
from lightning_cephalo.plan.state_groups import groups_by_node
from lightning_cephalo.preparation.limits import (
    Limits,
    check_limits,
    check_plan,
    named_where_nothing_fits,
    with_host_memory,
)
from lightning_cephalo.preparation.options import Options
from lightning_cephalo.profiling import job_cache
from lightning_cephalo.profiling.measure import ProfileOptions, measure
from lightning_cephalo.profiling.memory_model import largest_row
from lightning_cephalo.profiling.probe import ProfiledStep
from lightning_cephalo.profiling.progress import Progress
from lightning_cephalo.profiling.state_rates import (
    has_state_rates,
    measure_state_rates,
    planned_state_bytes,
    trained_sizes,
    with_state_rates,
    with_unit_parameters,
    without_host_updates,
)
from lightning_cephalo.ranks.control import ControlGroup

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


_ROUNDING = 1e-6


@dataclass(frozen=True)
class Loaders:
    """The user's training dataloaders."""

    flat: tuple[Any, ...]
    spec: Any
    mode: str = "max_size_cycle"

    def read(self, size: int, layouts: Sequence[BatchLayout]) -> Any:
        """Return a batch of the first samples; ``size`` is that of the first loader."""
        first = getattr(self.flat[0], "batch_size", None) or 1
        parts = []
        for each, layout in zip(self.flat, layouts or (None,) * len(self.flat), strict=True):
            other = getattr(each, "batch_size", None) or first
            count = size if self.spec is None else max(1, round(size * other / first))
            parts += sample_batches(each, (count,), layout)
        return parts[0] if self.spec is None else pytree.tree_unflatten(parts, self.spec)


@dataclass(frozen=True)
class Job:
    """The training to run, and its limits; equal on every rank.

    Attributes:
        global_batch_size: Samples of a step over all ranks; 0 where nothing is trained.
        ready_samples: Samples of the first ready batch, on the rank with the fewest; None: the
            dataloaders give single samples, or a plan is given.
        plan: The given plan; None: one must be made.
        late: Why updates follow the backward, in a few words; empty: they run inside of it.
        optimizers: What plans count of the optimizers; as of Adam until they exist.
        leaves_batches_whole: Whether no batch is cut or read before training: one rank follows a
            given plan of one microbatch.
        state_groups: The group of every rank, where each group holds the whole state; else empty.
    """

    options: Options
    limits: tuple[Limits, ...]
    global_batch_size: int = 0
    loaders: Loaders = Loaders((), None)
    layouts: tuple[BatchLayout, ...] = ()
    ready_samples: int | None = None
    plan: Plan | None = None
    late: str = ""
    optimizers: OptimizerFacts = field(default_factory=OptimizerFacts)
    leaves_batches_whole: bool = False
    state_groups: tuple[int, ...] = ()

    @classmethod
    def of_evaluation(cls, options: Options, world_size: int) -> Job:
        """Return the job of a run that trains nothing."""
        return cls(options, (Limits.none(),) * world_size)

    @property
    def trains(self) -> bool:
        """Whether anything is trained."""
        return bool(self.loaders.flat)

    @property
    def keeps_gradients(self) -> bool:
        """Whether devices hold the gradients of all their rows at once, until the update."""
        return bool(self.late) and self.options.optimizer_offload is False


# -- reading the job ------------------------------------------------------------------------------


def read_job(
    trainer: Trainer,
    control: ControlGroup,
    options: Options,
    nodes: Sequence[int],
    deals: bool,
) -> Job:
    """Read the training to run; collective.

    ``nodes`` is the node of every rank. ``deals``: each rank reads the same batches, to be dealt.

    Raises:
        PlanError: If the plan, the batch size, or a memory cap does not fit the run.
        RemoteRankError: If any of this failed on another rank.
    """
    failure, world_size = None, control.world_size
    firsts: list[int] = []
    late = ""
    whole = False
    try:
        doing = "reading the training dataloader"
        whole = _leaves_batches_whole(options, world_size)
        loaders = _training_loaders(trainer, is_read=not whole)
        doing = "finding the global batch size"
        own_size = _global_batch_size(loaders, options, world_size)
        doing = "finding how batches can be split"
        layouts = () if whole else read_layouts(loaders, options)
        doing = "reading the memory caps"
        own = _limits(trainer, control, options)
        doing = "finding when updates may run"
        late = "early_update=False"
        if options.planner.early_update:
            late = late_by_job(trainer, trainer.lightning_module)
    except Exception as error:
        failure = error
    control.raise_if_any_failed(failure, doing)
    ready_samples = None
    if options.plan is None and any(_is_ready_stream(each) for each in loaders.flat):
        firsts = control.together(
            "counting the samples of the first batch", partial(_first_rows, loaders, layouts)
        )
    rows = control.gather((own, firsts, late))
    own_limits, everyones, lates = zip(*rows, strict=True)
    if firsts:
        _refuse_ranks_without_batches(everyones)
        ready_samples = min(min(counts) for counts in everyones)
        counts = [counts[0] for counts in everyones]
        own_size = own_size or (counts[0] if deals else sum(counts))
    plan, batch_size = control.together(
        "reading the plan", partial(_plan_and_batch_size, options, world_size, own_size)
    )
    limits = tuple(own_limits)
    check_limits(limits)
    plan = control.broadcast(plan)
    if plan is not None:
        check_plan(plan, limits)
    late = next(filter(None, lates), "")
    groups = _state_groups(options, plan, nodes)
    return Job(
        options,
        limits,
        batch_size,
        loaders,
        layouts,
        ready_samples,
        plan,
        late,
        leaves_batches_whole=whole,
        state_groups=groups,
    )


def _state_groups(options: Options, plan: Plan | None, nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the group of every rank, where each holds the whole state; equal on every rank."""
    given = plan is not None and plan.state_groups
    if not given and (not options.planner.hybrid_sharding or len(nodes) == 1):
        return ()
    if options.optimizer_offload is not False:
        raise UnsupportedError(
            f"optimizer_offload={options.optimizer_offload!r} does not work with hybrid sharding so"
            " far. Leave it out, or hybrid_sharding and state_groups of the plan."
        )
    if plan is not None and given:
        return plan.state_groups
    if plan is not None:
        raise PlanError(
            "Planner(hybrid_sharding=True), but the plan has no state_groups: in it all ranks hold"
            f" the state together. Give a plan with state_groups: {list(nodes)} and shares that"
            " sum to 1 in each, or leave one of the two out."
        )
    if len(set(nodes)) == 1:
        raise PlanError(
            f"Planner(hybrid_sharding=True), but all {len(nodes)} ranks are on one node, so that"
            " there are no groups to hold the whole state each. Nodes are told apart by the"
            " launcher's node number, the host name, the kernel and the network namespace. Leave it"
            " out, or give a plan with state_groups, the group of every rank."
        )
    return groups_by_node(nodes)


def _leaves_batches_whole(options: Options, world_size: int) -> bool:
    if world_size > 1 or options.plan is None:
        return False
    plan = options.plan if isinstance(options.plan, Plan) else Plan.load(options.plan)
    return [len(rank.microbatch_sizes) for rank in plan.ranks] == [1]


def _training_loaders(trainer: Trainer, *, is_read: bool) -> Loaders:
    """Request the training dataloaders from the user's hook, as DeepSpeed's strategy does.

    Private API: they are needed before Lightning's loop requests them, which then gets the same.
    Its ``setup_data`` must not be called early, or a resumed loader would start anew.
    """
    from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    source = trainer.fit_loop._data_source
    if not source.is_defined():
        raise PlanError(
            "fit() was given no training dataloader, which planning needs. Give"
            " fit(module, loader) or fit(module, datamodule=...), or write train_dataloader()."
        )
    vars(source).pop("dataloader", None)  # of a run that has failed before its loop began
    found = _request_dataloader(source)
    if source.is_module():
        _answer_next_request(source, found)
    nested = found.iterables if isinstance(found, CombinedLoader) else found
    flat, spec = pytree.tree_flatten(nested)
    if not flat:
        raise PlanError(
            f"Expects a training dataloader, but got an empty {type(found).__name__}. Give a"
            " DataLoader, or an object whose __iter__ yields batches."
        )
    for each in flat if is_read else ():
        refuse_one_pass(each)
    single = len(flat) == 1 and nested is flat[0]
    mode = found._mode if isinstance(found, CombinedLoader) else Loaders.mode
    return Loaders(tuple(flat), None if single else spec, mode)


def _answer_next_request(source: Any, loaders: Any) -> None:
    """Give Lightning these loaders at the next request; later ones call the user's hook."""

    def dataloader() -> Any:
        del source.dataloader
        return loaders

    source.dataloader = dataloader  # on the instance, for one call


def _global_batch_size(loaders: Loaders, options: Options, world_size: int) -> int | None:
    if options.global_batch_size is not None:
        return options.global_batch_size
    size = global_batch_size(loaders.flat[0], world_size)
    if size is None and options.plan is None and not is_stream(loaders.flat[0]):
        raise PlanError(
            "The training dataloader does not say how many samples a batch has (batch_size=None"
            " with a map-style dataset, or an empty batch sampler). Give"
            " DataLoader(batch_size=...)."
        )
    return size


def _is_ready_stream(loader: Any) -> bool:
    return is_stream(loader) and yields_ready_batches(loader)


def _first_rows(loaders: Loaders, layouts: Sequence[BatchLayout]) -> list[int]:
    """Return the samples of the first batches of the streams of ready batches."""
    pairs = zip(loaders.flat, layouts, strict=True)
    return [first_rows(each, layout) for each, layout in pairs if _is_ready_stream(each)]


def _refuse_ranks_without_batches(everyones: Sequence[Sequence[int]]) -> None:
    without = [rank for rank, counts in enumerate(everyones) if not all(counts)]
    if without:
        raise PlanError(
            f"The training dataloader yields no batch on the ranks {without}, so that nothing can"
            " be measured or planned. Check its data, let it yield the same batches on every rank,"
            " or give a plan that leaves those ranks without samples."
        )


def _plan_and_batch_size(
    options: Options, world_size: int, own_size: int | None
) -> tuple[Plan | None, int]:
    plan = _given_plan(options, world_size, own_size)
    return plan, _check_ranks(plan, world_size, own_size)


def read_layouts(loaders: Loaders, options: Options) -> tuple[BatchLayout, ...]:
    """Return how each dataloader's batches can be cut, learned from its first samples."""
    return tuple(learn_layout(loader, splitter=options.split_batch) for loader in loaders.flat)


def _limits(trainer: Trainer, control: ControlGroup, options: Options) -> Limits:
    strategy: Any = trainer.strategy
    return Limits.read(
        accelerator_of(strategy.root_device),
        processes_on_this_host(strategy.num_processes),
        control.rank,
        control.world_size,
        options.memory_cap,
        options.planner.host_cap,
        options.kept_bytes,
    )


def _given_plan(options: Options, world_size: int, batch_size: int | None) -> Plan | None:
    if options.plan is None:
        return None
    plan = options.plan if isinstance(options.plan, Plan) else Plan.load(options.plan)
    plan.check(world_size=world_size, global_batch_size=batch_size)
    return plan


def _check_ranks(plan: Plan | None, world_size: int, batch_size: int | None) -> int:
    """Return the global batch size: the plan's, or the given one, with a sample for each rank."""
    if plan is not None:
        return plan.global_batch_size
    assert batch_size is not None, "without a plan it was read, or found in the first batch"
    if batch_size < world_size:
        raise PlanError(
            f"There are more ranks than samples: a global batch of {batch_size} for {world_size}"
            " ranks. Raise the DataLoader's batch_size or global_batch_size, use fewer ranks, or"
            " give a plan that leaves some ranks without samples."
        )
    return batch_size


# -- measuring the job, or loading an earlier measurement -----------------------------------------


def measure_or_load(
    job: Job,
    model: ShardedModel,
    trainer: Trainer,
    pause: Callable[[], None],
    manual: PhasedSteps | None = None,
    check: Callable[[Problem], None] = lambda problem: None,
) -> Problem:
    """Return the measured or cached problem, with the choices of the plan; collective.

    Args:
        model: The sharded model; afterwards it holds no full parameters.
        pause: Called between measurements, on all ranks; it may communicate, and raise everywhere.
        manual: Runs steps that call their backwards themselves; None: the executor runs both.
        check: Called with the problem on every rank, if it has been measured now.

    Raises:
        ProfilingError: If a rank fails while it is measured.
        TooLittleMemoryError: If no rank can run the smallest microbatch.
    """
    options, control = job.options, model.control
    offload = _optimizer_offload(job)
    device, smallest = job.limits[control.rank].device, smallest_microbatch(model.module)
    found = job_cache.look_up(
        control,
        device,
        lambda: job_cache.describe(
            model,
            trainer,
            partial(job.loaders.read, smallest, job.layouts),
            job.global_batch_size,
            options.of_measuring(),
        ),
        remeasure=options.planner.remeasure,
    )
    if found.said is not None:
        Progress(options.verbose and control.rank == 0).warn(found.said)
    problem = found.problem
    if problem is None:
        module: Any = model.module
        has_one_microbatch = options.planner.single_microbatch or manual is not None
        with named_where_nothing_fits(job.limits):
            problem = measure(
                model=model,
                trainer=trainer,
                device=device,
                read_batch=partial(job.loaders.read, layouts=job.layouts),
                step=ProfiledStep(
                    partial(step_on, module), trainer.precision_plugin.train_step_context, manual
                ),
                pause=pause,
                global_batch_size=job.global_batch_size,
                options=ProfileOptions(
                    budget_s=options.planner.budget_s,
                    minimum_microbatch_size=smallest,
                    ready_samples=job.ready_samples,
                    single_microbatch=has_one_microbatch,
                    choose_recompute=options.recompute.is_planned and manual is None,
                    verbose=options.verbose,
                ),
            )
        check(problem)
        _keep(problem, found, options, control)
    prices_moves = offload is not False or _gives_moved_state(job)
    if prices_moves and not has_state_rates(problem):
        pause()
        scales = loss_scaler(trainer.precision_plugin) is not None
        rates = measure_state_rates(model, device.capacity_bytes, with_host_updates=not scales)
        problem = with_state_rates(problem, rates)
        _keep(problem, found, options, control)
    model.release_buffers()
    reshard = options.reshard_after_forward.as_given
    problem = replace(problem, reshard_after_forward=reshard, no_idle_ranks=True)
    if manual is not None:
        return replace(problem, reshard_after_forward=True)
    if not job.late:
        problem = problem.with_early_update()
    problem = replace(
        with_unit_parameters(problem, model),
        optimizer_offload=offload,
        sends_gradients=gradients_leave(job.late, trainer) and not job.optimizers.late,
    )
    moves = offload is not False or _gives_moved_state(job)
    problem = with_optimizers(problem, model, job.optimizers, moves)
    if _gives_moved_state(job) and not _gives_host_updates(job):
        problem = without_host_updates(problem)
    # retained activations hold the boundaries: there is only state to offload
    boundaries = options.recompute.default
    if not boundaries and offload is False:
        return problem
    return with_host_memory(problem, [own.host for own in job.limits], boundaries)


def _optimizer_offload(job: Job) -> bool | Literal["auto"]:
    """Return whether the plan may keep optimizer state in host memory, or has to."""
    asked = job.options.optimizer_offload
    if asked is False and not _gives_moved_state(job):
        return False
    has_room = any(own.host.is_apart and own.host.capacity_bytes for own in job.limits)
    why = job.optimizers.stays or ("" if has_room else _NO_HOST)
    if not why:
        return asked or "auto"  # what a given plan does, others may do, too
    if asked is True:
        raise PlanError(
            f"optimizer_offload=True, but optimizer state has to stay on the devices: {why}. Use"
            " optimizer_offload='auto', which moves it only where that can be."
        )
    return False


def with_optimizers(
    problem: Problem, model: ShardedModel, facts: OptimizerFacts, moves_state: bool
) -> Problem:
    """Return a problem that counts what the user's optimizers hold, in place of Adam's moments."""
    planned = planned_state_bytes(model)
    each = facts.most_bytes if moves_state else facts.each_bytes
    if each is not None and not math.isclose(each, planned, rel_tol=_ROUNDING):
        problem = problem.with_moments(each, planned, sum(trained_sizes(model)))
        # a rank may hold a row more than its share
        row_bytes = max(0.0, each - planned) * largest_row(model)[0]
        problem = replace(problem, gathered_bytes=problem.gathered_bytes + row_bytes)
    # only where a plan counts on gradients that go as soon as they are used
    if moves_state and (problem.early_update or problem.sends_gradients):
        problem = problem.with_gradients_that_stay(facts.untrained_bytes)
    return problem


def _gives_moved_state(job: Job) -> bool:
    """Return whether the user's plan keeps optimizer state in host memory without the option."""
    return job.options.optimizer_offload is False and job.plan is not None and job.plan.moves_state


def _gives_host_updates(job: Job) -> bool:
    return job.plan is not None and any(rank.host_update_fraction for rank in job.plan.ranks)


_NO_HOST = (
    "no rank has host memory apart from its device (a CPU's is the same memory, and host_memory_cap"
    " may be 0)"
)


def _keep(
    problem: Problem, found: job_cache.CachedProblem, options: Options, control: ControlGroup
) -> None:
    if control.rank == 0 and found.path is not None:
        lost = job_cache.save(found.path, problem)
        if lost is not None and options.verbose:
            Progress(True).warn(f"The next start of this job will measure again: {lost}")


# -- making the plan ------------------------------------------------------------------------------


def make_plan(job: Job, problem: Problem, control: ControlGroup) -> Plan:
    """Solve for the plan on rank 0, and return it on every rank; collective."""
    with Progress(job.options.verbose and control.rank == 0) as progress:
        progress.say("solving for the plan")
        plan = control.together(
            "solving for the plan", partial(_solved, job, problem, control.rank)
        )
    return control.broadcast(plan)


def _solved(job: Job, problem: Problem, rank: int) -> Plan | None:
    if rank != 0:
        return None
    with named_where_nothing_fits(job.limits):
        try:
            return solve(problem)
        except InfeasibleError as error:
            if job.options.recompute.default:
                raise
            hint = "Recomputation is off: CephaloStrategy(recompute=True) takes less memory."
            raise InfeasibleError(f"{error} {hint}") from None
