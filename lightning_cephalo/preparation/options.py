"""Reads the options of ``CephaloStrategy`` once, into values that have one meaning each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import inf
from numbers import Integral
from os import PathLike
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cephalo.plan import Plan
from lightning_cephalo.preparation.limits import Cap

_OF_PLANNER = "Give CephaloStrategy(planner=Planner({}=...)); Planner is in lightning_cephalo."

REMOVED_OPTIONS: dict[str, str] = {
    **{
        name: _OF_PLANNER.format(name)
        for name in (
            "remeasure",
            "verbose",
            "hybrid_sharding",
            "early_update",
            "single_microbatch",
            "host_memory_cap",
        )
    },
    "profile_budget_s": _OF_PLANNER.format("budget_s"),
    "on_replan": "Read strategy.report.replans in a hook; loggers get cephalo/replans, too.",
    "trace": "Give CephaloStrategy(record=FOLDER), which also writes FOLDER/trace.json.",
    "optimizer_scope": (
        "A trial tells of other optimizers than torch's what an update depends on. Name those with"
        " element-wise updates: CephaloStrategy(planner=Planner(elementwise=[...]))."
    ),
    "accelerator": "Give Trainer(accelerator=...), which sets it.",
    "parallel_devices": "Give Trainer(devices=...), which sets them.",
    "cluster_environment": "Give Trainer(plugins=[...]), which sets it.",
    "checkpoint_io": "Give Trainer(plugins=[...]), which sets it.",
    "precision_plugin": "Give Trainer(precision=...) or Trainer(plugins=[...]), which set it.",
    "collate_per_microbatch": (
        "Give CephaloStrategy(split_batch=function): function(batch, sizes) returns one batch for"
        " each size, such as graphs of a collated batch."
    ),
    "equal_microbatches": (
        "Use lightning_cephalo.loss_over_batch() for a loss over the samples of all ranks, or"
        " Planner(single_microbatch=True), with which training_step may use collectives."
    ),
    "unit_types": "Give CephaloStrategy(units=[...]), a list of classes, or of their names.",
    "unit_names": "Give CephaloStrategy(units=[...]), a list of full names of modules.",
    "vocabulary_sharding": (
        "Embedding and head are gathered whole. Less memory for logits:"
        " lightning_cephalo.chunked_cross_entropy(head, hidden, targets)."
    ),
    "chunked_logits": (
        "Return lightning_cephalo.chunked_cross_entropy(head, hidden, targets) from training_step."
    ),
}
"""Options that ``CephaloStrategy`` no longer has: what to write instead, in sentences."""


def refuse_removed(given: Iterable[str]) -> None:
    """Raise TypeError for options that do not exist; of those that are no more, name the way on."""
    for name in given:
        if name in REMOVED_OPTIONS:
            raise TypeError(f"CephaloStrategy({name}=...) is no more. {REMOVED_OPTIONS[name]}")
        raise TypeError(f"CephaloStrategy() got an unexpected keyword argument {name!r}")


def require(name: str, value: Any, is_right: bool, expected: str, way_out: str = "") -> None:
    """Raise ValueError with what came and what an option may be, if it is not right."""
    if not is_right:
        raise ValueError(f"{name}: expected {expected}, but got {value!r}.{way_out}")


def require_bool(name: str, value: Any, way_out: str = "") -> None:
    """Raise ValueError if an option is neither True nor False."""
    require(name, value, isinstance(value, bool), "True or False", way_out)


Automatic: TypeAlias = bool | Literal["auto"]


def parse_automatic(name: str, value: Any) -> Automatic:
    """Read an option; raise ValueError if it is not True, False or "auto"."""
    is_right = isinstance(value, bool) or (isinstance(value, str) and value == "auto")
    require(name, value, is_right, "True, False or 'auto'")
    return value


@dataclass(frozen=True)
class Choice:
    """A yes-or-no choice of the user, or of the planner: then both ways are measured."""

    default: bool
    is_planned: bool = False

    @classmethod
    def parse(cls, name: str, value: Automatic) -> Choice:
        """Read an option; raise ValueError if it is not True, False or "auto"."""
        return cls(bool(parse_automatic(name, value)), is_planned=value == "auto")

    def of_plan(self, choice: bool | None) -> bool:
        """Return the value under a plan with ``choice``; None: the plan does not say."""
        return self.default if choice is None else choice

    @property
    def as_given(self) -> Automatic:
        """The option as the user writes it."""
        return "auto" if self.is_planned else self.default


@dataclass(frozen=True)
class Planner:
    """How ranks are measured, and what plans that are made for them may use.

    ::

        CephaloStrategy(planner=Planner(budget_s=60.0, verbose=2, elementwise=["Lion"]))

    Args:
        budget_s: Seconds that measuring may take, approximately.
        remeasure: Measure even if an earlier start of the same job on the same devices has.
        verbose: Whether rank 0 prints the plan before and the prediction after training. 2 also
            prints how the plan was solved, and how far from the optimum it may be.
        hybrid_sharding: Let each node hold the whole state, cut unevenly among its ranks, in place
            of all ranks together. Gathers then stay inside of a node, and gradients cross to
            another node once. For slow links between nodes that have the memory, over gloo. A plan
            that is given says so itself (``state_groups``).
        early_update: Update each unit's rows inside the backward, as soon as their gradients are
            reduced, so that gradients are never held whole. "auto": where the result is the same to
            the last bit and no code of the user's reads gradients; the plan's table says why not.
            False: all updates follow the backward.
        single_microbatch: In measured plans every rank runs all of its samples at once, so that
            code in ``training_step`` may use collectives of its own. With manual optimization it
            always does.
        host_memory_cap: How much of its host's memory each rank may use for activations that the
            plan offloads because a device is too small for them, and for optimizer state: a
            fraction (a float up to 1.0), bytes (an int, or "8 GB"), or 0 for none. None: an equal
            part of half of the free memory.
        elementwise: Optimizers that are not torch's, and whose update of an element depends on
            nothing but that element: a list of classes and names of classes, such as ``["Lion",
            MyOptimizer]``. Each rank then updates its own rows. A trial refuses what is plainly
            wrong. Of all others a trial finds whether they update whole parameters, or the whole
            model at once.

    Raises:
        ValueError: For values of another kind.
        PlanError: For a ``host_memory_cap`` that is no amount of memory.
    """

    budget_s: float = 20.0
    remeasure: bool = False
    verbose: bool | Literal[0, 1, 2] = True
    hybrid_sharding: bool = False
    early_update: Literal["auto", False] = "auto"
    single_microbatch: bool = False
    host_memory_cap: float | int | str | None = None
    elementwise: Sequence[type[Optimizer] | str] = ()

    def __post_init__(self) -> None:
        seconds = self.budget_s
        is_time = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        require("budget_s", seconds, is_time and 0 < seconds < inf, "seconds above 0")
        require_bool("remeasure", self.remeasure)
        is_level = isinstance(self.verbose, int) and int(self.verbose) in (0, 1, 2)
        require("verbose", self.verbose, is_level, "True, False, or 0, 1 or 2")
        require_bool(
            "hybrid_sharding",
            self.hybrid_sharding,
            " To choose, start once with each and compare the predicted steps, or let `cephalo plan"
            " --hybrid-sharding auto` estimate both.",
        )
        require(
            "early_update",
            self.early_update,
            self.early_update is False or self.early_update == "auto",
            "'auto' or False",
            " Where updates inside the backward are not exact, none can be forced.",
        )
        require_bool("single_microbatch", self.single_microbatch)
        expected = "a list of classes of optimizers and names of classes"
        named = parse_items("elementwise", self.elementwise, (Optimizer,), expected)
        object.__setattr__(self, "elementwise", named)
        _ = self.host_cap

    @property
    def host_cap(self) -> Cap:
        """What ``host_memory_cap`` allows each rank."""
        return Cap.parse("host_memory_cap", self.host_memory_cap, zero=True)


def parse_reduce_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """Read ``reduce_dtype``: None, float32, bfloat16, or a name of these; else raise ValueError."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    found = known.get(str(value).removeprefix("torch."))
    require(
        "reduce_dtype",
        value,
        found is not None or value is None,
        "None, torch.float32 or torch.bfloat16",
        " Narrower exponents would lose small gradients.",
    )
    return found


