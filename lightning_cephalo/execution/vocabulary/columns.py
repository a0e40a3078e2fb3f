"""What one rank computes with its own rows of a table: columns of logits, in chunks of tokens.

Pure arithmetic on local tensors; ``rounds.py`` moves them between the ranks. Logits exist for a
chunk of tokens at a time only, and are computed again for the backward.
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
    """

    rows: Tensor
    bias: Tensor | None
    first: int

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
        size = max(1, CHUNK_BYTES // (4 * max(len(self.rows), 1)))
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
            logits = self.logits(hidden[part]).to(found.dtype)
            largest = logits.amax(1)
            found[part, 0] = largest
            own, places = self._own(targets[part])
            picked = logits.gather(1, places[:, None])[:, 0]
            found[part, 2] = torch.where(own, picked, 0.0)
            found[part, 3] = logits.sum(1)
            # a row of minus infinities has no largest logit to subtract
            shift = torch.where(largest.isinf(), 0.0, largest)
            found[part, 1] = logits.sub_(shift[:, None]).exp_().sum(1)
        return found

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
        hidden: Of the hidden states of all tokens, which the ranks then sum.
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
