"""What training costs: prices of devices per hour, and the mixes of a cluster's devices."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.estimate.cluster import Cluster, Node
from lightning_cephalo.offline.estimate.devices import same_name
from lightning_cephalo.plan import Problem

MOST_MIXES = 64


def prices_of(text: str | None, cluster: Cluster | None) -> dict[str, float]:
    """Return prices per hour by device, from ``A6000=0.8,L4=0.7`` and then from the cluster."""
    prices: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, separator, price = (word.strip() for word in part.partition("="))
        if not name or not separator:
            raise PlanError(
                f'--price: expected prices per hour such as "A6000=0.8,L4=0.7", but got {text!r}.'
            )
        prices[name] = records.real(f"--price: {name}", price)
    # the first price of a device counts
    for device in (*cluster.devices, *cluster.own_devices) if cluster is not None else ():
        if device.price_per_hour is not None:
            prices.setdefault(device.name, device.price_per_hour)
    return prices


def price_of(problem: Problem, prices: Mapping[str, float]) -> float | None:
    """Return the price per hour of all ranks; None if there are no prices."""
    if not prices:
        return None
    total = 0.0
    for name, count in Counter(rank.name for rank in problem.ranks).items():
        known = [price for other, price in prices.items() if same_name(name, other)]
        if not known:
            raise PlanError(
                f"--price: expected a price per hour of each device, but got none of {name!r}. Add "
                f'"{name}=PRICE", or a line such as "{name}: {{price: 0.8}}" under devices: in '
                f"cluster.yaml."
            )
        total += count * known[0]
    return total


def counted(problem: Problem) -> str:
    """Return the devices of the ranks, such as ``2 × A6000, 1 × L4``."""
    counts = Counter(rank.name for rank in problem.ranks)
    return ", ".join(f"{count} × {name}" for name, count in counts.items())


def mixes(cluster: Cluster) -> Iterator[Cluster]:
    """Yield each cluster that some devices of this one make, without nodes that have none.

    PlanError: there are more than MOST_MIXES.
    """
    # equal nodes can be exchanged for each other where all links between nodes are equal
    alike: dict[object, list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        alike.setdefault(node if cluster.network.is_uniform else index, []).append(index)
    groups = [
        (members, Counter(rank.device for rank in cluster.ranks if rank.node == members[0]))
        for members in alike.values()
    ]
    count = math.prod(
        math.comb(math.prod(n + 1 for n in own.values()) + len(members) - 1, len(members))
        for members, own in groups
    )
    count -= 1  # the mix without any device
    if count > MOST_MIXES:
        raise PlanError(
            f"--deadline: expected at most {MOST_MIXES} mixes of the cluster's devices, as each is "
            f"planned, but got {count:,}. Offer fewer devices."
        )
    choices = [
        itertools.combinations_with_replacement(
            itertools.product(*(range(n + 1) for n in own.values())), len(members)
        )
        for members, own in groups
    ]
    for chosen in itertools.product(*choices):
        nodes: dict[int, Node] = {}
        for (members, own), parts in zip(groups, chosen, strict=True):
            for index, counts in zip(members, parts, strict=True):
                if any(counts):
                    kept = tuple((d, n) for d, n in zip(own, counts, strict=True) if n)
                    nodes[index] = replace(cluster.nodes[index], devices=kept)
        if nodes:
            order = sorted(nodes)
            between = tuple(tuple(cluster.between[one][other] for other in order) for one in order)
            yield replace(cluster, nodes=tuple(nodes[index] for index in order), between=between)
