"""Runs a LightningModule's own ``backward()`` around the layered backward.

The user's code gets a loss whose graph is one node, which notes the gradient that arrives. The
layered backward then runs with this factor, on the thread of the caller: autograd would run the
node on a thread of the device, where collectives do not belong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup

_ONCE = (
    "Cephalo frees each unit's graph when its backward has run, so a loss has one backward. Call"
    " loss.backward() without arguments, once."
)


class UserBackward:
    """One call of ``LightningModule.backward``; ``layered`` takes the factor of all gradients."""

    def __init__(self, control: ControlGroup, layered: Callable[[float], None]) -> None:
        self._control = control
        self._layered = layered
        self._gradient: Tensor | None = None
        self._has_met = False

    def loss_of(self, value: Tensor) -> Tensor:
        """Return a loss of this value; its backward leads to the layered backward."""
        anchor = torch.zeros((), requires_grad=True)
        with torch.enable_grad():
            loss = _Node.apply(value.detach(), anchor, self).as_subclass(_LayeredLoss)
        loss.backward_of = self
        return loss

    def run(self, user: Callable[[], Any]) -> None:
        """Call the user's ``backward()``, and the layered one within it; collective."""
        failure: Exception | None = None
        try:
            user()
        except Exception as error:
            if self._has_met:  # all ranks have come to their backward: this is another error
                raise
            failure = error
        if not self._has_met:
            if failure is None and self._gradient is None:
                failure = UnsupportedError(
                    "backward() of the LightningModule has returned without a backward of the loss."
                    " Call loss.backward() in it, on every rank."
                )
            self._run_layered(failure)

    def reached(self, gradient: Tensor) -> None:
        """Note the gradient that has arrived at the loss."""
        if self._gradient is not None:
            raise UnsupportedError(f"A second backward of the loss. {_ONCE}")
        self._gradient = gradient

    def after_backward(self) -> None:
        """Run the layered backward if a gradient has arrived since; collective."""
        if self._gradient is not None and not self._has_met:
            self._run_layered(None)

    def _run_layered(self, failure: Exception | None) -> None:
        self._has_met = True
        doing = "running backward() of the LightningModule"
        self._control.raise_if_any_failed(failure, doing)
        assert self._gradient is not None
        factors = self._control.gather(float(self._gradient))
        if len({str(factor) for factor in factors}) > 1:  # a NaN equals a NaN here
            failure = UnsupportedError(
                f"backward() multiplies the loss by another factor on each rank: {factors}. Each"
                " rank's loss is the mean of its own samples, so the factor must not depend on it."
                " Change the loss in training_step instead, where it is that of each microbatch."
            )
        self._control.raise_if_any_failed(failure, doing)
        self._layered(factors[0])


class _Node(torch.autograd.Function):
    """The graph of a loss."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, owner: UserBackward) -> Tensor:
        ctx.owner = owner
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.owner.reached(gradient)
        return None, None, None


class _LayeredLoss(Tensor):
    """A loss, and everything computed from it, whose ``backward`` runs the layered one, too."""

    backward_of: UserBackward

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        owner = next(leaf.backward_of for leaf in leaves if isinstance(leaf, cls))
        if func is Tensor.backward:
            _refuse_options(*args[1:], **(kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.backward:
            owner.after_backward()
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, cls):
                leaf.backward_of = owner
        return result


def _refuse_options(
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    given = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise UnsupportedError(f"loss.backward({wrong[0]}=...) in backward(). {_ONCE}")
