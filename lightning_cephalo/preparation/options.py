"""Reads the options of ``CephaloStrategy`` once, into values that have one meaning each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Literal

import torch
from torch import nn

from lightning_cephalo.plan import Plan
from lightning_cephalo.plan.replan import Replan
from lightning_cephalo.preparation.limits import Cap

REMOVED_OPTIONS: dict[str, str] = {
    "collate_per_microbatch": (
        "Give CephaloStrategy(split_batch=function): function(batch, sizes) returns one batch for"
        " each size, such as graphs of a collated batch."
    ),
    "equal_microbatches": (
        "Use lightning_cephalo.loss_over_batch() for a loss over the samples of all ranks, or"
        " CephaloStrategy(single_microbatch=True), with which training_step may use collectives."
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


@dataclass(frozen=True)
class Choice:
    """A yes-or-no choice of the user, or of the planner: then both ways are measured."""

    default: bool
    is_planned: bool = False

    @classmethod
    def parse(cls, name: str, value: bool | Literal["auto"]) -> Choice:
        """Read an option; raise ValueError if it is not True, False or "auto"."""
        if isinstance(value, bool):
            return cls(value)
        if value == "auto":
            return cls(True, is_planned=True)
        raise ValueError(f"{name}: expected True, False or 'auto', but got {value!r}.")

    def of_plan(self, choice: bool | None) -> bool:
        """Return the value under a plan with ``choice``; None: the plan does not say."""
        return self.default if choice is None else choice

    @property
    def as_given(self) -> bool | Literal["auto"]:
        """The option as the user writes it."""
        return "auto" if self.is_planned else self.default


def verbosity(value: bool | int) -> int:
    """Read the option ``verbose``: 0, 1 or 2; True is 1. Raise ValueError for others."""
    if isinstance(value, int) and int(value) in (0, 1, 2):
        return int(value)
    raise ValueError(f"verbose: expected True, False, or 0, 1 or 2, but got {value!r}.")


def parse_early_update(value: Literal["auto"] | bool) -> bool:
    """Read the option ``early_update``; raise ValueError if it is neither "auto" nor False."""
    if value is False:
        return False
    if value == "auto":
        return True
    raise ValueError(
        f"early_update: expected 'auto' or False, but got {value!r}. Where updates inside the"
        " backward are not exact, none can be forced."
    )


def parse_reduce_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """Read ``reduce_dtype``: None, float32, bfloat16, or a name of these; else raise ValueError."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    found = known.get(str(value).removeprefix("torch."))
    if found is not None or value is None:
        return found
    raise ValueError(
        f"reduce_dtype: expected None, torch.float32 or torch.bfloat16, but got {value!r}. Narrower"
        " exponents would lose small gradients."
    )


def parse_hybrid_sharding(value: bool) -> bool:
    """Read the option ``hybrid_sharding``; raise ValueError if it is neither True nor False."""
    if isinstance(value, bool):
        return value
    raise ValueError(
        f"hybrid_sharding: expected True or False, but got {value!r}. To choose, start once with"
        " each and compare the predicted steps, or let `cephalo plan --hybrid-sharding auto`"
        " estimate both."
    )


def parse_optimizer_offload(value: bool | Literal["auto"]) -> bool | Literal["auto"]:
    """Read ``optimizer_offload``; raise ValueError if it is none of True, False and "auto"."""
    return Choice.parse("optimizer_offload", value).as_given


def parse_units(value: Sequence[Any] | None) -> tuple[type[nn.Module] | str, ...] | None:
    """Read ``units``: None, or classes of modules and names; raise ValueError for others."""
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) or _is_module(v) for v in value):
        return tuple(value)
    raise ValueError(
        "units: expected a list of classes of modules, names of classes and full names of modules,"
        f" but got {value!r}. An empty list makes the whole model one unit."
    )


def _is_module(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, nn.Module)


@dataclass(frozen=True)
class Options:
    """The user's options for batches, units, memory and planning; see ``CephaloStrategy``.

    Attributes:
        plan: A plan, or its path; None: one is made.
        global_batch_size: Samples of a step over all ranks; None: as the dataloader says.
        units: Modules that are units, by class or name; None: they are searched.
        optimizer_scope: What updates of optimizers depend on, by class if it is a dict.
        reduce_dtype: Dtype that gradients travel in; None: their own.
        kept_bytes: Memory of its host that each rank keeps for a restart, on average.
        records_step: Whether to keep what ranks hold before each instruction of one step.
    """

    plan: Plan | str | PathLike[str] | None = None
    global_batch_size: int | None = None
    units: tuple[type[nn.Module] | str, ...] | None = None
    recompute: Choice = Choice(True)
    reshard_after_forward: Choice = Choice(True, is_planned=True)
    split_batch: Callable[[Any, Sequence[int]], list[Any]] | None = None
    single_microbatch: bool = False
    summed_buffers: tuple[str, ...] = ()
    memory_cap: Cap = field(default_factory=lambda: Cap("memory_cap"))
    host_memory_cap: Cap = field(default_factory=lambda: Cap("host_memory_cap"))
    early_update: bool = True
    optimizer_offload: bool | Literal["auto"] = False
    optimizer_scope: str | Mapping[Any, str] = "auto"
    reduce_dtype: torch.dtype | None = None
    hybrid_sharding: bool = False
    profile_budget_s: float = 20.0
    replan: bool | Literal["auto"] = "auto"
    on_replan: Callable[[Replan], Any] | None = None
    remeasure: bool = False
    verbose: bool = True
    details: bool = False
    kept_bytes: float = 0.0
    records_step: bool = False

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
        single = {"single_microbatch": True} if self.single_microbatch else {}
        return {
            **single,
            **rounded,
            "global_batch_size": self.global_batch_size,
            "split_batch": self.split_batch,
            "profile_budget_s": self.profile_budget_s,
            "host_memory_cap": self.host_memory_cap.everyone,
            "choose_recompute": self.recompute.is_planned,
            "reshard_after_forward": self.reshard_after_forward.as_given,
            "memory_cap": None if self.memory_cap.is_empty else self.memory_cap,
        }
