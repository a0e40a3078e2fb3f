"""Heads that every rank has whole, and whose logits are computed in chunks of tokens.

Such a head returns lazy logits, and answers their questions itself: gradients are those of an
ordinary graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.vocabulary.columns import Columns, Gradients, joined, wide
from lightning_cephalo.execution.vocabulary.logits import LazyLogits
from lightning_cephalo.execution.vocabulary.questions import Kind, Question

if TYPE_CHECKING:
    from lightning_cephalo.execution.vocabulary.layers import VocabularyLayers

CHUNK_TOKENS = 1024
"""Tokens of a chunk: with fewer, a GPU would wait for the memory of the table and its gradient.

A step with fewer holds less. So the memory of steps grows until a chunk is full, and profiling
measures it there (``profiling/sweep.py``).
"""

LARGE_BYTES = 256 * 2**20
"""Bytes of logits in single precision above which "auto" computes them in chunks.

A loss holds about three times as many of all logits: on most devices less is not worth a change.
"""


class ChunkedHead:
    """A head whose logits never exist for all tokens of a microbatch.

    Evaluation, code without gradients, and code inside of units get all logits, as on one device.

    Args:
        layers: All layers with such forwards.
        name: Name of the layer.
        module: The layer.
        only_large: Whether calls of few tokens give all logits; see ``LARGE_BYTES``.

    Attributes:
        vocabulary: Number of logits of a token.
        has_warned: Whether the user knows that all logits are computed.
        only_large: Whether calls of few tokens give all logits.
        most_tokens: Most tokens of a call in a training step, since someone has set it to 0.
    """

    computes = "computes its logits in chunks of tokens"
    way_out = "Use CephaloStrategy(chunked_logits=False)."

    def __init__(
        self, layers: VocabularyLayers, name: str, module: nn.Linear, *, only_large: bool = False
    ) -> None:
        self._layers = layers
        self.name = name
        self.module = module
        self.vocabulary, self.width = module.weight.shape
        self.only_large = only_large
        self.has_warned = False
        self.most_tokens = 0

    @property
    def whole_tokens(self) -> int:
        """Most tokens of which a call gives all logits."""
        return LARGE_BYTES // (4 * self.vocabulary) if self.only_large else 0

    def __call__(self, value: Tensor) -> Tensor:
        """Run in place of the layer's forward."""
        running = self._layers.running()
        needs_gradient = any(
            each is not None and each.requires_grad for each in (value, *self._parameters)
        )
        dtype = self._dtype_for(value)
        if running is not None and running.computes_glue and needs_gradient and dtype is not None:
            tokens = value.numel() // self.width
            self.most_tokens = max(self.most_tokens, tokens)
            if tokens > self.whole_tokens:
                return LazyLogits(self, value, dtype, value.ndim - 1, needs_gradient=True)
        whole: Tensor = type(self.module).forward(self.module, value)
        return whole

    def _dtype_for(self, value: Tensor) -> torch.dtype | None:
        """Return the dtype to compute in; None: torch has an error for this input."""
        weight, kind = self.module.weight, value.device.type
        if value.device != weight.device or value.shape[-1:] != (self.width,):
            return None
        both = (value.dtype, weight.dtype)
        if torch.is_autocast_enabled(kind) and torch.float64 not in both:
            return torch.get_autocast_dtype(kind)
        return value.dtype if value.dtype == weight.dtype else None

    @property
    def _parameters(self) -> tuple[Tensor, Tensor | None]:
        return self.module.weight, self.module.bias

    def ask(self, question: Question, source: Tensor | None, *, differentiable: bool) -> Tensor:
        """Return the answer to a question about logits.

        Args:
            question: The question.
            source: The hidden states that its values were computed from.
            differentiable: Whether a backward may pass.

        Raises:
            UnitUseError: If no step is running.
        """
        self._check_runs()
        hidden = question.values
        if differentiable:
            assert source is not None
            hidden = source.reshape(hidden.shape).to(hidden.dtype)
        with torch.set_grad_enabled(differentiable), _without_autocast(hidden):
            if question.kind is Kind.STATISTICS:
                answer: Tensor = _Statistics.apply(hidden, *self._parameters, question.targets)
            elif question.kind is Kind.BEST:
                answer = _columns(hidden, *self._parameters).best(hidden)[1]
            else:
                weight, bias = self._parameters
                bias = None if bias is None else bias.to(hidden.dtype)
                answer = functional.linear(hidden, weight.to(hidden.dtype), bias)
            return answer.view(question.shape)

    def summed_losses(
        self, hidden: Tensor, targets: Tensor, weights: Tensor, smoothing: float
    ) -> Tensor:
        """Return the sum of all tokens' cross-entropy times their weights.

        Args:
            hidden: Of shape ``(tokens, width)``, in the dtype that the layer computes in.
            targets: A token of the vocabulary for each; a negative one counts for nothing.
            weights: Of each token.
            smoothing: As for ``torch.nn.functional.cross_entropy``.
        """
        self._check_runs()
        with _without_autocast(hidden):
            total: Tensor = _SummedLosses.apply(
                hidden, *self._parameters, targets, weights, smoothing
            )
        return total

    def _check_runs(self) -> None:
        if self._layers.running() is None:
            raise UnitUseError(
                f"Logits of {self.name!r} are used behind their step, or in a hook between forward"
                f" and backward. The head {self.computes}, and they were never there. Compute what"
                f" you need in training_step, or {self.way_out[0].lower()}{self.way_out[1:]}"
            )


def _columns(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Columns:
    rows = weight.detach().to(hidden.dtype)  # once, not for each chunk
    return Columns(rows, None if bias is None else bias.detach(), 0, CHUNK_TOKENS)


def _gradients(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Gradients:
    """Return memory for the gradients of these, as far as they need them."""
    of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
    return Gradients(
        # chunks add up in single precision
        torch.zeros_like(weight, dtype=wide(weight.dtype)) if of_weight else None,
        None if bias is None or not of_bias else torch.zeros_like(bias, dtype=wide(bias.dtype)),
        torch.empty_like(hidden) if of_hidden else None,
    )


def _without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    return torch.autocast(tensor.device.type, enabled=False)


class _Statistics(torch.autograd.Function):
    """Log-sum of exponentials, the target's logit, and the mean logit of each token."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        columns = _columns(hidden, weight, bias)
        found = columns.statistics(hidden, targets)
        answer, log_sum = joined(found[None], len(weight))
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum)
        return answer

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sum = ctx.saved_tensors
        into = _gradients(ctx, hidden, weight, bias)
        with _without_autocast(hidden):
            _columns(hidden, weight, bias).backward_of_statistics(
                hidden, targets, log_sum, gradients, len(weight), into
            )
        return into.hidden, into.rows, into.bias, None


class _SummedLosses(torch.autograd.Function):
    """The sum of cross-entropies, with its gradients: each chunk's logits are computed once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        smoothing: float,
    ) -> Tensor:
        into = _gradients(ctx, hidden, weight, bias)
        columns = _columns(hidden, weight, bias)
        losses = columns.losses(hidden, targets, weights, smoothing, into)
        ctx.save_for_backward(into.hidden, into.rows, into.bias)
        return (torch.where(targets >= 0, losses, 0.0) * weights).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if each is None else each * factor for each in ctx.saved_tensors)
        return (*found, None, None, None)
