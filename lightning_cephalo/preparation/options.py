"""The options of ``CephaloStrategy`` and ``Planner``; a row of a table for what each may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from numbers import Integral, Real
from os import PathLike
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cephalo.plan import Plan
from lightning_cephalo.preparation.limits import Cap, check_cap

Automatic: TypeAlias = bool | Literal["auto"]
"""A choice of the user, or of the planner."""


class _Rule(NamedTuple):
    """What an option may be, in code and in words, and what to do in place of another value."""

    is_right: Callable[[Any], bool]
    expected: str
    way_out: str = ""


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _is_number(value: Any, kind: Any, least: float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value < inf


def _lists(*kinds: type) -> Callable[[Any], bool]:
    """Return what tells whether a value is a list of names, and of subclasses of ``kinds``."""
    return lambda value: (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(
            isinstance(item, str) or (isinstance(item, type) and issubclass(item, kinds))
            for item in value
        )
    )


_BOOL = _Rule(_is(bool), "True or False")
_AUTOMATIC = _Rule(
    lambda value: _is_auto(value) or isinstance(value, bool), "True, False or 'auto'"
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_METHODS = ("popen", "spawn", "fork", "forkserver")
_RULES = {
    # of CephaloStrategy
    "plan": _Rule(
        _is(Plan, str, PathLike, NoneType), "a lightning_cephalo.Plan, or the path of one"
    ),
    "global_batch_size": _Rule(
        lambda value: value is None or _is_number(value, Integral, 1), "None, or 1 or more samples"
    ),
    "units": _Rule(
        lambda value: value is None or _lists(nn.Module)(value),
        "a list of classes of modules, names of classes and full names of modules",
        " An empty list makes the whole model one unit.",
    ),
    "recompute": _AUTOMATIC,
    "reshard_after_forward": _AUTOMATIC,
    "optimizer_offload": _AUTOMATIC,
    "replan": _AUTOMATIC,
    "reduce_dtype": _Rule(
        lambda value: value is None or _dtype(value) is not None,
        "None, torch.float32 or torch.bfloat16",
        " Narrower exponents would lose small gradients.",
    ),
    "split_batch": _Rule(
        lambda value: value is None or callable(value), "None, or a function of a batch and sizes"
    ),
    "summed_buffers": _Rule(_lists(), "a list of names"),
    "planner": _Rule(lambda value: isinstance(value, Planner), "a lightning_cephalo.Planner"),
    "record": _Rule(_is(str, PathLike, NoneType), "None, or the path of a folder"),
    "process_group_backend": _Rule(_is(str, NoneType), 'None, or a name such as "gloo"'),
    "timeout": _Rule(
        lambda value: isinstance(value, timedelta) and value > timedelta(0),
        "a datetime.timedelta above 0",
    ),
    "start_method": _Rule(lambda value: value in _METHODS, f"one of {_METHODS}"),
    # of Planner
    "budget_s": _Rule(lambda value: _is_number(value, Real, 1e-9), "seconds above 0"),
    "remeasure": _BOOL,
    "verbose": _Rule(
        lambda value: isinstance(value, int) and 0 <= value <= 2, "True, False, or 0, 1 or 2"
    ),
    "hybrid_sharding": _Rule(
        _is(bool),
        "True or False",
        " To choose, start once with each and compare the predicted steps, or let `cephalo compare"
        " --cluster FILE` estimate both.",
    ),
    "early_update": _Rule(
        lambda value: value is False or _is_auto(value),
        "'auto' or False",
        " Where updates inside the backward are not exact, none can be forced.",
    ),
    "single_microbatch": _BOOL,
    "elementwise": _Rule(_lists(Optimizer), "a list of classes of optimizers and names of classes"),
}


def check(**options: Any) -> None:
    """Raise ValueError with what came and what it may be, for the first option that is wrong."""
    for name, value in options.items():
        if name in _RULES and not _RULES[name].is_right(value):
            _, expected, way_out = _RULES[name]
            raise ValueError(f"{name}: expected {expected}, but got {value!r}.{way_out}")


def _dtype(value: Any) -> torch.dtype | None:
    return _DTYPES.get(str(value).removeprefix("torch."))


def chosen(option: Automatic, by_plan: bool | None) -> bool:
    """Return what holds under a plan: what it says, or else the option; "auto" is True."""
    return bool(option) if by_plan is None else by_plan


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
        hybrid_sharding: Let each node hold the whole state, cut unevenly among its ranks. Gathers
            stay inside of a node, and gradients cross to another node once, over gloo. A plan that
            is given says so itself (``groups``).
        early_update: Update each unit's rows inside the backward, as soon as their gradients are
            reduced, so that gradients are never held whole. "auto": where the result is the same to
            the last bit and no code of the user's reads gradients. False: behind the backward.
        single_microbatch: In measured plans every rank runs all of its samples at once, for code
            that cannot run several times in a step. With manual optimization it always does.
        host_memory_cap: How much of its host's memory each rank may use for activations and
            optimizer state: a fraction (a float up to 1.0), bytes (an int, or "8 GB"), or 0 for
            none. None: an equal part of half of the free memory.
        elementwise: Optimizers that are not torch's, and whose update of an element depends on
            nothing but that element: a list of classes and names of classes. Each rank then updates
            its own rows. Of all others a trial finds whether they update whole parameters, or the
            whole model at once.

    Raises:
        ValueError: For values of another kind; for ``host_memory_cap`` it is a PlanError.
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
        check(**vars(self))
        check_cap("host_memory_cap", self.host_memory_cap or None)


@dataclass(frozen=True)
class Options:
    """What the user gives for batches, units, memory and planning; see ``CephaloStrategy``."""

    plan: Plan | str | PathLike[str] | None = None
    global_batch_size: int | None = None
    units: Sequence[type[nn.Module] | str] | None = None
    memory_cap: Cap = None
    optimizer_offload: Automatic = False
    recompute: Automatic = True
    reshard_after_forward: Automatic = "auto"
    reduce_dtype: torch.dtype | str | None = None
    split_batch: Callable[[Any, Sequence[int]], list[Any]] | None = None
    summed_buffers: Sequence[str] = ()
    planner: Planner = field(default_factory=Planner)
    replan: Automatic = "auto"
    record: str | PathLike[str] | None = None
    kept_bytes: float = 0.0  # of its host that each rank keeps for a restart, on average

    def __post_init__(self) -> None:
        check(**vars(self))
        check_cap("memory_cap", self.memory_cap)

    @property
    def verbose(self) -> bool:
        """Whether rank 0 prints plans and predictions."""
        return bool(self.planner.verbose)

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """Dtype that gradients travel in; None: their own."""
        return _dtype(self.reduce_dtype)

    def of_measuring(self) -> dict[str, Any]:
        """Return what measured times depend on."""
        return {
            "single_microbatch": self.planner.single_microbatch,
            "reduce_dtype": str(self.gradient_dtype),
            "global_batch_size": self.global_batch_size,
            "split_batch": self.split_batch,
            "profile_budget_s": self.planner.budget_s,
            "host_memory_cap": self.planner.host_memory_cap,
            "choose_recompute": self.recompute == "auto",
            "reshard_after_forward": self.reshard_after_forward,
            "memory_cap": self.memory_cap,
        }
