"""Reads the training to run, before the model is sharded: a value that is equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.accelerator.host import processes_on_this_host
from lightning_cephalo.adapters.early_update import late_by_job
from lightning_cephalo.adapters.held_state import OptimizerFacts
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.batch_layout import BatchLayout
from lightning_cephalo.data.loaders import (
    first_batch,
    global_batch_size,
    is_stream,
    learn_layout,
    refuse_one_pass,
    sample_batches,
    yields_ready_batches,
)
from lightning_cephalo.plan import Plan, PlanError
from lightning_cephalo.plan.state_groups import groups_by_node
from lightning_cephalo.preparation.limits import Limits, check_cap, check_plan, read_limits
from lightning_cephalo.preparation.options import Options
from lightning_cephalo.ranks.groups import Groups


@dataclass(frozen=True)
class Loaders:
    """The user's training dataloaders."""

    flat: tuple[Any, ...]
    spec: Any

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
        return cls(options, (Limits(),) * world_size)

    @property
    def trains(self) -> bool:
        """Whether anything is trained."""
        return bool(self.loaders.flat)

    @property
    def keeps_gradients(self) -> bool:
        """Whether devices hold the gradients of all their rows at once, until the update."""
        return bool(self.late) and self.options.optimizer_offload is False


def read_job(view: TrainerView, groups: Groups, options: Options, deals: bool) -> Job:
    """Read the training to run; collective. ``deals``: ranks read the same batches, to be dealt.

    Raises:
        PlanError: If the plan, the batch size, or a memory cap does not fit the run.
        RemoteRankError: If any of this failed on another rank.
    """
    control = groups.control
    ranks, together = control.world_size, control.together
    plan: Plan | None = together("reading the plan", partial(_given_plan, options))
    whole = ranks == 1 and plan is not None and len(plan.ranks[0].microbatch_sizes) == 1
    loaders: Loaders = together(
        "reading the training dataloader", partial(_training_loaders, view, is_read=not whole)
    )
    size: int | None = together(
        "finding the global batch size", partial(_global_batch_size, loaders, options, ranks)
    )
    layouts: tuple[BatchLayout, ...] = together(
        "finding how batches can be split", lambda: () if whole else read_layouts(loaders, options)
    )
    own = together("reading the memory caps", partial(_limits, view, control.rank, ranks, options))
    limits = tuple(control.gather(own))
    late = together("finding when updates may run", partial(_late, view, options))
    late = next(filter(None, control.gather(late)), "")
    ready_samples = None
    if plan is None and any(map(_is_ready_stream, loaders.flat)):
        count = partial(_first_rows, loaders, layouts)
        counts: list[tuple[int, ...]] = control.gather(
            together("counting the samples of the first batch", count)
        )
        _refuse_ranks_without_batches(counts)
        ready_samples = min(map(min, counts))
        firsts = [each[0] for each in counts]
        size = size or (firsts[0] if deals else sum(firsts))
    size = together("reading the plan", partial(_checked_size, plan, ranks, size))
    plan = control.broadcast(plan)
    if plan is not None:
        check_plan(plan, limits)
    return Job(
        options,
        limits,
        size,
        loaders,
        layouts,
        ready_samples,
        plan,
        late,
        leaves_batches_whole=whole,
        state_groups=_state_groups(options, plan, groups.nodes),
    )


def _given_plan(options: Options) -> Plan | None:
    plan = options.plan
    return plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)


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


def _training_loaders(view: TrainerView, *, is_read: bool) -> Loaders:
    """Request the training dataloaders from the user's hook, as DeepSpeed's strategy does."""
    if not view.loader_source.is_defined():
        raise PlanError(
            "fit() was given no training dataloader, which planning needs. Give"
            " fit(module, loader) or fit(module, datamodule=...), or write train_dataloader()."
        )
    found = view.request_loaders()
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
    return Loaders(tuple(flat), None if single else spec)


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


def _first_rows(loaders: Loaders, layouts: Sequence[BatchLayout]) -> tuple[int, ...]:
    """Return the samples of the first batches of the streams of ready batches."""
    pairs = zip(loaders.flat, layouts, strict=True)
    return tuple(first_batch(each, layout)[1] for each, layout in pairs if _is_ready_stream(each))


def _refuse_ranks_without_batches(everyones: Sequence[Sequence[int]]) -> None:
    without = [rank for rank, counts in enumerate(everyones) if not all(counts)]
    if without:
        raise PlanError(
            f"The training dataloader yields no batch on the ranks {without}, so that nothing can"
            " be measured or planned. Check its data, let it yield the same batches on every rank,"
            " or give a plan that leaves those ranks without samples."
        )


def read_layouts(loaders: Loaders, options: Options) -> tuple[BatchLayout, ...]:
    """Return how each dataloader's batches can be cut, learned from its first samples."""
    return tuple(learn_layout(loader, splitter=options.split_batch) for loader in loaders.flat)


def _late(view: TrainerView, options: Options) -> str:
    if not options.planner.early_update:
        return "early_update=False"
    return late_by_job(view, view.module)


def _limits(view: TrainerView, rank: int, ranks: int, options: Options) -> Limits:
    check_cap("memory_cap", options.memory_cap, ranks)
    strategy = view.strategy
    processes = processes_on_this_host(strategy.num_processes)
    return read_limits(accelerator_of(strategy.root_device), processes, rank, options)


def _checked_size(plan: Plan | None, ranks: int, size: int | None) -> int:
    """Return the global batch size: the plan's, or the given one, with a sample for each rank."""
    if plan is not None:
        plan.check(world_size=ranks, global_batch_size=size)
        return plan.global_batch_size
    if size is None or size < ranks:
        raise PlanError(
            f"There are more ranks than samples: a global batch of {size} for {ranks} ranks. Raise"
            " the DataLoader's batch_size or global_batch_size, use fewer ranks, or give a plan"
            " that leaves some ranks without samples."
        )
    return size
