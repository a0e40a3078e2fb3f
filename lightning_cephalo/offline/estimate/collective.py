"""Seconds of collectives on a cluster that is not here: the lower bound that its links set.

A ring over all ranks passes every link once, so the slowest link decides: each sends all but its
own part, ``(n - 1) / n`` of the bytes. The latency is that of a tree: as many hops as it has
levels. Real collectives take longer where other traffic shares the link.
"""

from __future__ import annotations

import math

from lightning_cephalo.offline.estimate.cluster import Cluster

# Uneven shards against even ones: mean over gathers and reduces of two ranks on gloo
# (1.3, 0.8, 1.1, 1.1, 1.1, 1.3, 1.1, 0.8: too noisy for more digits). Nothing was measured on
# NCCL; the Cephalo paper says up to 1.25.
UNEVEN_FACTOR = 1.1


def even_collective_s(cluster: Cluster, nbytes: float) -> float:
    """Seconds to gather (or to reduce and scatter) ``nbytes`` in all, from (into) even shards."""
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
    """As :func:`even_collective_s`, for uneven shards.

    Args:
        cluster: what there is.
        nbytes: of the whole unit.
        uneven_factor: what uneven shards cost over even ones.
    """
    return uneven_factor * even_collective_s(cluster, nbytes)
