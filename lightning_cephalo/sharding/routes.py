"""The ways that slices take between ranks over sends and receives: straight, or by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cephalo.sharding.by_node import ByNode
from lightning_cephalo.sharding.transfers import exchange, sum_of


class Route(Protocol):
    """Moves slices of host memory between the ranks of a group; without local results."""

    def gather(self, slices: Sequence[Tensor], group: dist.ProcessGroup) -> list[Any]:
        """Start to fill all slices but this rank's own, which is sent; return the handles."""
        ...

    def reduce(
        self,
        slices: Sequence[Tensor],
        memory: Tensor,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> tuple[list[Any], Callable[[], Tensor]]:
        """Start to sum this rank's slice over the ranks."""
        ...

    def received_numel(self, sizes: Sequence[int], rank: int) -> int:
        """Return the elements that a reduce receives into on a rank."""
        ...


class Straight:
    """Every rank exchanges its slices with every other rank."""

    def gather(self, slices: Sequence[Tensor], group: dist.ProcessGroup) -> list[Any]:
        """See :meth:`Route.gather`."""
        return exchange([slices[group.rank()]] * len(slices), slices, group)

    def reduce(
        self,
        slices: Sequence[Tensor],
        memory: Tensor,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> tuple[list[Any], Callable[[], Tensor]]:
        """See :meth:`Route.reduce`; the sum is in rank order."""
        own = slices[group.rank()]
        rows = memory.view(len(slices), own.numel()).unbind()
        rows[group.rank()].copy_(own)
        return exchange(slices, rows, group), lambda: sum_of(rows, dtype)

    def received_numel(self, sizes: Sequence[int], rank: int) -> int:
        """See :meth:`Route.received_numel`."""
        return len(sizes) * sizes[rank]


class Routing:
    """The choice of the way that slices take.

    Args:
        on_host: Whether slices travel in sends and receives at all, rather than in the collectives
            of a backend that runs on the device and finds its own ways.
        groups: Number of groups of ranks that each hold the whole state; nodes are then those of
            the largest group.

    Attributes:
        has_choice: Whether going by node differs from the straight way.
        by_node: Whether slices go by node.
    """

    def __init__(self, nodes: Sequence[int], *, on_host: bool = True, groups: int = 1) -> None:
        self.nodes = tuple(nodes)
        self.has_choice = on_host and 1 < len(set(nodes)) < len(nodes)
        self._on_host, self._world_size = on_host, len(nodes)
        # a group's own sum, and those of the others
        self._of_groups = groups if groups > 1 else 0
        self._straight, self._by_node = Straight(), ByNode(nodes)
        self.choose(by_node=False)

    def choose(self, *, by_node: bool) -> None:
        """Choose between steps, on all ranks together; no effect without :attr:`has_choice`."""
        self.by_node = by_node and self.has_choice
        self.route: Route = self._by_node if self.by_node else self._straight

    @property
    def summands(self) -> int:
        """The most summands that a reduce receives for a rank's slice; 1 if the backend adds up."""
        if not self._on_host:
            return 1
        if self.by_node:
            return self._by_node.summands
        return self._world_size + self._of_groups

    def received_numel(self, sizes: Sequence[int], rank: int, route: Route | None = None) -> int:
        """Return the elements that a reduce of slices of these sizes receives into on a rank."""
        if not self._on_host:
            return sizes[rank]
        return (route or self.route).received_numel(sizes, rank)
