"""Reads the training to run, before the model is sharded: a value that is equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.accelerator.backends import backend_of
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
    """The user's training dataloaders, and how batches of each can be cut."""

    flat: tuple[Any, ...] = ()
    spec: Any = None
    layouts: tuple[BatchLayout, ...] = ()

    def read(self, size: int) -> Any:
        """Return a batch of the first samples; ``size`` is that of the first loader."""
        first = getattr(self.flat[0], "batch_size", None) or 1
        parts = []
        for each, layout in zip(self.flat, self.layouts, strict=True):
            other = getattr(each, "batch_size", None) or first
            parts += sample_batches(each, (max(1, round(size * other / first)),), layout)
        return pytree.tree_unflatten(parts, self.spec)


@dataclass(frozen=True)
class Job:
    """The training to run, and its limits; without loaders nothing is. Equal on every rank."""

    options: Options
    limits: tuple[Limits, ...]
    global_batch_size: int = 0  # of a step over all ranks; 0 where nothing is trained
    loaders: Loaders = Loaders()
    # of the first ready batch, on the rank with the fewest; None: loaders give single samples
    ready_samples: int | None = None
    plan: Plan | None = None  # None: one must be made
    late: str = ""  # why updates follow the backward; empty: they run inside of it
    optimizers: OptimizerFacts = field(default_factory=OptimizerFacts)  # as Adam's at first
    state_groups: tuple[int, ...] = ()  # the group of every rank that holds the whole state

    @property
    def trains(self) -> bool:
        """Whether anything is trained."""
        return bool(self.loaders.flat)

    @property
    def keeps_gradients(self) -> bool:
        """Whether devices hold the gradients of all their rows at once, until the update."""
        return bool(self.late) and self.options.optimizer_offload is False


class _Found(NamedTuple):
    """What a rank finds by itself."""

    plan: Plan | None
    size: int | None
    limits: Limits
    late: str
    first_rows: tuple[int, ...]


def read_job(view: TrainerView, groups: Groups, options: Options, deals: bool) -> Job:
    """Read the training to run; collective. ``deals``: ranks read the same batches, to be dealt."""
    control = groups.control
    loaders, found = control.together(
        "reading the dataloader and the options", partial(_find, view, groups, options)
    )
    everyones: list[_Found] = control.gather(found)
    plan, size = everyones[0][:2]
    limits = tuple(own.limits for own in everyones)
    ready_samples = None
    if any(own.first_rows for own in everyones):
        without = [rank for rank, own in enumerate(everyones) if not all(own.first_rows or (0,))]
        if without:
            raise PlanError(
                f"The training dataloader yields no batch on the ranks {without}. Check its data,"
                " let it yield the same batches on every rank, or give a plan that leaves those"
                " ranks without samples."
            )
        ready_samples = min(min(own.first_rows) for own in everyones)
        firsts = [own.first_rows[0] for own in everyones]
        size = size or (firsts[0] if deals else sum(firsts))
    if plan is not None:
        check_plan(plan, limits, size)
        size = plan.global_batch_size
    elif size is None or size < control.world_size:
        raise PlanError(
            f"There are more ranks than samples: a global batch of {size} for"
            f" {control.world_size} ranks. Raise the DataLoader's batch_size or global_batch_size,"
            " use fewer ranks, or give a plan that leaves some ranks without samples."
        )
    return Job(
        options,
        limits,
        size,
        loaders,
        ready_samples,
        plan,
        late=next((own.late for own in everyones if own.late), ""),
        state_groups=_state_groups(options, plan, groups),
    )


def _find(view: TrainerView, groups: Groups, options: Options) -> tuple[Loaders, _Found]:
    ranks, strategy, plan = groups.control.world_size, view.strategy, options.plan
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(plan)
    loaders = _training_loaders(view, options)
    check_cap("memory_cap", options.memory_cap, ranks)
    processes = processes_on_this_host(strategy.num_processes)
    accelerator = accelerator_of(strategy.root_device)
    late = late_by_job(view, view.module) if options.planner.early_update else "early_update=False"
    size = options.global_batch_size or global_batch_size(loaders.flat[0], ranks)
    if size is None and plan is None and not is_stream(loaders.flat[0]):
        raise PlanError(
            "The training dataloader does not say how many samples a batch has (batch_size=None"
            " with a map-style dataset, or an empty batch sampler). Give"
            " DataLoader(batch_size=...)."
        )
    pairs = zip(loaders.flat, loaders.layouts, strict=True)
    first_rows = (
        ()
        if plan is not None
        else tuple(
            first_batch(each, layout)[1]
            for each, layout in pairs
            if is_stream(each) and yields_ready_batches(each)
        )
    )
    limits = read_limits(accelerator, processes, groups.control.rank, options)
    return loaders, _Found(plan, size, limits, late, first_rows)


def _state_groups(options: Options, plan: Plan | None, groups: Groups) -> tuple[int, ...]:
    """Return the group of every rank, where each holds the whole state; equal on every rank."""
    given, nodes = () if plan is None else plan.groups, groups.nodes
    if not given and (not options.planner.hybrid_sharding or len(nodes) == 1):
        return ()
    if backend_of(groups.gather).runs_on_device:
        raise UnsupportedError(
            "Hybrid sharding adds up gradients across nodes over gloo only, but these ranks"
            " communicate by a backend of their devices. Use"
            " CephaloStrategy(process_group_backend='gloo'), or leave hybrid sharding out."
        )
    if options.optimizer_offload is not False:
        raise UnsupportedError(
            f"optimizer_offload={options.optimizer_offload!r} does not work with hybrid sharding so"
            " far. Leave it out, or hybrid_sharding and groups of the plan."
        )
    if plan is not None and not given:
        raise PlanError(
            "Planner(hybrid_sharding=True), but the plan has no groups. Give a plan with"
            f" groups: {list(nodes)} and shares that sum to 1 in each, or leave one of the"
            " two out."
        )
    if plan is None and len(set(nodes)) == 1:
        raise PlanError(
            f"Planner(hybrid_sharding=True), but all {len(nodes)} ranks are on one node. Nodes are"
            " told apart by the launcher's node number, the host name, the kernel and the network"
            " namespace. Leave it out, or give a plan with groups, the group of every rank."
        )
    return given or groups_by_node(nodes)


def _training_loaders(view: TrainerView, options: Options) -> Loaders:
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
    for each in flat:
        refuse_one_pass(each)
    layouts = tuple(learn_layout(each, splitter=options.split_batch) for each in flat)
    return Loaders(tuple(flat), spec, layouts)
