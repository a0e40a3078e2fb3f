"""Logits in chunks of tokens: pure arithmetic on local tensors.

Logits exist for a chunk of tokens at a time only, and are computed again for the
backward. Losses that one rank computes alone have their gradients in the forward: their factor is
one number, by which the backward multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Logits of one chunk, in single precision. Three tensors of that size live at a time.
CHUNK_BYTES = 32 * 2**20

STATISTICS = 4
"""Numbers per token that a rank knows: largest logit, sum of exponentials, target's, sum."""


@dataclass(frozen=True)
class Columns:
    """The rows of a head's table that a rank holds, which give columns of logits.

    Attributes:
        rows: Of shape ``(rows, width)``, in compute dtype.
        bias: Of shape ``(rows,)``, or None.
        first: Index of the first of these tokens of the vocabulary.
        chunk_tokens: Tokens of a chunk; None: as many as ``CHUNK_BYTES`` hold.
    """

    rows: Tensor
    bias: Tensor | None
    first: int
    chunk_tokens: int | None = None

    @property
    def end(self) -> int:
        """One past the last of these tokens."""
        return self.first + len(self.rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the columns for these tokens' hidden states, in the dtype of these."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return functional.linear(hidden, self.rows.to(hidden.dtype), bias)

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Yield slices of tokens whose logits are not too large."""
        size = self.chunk_tokens or max(1, CHUNK_BYTES // (4 * max(len(self.rows), 1)))
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))

    def statistics(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return what these columns say of each token, of shape ``(tokens, STATISTICS)``.

        Args:
            hidden: Of shape ``(tokens, width)``.
            targets: A token of the vocabulary for each; a negative one is nowhere.
        """
        found = hidden.new_zeros((len(hidden), STATISTICS), dtype=wide(hidden.dtype))
        found[:, 0] = -torch.inf
        if not len(self.rows):
            return found
        for part in self.chunks(len(hidden)):
            self._chunk(hidden[part], targets[part], found[part])
        return found

    def _chunk(self, hidden: Tensor, targets: Tensor, found: Tensor) -> Tensor:
        """Write the statistics of a chunk; return ``exp(logits - largest)``."""
        logits = self.logits(hidden).to(found.dtype)
        largest = logits.amax(1)
        found[:, 0] = largest
        own, places = self._own(targets)
        picked = logits.gather(1, places[:, None])[:, 0]
        found[:, 2] = torch.where(own, picked, 0.0)
        found[:, 3] = logits.sum(1)
        # a row of minus infinities has no largest logit to subtract
        shift = torch.where(largest.isinf(), 0.0, largest)
        exponentials = logits.sub_(shift[:, None]).exp_()
        found[:, 1] = exponentials.sum(1)
        return exponentials

    def losses(
        self, hidden: Tensor, targets: Tensor, weights: Tensor, smoothing: float, into: Gradients
    ) -> Tensor:
        """Return each token's cross-entropy, where these are all columns.

        Gradients are those of the sum of the losses times ``weights``.

        Args:
            hidden: As for :meth:`statistics`.
            targets: As for :meth:`statistics`.
            weights: Of each token.
            smoothing: As for ``torch.nn.functional.cross_entropy``.
            into: What to add to.
        """
        losses = hidden.new_empty(len(hidden), dtype=wide(hidden.dtype))
        for part in self.chunks(len(hidden)):
            given = hidden[part], targets[part], weights[part]
            losses[part] = self._losses_of_chunk(*given, smoothing, part, into)
        return losses

    # a method of its own: what it makes is gone before the next chunk
    def _losses_of_chunk(
        self,
        hidden: Tensor,
        targets: Tensor,
        weights: Tensor,
        smoothing: float,
        part: slice,
        into: Gradients,
    ) -> Tensor:
        vocabulary = len(self.rows)
        found = hidden.new_empty((len(hidden), STATISTICS), dtype=wide(hidden.dtype))
        exponentials = self._chunk(hidden, targets, found)
        log_sum, target, mean = joined(found[None], vocabulary)[0].unbind(1)
        of_logits = exponentials.mul_((weights / found[:, 1])[:, None])
        if smoothing:
            of_logits -= (weights * (smoothing / vocabulary))[:, None]
        own, places = self._own(targets)
        of_target = torch.where(own, (smoothing - 1.0) * weights, 0.0)
        of_logits.scatter_add_(1, places[:, None], of_target[:, None])
        self._through(hidden, of_logits, part, into)
        return log_sum - (1.0 - smoothing) * target - smoothing * mean

    def _own(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return which targets are in these columns, and their places; 0 for the others."""
        own = (targets >= self.first) & (targets < self.end)
        return own, torch.where(own, targets - self.first, 0)

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's largest logit in these columns, and its place in the vocabulary."""
        value = hidden.new_full((len(hidden),), -torch.inf, dtype=wide(hidden.dtype))
        place = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        if not len(self.rows):
            return value, place
        for part in self.chunks(len(hidden)):
            own = self.logits(hidden[part]).max(1)
            value[part], place[part] = own.values.to(value.dtype), own.indices + self.first
        return value, place

    def backward_of_statistics(
        self,
        hidden: Tensor,
        targets: Tensor,
        log_sum: Tensor,
        gradients: Tensor,
        vocabulary: int,
        into: Gradients,
    ) -> None:
        """Add the gradients of the rows, of the bias, and of the hidden states.

        Args:
            hidden: As for :meth:`statistics`.
            targets: As for :meth:`statistics`.
            log_sum: Logarithm of the sum of exponentials of all logits of each token.
            gradients: Of the log-sum, the target's logit, and the mean logit; ``(tokens, 3)``.
            vocabulary: Number of logits of a token.
            into: What to add to.
        """
        if not len(self.rows):
            return
        for part in self.chunks(len(hidden)):
            of_sum, of_target, of_mean = gradients[part].unbind(1)
            logits = self.logits(hidden[part]).to(log_sum.dtype)
            found = logits.sub_(log_sum[part, None]).exp_().mul_(of_sum[:, None])
            found += of_mean[:, None] / vocabulary
            own, places = self._own(targets[part])
            found.scatter_add_(1, places[:, None], torch.where(own, of_target, 0.0)[:, None])
            self._through(hidden[part], found, part, into)
            del logits, found  # they would be there beside those of the next chunk

    def backward_of_logits(
        self, hidden: Tensor, gradients: Tensor, start: int, into: Gradients
    ) -> None:
        """Add the gradients of the rows, of the bias, and of the hidden states.

        Args:
            hidden: As for :meth:`statistics`.
            gradients: Those of the columns, of shape ``(tokens, rows)``.
            start: Where these tokens are in ``into.hidden``.
            into: What to add to.
        """
        if len(self.rows):
            part = slice(start, start + len(hidden))
            self._through(hidden, gradients, part, into)

    def _through(self, hidden: Tensor, of_logits: Tensor, part: slice, into: Gradients) -> None:
        narrow = of_logits.to(hidden.dtype)
        if into.hidden is not None:
            torch.mm(narrow, self.rows.to(hidden.dtype), out=into.hidden[part])
        if into.rows is not None:
            if into.rows.dtype == hidden.dtype:
                into.rows.addmm_(narrow.T, hidden)
            else:
                into.rows.add_(narrow.T @ hidden)
        if into.bias is not None:
            into.bias.add_(of_logits.sum(0))


@dataclass(frozen=True)
class Gradients:
    """Where a rank adds its part of gradients; None: that needs none.

    Attributes:
        rows: Of the rows, in the dtype of the master copy.
        bias: Of their bias.
        hidden: Of the hidden states of all tokens. Where each rank has some columns, the ranks then
            sum it.
    """

    rows: Tensor | None
    bias: Tensor | None
    hidden: Tensor | None


def joined(statistics: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return what all columns together say of each token.

    Args:
        statistics: Those of all ranks, of shape ``(ranks, tokens, STATISTICS)``.
        vocabulary: Number of logits of a token.

    Returns:
        Log-sum of exponentials, the target's logit and the mean logit, of shape ``(tokens, 3)``;
        and the first of them alone.
    """
    largest = statistics[..., 0]
    top = largest.amax(0)
    shift = torch.where(top.isinf(), 0.0, top)
    log_sum = (statistics[..., 1] * (largest - shift).exp()).sum(0).log() + shift
    target, total = statistics[..., 2].sum(0), statistics[..., 3].sum(0)
    return torch.stack([log_sum, target, total / vocabulary], 1), log_sum


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which exponentials are summed."""
    return torch.promote_types(dtype, torch.float32)
