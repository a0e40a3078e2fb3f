"""Warns of code between units that sees gradients in parts, where one device shows it their sum.

The backward passes the code before a unit when the gradient of that unit's input is there. A tensor
that a residual around the unit uses, too, has got another part of its gradient before. The parts
add up for all operators of torch, which are linear in the gradient. Hooks, and functions of users,
need not be linear: they clip gradients, or add noise. torch tells neither which nodes have hooks,
nor can it stop a backward before such a node, as hooks see what is captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

_REMEDY = (
    " Let a unit contain the whole residual: a module whose forward returns `x + f(x)`, or larger"
    " units with unit_names=."
)


class GradientParts:
    """Says once what sees gradients in parts."""

    def __init__(self) -> None:
        self._has_said_hooks = self._has_said_functions = False

    def is_due(self, registers_hooks: bool, searches: bool) -> bool:
        """Whether :meth:`warn` would say something new."""
        due_hooks = registers_hooks and not searches and not self._has_said_hooks
        return due_hooks or (searches and not self._has_said_functions)

    def warn(self, nodes: Iterable[Any], registers_hooks: bool, searches: bool) -> None:
        """Warn of nodes that several backwards pass."""
        nodes = [*nodes]
        functions = sorted({name for node in nodes if (name := _users_function(node))})
        if functions and not self._has_said_functions:
            self._has_said_functions = True
            warnings.warn(
                f"The backward of {', '.join(functions)} (torch.autograd.Function), between units,"
                " gets its gradient in parts, as a residual around a unit uses the same tensor. It"
                " runs once for each part. That is exact if it is linear in the gradient, as a"
                f" reversal is; clipping is not.{_REMEDY}",
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
                f" tensors in units.{_REMEDY}",
                stacklevel=2,
            )


def _users_function(node: Any) -> str:
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return ""
    owner = node._forward_cls  # type: ignore[attr-defined]
    is_ours = owner.__module__.split(".")[0] in ("torch", "lightning_cephalo")
    return "" if is_ours else owner.__name__
