"""The links of a cluster: inside each node, and between each pair of nodes.

A ring passes the nodes in their order and returns to the first, so its slowest link decides. Where
one pair of nodes has a slow link, an order in which these two are not neighbours helps.

::

    network = Network(
        inside=(Link(250e9), Link(12e9)),
        between=((None, Link(3e9)), (Link(3e9), None)),
    )
    network.ring_s({0: 8, 1: 4}, 1e9)       # seconds to gather 1 GB over 12 ranks
    network.between_groups((0,), (1,))      # Link(3e9)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import SECONDS
from lightning_cephalo.common.records import Amount, Checked, Positive

# Start-up time of a collective inside a node and over a network: assumed, not measured.
NODE_LATENCY_S = 10e-6
NETWORK_LATENCY_S = 30e-6


@dataclass(frozen=True)
class Link(Checked):
    """A link between ranks: bytes per second each way, and seconds before the first byte."""

    bandwidth_bytes_per_s: Positive
    latency_s: Amount = NODE_LATENCY_S


LinkMatrix = tuple[tuple[Link | None, ...], ...]
"""A link for each pair of nodes, in node order; None on the diagonal."""
NO_OWN_LINK = "Between nodes that are connected through others, write the slowest link on the way."


def link_matrix(field: str, rows: Any, nodes: int) -> LinkMatrix:
    """Return a checked matrix of links between nodes."""
    matrix = tuple(
        records.items(f"{field}[{index}]", row, of="links")
        for index, row in enumerate(records.items(field, rows, of="rows of links"))
    )
    lengths = [len(row) for row in matrix]
    if lengths != [nodes] * nodes:
        raise PlanError(
            f"{field}: expected a square matrix, {nodes} rows of {nodes} links for {nodes} nodes, "
            f"but got {_counted(lengths)}. "
            f"Write one row per node, also for each of 'count' equal ones."
        )
    for one, row in enumerate(matrix):
        for other, link in enumerate(row):
            if one == other:
                if link is not None:
                    raise PlanError(
                        f"{field}[{one}][{one}]: expected null, as this is a node and itself, but "
                        f"got {_text(link)}. The link inside of a node is its 'link'."
                    )
            elif not isinstance(link, Link):
                raise PlanError(
                    f"{field}[{one}][{other}]: expected a link between nodes {one} and {other}, "
                    f"but got {records.shortened(link)}. {NO_OWN_LINK}"
                )
            elif link != matrix[other][one]:
                raise PlanError(
                    f"{field}: expected the same link both ways, but nodes {one} and {other} have "
                    f"{_text(link)} one way and {_text(matrix[other][one])} the other. "
                    f"Write the slower one in both places."
                )
    return matrix


def uniform(link: Link | None, nodes: int) -> LinkMatrix:
    """Return the matrix in which all pairs of nodes have this link."""
    return tuple(
        tuple(None if one == other else link for other in range(nodes)) for one in range(nodes)
    )


@dataclass(frozen=True)
class Network(Checked):
    """The links of some nodes."""

    inside: tuple[Link, ...]
    between: LinkMatrix

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inside:
            raise PlanError("Network.inside: expected the link of at least one node, but got none.")
        matrix = link_matrix("Network.between", self.between, len(self.inside))
        object.__setattr__(self, "between", matrix)

    @property
    def is_uniform(self) -> bool:
        """Whether all pairs of nodes have equal links."""
        return len({link for row in self.between for link in row if link is not None}) <= 1

    def scaled(self, factor: float) -> Network:
        """Return this network with all bandwidths between nodes times ``factor``."""
        return Network(
            self.inside,
            tuple(
                tuple(
                    link and Link(link.bandwidth_bytes_per_s * factor, link.latency_s)
                    for link in row
                )
                for row in self.between
            ),
        )

    def ring_s(self, ranks: Mapping[int, int], nbytes: float) -> float:
        """Return the seconds to all-gather, or reduce-scatter, ``nbytes`` with even shards.

        A ring passes every link once, so the slowest one decides. Each rank sends all except its
        own part, ``(n - 1) / n`` of the bytes. The latency is that of a tree: one hop per level.
        """
        count = sum(ranks.values())
        if count == 1:
            return 0.0
        nodes = sorted(ranks)
        links = [self.inside[node] for node in nodes if ranks[node] > 1]
        latency_s = 0.0
        if links:
            hops = math.ceil(math.log2(max(ranks.values())))
            latency_s += max(link.latency_s for link in links) * hops
        crossed = self._ring(nodes)
        if crossed:
            latency_s += max(link.latency_s for link in crossed) * math.ceil(math.log2(len(nodes)))
        slowest = min(link.bandwidth_bytes_per_s for link in [*links, *crossed])
        return (count - 1) / count * nbytes / slowest + latency_s

    def exchange_s(self, nbytes: float) -> float:
        """Return the seconds in which every node sends ``nbytes`` to every other node.

        A node's transfers share its link, one after the other.
        """
        return max(
            math.fsum(
                nbytes / link.bandwidth_bytes_per_s + link.latency_s
                for link in row
                if link is not None
            )
            for row in self.between
        )

    def between_groups(self, one: Collection[int], other: Collection[int]) -> Link:
        """Return the slowest link between the nodes of two groups; inside if they share a node."""
        return _slowest(self.between[a][b] or self.inside[a] for a in one for b in other)

    def _ring(self, nodes: Sequence[int]) -> list[Link]:
        """Return the links between neighbours in a ring of these nodes."""
        pairs = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        found = (self.between[one][other] for one, other in pairs)
        return [link for link in found if link is not None]


def _slowest(links: Iterable[Link]) -> Link:
    found = tuple(links)
    return Link(
        min(link.bandwidth_bytes_per_s for link in found), max(link.latency_s for link in found)
    )


def _counted(lengths: Sequence[int]) -> str:
    if not lengths:
        return "no rows"
    links = ", ".join(map(str, lengths))
    return f"one row of {links}" if len(lengths) == 1 else f"{len(lengths)} rows of {links}"


def _text(link: Link | None) -> str:
    if link is None:
        return "none"
    return f"{link.bandwidth_bytes_per_s / 1e9:g} GB/s (latency {SECONDS.text(link.latency_s)})"
