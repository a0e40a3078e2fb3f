"""Describes a cluster: its devices, their nodes, and the links between them.

It is read from ``cluster.yaml``::

    nodes:
      - {devices: {RTX 4090: 2, RTX 3090: 1}, link: 25 GB/s}
      - {count: 4, devices: {V100: 4}, link: 130 GB/s, host_memory: 256 GiB}
    between_nodes: 100 Gb/s
    devices:                            # own devices, or corrections of known ones
      MyCard: {memory: 20 GiB, fp32: 30 TFLOP/s, fp16: 60 TFLOP/s, bandwidth: 600 GB/s}

A link is a bandwidth each way, or ``{bandwidth: 25 GB/s, latency: 5 us}``. Where pairs of nodes
have different links, ``between_nodes`` is a symmetric matrix: one row per node, null for the node
itself::

    between_nodes:
      - [null, 100 Gb/s, 10 Gb/s]
      - [100 Gb/s, null, 10 Gb/s]
      - [10 Gb/s, 10 Gb/s, null]

Ranks are numbered node by node, in the order of the file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lightning_cephalo.common import files, records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import (
    BYTES,
    BYTES_PER_S,
    SECONDS,
    USABLE_SHARE,
)
from lightning_cephalo.common.records import Amount, Checked, Count, FileRecord, Positive
from lightning_cephalo.offline.estimate.devices import KEYS, Device, described, find_device, lookup
from lightning_cephalo.offline.estimate.network import (
    NETWORK_LATENCY_S,
    NO_OWN_LINK,
    NODE_LATENCY_S,
    Link,
    LinkMatrix,
    Network,
    link_matrix,
    uniform,
)

# Of a node's memory: what updates by hosts of A100s reached in published logs, four ranks a node.
# Hosts of H100s reached three times as much.
HOST_BYTES_PER_S = 100e9


@dataclass(frozen=True)
class NodeGroup(Checked):
    """A group of equal nodes."""

    devices: tuple[tuple[Device, int], ...]
    count: Count = 1
    link: Link | None = None
    host_memory_bytes: Amount = 0.0
    host_bytes_per_s: Positive = HOST_BYTES_PER_S

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.devices:
            raise PlanError("NodeGroup.devices: expected at least one device, but got none.")
        for device, count in self.devices:
            records.whole(f"NodeGroup.devices: count of {device.name!r}", count, minimum=1)

    @property
    def ranks_per_node(self) -> int:
        """Number of devices in one node."""
        return sum(count for _, count in self.devices)

    @property
    def inner_link(self) -> Link:
        """``link``, or else the slowest device's PCIe."""
        return self.link or Link(min(device.pcie_bytes_per_s for device, _ in self.devices))


@dataclass(frozen=True)
class ClusterRank:
    """One rank: its device, the index of its node, and its share of the node's host memory."""

    device: Device
    node: int
    host_memory_bytes: float
    host_bytes_per_s: float


def _share_below_1(field: str, value: Any) -> float:
    share = records.real(field, value)
    if share >= 1:
        raise PlanError(f"{field}: expected a share below 1, but got {value!r}.")
    return share