def parse_units(value: Sequence[Any] | None) -> tuple[type[nn.Module] | str, ...] | None:
    """Read ``units``: None, or classes of modules and names; raise ValueError for others."""
    if value is None:
        return None
    return parse_items(
        "units",
        value,
        (nn.Module,),
        "a list of classes of modules, names of classes and full names of modules",
        " An empty list makes the whole model one unit.",
    )


def parse_items(
    name: str, value: Any, kinds: tuple[type, ...], expected: str, way_out: str = ""
) -> tuple[Any, ...]:
    """Read a list of names, and of subclasses of ``kinds``; raise ValueError for others."""

    def is_item(item: Any) -> bool:
        return isinstance(item, str) or (isinstance(item, type) and issubclass(item, kinds))

    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    require(name, value, is_list and all(map(is_item, value)), expected, way_out)
    return tuple(value)


def check_ranks_options(backend: Any, timeout: Any, start_method: Any) -> None:
    """Raise ValueError for values of the options that say how ranks start and communicate."""
    is_backend = backend is None or isinstance(backend, str)
    require("process_group_backend", backend, is_backend, 'None, or a name such as "gloo"')
    is_time = isinstance(timeout, timedelta) and timeout > timedelta(0)
    require("timeout", timeout, is_time, "a datetime.timedelta above 0")
    methods = ("popen", "spawn", "fork", "forkserver")
    require("start_method", start_method, start_method in methods, f"one of {methods}")


