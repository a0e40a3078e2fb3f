"""Estimates the seconds of collectives from a cluster's links, as a lower bound.

A ring over all ranks passes every link once, so the slowest link decides. Each rank sends all
except its own part, ``(n - 1) / n`` of the bytes. The latency is that of a tree: one hop per level.
Real collectives take longer if other traffic shares the link.
"""

from __future__ import annotations

import math

from lightning_cephalo.offline.estimate.cluster import Cluster

# Time with uneven shards over that with even ones: mean over gathers and reduces of two ranks on
# gloo (1.3, 0.8, 1.1, 1.1, 1.1, 1.3, 1.1, 0.8: too noisy for more digits). Nothing was measured on
# NCCL; the Cephalo paper reports up to 1.25.
UNEVEN_FACTOR = 1.1


def even_collective_s(cluster: Cluster, nbytes: float) -> float:
    """Return the seconds to all-gather, or reduce-scatter, ``nbytes`` in total with even shards."""
    ranks = sum(group.count * group.ranks_per_node for group in cluster.nodes)
    if ranks == 1:
        return 0.0
    widest = max(group.ranks_per_node for group in cluster.nodes)
    links = [group.inner_link for group in cluster.nodes if group.ranks_per_node > 1]
    latency_s = 0.0
    if links:
        latency_s += max(link.latency_s for link in links) * math.ceil(math.log2(widest))
    if cluster.between_nodes is not None and cluster.node_count > 1:
        links.append(cluster.between_nodes)
        latency_s += cluster.between_nodes.latency_s * math.ceil(math.log2(cluster.node_count))
    slowest = min(link.bandwidth_bytes_per_s for link in links)
    return (ranks - 1) / ranks * nbytes / slowest + latency_s


def uneven_collective_s(
    cluster: Cluster, nbytes: float, *, uneven_factor: float = UNEVEN_FACTOR
) -> float:
    """Return the same as :func:`even_collective_s`, for uneven shards.

    Args:
        cluster: gives the links.
        nbytes: of the whole unit.
        uneven_factor: time with uneven shards over that with even ones.
    """
    return uneven_factor * even_collective_s(cluster, nbytes)
