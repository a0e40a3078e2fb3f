"""Reads the options of ``CephaloStrategy`` once, into values that have one meaning each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Literal

import torch

from lightning_cephalo.execution.sharded_model import UnitOptions
from lightning_cephalo.plan import Plan
from lightning_cephalo.plan.replan import Replan
from lightning_cephalo.preparation.limits import Cap

REMOVED_OPTIONS: dict[str, str] = {
    "equal_microbatches": (
        "Use lightning_cephalo.loss_over_batch() for a loss over the samples of all ranks, or"
        " CephaloStrategy(single_microbatch=True), with which training_step may use collectives."
    ),
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
    """Raise for options that ``CephaloStrategy`` does not have.

    Raises:
        TypeError: The message names one; of those that are no more, also the way on.
    """
    for name in given:
        if name in REMOVED_OPTIONS:
            raise TypeError(f"CephaloStrategy({name}=...) is no more. {REMOVED_OPTIONS[name]}")
        raise TypeError(f"CephaloStrategy() got an unexpected keyword argument {name!r}")


@dataclass(frozen=True)
class Choice:
    """A yes-or-no choice that the user or the plan makes.

    Attributes:
        default: The value if a plan does not say.
        is_planned: Whether the planner chooses, so that both ways are measured.
    """

    default: bool
    is_planned: bool = False

    @classmethod
    def parse(cls, name: str, value: bool | Literal["auto"]) -> Choice:
        """Read an option that may be True, False or "auto".

        Raises:
            ValueError: If the value is none of these; the message says what was expected.
        """
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
    """Read the option ``verbose``: 0, 1 or 2; True is 1.

    Raises:
        ValueError: If the value is none of these.
    """
    if isinstance(value, int) and int(value) in (0, 1, 2):
        return int(value)
    raise ValueError(f"verbose: expected True, False, or 0, 1 or 2, but got {value!r}.")


def parse_early_update(value: Literal["auto"] | bool) -> bool:
    """Read the option ``early_update``: whether units are updated early where that is exact.

    Raises:
        ValueError: If it is neither "auto" nor False.
    """
    if value is False:
        return False
    if value == "auto":
        return True
    raise ValueError(
        f"early_update: expected 'auto' or False, but got {value!r}. Where updates inside the"
        " backward are not exact, none can be forced."
    )


def parse_reduce_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """Read the option ``reduce_dtype``: None, torch.float32, torch.bfloat16, or a name of these.

    Raises:
        ValueError: If it is none of these.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    found = known.get(str(value).removeprefix("torch."))
    if found is not None or value is None:
        return found
    raise ValueError(
        f"reduce_dtype: expected None, torch.float32 or torch.bfloat16, but got {value!r}. Narrower"
        " exponents would lose small gradients."
    )


def parse_hybrid_sharding(value: bool) -> bool:
    """Read the option ``hybrid_sharding``.

    Raises:
        ValueError: If it is neither True nor False.
    """
    if isinstance(value, bool):
        return value
    raise ValueError(
        f"hybrid_sharding: expected True or False, but got {value!r}. To choose, start once with"
        " each and compare the predicted steps, or let `cephalo plan --hybrid-sharding auto`"
        " estimate both."
    )


def parse_optimizer_offload(value: bool | Literal["auto"]) -> bool | Literal["auto"]:
    """Read the option ``optimizer_offload``.

    Raises:
        ValueError: If it is none of True, False and "auto".
    """
    return Choice.parse("optimizer_offload", value).as_given


@dataclass(frozen=True)
class Options:
    """The user's options for batches, units, memory and planning; see ``CephaloStrategy``.

    Attributes:
        plan: A plan, or its path; None: one is made.
        global_batch_size: Samples of a step over all ranks; None: as the dataloader says.
        units: How units are chosen.
        recompute: Whether units are recomputed in the backward.
        reshard_after_forward: Whether units are freed between the forward and the backward.
        collate_per_microbatch: Whether each microbatch is collated separately.
        split_batch: Cuts a batch in place of the built-in rules.
        single_microbatch: Whether measured plans give every rank one microbatch; those of steps
            that optimize manually always do.
        summed_buffers: Names of buffers to which steps add sums over samples.
        memory_cap: Cap of every rank's device.
        host_memory_cap: Cap of every rank's part of its host.
        early_update: Whether units are updated inside the backward where that is exact.
        optimizer_offload: Whether plans keep optimizer state in host memory; "auto": where it does
            not fit otherwise, or steps get shorter.
        optimizer_scope: What updates of optimizers depend on, by class if it is a dict.
        reduce_dtype: Dtype that gradients travel in; None: their own.
        hybrid_sharding: Whether each node holds the whole state.
        profile_budget_s: Seconds that measuring may take, approximately.
        replan: Whether the plan may change while training; "auto": where it was solved.
        on_replan: Called on every rank after each such change.
        remeasure: Whether to measure even if an earlier start has measured.
        verbose: Whether rank 0 prints tables.
        details: Whether they also say how the plan was solved.
        kept_bytes: Memory of its host that each rank keeps for a restart, on average.
        records_step: Whether to keep what ranks hold before each instruction of one step.
    """

    plan: Plan | str | PathLike[str] | None = None
    global_batch_size: int | None = None
    units: UnitOptions = field(default_factory=UnitOptions)
    recompute: Choice = Choice(True)
    reshard_after_forward: Choice = Choice(True, is_planned=True)
    collate_per_microbatch: bool = False
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
        """Return the options of a training that can go on after a restart.

        Args:
            global_batch_size: That of the first start, if other ranks than now have begun.
            kept_bytes: Memory of its host that each rank keeps, on average.
        """
        size = self.global_batch_size or global_batch_size
        return replace(self, global_batch_size=size, kept_bytes=kept_bytes)

    def without_recompute(self) -> Options:
        """Return the options for a model whose units cannot be recomputed one microbatch at a time.

        Microbatches that meet in the middle of a unit hold its graph at the same time. The
        planner's memory is right for that without recomputation only. A given plan may recompute.
        """
        return self if self.plan is not None else replace(self, recompute=Choice(False))

    def of_measuring(self) -> dict[str, Any]:
        """Return the options that distinguish measured jobs, as plain values.

        They are part of the key under which a problem is cached: other names or values here make
        every job measure again.
        """
        rounded = {} if self.reduce_dtype is None else {"reduce_dtype": str(self.reduce_dtype)}
        single = {"single_microbatch": True} if self.single_microbatch else {}
        return {
            **single,
            **rounded,
            "global_batch_size": self.global_batch_size,
            "collate_per_microbatch": self.collate_per_microbatch,
            "split_batch": self.split_batch,
            "profile_budget_s": self.profile_budget_s,
            "host_memory_cap": self.host_memory_cap.everyone,
            "choose_recompute": self.recompute.is_planned,
            "reshard_after_forward": self.reshard_after_forward.as_given,
            "memory_cap": None if self.memory_cap.is_empty else self.memory_cap,
        }
