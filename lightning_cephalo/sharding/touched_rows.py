"""Notes which rows of a parameter have had sparse gradients on this rank.

``nn.Embedding(sparse=True)`` gives gradients of the rows that its samples use. They are added to a
dense gradient, which is summed over the ranks. An optimizer for sparse gradients updates the rows
that some sample has used, also those whose gradient is zero. The dense gradient does not show them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TouchedRows:
    """Flags of the rows that sparse gradients have reached since :meth:`clear`.

    Args:
        parameter: The gathered parameter, to whose gradients of every microbatch it listens.

    Attributes:
        flags: One flag per row; behind them, one that says that some gradient was dense.
        is_used: Whether an update has used them. The next backward begins new ones: until then,
            a further update may use the same gradient.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        rows = parameter.shape[0]
        self.flags = torch.zeros(rows + 1, dtype=torch.uint8, device=parameter.device)
        self.is_used = False
        needs_gradient = parameter.requires_grad
        parameter.requires_grad_(True)  # torch takes hooks of no others; it may be thawed later
        parameter.register_hook(self._note)
        parameter.requires_grad_(needs_gradient)

    def _note(self, gradient: Tensor) -> None:
        if gradient.is_sparse and gradient.sparse_dim() == 1:
            self.flags[gradient.coalesce().indices()[0]] = 1
        else:
            self.flags[-1] = 1

    def clear(self) -> None:
        """Forget all rows."""
        self.flags.zero_()
        self.is_used = False
