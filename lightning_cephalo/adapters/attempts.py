"""Gives each attempt at a step the batch that the step has found; see ``repeated_step.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.containers import own_copy


class Attempts:
    """A rank's batch, for each attempt at its step.

    Containers are those of before the step: code may pop labels. Tensors are the same ones, as a
    copy of each batch would cost memory in every step.
    """

    def __init__(self, batch: Any, *, may_repeat: bool) -> None:
        self._batch, self._is_first = batch, True
        self._before = own_copy(batch, with_arrays=False) if may_repeat else batch
        self._may_repeat = may_repeat
        self._parts: list[tuple[Tensor, int]] = []

    def next(self) -> Any:
        """Return the batch for the next attempt."""
        if self._is_first or not self._may_repeat:
            self._is_first = False
            return self._batch
        return own_copy(self._before, with_arrays=False)

    def cut_into(self, pieces: Sequence[tuple[Any, int]]) -> UnsupportedError | None:
        """Note what an attempt's microbatches are; return why it cannot run, if it cannot."""
        written = [part for part, version in self._parts if part._version != version]
        if written:
            shapes = sorted({tuple(part.shape) for part in written})
            return UnsupportedError(
                f"training_step has written to tensors of its batch in place (shapes: {shapes})."
                " This step has to run again, and would change them twice. Make new tensors, as in"
                " x = x / 255 rather than x.div_(255)."
            )
        if self._may_repeat:
            leaves = pytree.tree_leaves([piece for piece, _ in pieces])
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self._parts = [(part, part._version) for part in tensors if not part.is_inference()]
        return None
