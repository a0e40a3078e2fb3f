"""Replaces the forwards of layers whose logits are never whole, on the instances.

They stay cut along the vocabulary, or compute their logits in chunks of tokens (``chunked.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.vocabulary import chunked
from lightning_cephalo.execution.vocabulary.chunked import ChunkedHead
from lightning_cephalo.execution.vocabulary.columns import Columns
from lightning_cephalo.execution.vocabulary.logits import LazyLogits, gather, refuse_other_device
from lightning_cephalo.execution.vocabulary.questions import WAY_OUT, Kind, Question
from lightning_cephalo.sharding.discovery import UnitMembers
from lightning_cephalo.sharding.flat import Flat
from lightning_cephalo.sharding.unit import Unit
from lightning_cephalo.sharding.vocabulary import (
    VocabularyParameter,
    heads_of,
    modules_of,
    vocabulary_of,
)

if TYPE_CHECKING:
    from lightning_cephalo.execution.microbatch import Microbatch


class CutLayer:
    """An embedding or a head, of whose table each rank holds some rows.

    Args:
        layers: All such layers.
        meeting: Index of the layer among the places where microbatches meet.
        name: Name of the layer.
        module: The layer.
        flat: Its table.

    Attributes:
        intervals: Each rank's tokens of the vocabulary, as ``(first, one past the last)``.
        has_warned: Whether the user knows that its logits are gathered.
    """

    computes, way_out = "is cut along the vocabulary", WAY_OUT

    def __init__(
        self, layers: VocabularyLayers, meeting: int, name: str, module: nn.Module, flat: Flat
    ) -> None:
        self._layers = layers
        self.meeting = meeting
        self.name = name
        self.module = module
        self._flat = flat
        self.vocabulary, self.width = flat.shapes[0]
        self.has_warned = False

    @property
    def intervals(self) -> tuple[tuple[int, int], ...]:
        """Each rank's tokens of the vocabulary, as ``(first, one past the last)``."""
        assert self._flat.layout is not None
        return self._flat.layout.rows(0)

    def interval(self, rank: int) -> tuple[int, int]:
        """Return a rank's tokens of the vocabulary."""
        return self.intervals[rank]

    @property
    def rows(self) -> Tensor:
        """This rank's rows of the table, in compute dtype."""
        assert self._flat.rows is not None
        return self._flat.rows

    @property
    def grad_rows(self) -> Tensor | None:
        """Their gradient, to add to; None: the table is frozen."""
        return self._flat.grad_rows

    @property
    def is_trained(self) -> bool:
        """Whether its table or bias needs a gradient."""
        bias = self._bias
        return self._flat.trainable or (bias is not None and bias.requires_grad)

    @property
    def padding(self) -> int | None:
        """Index among this rank's rows of the token whose row gets no gradient; None: none."""
        index = self.module.padding_idx if isinstance(self.module, nn.Embedding) else None
        first, end = self.interval(dist.get_rank())
        return index - first if index is not None and first <= index < end else None

    @property
    def _bias(self) -> Tensor | None:
        return self.module.bias if isinstance(self.module, nn.Linear) else None

    @property
    def columns(self) -> Columns:
        """This rank's columns of logits."""
        first, end = self.interval(dist.get_rank())
        bias = self._bias
        return Columns(self.rows, None if bias is None else bias.detach()[first:end], first)

    @property
    def grad_bias(self) -> Tensor | None:
        """The gradient of the bias of these columns, to add to; None: there is none."""
        bias = self._bias
        first, end = self.interval(dist.get_rank())
        return None if bias is None or bias.grad is None else bias.grad[first:end]

    def __call__(self, value: Tensor) -> Tensor:
        """Run in place of the layer's forward."""
        if not self._layers.root.is_cut:
            whole: Tensor = type(self.module).forward(self.module, value)
            return whole
        refuse_other_device(value, self._flat.shard.device, f"input of {self.name!r}")
        if isinstance(self.module, nn.Embedding):
            return self._look_up(value)
        dtype, kind = value.dtype, value.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        elif dtype != self._flat.dtype:
            raise RuntimeError(
                f"{self.name!r}: mat1 and mat2 must have the same dtype, but got {dtype} and"
                f" {self._flat.dtype}."
            )
        if value.shape[-1] != self.width:
            raise RuntimeError(
                f"{self.name!r} got hidden states of shape {tuple(value.shape)}; expected"
                f" (..., {self.width})."
            )
        needs_gradient = torch.is_grad_enabled() and (value.requires_grad or self.is_trained)
        return LazyLogits(self, value, dtype, value.ndim - 1, needs_gradient)

    def _look_up(self, ids: Tensor) -> Tensor:
        if ids.dtype not in (torch.int64, torch.int32):
            raise RuntimeError(
                f"{self.name!r}: Expected tensor for argument #1 'indices' to have one of the"
                f" following scalar types: Long, Int; but got {ids.dtype} instead."
            )
        if ids.numel():
            low, high = (int(each) for each in torch.aminmax(ids))
            if low < 0 or high >= self.vocabulary:
                raise IndexError(
                    f"{self.name!r} got tokens from {low} to {high}; expected 0 to"
                    f" {self.vocabulary - 1}."
                )
        shape = (*ids.shape, self.width)
        question = Question(Kind.LOOKUP, self.meeting, ids.detach().reshape(-1), shape)
        differentiable = torch.is_grad_enabled() and self._flat.trainable
        return self.ask(question, None, differentiable=differentiable)

    def ask(self, question: Question, source: Tensor | None, *, differentiable: bool) -> Tensor:
        """Return what all ranks answer to the running microbatch.

        Args:
            question: The question.
            source: What its values were computed from; None: they need no gradient.
            differentiable: Whether a backward passes.

        Raises:
            UnitUseError: If no step is running.
        """
        running = self._layers.running()
        if running is None:
            raise UnitUseError(
                f"{self.name!r} is cut along the vocabulary, and is used, or its logits are,"
                " where not all ranks meet: in a hook between forward and backward, in"
                " torch.utils.checkpoint, or in a hook that reads what training_step has stored."
                f" Compute what you need in training_step. Or {WAY_OUT[0].lower()}{WAY_OUT[1:]}"
            )
        return running.ask(question, source, differentiable=differentiable)

    def summed_losses(
        self, hidden: Tensor, targets: Tensor, weights: Tensor, smoothing: float
    ) -> None:
        """Return None: gradients of other ranks' tokens do not come before the backward."""


