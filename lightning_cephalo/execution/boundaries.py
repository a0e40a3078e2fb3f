"""The tensors at which a microbatch's graph is cut, and the glue between units.

Where the graph is cut a *leaf* takes a tensor's place: the unit sees the leaf instead of what it
was called with, and the code after a unit sees a stand-in for the leaf of its output. What lies
between units (residuals, embeddings, masks: the *glue*) keeps a graph of its own, which is walked
once per tensor, with the sum of the gradients of all its uses; see [Note: cuts] in
:mod:`~lightning_cephalo.execution.microbatch`.

Nothing here keeps the user's tensors alive: whether they are still held tells what may be moved
to host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import TensorWeakRef

from lightning_cephalo.common.errors import UnitUseError


class _OutOfUnit(torch.autograd.Function):
    """What the glue sees of an output's leaf, so that it may change it in place (``x += y``)."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


# where the glue's graph ends: at parameters and other leaves, and at outputs of units
_ENDS = ("AccumulateGrad", "_OutOfUnitBackward")


@dataclass
class _Cut:
    """A tensor of the user's and the leaf that stands for it.

    Attributes:
        source: The tensor; the same as long as it has this node.
        node: Its ``grad_fn`` when it was cut.
        leaf: What units see.
        is_used: Whether a unit was called with it.
    """

    source: TensorWeakRef
    node: Any
    leaf: Tensor
    is_used: bool = False


@dataclass
class _Glue:
    """Where gradients of a leaf go on."""

    edge: GradientEdge
    leaf: Tensor


class Boundaries:
    """The cuts of one microbatch.

    Args:
        inside: Ids of the units' parameters, in a step that looks for tensors which leave a unit
            other than as its outputs; None: nobody looks.
    """

    def __init__(self, inside: frozenset[int] | None = None) -> None:
        self._inside = inside
        self._cuts: dict[int, _Cut] = {}
        self._glue: dict[int, list[_Glue]] = {}
        self._entered: dict[int, list[_Cut]] = {}
        self._needed_until: dict[int, list[Tensor]] = {}
        self._shown: list[_Cut] = []

    def leaf_of(self, value: Any, position: int) -> Any:
        """Return what a unit sees of an argument, at this position in the order of visits."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        cut = self._cuts.get(id(value))
        if cut is None or cut.source() is not value or cut.node is not value.grad_fn:
            self.refuse_leaks(value)
            cut = _Cut(TensorWeakRef(value), value.grad_fn, _new_leaf(value))
            self._cuts[id(value)] = cut
            edge = get_gradient_edge(value)
            self._glue.setdefault(position, []).append(_Glue(edge, cut.leaf))
        if not cut.is_used:
            cut.is_used = True
            self._entered.setdefault(position, []).append(cut)
            self._needed_until.setdefault(position, []).append(cut.leaf)
        return cut.leaf

    def show(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Cut an output of a unit; return its leaf and what the glue sees of it."""
        leaf = _new_leaf(output)
        shown = _OutOfUnit.apply(leaf)
        cut = _Cut(TensorWeakRef(shown), shown.grad_fn, leaf)
        self._cuts[id(shown)] = cut
        self._shown.append(cut)
        return leaf, shown

    def drop_values(self) -> None:
        """Take the memory of outputs whose values nobody can ask for any more.

        Of what no unit was called with only the gradient is needed, such as of a branch that the
        glue has added to a residual.
        """
        shown, self._shown = self._shown, []
        for cut in shown:
            if not cut.is_used and cut.source() is None:
                take_memory(cut.leaf)

    def let_go(self, position: int) -> list[Tensor]:
        """Return leaves that first entered a unit there and that only this microbatch still holds.

        To be asked once for each position, when the code after the unit has gone on to the next.
        """
        cuts = self._entered.pop(position, [])
        return [cut.leaf for cut in cuts if cut.source() is None]

    def end_forward(self) -> None:
        """Nothing is cut any more: leaves live as long as the backward needs them."""
        self._cuts.clear()
        self._entered.clear()

    def refuse_leaks(self, tensor: Tensor) -> None:
        """Refuse what was computed inside a unit and came out other than as its output."""
        if self._inside is None:
            return
        nodes = _nodes([tensor.grad_fn])
        variables = [n.variable for n in nodes if type(n).__name__ == "AccumulateGrad"]
        # any microbatch's leaves: what is stored on a module is the last microbatch's
        if any(id(v) in self._inside or hasattr(v, "_leaf_of_unit") for v in variables):
            raise UnitUseError(
                "The loss depends on a tensor that was computed inside a unit and is not one of"
                " its outputs: it was stored on a module or recorded by a hook (an auxiliary loss,"
                " router logits), or the unit's parameters are used outside of it. Its gradient"
                " would be lost. Return it from the unit's forward, or leave it out of the loss."
            )

    def shares_glue(self, loss: Tensor) -> bool:
        """Whether the graph of the loss has nodes in common with what units were called with."""
        pending = [entry.edge.node for entries in self._glue.values() for entry in entries]
        return bool(pending) and bool(_reachable([loss.grad_fn]) & _reachable(pending))

    def passed(self, position: int) -> None:
        """Take the values of leaves that first entered a unit there: its backward is done."""
        for leaf in self._needed_until.pop(position, []):
            take_memory(leaf)

    def through_glue(self, position: int) -> None:
        """Carry the gradients of leaves that first entered a unit there on through the glue."""
        entries = self._glue.pop(position, [])
        reached = [entry for entry in entries if entry.leaf.grad is not None]
        if reached:
            torch.autograd.backward(
                [entry.edge for entry in reached],
                [entry.leaf.grad for entry in reached],
                retain_graph=True,
            )


def take_memory(leaf: Tensor) -> None:
    """Let go of a leaf's values. It keeps its shape, to which gradients must fit meanwhile.

    What is not :func:`is_plain` stays as it is.
    """
    if is_plain(leaf):
        leaf.data = leaf.new_empty(()).expand(leaf.shape)


def is_plain(tensor: Tensor) -> bool:
    """Whether shape and strides tell where its values are: not of nested and sparse tensors."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


def _new_leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach().requires_grad_()
    leaf._leaf_of_unit = True  # type: ignore[attr-defined]
    return leaf


def _reachable(roots: Sequence[Any]) -> set[Any]:
    """Nodes of the graph that hold buffers, from these on, down to the leaves of outputs."""
    return {node for node in _nodes(roots) if type(node).__name__ not in _ENDS}


def _nodes(roots: Sequence[Any]) -> set[Any]:
    seen: set[Any] = set()
    stack = [node for node in roots if node is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ not in _ENDS:
            stack.extend(following for following, _ in node.next_functions if following is not None)
    return seen
