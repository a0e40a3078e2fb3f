"""Sends gradients in a narrower dtype than they are summed in, and measures what that changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Rounding:
    """The dtype that gradients travel in, and what rounding to it changes while it is measured.

    ::

        rounding = Rounding(torch.bfloat16)
        rounding.measure()
        sent = rounding.rounded(gradient, scale)  # this rank's summands of a reduce
        rounding.summed(shard)                    # this rank's rows of the sum, times the scale
        changed, whole = rounding.squares()       # to be added up over all ranks

    Args:
        dtype: Dtype of what is sent.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._changed: list[Tensor] = []
        self._whole: list[Tensor] = []
        self.is_measured = False

    def dtype_of(self, master: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a dtype are sent: never a wider one."""
        is_narrower = master.is_floating_point and self.dtype.itemsize < master.itemsize
        return self.dtype if is_narrower else master

    def rounded(self, gradient: Tensor, scale: float) -> Tensor:
        """Return a gradient as it is sent: a copy, or itself if its dtype stays.

        Args:
            gradient: This rank's summands.
            scale: Factor of the sum.
        """
        sent = gradient.to(self.dtype_of(gradient.dtype))
        if self.is_measured:
            self._changed.append(_square(gradient - sent) * scale**2)
        return sent

    def summed(self, shard: Tensor) -> None:
        """Note this rank's rows of a sum over all ranks."""
        if self.is_measured:
            self._whole.append(_square(shard))

    def measure(self) -> None:
        """Measure from here on."""
        self._changed, self._whole, self.is_measured = [], [], True

    def stop(self) -> None:
        """Measure no longer."""
        self._changed, self._whole, self.is_measured = [], [], False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Measure nothing in a ``with`` block."""
        before, self.is_measured = self.is_measured, False
        try:
            yield
        finally:
            self.is_measured = before

    def squares(self) -> tuple[float, float]:
        """Return the squared norms of what rounding took so far, and of the sums.

        Both are this rank's part. Roundings are nearly independent of each other, so their squares
        add up over the ranks. Waits for the device.
        """
        return _total(self._changed), _total(self._whole)


def _square(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values).double().square()


def _total(squares: list[Tensor]) -> float:
    return float(torch.stack(squares).sum()) if squares else 0.0
