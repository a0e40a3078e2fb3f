"""The way that a reduce's slices take between ranks over sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cephalo.sharding.transfers import exchange, sum_of


class Route:
    """The straight way: every rank sends its summands to every other rank of the group."""

    def reduce(
        self,
        slices: Sequence[Tensor],
        memory: Tensor,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> tuple[list[Any], Callable[[], Tensor]]:
        """Start to sum this rank's slice in rank order; return handles, and what gives the sum."""
        own = slices[group.rank()]
        rows = memory.view(len(slices), own.numel()).unbind()
        rows[group.rank()].copy_(own)
        return exchange(slices, rows, group), lambda: sum_of(rows, dtype)

    def received_numel(self, sizes: Sequence[int], rank: int) -> int:
        """Return the elements that a reduce of slices receives into on a rank."""
        return len(sizes) * sizes[rank]


STRAIGHT = Route()