@dataclass(frozen=True)
class Cluster(FileRecord):
    """Devices in nodes."""

    kind = "cluster"

    nodes: tuple[NodeGroup, ...]
    between_nodes: Link | LinkMatrix | None = None
    own_devices: tuple[Device, ...] = ()
    reserve: Annotated[float, _share_below_1] = round(1 - USABLE_SHARE, 10)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.nodes:
            raise PlanError("nodes: expected at least one node, but got none.")
        if self.node_count > 1 and self.between_nodes is None:
            raise PlanError(
                f"between_nodes: expected the link between {self.node_count} nodes, but got none. "
                f"Add a line such as 'between_nodes: 100 Gb/s'."
            )
        if isinstance(self.between_nodes, Sequence):
            matrix = link_matrix("between_nodes", self.between_nodes, self.node_count)
            object.__setattr__(self, "between_nodes", matrix)

    def _where(self) -> str:
        return ""  # the file's own keys

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return sum(group.count for group in self.nodes)

    @property
    def ranks(self) -> tuple[ClusterRank, ...]:
        """One entry per rank, in rank order."""
        ranks: list[ClusterRank] = []
        node = 0
        for group in self.nodes:
            host = group.host_memory_bytes / group.ranks_per_node
            rate = group.host_bytes_per_s / group.ranks_per_node
            for _ in range(group.count):
                for device, count in group.devices:
                    ranks += [ClusterRank(device, node, host, rate)] * count
                node += 1
        return tuple(ranks)

    @property
    def network(self) -> Network:
        """The links inside the nodes and between each pair of them."""
        inside = tuple(group.inner_link for group in self.nodes for _ in range(group.count))
        between = self.between_nodes
        if between is None or isinstance(between, Link):
            between = uniform(between, self.node_count)
        return Network(inside, between)

    def with_network_scaled(self, factor: float) -> Cluster:
        """Return this cluster with all bandwidths between nodes times ``factor``."""
        between = self.between_nodes
        if isinstance(between, Link):
            scaled = Link(between.bandwidth_bytes_per_s * factor, between.latency_s)
            return dataclasses.replace(self, between_nodes=scaled)
        if between is None:
            return self
        return dataclasses.replace(self, between_nodes=self.network.scaled(factor).between)

    def capacity_bytes(self, device: Device) -> float:
        """Return the bytes of this device's memory that a plan may use."""
        return device.memory_bytes * (1 - self.reserve)

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that ``cluster.yaml`` holds."""
        data: dict[str, Any] = {"nodes": [_group_dict(group) for group in self.nodes]}
        if self.between_nodes is not None:
            data["between_nodes"] = _between_value(self.between_nodes)
        if self.own_devices:
            data["devices"] = {device.name: _device_dict(device) for device in self.own_devices}
        if self.reserve != Cluster.reserve:
            data["reserve"] = self.reserve
        return data

    @classmethod
    def from_dict(
        cls, data: Any, *, where: str | None = None, source: str | None = None
    ) -> Cluster:
        """Inverse of :meth:`to_dict`. Raises PlanError naming ``source`` and the field."""
        try:
            return _cluster(cls, data)
        except PlanError as error:
            raise PlanError(f"{files.in_source(where or source)}{error}") from None

    @staticmethod
    def _format_of(path: Path) -> str:
        return "yaml"  # for every file name


def _cluster(cls: type[Cluster], data: Any) -> Cluster:
    known = ("nodes", "between_nodes", "devices", "reserve")
    values = records.mapping("cluster", data, known=known, required=("nodes",))
    own = tuple(
        described(name, entry, where=f"devices: {name}", base=lookup(name))
        for name, entry in _named(values.get("devices", {}), "devices", "devices by name").items()
    )
    groups = records.items("nodes", values["nodes"], of="nodes")
    between = values.get("between_nodes")
    return cls(
        nodes=tuple(_group(f"nodes[{i}]", entry, own) for i, entry in enumerate(groups)),
        between_nodes=_between(between),
        own_devices=own,
        reserve=values.get("reserve", cls.reserve),
    )


def _group(where: str, data: Any, own: tuple[Device, ...]) -> NodeGroup:
    known = ("count", "devices", "link", "host_memory", "host_bandwidth")
    values = records.mapping(where, data, known=known, required=("devices",))
    counts = _named(values["devices"], f"{where}: devices", "devices and their counts")
    if not counts:
        raise PlanError(f"{where}: devices: expected at least one device, but got none.")
    link, host = values.get("link"), values.get("host_memory")
    rate = values.get("host_bandwidth")
    return NodeGroup(
        devices=tuple(
            (
                find_device(name, own, where=f"{where}: devices"),
                records.whole(f"{where}: devices: {name}", count, minimum=1),
            )
            for name, count in counts.items()
        ),
        count=records.whole(f"{where}: count", values.get("count", 1), minimum=1),
        link=None if link is None else _link(f"{where}: link", link, NODE_LATENCY_S),
        host_memory_bytes=0.0 if host is None else BYTES.parse(f"{where}: host_memory", host),
        host_bytes_per_s=HOST_BYTES_PER_S
        if rate is None
        else BYTES_PER_S.parse(f"{where}: host_bandwidth", rate),
    )


def _between(data: Any) -> Link | LinkMatrix | None:
    if not isinstance(data, list):
        return None if data is None else _link("between_nodes", data, NETWORK_LATENCY_S)
    return tuple(
        tuple(
            None if entry is None else _link_of_pair(f"between_nodes[{i}][{j}]", entry)
            for j, entry in enumerate(records.items(f"between_nodes[{i}]", row, of="links"))
        )
        for i, row in enumerate(data)
    )


def _link_of_pair(where: str, data: Any) -> Link:
    try:
        return _link(where, data, NETWORK_LATENCY_S)
    except PlanError as error:
        raise PlanError(f"{error} {NO_OWN_LINK}") from None


def _between_value(between: Link | LinkMatrix) -> Any:
    if isinstance(between, Link):
        return _link_value(between, NETWORK_LATENCY_S)
    return [
        [None if link is None else _link_value(link, NETWORK_LATENCY_S) for link in row]
        for row in between
    ]


def _link(where: str, data: Any, latency_s: float) -> Link:
    if not isinstance(data, Mapping):
        return Link(BYTES_PER_S.parse(where, data), latency_s)
    known = ("bandwidth", "latency")
    values = records.mapping(where, data, known=known, required=("bandwidth",))
    if "latency" in values:
        latency_s = SECONDS.parse(f"{where}: latency", values["latency"], zero=True)
    return Link(BYTES_PER_S.parse(f"{where}: bandwidth", values["bandwidth"]), latency_s)


def _named(data: Any, where: str, what: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise PlanError(
            f"{where}: expected a mapping of {what}, but got {records.shortened(data)}."
        )
    return {str(name): value for name, value in data.items()}


def _group_dict(group: NodeGroup) -> dict[str, Any]:
    data: dict[str, Any] = {"count": group.count} if group.count > 1 else {}
    data["devices"] = {device.name: count for device, count in group.devices}
    if group.link is not None:
        data["link"] = _link_value(group.link, NODE_LATENCY_S)
    if group.host_memory_bytes:
        data["host_memory"] = BYTES.text(group.host_memory_bytes)
    if group.host_bytes_per_s != HOST_BYTES_PER_S:
        data["host_bandwidth"] = BYTES_PER_S.text(group.host_bytes_per_s)
    return data


def _link_value(link: Link, usual_latency_s: float) -> Any:
    bandwidth = BYTES_PER_S.text(link.bandwidth_bytes_per_s)
    if math.isclose(link.latency_s, usual_latency_s):
        return bandwidth
    return {"bandwidth": bandwidth, "latency": SECONDS.text(link.latency_s)}


def _device_dict(device: Device) -> dict[str, str]:
    values = {key: (getattr(device, field), unit) for key, (field, unit) in KEYS.items()}
    return {key: unit.text(value) for key, (value, unit) in values.items() if value is not None}
