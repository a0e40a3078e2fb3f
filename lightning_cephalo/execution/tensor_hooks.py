"""Hooks of tensors between units, and what refuses gradients that lack a part.

Users get a stand-in for a unit's output, to which their hooks belong. Units pass gradients from
leaf to leaf, so ``boundaries.py`` cuts an output with hooks once more: its gradient then passes it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from lightning_cephalo.common.errors import UnitUseError


def _hook_too_late() -> UnitUseError:
    return UnitUseError(
        "A hook is registered on the output of a unit after another unit was called with it."
        " It would miss the gradient: call tensor.register_hook() before, where the tensor is"
        " made, or in a forward hook of the module that returns it."
    )


def gradient_through_units() -> UnitUseError:
    return UnitUseError(
        "Your code computes a gradient through a unit itself (torch.autograd.grad for a gradient"
        " penalty or in evaluation, or a backward). Graphs are cut at units, so that a part of it"
        " would be missing. Leave that network out of the units: CephaloStrategy(unit_types=[...])"
        " with the blocks of other networks, or unit_names=[] if there is no other."
    )


@dataclass(eq=False)
class Owner:
    """The microbatch of leaves; ``runs`` while its user's code runs, and no backward of ours."""

    runs: bool = False
    backwards: int = 0

    @unserializable_hook  # else torch.save() warns of it, long after the forward
    def refuse(self, gradient: Tensor) -> None:
        """Raise for a gradient that lacks the part through a unit."""
        if self.runs:
            raise gradient_through_units()


class HooksOfEntered(dict[Any, Callable[[Tensor], Any]]):
    """The hooks of a unit's output that has entered another unit, past which its gradient goes."""

    __slots__ = ("__weakref__",)

    def __setitem__(self, key: Any, hook: Callable[[Tensor], Any]) -> None:
        raise _hook_too_late()


def count_of_users(hooks: dict[Any, Any] | None) -> int:
    return sum(not isinstance(key, Owner) for key in hooks or ())


def refuse_hooks_inside(inputs: Sequence[Any]) -> None:
    """Raise if the code of a unit has hooked an argument: it would miss gradients of other uses."""
    for value in inputs:
        hooks = value._backward_hooks if isinstance(value, Tensor) else None
        if hooks and count_of_users(hooks):
            raise UnitUseError(
                "A unit registers a hook on an argument of its forward. It would not see the whole"
                " gradient, which other units and code between units may add to. Register it on a"
                " tensor of the unit's own: `x = x.view_as(x)`, then"
                " `if x.requires_grad: x.register_hook(...)`, as the unit may run without a graph"
                " first. Or register it before the unit is called."
            )


_NEVER = -1  # number of a backward


class SeenOnce:
    """Our hook at a tensor that has entered a unit: it refuses what hooks of others would see."""

    __torch_unserializable__ = True  # as of Owner.refuse

    def __init__(
        self, owner: Owner, hooks: weakref.ref[dict[Any, Any]], node_has_hooks: bool
    ) -> None:
        self._owner, self._hooks, self._seen_in = owner, hooks, _NEVER
        self._node_has_hooks = node_has_hooks

    def __call__(self, gradient: Tensor) -> None:
        self._owner.refuse(gradient)
        before, self._seen_in = self._seen_in, self._owner.backwards
        if before != self._seen_in:
            return
        # ours are there too, one for each microbatch that uses the tensor
        if self._node_has_hooks or count_of_users(self._hooks()):
            raise UnitUseError(
                "A tensor between units has a hook, and both a unit and other code use it. The hook"
                " would see its gradient in parts. Register it in the forward of the unit that"
                " makes the tensor, where it sees all of it. Or give it a tensor of its own, for"
                " either use: `x = x.view_as(x); x.register_hook(...)`."
            )


