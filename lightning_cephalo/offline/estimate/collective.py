"""Estimates the seconds of collectives from a cluster's links, as a lower bound.

``network.py`` has the formula. Real collectives take longer if other traffic shares the link.
"""

from __future__ import annotations

from collections import Counter

from lightning_cephalo.offline.estimate.cluster import Cluster

# Time with uneven shards over that with even ones: mean over gathers and reduces of two ranks on
# gloo (1.3, 0.8, 1.1, 1.1, 1.1, 1.3, 1.1, 0.8: too noisy for more digits). Nothing was measured on
# NCCL; the Cephalo paper reports up to 1.25.
UNEVEN_FACTOR = 1.1


def hybrid_gather_s(cluster: Cluster, nbytes: float) -> float:
    """Return the seconds to all-gather ``nbytes`` inside of every node, which holds all of them."""
    ranks = Counter(rank.node for rank in cluster.ranks)
    network = cluster.network  # a matrix of all pairs of nodes, made anew
    inside = (network.ring_s({node: count}, nbytes) for node, count in ranks.items())
    return UNEVEN_FACTOR * max(inside)


def hybrid_reduce_s(cluster: Cluster, nbytes: float) -> float:
    """Return the seconds to reduce-scatter in every node, and to exchange the nodes' sums.

    Each node's sums cross to each other node once.
    """
    exchange_s = cluster.network.exchange_s(nbytes)
    return hybrid_gather_s(cluster, nbytes) + UNEVEN_FACTOR * exchange_s


def uneven_collective_s(cluster: Cluster, nbytes: float) -> float:
    """Return the seconds to all-gather, or reduce-scatter, ``nbytes`` in total."""
    ranks = Counter(rank.node for rank in cluster.ranks)
    return UNEVEN_FACTOR * cluster.network.ring_s(ranks, nbytes)
