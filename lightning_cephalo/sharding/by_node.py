"""Sends slices so that each crosses the network between two nodes once.

A gather sends a rank's slice to one rank of every other node, its relay there, which passes it on
inside the node. A reduce goes the other way: the relay adds up what the ranks of its node have for
that rank, and sends the sum. Sent straight, a slice would cross once for every rank of the other
node. Measurements: docs/design/collectives.md, "By node".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cephalo.sharding.line import Line
from lightning_cephalo.sharding.transfers import Transfer, receive, send, sum_of

# Straight sends have tag 0, and may overtake slices that are still to be passed on.
_FIRST_TAG = 1


class ByNode:
    """Exchanges slices by node; a :class:`~lightning_cephalo.sharding.routes.Route`.

    The tag of a message tells whose slice it is. A collective sends at most one message of a tag
    from one rank to another, and gloo keeps the order of messages of one tag. One thread passes on
    slices, in the order of the collectives, so that both ends have the same order.
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = tuple(nodes)
        self._gathers, self._reduces = Line(), Line()
        self._roles: dict[tuple[int, tuple[int, ...]], _Role] = {}

    def gather(self, slices: Sequence[Tensor], group: dist.ProcessGroup) -> list[Any]:
        """Start to fill all slices but this rank's own; return the handles."""
        rank = group.rank()
        role = self._role(rank, [len(part) for part in slices])
        arriving = {
            owner: _receive(slices[owner], owner if relay == rank else relay, owner, group)
            for owner, relay in role.relays.items()
            if owner != rank
        }
        leaving = [_send(slices[rank], partner, rank, group) for partner in role.partners]

        def pass_on() -> None:
            sent = []
            for owner in role.relayed:
                arriving[owner].wait()
                sent += [_send(slices[owner], peer, owner, group) for peer in role.peers]
            for transfer in sent:
                transfer.wait()

        relaying = [self._gathers.run(pass_on)] if role.relayed and role.peers else []
        return [*arriving.values(), *leaving, *relaying]

    def reduce(
        self,
        slices: Sequence[Tensor],
        memory: Tensor,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> tuple[list[Any], Callable[[], Tensor]]:
        """Start to sum this rank's slice: inside every node, then over the nodes.

        What a node passes on is rounded to the dtype of the slices.
        """
        rank, sizes = group.rank(), [len(part) for part in slices]
        role = self._role(rank, sizes)
        rows = memory.split(list(role.rows))
        own = rows[: len(role.partners)]
        added = dict(zip(role.relayed if role.peers else (), rows[len(own) :], strict=True))
        arriving = [
            _receive(row, partner, rank, group)
            for row, partner in zip(own, role.partners, strict=True)
        ]
        summands = {
            owner: _receive(row, role.peers[0], owner, group) for owner, row in added.items()
        }
        leaving = [
            _send(slices[owner], relay, owner, group)
            for owner, relay in role.relays.items()
            if relay != rank
        ]

        def collect() -> None:
            for following in [*role.peers[1:], None]:
                for owner, row in added.items():
                    summands[owner].wait()
                    slices[owner].add_(row)
                    # one after the other: a row for each slice is enough
                    if following is not None:
                        summands[owner] = _receive(row, following, owner, group)
            for transfer in [_send(slices[owner], owner, owner, group) for owner in role.relayed]:
                transfer.wait()

        relaying = [self._reduces.run(collect)] if role.relayed else []
        return [*arriving, *leaving, *relaying], lambda: sum_of([slices[rank], *own], dtype)

    def received_numel(self, sizes: Sequence[int], rank: int) -> int:
        """Return the elements that a reduce receives into on a rank."""
        return sum(self._role(rank, sizes).rows)

    @property
    def summands(self) -> int:
        """The most summands that a reduce receives for a rank's own slice."""
        largest = max(self._nodes.count(node) for node in self._nodes)
        return largest - 1 + len(set(self._nodes)) - 1

    def _role(self, rank: int, sizes: Sequence[int]) -> _Role:
        key = rank, tuple(sizes)
        if key not in self._roles:
            self._roles[key] = _role(rank, tuple(sizes), self._nodes)
        return self._roles[key]


@dataclass(frozen=True)
class _Role:
    """What a rank does in a collective of slices of given sizes; empty slices take no part."""

    rows: tuple[int, ...]
    peers: tuple[int, ...]
    partners: tuple[int, ...]
    relays: Mapping[int, int]
    relayed: tuple[int, ...]


def _relays(node: int, sizes: Sequence[int], nodes: Sequence[int]) -> dict[int, int]:
    """Return by owner who relays a slice in a node; the largest slices are spread out first."""
    loads = {rank: 0 for rank, of in enumerate(nodes) if of == node}
    owners = [owner for owner in range(len(sizes)) if sizes[owner]]
    found = {}
    for owner in sorted(owners, key=lambda owner: (-sizes[owner], owner)):
        found[owner] = owner
        if owner not in loads:
            found[owner] = min(loads, key=lambda rank: (loads[rank], rank))
            loads[found[owner]] += sizes[owner]
    return dict(sorted(found.items()))


def _role(rank: int, sizes: Sequence[int], nodes: Sequence[int]) -> _Role:
    node = nodes[rank]
    relays = _relays(node, sizes, nodes)
    peers = tuple(other for other, of in enumerate(nodes) if of == node and other != rank)
    partners: tuple[int, ...] = ()
    if sizes[rank]:
        others = sorted(set(nodes) - {node})
        partners = (*peers, *(_relays(other, sizes, nodes)[rank] for other in others))
    relayed = tuple(owner for owner, relay in relays.items() if relay == rank != owner)
    rows = [sizes[rank]] * len(partners) + [sizes[owner] for owner in relayed if peers]
    return _Role(tuple(rows), peers, partners, relays, relayed)


def _send(part: Tensor, to: int, owner: int, group: dist.ProcessGroup) -> Transfer:
    return send(part, to, group, owner + _FIRST_TAG)


def _receive(part: Tensor, source: int, owner: int, group: dist.ProcessGroup) -> Transfer:
    return receive(part, source, group, owner + _FIRST_TAG)