def tables_of(module: nn.Module, root: UnitMembers) -> tuple[VocabularyParameter, ...]:
    """Return the tables of a model that can stay cut.

    Args:
        module: The model.
        root: Its root unit.

    Raises:
        UnsupportedError: If it has none, or they are in a module that is compiled.
    """
    tables = vocabulary_of(root)
    if not tables:
        raise UnsupportedError(
            f"vocabulary_sharding=True, but {type(module).__name__} has no torch.nn.Embedding"
            " outside of its units that could stay cut: it must have the forward of"
            " torch.nn.Embedding, without max_norm, sparse and scale_grad_by_freq, and share its"
            f" table with no other layer than such ones and torch.nn.Linear. {WAY_OUT}"
        )
    for name in _compiled(module, [name for name, _, _ in modules_of(tables)]):
        raise UnsupportedError(
            f"vocabulary_sharding=True, but {name!r} is inside of a module that torch.compile"
            " compiles. Microbatches of all ranks meet there, which cannot be compiled. Compile"
            f" the blocks, and not what is around them. {WAY_OUT}"
        )
    return tables


def chunked_heads_of(module: nn.Module, root: UnitMembers) -> tuple[tuple[str, nn.Linear], ...]:
    """Return name and layer of the heads of a model that can compute their logits in chunks.

    Args:
        module: The model.
        root: Its root unit.

    Raises:
        UnsupportedError: If it has none, or they are in a module that is compiled.
    """
    heads = heads_of(root)
    if not heads:
        raise UnsupportedError(
            f"chunked_logits=True, but {type(module).__name__} has no head outside of its units:"
            " a torch.nn.Linear, with its own forward, of as many outputs as the largest"
            f" torch.nn.Embedding there has tokens. {ChunkedHead.way_out}"
        )
    for name in _compiled(module, [name for name, _ in heads]):
        raise UnsupportedError(
            f"chunked_logits=True, but {name!r} is inside of a module that torch.compile compiles,"
            " which would look at all logits. Compile the blocks, and not what is around them."
            f" {ChunkedHead.way_out}"
        )
    return heads


