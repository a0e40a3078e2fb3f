"""Describes a cluster: its devices, their nodes, and the links between them.

It is read from ``cluster.yaml``::

    nodes:
      - {devices: {RTX 4090: 2, RTX 3090: 1}, link: 25 GB/s}
      - {count: 4, devices: {V100: 4}, link: 130 GB/s, host_memory: 256 GiB}
    between_nodes: 100 Gb/s
    devices:                            # own devices, or corrections and prices of known ones
      MyCard: {memory: 20 GiB, fp32: 30 TFLOP/s, fp16: 60 TFLOP/s, bandwidth: 600 GB/s}
      V100: {price: 1.2}                # per hour

A link is a bandwidth each way, or ``{bandwidth: 25 GB/s, latency: 5 us}``. ``between_nodes`` may
be a symmetric matrix: ``[[null, 100 Gb/s], [100 Gb/s, null]]``. Ranks are numbered node by node.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_cephalo.common import files, records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import (
    BYTES,
    BYTES_PER_S,
    SECONDS,
    USABLE_SHARE,
    parse_each,
)
from lightning_cephalo.offline.estimate.devices import Device, described, find_device, lookup
from lightning_cephalo.offline.estimate.network import (
    NETWORK_LATENCY_S,
    NODE_LATENCY_S,
    UNEVEN_FACTOR,
    Link,
    LinkMatrix,
    Network,
    uniform,
)

# Of a node's memory: what updates by hosts of A100s reached in published logs, four ranks a node.
# Hosts of H100s reached three times as much.
HOST_BYTES_PER_S = 100e9
# key in YAML -> field of Node or Link, dimension
_HOST = {
    "host_memory": ("host_memory_bytes", BYTES),
    "host_bandwidth": ("host_bytes_per_s", BYTES_PER_S),
}
_LINK = {"bandwidth": ("bandwidth_bytes_per_s", BYTES_PER_S), "latency": ("latency_s", SECONDS)}


@dataclass(frozen=True)
class Node:
    """The devices of a node with their counts, and the memory of its host."""

    devices: tuple[tuple[Device, int], ...]
    link: Link | None = None
    host_memory_bytes: float = 0.0
    host_bytes_per_s: float = HOST_BYTES_PER_S

    @property
    def inner_link(self) -> Link:
        """``link``, or else the slowest device's PCIe."""
        return self.link or Link(min(device.pcie_bytes_per_s for device, _ in self.devices))


@dataclass(frozen=True)
class ClusterRank:
    """One rank: its device, the index of its node, and its share of the node's host."""

    device: Device
    node: int
    host_memory_bytes: float
    host_bytes_per_s: float


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes. A share of every memory, ``reserve``, is left to other uses."""

    nodes: tuple[Node, ...]
    between: LinkMatrix = ((None,),)
    own_devices: tuple[Device, ...] = ()
    reserve: float = round(1 - USABLE_SHARE, 10)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Cluster:
        """Read ``cluster.yaml``, or raise PlanError naming the file and the field."""
        return cls.from_yaml(files.read_text(Path(path), what="a cluster"), source=str(path))

    @classmethod
    def from_yaml(cls, content: str, *, source: str | None = None) -> Cluster:
        """Return the cluster that a text describes, or raise PlanError naming ``source``."""
        try:
            return _cluster(files.parse_yaml(content, what="a cluster"))
        except PlanError as error:
            raise PlanError(f"{files.in_source(source)}{error}") from None

    @cached_property
    def ranks(self) -> tuple[ClusterRank, ...]:
        """One entry per rank, in rank order."""
        ranks: list[ClusterRank] = []
        for index, node in enumerate(self.nodes):
            inside = sum(count for _, count in node.devices)
            host = node.host_memory_bytes / inside, node.host_bytes_per_s / inside
            for device, count in node.devices:
                ranks += [ClusterRank(device, index, *host)] * count
        return tuple(ranks)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The kinds of devices that ranks have."""
        return tuple(dict.fromkeys(rank.device for rank in self.ranks))

    @cached_property
    def network(self) -> Network:
        """The links inside the nodes and between each pair of them."""
        return Network(tuple(node.inner_link for node in self.nodes), self.between)

    def with_network_scaled(self, factor: float) -> Cluster:
        """Return this cluster with all bandwidths between nodes times ``factor``."""
        between = tuple(tuple(link and link.scaled(factor) for link in row) for row in self.between)
        return replace(self, between=between)

    def with_device(self, device: Device) -> Cluster:
        """Return this cluster with one more device in its first node."""
        first, *others = self.nodes
        larger = replace(first, devices=(*first.devices, (device, 1)))
        return replace(self, nodes=(larger, *others))

    def capacity_bytes(self, device: Device) -> float:
        """Return the bytes of this device's memory that a plan may use."""
        return device.memory_bytes * (1 - self.reserve)

    def gather_s(self, nbytes: float, *, hybrid: bool = False) -> float:
        """Return the seconds to all-gather ``nbytes``: over all ranks, or in every node."""
        ranks = Counter(rank.node for rank in self.ranks)
        rings = [{node: count} for node, count in ranks.items()] if hybrid else [ranks]
        return UNEVEN_FACTOR * max(self.network.ring_s(ring, nbytes) for ring in rings)

    def reduce_s(self, nbytes: float, *, hybrid: bool = False) -> float:
        """Return the seconds to reduce-scatter ``nbytes``; nodes may exchange their sums behind it.

        Each node's sums cross to each other node once.
        """
        exchange_s = UNEVEN_FACTOR * self.network.exchange_s(nbytes) if hybrid else 0.0
        return self.gather_s(nbytes, hybrid=hybrid) + exchange_s


