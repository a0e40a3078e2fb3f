"""Sums gradients over groups of ranks that each hold the whole state: hybrid sharding.

A reduce sums a flat inside of each group, as without groups, into the slices of its ranks. Groups
cut a flat in different places. So each rank then exchanges its sums with those ranks of the other
groups whose slices overlap its own. An element thus crosses to another group once.

All ranks add up the sums of the groups in one order. Each of these sums is computed on one rank,
and sent to the others. So the result has the same bits in all groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cephalo.sharding.line import Line
from lightning_cephalo.sharding.routes import Route
from lightning_cephalo.sharding.transfers import receive, send, sum_of


@dataclass(frozen=True)
class Across:
    """The groups of ranks that hold the whole state, and what connects them.

    Attributes:
        gathers: Process group of all ranks, apart from their reduces.
        reduces: Process group of all ranks for reduces.
        line: Sends the sums of this rank's group.
    """

    members: tuple[tuple[int, ...], ...]
    gathers: dist.ProcessGroup
    reduces: dist.ProcessGroup
    line: Line = field(default_factory=Line, repr=False)

    @property
    def own(self) -> int:
        """Number of this rank's group."""
        rank = dist.get_rank(self.reduces)
        return next(number for number, ranks in enumerate(self.members) if rank in ranks)

    def route(self, cuts: Sequence[Sequence[int]]) -> Route:
        """Return the way of a flat's slices."""
        own = self.own
        place = self.members[own].index(dist.get_rank(self.reduces))
        start, end = cuts[own][place : place + 2]
        peers = tuple(
            _Peer(number, rank, max(first, start) - start, min(last, end) - start)
            for number, (ranks, edges) in enumerate(zip(self.members, cuts, strict=True))
            if number != own
            for rank, (first, last) in zip(ranks, itertools.pairwise(edges), strict=True)
            if max(first, start) < min(last, end)
        )
        return _AcrossGroups(self, own, peers)


@dataclass(frozen=True)
class _Peer:
    """A rank of another group whose slice overlaps this rank's."""

    group: int
    rank: int
    start: int
    end: int


@dataclass(frozen=True)
class _AcrossGroups(Route):
    """Reduces inside of a group, and then across groups."""

    across: Across
    own: int
    peers: tuple[_Peer, ...]

    def reduce(
        self,
        slices: Sequence[Tensor],
        memory: Tensor,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> tuple[list[Any], Callable[[], Tensor]]:
        """See :meth:`Route.reduce`; what groups exchange is rounded to the dtype of the slices."""
        rank, sizes = dist.get_rank(group), [len(part) for part in slices]
        beside = super().received_numel(sizes, rank)
        works, total_of = super().reduce(slices, memory[:beside], group, dtype)
        rows = memory[beside:].view(len(self.across.members), sizes[rank])
        reduces, sums = self.across.reduces, rows[self.own]
        arriving = [receive(rows[p.group][p.start : p.end], p.rank, reduces) for p in self.peers]

        def pass_on() -> None:
            for work in works:
                work.wait()
            if not len(sums):
                return
            sums.copy_(total_of())
            sent = [send(sums[p.start : p.end], p.rank, reduces) for p in self.peers]
            for transfer in sent:
                transfer.wait()

        return [*arriving, self.across.line.run(pass_on)], lambda: sum_of(rows.unbind(), dtype)

    def received_numel(self, sizes: Sequence[int], rank: int) -> int:
        return super().received_numel(sizes, rank) + len(self.across.members) * sizes[rank]