@dataclass(frozen=True)
class Options:
    """The user's options for batches, units, memory and planning; see ``CephaloStrategy``.

    Attributes:
        plan: A plan, or its path; None: one is made.
        global_batch_size: Samples of a step over all ranks; None: as the dataloader says.
        units: Modules that are units, by class or name; None: they are searched.
        reduce_dtype: Dtype that gradients travel in; None: their own.
        kept_bytes: Memory of its host that each rank keeps for a restart, on average.
    """

    plan: Plan | str | PathLike[str] | None = None
    global_batch_size: int | None = None
    units: tuple[type[nn.Module] | str, ...] | None = None
    recompute: Choice = Choice(True)
    reshard_after_forward: Choice = Choice(True, is_planned=True)
    split_batch: Callable[[Any, Sequence[int]], list[Any]] | None = None
    summed_buffers: tuple[str, ...] = ()
    memory_cap: Cap = field(default_factory=lambda: Cap("memory_cap"))
    optimizer_offload: Automatic = False
    reduce_dtype: torch.dtype | None = None
    planner: Planner = field(default_factory=Planner)
    replan: Automatic = "auto"
    record: str | PathLike[str] | None = None
    kept_bytes: float = 0.0

    def __post_init__(self) -> None:
        is_plan = self.plan is None or isinstance(self.plan, (Plan, str, PathLike))
        require("plan", self.plan, is_plan, "a lightning_cephalo.Plan, or the path of one")
        size, split = self.global_batch_size, self.split_batch
        is_size = isinstance(size, Integral) and not isinstance(size, bool) and size >= 1
        require("global_batch_size", size, size is None or is_size, "None, or 1 or more samples")
        is_function = split is None or callable(split)
        require("split_batch", split, is_function, "None, or a function of a batch and sizes")
        is_planner = isinstance(self.planner, Planner)
        require("planner", self.planner, is_planner, "a lightning_cephalo.Planner")
        is_folder = self.record is None or isinstance(self.record, (str, PathLike))
        require("record", self.record, is_folder, "None, or the path of a folder")

    @property
    def verbose(self) -> bool:
        """Whether rank 0 prints plans and predictions."""
        return bool(self.planner.verbose)

    def given_plan(self) -> Plan | None:
        """Return the plan that is given; None: one must be made."""
        return (
            self.plan if self.plan is None or isinstance(self.plan, Plan) else Plan.load(self.plan)
        )

    def recovering(self, global_batch_size: int | None, kept_bytes: float) -> Options:
        """Return the options after a restart, with the batch size of the first start."""
        size = self.global_batch_size or global_batch_size
        return replace(self, global_batch_size=size, kept_bytes=kept_bytes)

    def without_recompute(self) -> Options:
        """Return the options for units that cannot be recomputed one microbatch at a time."""
        return self if self.plan is not None else replace(self, recompute=Choice(False))

    def of_measuring(self) -> dict[str, Any]:
        """Return a measured job's key as plain values: other names make every job measure again."""
        rounded = {} if self.reduce_dtype is None else {"reduce_dtype": str(self.reduce_dtype)}
        single = {"single_microbatch": True} if self.planner.single_microbatch else {}
        return {
            **single,
            **rounded,
            "global_batch_size": self.global_batch_size,
            "split_batch": self.split_batch,
            "profile_budget_s": self.planner.budget_s,
            "host_memory_cap": self.planner.host_cap.everyone,
            "choose_recompute": self.recompute.is_planned,
            "reshard_after_forward": self.reshard_after_forward.as_given,
            "memory_cap": None if self.memory_cap.is_empty else self.memory_cap,
        }