def _compiled(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Return which of these layers are inside of a module that is compiled."""
    compiled = [name for name, inner in module.named_modules() if _is_compiled(inner)]
    return [n for n in names if any(not c or n == c or n.startswith(f"{c}.") for c in compiled)]


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


class VocabularyLayers:
    """The layers of a model whose logits are never whole.

    Args:
        root: The root unit, which has their tables.
        first: Index of the first cut one among the places where microbatches meet.
        running: Returns the microbatch whose step is running, or None.

    Attributes:
        layers: Those that can stay cut along the vocabulary.
        forwards: Those that are installed.
    """

    def __init__(self, root: Unit, first: int, running: Callable[[], Microbatch | None]) -> None:
        self.root = root
        self.running = running
        self._first = first
        self.layers = [
            CutLayer(self, first + index, name, module, root.cuts[number])
            for index, (name, module, number) in enumerate(modules_of(root.vocabulary))
        ]
        self._heads = [
            ChunkedHead(self, name, module, only_large=root.chunks_only_large)
            for name, module in root.chunked_heads
        ]
        self.forwards: list[CutLayer | ChunkedHead] = []

    def install(self) -> None:
        """Replace the layers' forwards, by whether the vocabulary stays cut."""
        self.uninstall()
        cut = list(self.layers) if self.root.cuts else []
        are_cut = {id(layer.module) for layer in cut}
        self.forwards = [*cut, *(head for head in self._heads if id(head.module) not in are_cut)]
        for layer in self.forwards:
            layer.module.forward = layer

    def uninstall(self) -> None:
        """Undo :meth:`install`."""
        for layer in self.forwards:
            if vars(layer.module).get("forward") is layer:
                del layer.module.forward
        self.forwards = []

    def described(self) -> str:
        """Return a line that names the layers; it is empty if there are none."""
        lines = []
        cut = [layer.name for layer in self.forwards if isinstance(layer, CutLayer)]
        if cut:
            vocabulary = self.layers[0].vocabulary
            lines.append(f"cut along the vocabulary of {vocabulary:,} tokens: {', '.join(cut)}")
        if self.chunked:
            heads = ", ".join(head.name for head in self.chunked)
            where = ""
            if self.chunked[0].only_large:
                where = f" where they are more than {format_mib(chunked.LARGE_BYTES)}"
            lines.append(f"logits in chunks of {chunked.CHUNK_TOKENS:,} tokens{where}: {heads}")
        return "; ".join(lines)

    def with_whole_results(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return a step whose results have no lazy logits, which nobody could read afterwards."""

        def step_and_gather() -> Any:
            result = step()
            if not any(isinstance(leaf, LazyLogits) for leaf in pytree.tree_leaves(result)):
                return result  # the very object
            return pytree.tree_map_only(
                LazyLogits, lambda logits: gather(logits.detach(), "a result of the step"), result
            )

        return step_and_gather if self.forwards else step

    @property
    def chunked(self) -> list[ChunkedHead]:
        """The heads that compute their logits in chunks of tokens now."""
        return [layer for layer in self.forwards if isinstance(layer, ChunkedHead)]

    def at(self, meeting: int) -> CutLayer:
        """Return the layer of a meeting."""
        return self.layers[meeting - self._first]

    def has(self, meeting: int) -> bool:
        """Whether microbatches meet there at one of these layers."""
        return meeting >= self._first