class RetainedGradient:
    """Gives a unit's output, which retains its gradient, that of its leaf."""

    def __init__(self, source: weakref.ref[Tensor]) -> None:
        self._source = source
        self.before: Tensor | None = None

    def __call__(self, leaf: Tensor) -> None:
        source, gradient = self._source(), leaf.grad
        if source is not None and gradient is not None:
            source.grad = gradient if self.before is None else self.before + gradient


_LARGER_UNITS = (
    " Let a unit contain the whole residual: a module whose forward returns `x + f(x)`, or larger"
    " units with unit_names=."
)


class GradientParts:
    """Warns once of code between units that sees gradients in parts, not their sum.

    The backward passes the code before a unit when the gradient of that unit's input is there. A
    residual around the unit adds another part. The parts add up for all operators of torch; hooks
    and functions of users may clip. torch does not tell which nodes have hooks.
    """

    def __init__(self) -> None:
        self._has_said_hooks = self._has_said_functions = False

    def is_due(self, registers_hooks: bool, searches: bool) -> bool:
        """Whether :meth:`warn` would say something new."""
        due_hooks = registers_hooks and not searches and not self._has_said_hooks
        return due_hooks or (searches and not self._has_said_functions)

    def warn(self, nodes: Iterable[Any], registers_hooks: bool, searches: bool) -> None:
        nodes = [*nodes]
        functions = sorted({name for node in nodes if (name := _users_function(node))})
        if functions and not self._has_said_functions:
            self._has_said_functions = True
            warnings.warn(
                f"The backward of {', '.join(functions)} (torch.autograd.Function), between units,"
                " gets its gradient in parts, as a residual around a unit uses the same tensor. It"
                " runs once for each part. That is exact if it is linear in the gradient, as a"
                f" reversal is; clipping is not.{_LARGER_UNITS}",
                stacklevel=2,
            )
        if nodes and registers_hooks and not searches and not self._has_said_hooks:
            self._has_said_hooks = True
            names = sorted({type(node).__name__ for node in nodes})[:3]
            warnings.warn(
                "training_step registers hooks of tensors, and some tensors between units get"
                f" their gradients in parts ({', '.join(names)}), as a residual around a unit uses"
                " them, too. A hook of such a tensor runs once for each part, so that it sees or"
                " clips less than on one device. Hooks of other tensors are exact, and those of"
                f" tensors in units.{_LARGER_UNITS}",
                stacklevel=2,
            )


def _users_function(node: Any) -> str:
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return ""
    owner = node._forward_cls  # type: ignore[attr-defined]
    is_ours = owner.__module__.split(".")[0] in ("torch", "lightning_cephalo")
    return "" if is_ours else owner.__name__


class _OutOfUnit(torch.autograd.Function):
    """Makes the glue's stand-in for an output's leaf, which ``x += y`` may change in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, owner: Owner) -> Tensor:
        ctx.owner = owner
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.owner.refuse(gradient)
        return gradient, None


def _register_hook(node: Any, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook of the node behind a unit's output: ``x.grad_fn.register_hook(hook)``."""
    _expect_hooks(node)
    return torch._C._FunctionBase.register_hook(node, hook)


def _register_prehook(node: Any, hook: Callable[..., Any]) -> RemovableHandle:
    _expect_hooks(node)
    return torch._C._FunctionBase.register_prehook(node, hook)


def _expect_hooks(node: Any) -> None:
    if node.has_entered:
        raise _hook_too_late()
    node.has_hooks = True


# Private: the class of our own nodes. Nothing else tells whether a node has hooks.
_Node: Any = _OutOfUnit._backward_cls
_Node.has_hooks = _Node.has_entered = False
_Node.register_hook, _Node.register_prehook = _register_hook, _register_prehook


# Private: the part of `apply` that is written in C. The rest serves functorch's transforms, which
# cannot pass a cut, and takes as long again; tests/execution/test_boundaries.py calls it.
out_of_unit = super(torch.autograd.Function, _OutOfUnit).apply

OUTPUT = "_OutOfUnitBackward"
"""The name of the nodes behind outputs of units, where the glue's graph ends."""
