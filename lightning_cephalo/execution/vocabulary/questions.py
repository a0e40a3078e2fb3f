"""What microbatches ask of layers that are cut along the vocabulary."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor

WAY_OUT = "Use CephaloStrategy(vocabulary_sharding=False)."


class Kind(enum.IntEnum):
    """What is asked."""

    LOOKUP = 0  # the rows of tokens in a table
    STATISTICS = 1  # log-sum of exponentials, logit of a target, and mean, of each token
    BEST = 2  # the place of each token's largest logit
    LOGITS = 3  # all logits of each token


@dataclass(eq=False)
class Question:
    """What one microbatch asks, and the leaf that gets the gradient of the answer.

    Attributes:
        kind: What is asked.
        meeting: Index of the layer among the places where microbatches meet.
        values: Tokens, of shape ``(tokens,)``; or their hidden states, of shape ``(tokens, width)``
            in the dtype of the layer's output.
        shape: Shape of the answer.
        targets: A token of the vocabulary for each, for STATISTICS.
        source: Leaf of what the values were computed from; None: it needs no gradient.
        leaf: Leaf of the answer.
        needs_gradient: Whether the values need a gradient.
    """

    kind: Kind
    meeting: int
    values: Tensor
    shape: tuple[int, ...]
    targets: Tensor | None = None
    source: Tensor | None = None
    leaf: Tensor | None = None
    needs_gradient: bool = False

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of the answer; None: none has come."""
        return None if self.leaf is None else self.leaf.grad

    @property
    def own(self) -> tuple[Tensor, ...]:
        """The leaves to which code behind it sends gradients."""
        return () if self.leaf is None else (self.leaf,)

    def finish(self, gradient: Tensor) -> None:
        """Pass the gradient of the values on."""
        source = self.source
        if source is None or not source.requires_grad:
            return
        gradient = gradient.to(source.dtype).view(source.shape)
        source.grad = gradient if source.grad is None else source.grad + gradient
