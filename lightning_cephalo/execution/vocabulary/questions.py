"""What lazy logits ask of their head."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor


class Kind(enum.Enum):
    """What is asked."""

    STATISTICS = "log-sum of exponentials, logit of a target, and mean, of each token"
    BEST = "the place of each token's largest logit"
    LOGITS = "all logits of each token"


@dataclass(eq=False)
class Question:
    """A question about logits.

    Attributes:
        kind: What is asked.
        values: Hidden states, of shape ``(tokens, width)`` in the dtype of the layer's output.
        shape: Shape of the answer.
        targets: A token of the vocabulary for each, for STATISTICS.
    """

    kind: Kind
    values: Tensor
    shape: tuple[int, ...]
    targets: Tensor | None = None
