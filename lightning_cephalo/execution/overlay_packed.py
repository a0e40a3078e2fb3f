"""Means and sums of tensors over the microbatches of all ranks, in one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cephalo.sharding.collectives import all_reduce


@dataclass(frozen=True)
class Part:
    """A buffer, or a tensor without dimensions, and what microbatches of this rank have left.

    ``own`` takes the value of all ranks. A rank without samples has no values.
    """

    own: Tensor
    values: Sequence[Tensor]
    is_sum: bool = False
    name: str = ""

    @property
    def is_integer(self) -> bool:
        return not (self.own.is_floating_point() or self.own.is_complex())

    def _rows(self, where: torch.device) -> Tensor:
        rows = torch.stack([_real(value.detach()).flatten() for value in self.values])
        return rows.to(where, torch.float64)

    def share(self, weights: Tensor) -> Tensor:
        """Return this rank's sum, and its weight behind it."""
        if not self.values:
            return weights.new_zeros(_real(self.own).numel() + 1)
        rows = self._rows(weights.device)
        if self.is_sum:
            rows = rows - _real(self.own).flatten().to(rows)
            weights = torch.ones_like(weights)
        return torch.cat([weights @ rows, weights.sum()[None]])

    def differs(self, total: Tensor) -> Tensor:
        """Return whether a microbatch has other integers than the mean, on the device."""
        return (self._rows(total.device) != (total[:-1] / total[-1]).round()).any()

    def take(self, total: Tensor) -> None:
        real = _real(self.own)
        value = total[:-1] if self.is_sum else total[:-1] / total[-1]
        value = value.view(real.shape)
        if self.is_sum:
            value = value + real.to(value.device).double()
        if self.is_integer:
            upper, lower = value.round().long().unbind(-1)
            self.own.copy_((upper << 32) + lower)
        else:
            (torch.view_as_real(self.own) if self.own.is_complex() else self.own).copy_(value)


class Packed:
    """This rank's share of all means and sums, in one tensor of float64 for one all-reduce."""

    def __init__(self, parts: Sequence[Part], weights: Tensor) -> None:
        """``parts`` are in one order on all ranks; ``weights`` are those of microbatches."""
        self._parts, shares = parts, [part.share(weights) for part in parts]
        self._lengths = [len(share) for share in shares]
        self._total = torch.cat([weights.new_zeros(0), *shares])

    def merge(self, several_ranks: bool) -> tuple[Tensor | None, list[str]]:
        """Write the values of all ranks; collective.

        Returns whether integers differ (on the device, None for none), and their names.
        """
        if several_ranks and self._parts:
            all_reduce(self._total).wait()
        pairs = [*zip(self._parts, self._total.split(self._lengths), strict=True)]
        integers = [each for each in pairs if each[0].is_integer and not each[0].is_sum]
        with torch.no_grad():
            differ = [part.differs(total) for part, total in integers if part.values]
            for part, total in pairs:
                part.take(total)
        names = [part.name for part, _ in integers]
        return torch.stack(differ).any() if differ else None, names


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers so that float64 holds each of them exactly."""
    if tensor.is_floating_point():
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return torch.stack([tensor.long() >> 32, tensor.long() & 0xFFFFFFFF], -1)
