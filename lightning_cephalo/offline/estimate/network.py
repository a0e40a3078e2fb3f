"""The links of a cluster: inside each node, and between each pair of nodes.

A ring passes the nodes in their order and returns to the first, so its slowest link decides. All
times are lower bounds: real collectives take longer if other traffic shares the link.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

# Start-up time of a collective inside a node and over a network: assumed, not measured.
NODE_LATENCY_S = 10e-6
NETWORK_LATENCY_S = 30e-6
# Time with uneven shards over that with even ones: mean over gathers and reduces of two ranks on
# gloo (1.3, 0.8, 1.1, 1.1, 1.1, 1.3, 1.1, 0.8: too noisy for more digits). Nothing was measured on
# NCCL; the Cephalo paper reports up to 1.25.
UNEVEN_FACTOR = 1.1


@dataclass(frozen=True)
class Link:
    """A link between ranks: bytes per second each way, and seconds before the first byte."""

    bandwidth_bytes_per_s: float
    latency_s: float = NODE_LATENCY_S

    def scaled(self, factor: float) -> Link:
        """Return this link with its bandwidth times ``factor``."""
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor)


LinkMatrix = tuple[tuple[Link | None, ...], ...]
"""A link for each pair of nodes, in node order; None on the diagonal."""


def uniform(link: Link | None, nodes: int) -> LinkMatrix:
    """Return the matrix in which all pairs of nodes have this link."""
    return tuple(
        tuple(None if one == other else link for other in range(nodes)) for one in range(nodes)
    )


@dataclass(frozen=True)
class Network:
    """The links inside some nodes, and between them."""

    inside: tuple[Link, ...]
    between: LinkMatrix

    @property
    def is_uniform(self) -> bool:
        """Whether all pairs of nodes have equal links."""
        return len({link for row in self.between for link in row if link is not None}) <= 1

    def ring_s(self, ranks: Mapping[int, int], nbytes: float) -> float:
        """Return the seconds to all-gather, or reduce-scatter, ``nbytes`` with even shards.

        A ring passes every link once, so the slowest one decides. Each rank sends all except its
        own part, ``(n - 1) / n`` of the bytes. The latency is that of a tree: one hop per level.
        ``ranks`` are the ranks of each node.
        """
        count = sum(ranks.values())
        if count == 1:
            return 0.0
        nodes = sorted(ranks)
        inner = [self.inside[node] for node in nodes if ranks[node] > 1]
        ring = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        crossed = [link for one, other in ring if (link := self.between[one][other]) is not None]
        latency_s = 0.0
        for links, members in ((inner, max(ranks.values())), (crossed, len(nodes))):
            if links:
                latency_s += max(link.latency_s for link in links) * math.ceil(math.log2(members))
        slowest = min(link.bandwidth_bytes_per_s for link in inner + crossed)
        return (count - 1) / count * nbytes / slowest + latency_s

    def exchange_s(self, nbytes: float) -> float:
        """Return the seconds in which every node sends ``nbytes`` to every other node.

        A node's transfers share its link, one after the other.
        """
        return max(
            math.fsum(nbytes / link.bandwidth_bytes_per_s + link.latency_s for link in row if link)
            for row in self.between
        )

    def between_groups(self, one: Collection[int], other: Collection[int]) -> Link:
        """Return the slowest link between the nodes of two groups; inside if they share a node."""
        links = [self.between[a][b] or self.inside[a] for a in one for b in other]
        return Link(
            min(link.bandwidth_bytes_per_s for link in links), max(link.latency_s for link in links)
        )