def _cluster(data: Any) -> Cluster:
    known = ("nodes", "between_nodes", "devices", "reserve")
    values = records.mapping("cluster", data, known=known, required=("nodes",))
    own = tuple(
        described(name, entry, where=f"devices: {name}", base=lookup(name))
        for name, entry in _named("devices", values.get("devices", {})).items()
    )
    nodes: list[Node] = []
    for index, entry in enumerate(records.items("nodes", values["nodes"], of="nodes")):
        nodes += _nodes(f"nodes[{index}]", entry, own)
    if not nodes:
        raise PlanError("nodes: expected at least one node, but got none.")
    reserve = records.real("reserve", values.get("reserve", Cluster.reserve))
    if reserve >= 1:
        raise PlanError(f"reserve: expected a share below 1, but got {reserve!r}.")
    return Cluster(tuple(nodes), _between(values.get("between_nodes"), len(nodes)), own, reserve)


def _nodes(where: str, data: Any, own: tuple[Device, ...]) -> list[Node]:
    """Return a node once for each of its ``count``."""
    known = ("count", "devices", "link", *_HOST)
    values = records.mapping(where, data, known=known, required=("devices",))
    counts = _named(f"{where}: devices", values["devices"])
    if not counts:
        raise PlanError(f"{where}: devices: expected at least one device, but got none.")
    devices = tuple(
        (
            find_device(name, own, where=f"{where}: devices"),
            records.whole(f"{where}: devices: {name}", count, minimum=1),
        )
        for name, count in counts.items()
    )
    link = _link(f"{where}: link", values["link"], NODE_LATENCY_S) if "link" in values else None
    node = Node(devices, link, **parse_each(where, values, _HOST))
    return [node] * records.whole(f"{where}: count", values.get("count", 1), minimum=1)


def _between(data: Any, nodes: int) -> LinkMatrix:
    if data is None and nodes > 1:
        raise PlanError(
            f"between_nodes: expected the link between {nodes} nodes, but got none. "
            f"Add a line such as 'between_nodes: 100 Gb/s'."
        )
    if not isinstance(data, list):
        link = None if data is None else _link("between_nodes", data, NETWORK_LATENCY_S)
        return uniform(link, nodes)
    rows = [
        records.items(f"between_nodes[{index}]", row, of="links") for index, row in enumerate(data)
    ]
    if [len(row) for row in rows] != [nodes] * nodes:
        raise PlanError(
            f"between_nodes: expected a square matrix, {nodes} rows of {nodes} links, but got rows "
            f"of {[len(row) for row in rows]}. Write one row per node, also for each of 'count'."
        )
    matrix = tuple(
        tuple(
            None
            if link is None and one == other
            else _link(f"between_nodes[{one}][{other}]", link, NETWORK_LATENCY_S)
            for other, link in enumerate(row)
        )
        for one, row in enumerate(rows)
    )
    for one, other in itertools.combinations_with_replacement(range(nodes), 2):
        if matrix[one][other] != (None if one == other else matrix[other][one]):
            raise PlanError(
                f"between_nodes: expected null for a node itself and the same link both ways, but "
                f"nodes {one} and {other} have {rows[one][other]!r} one way and "
                f"{rows[other][one]!r} the other. Write the slower one in both places; the link "
                f"inside of a node is its 'link'."
            )
    return matrix


def _link(where: str, data: Any, latency_s: float) -> Link:
    given = data if isinstance(data, Mapping) else {"bandwidth": data}
    values = records.mapping(where, given, known=tuple(_LINK), required=("bandwidth",))
    return Link(**{"latency_s": latency_s, **parse_each(where, values, _LINK)})


def _named(where: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        shown = records.shortened(data)
        raise PlanError(f"{where}: expected a mapping by device, but got {shown}.")
    return {str(name): value for name, value in data.items()}
