"""cluster.yaml: what it says, and every way to get it wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_cephalo.offline.estimate.cluster import Cluster
from lightning_cephalo.offline.estimate.network import UNEVEN_FACTOR, Link, Network, uniform
from lightning_cephalo.plan import PlanError

GIB = 2**30
EXAMPLE = """
nodes:
  - {devices: {RTX 4090: 2, NVIDIA GeForce RTX 3090: 1}, link: 25 GB/s}
  - {count: 4, devices: {v100: 4}, link: {bandwidth: 130 GB/s, latency: 5 us}, host_memory: 256 GiB}
between_nodes: 100 Gb/s
devices:
  MyCard: {memory: 20 GiB, fp32: 30 TFLOP/s, fp16: 60 TFLOP/s, bandwidth: 600 GB/s}
  L4: {memory: 20 GiB}
"""


def test_a_cluster_is_read_in_rank_order():
    cluster = Cluster.from_yaml(EXAMPLE)
    assert len(cluster.nodes) == 5
    names = [rank.device.name for rank in cluster.ranks]
    assert names == ["RTX 4090", "RTX 4090", "RTX 3090"] + 16 * ["V100 16GB"]
    assert [rank.node for rank in cluster.ranks][2:8] == [0, 1, 1, 1, 1, 2]
    assert cluster.ranks[3].host_memory_bytes == 64 * GIB
    assert cluster.nodes[1].link == Link(130e9, 5e-6)
    assert cluster.between == uniform(Link(12.5e9, 30e-6), 5)
    assert cluster.capacity_bytes(cluster.ranks[0].device) == pytest.approx(0.9 * 24 * GIB)


def test_a_share_of_memory_is_left_to_others():
    cluster = Cluster.from_yaml(EXAMPLE + "reserve: 0.2\n")
    assert cluster.capacity_bytes(cluster.ranks[0].device) == pytest.approx(0.8 * 24 * GIB)


def test_own_devices_and_corrections():
    mine, corrected = Cluster.from_yaml(EXAMPLE).own_devices
    assert (mine.memory_bytes, mine.peak_flops_per_s("fp16")) == (20 * GIB, 60e12)
    with pytest.raises(PlanError, match="'bf16'"):
        mine.peak_flops_per_s("bf16")
    assert (corrected.memory_bytes, corrected.bandwidth_bytes_per_s) == (20 * GIB, 300e9)
    cluster = Cluster.from_yaml("nodes: [{devices: {l4: 1}}]\ndevices: {L4: {memory: 20 GiB}}")
    assert cluster.ranks[0].device.memory_bytes == 20 * GIB


def test_a_node_without_link_has_its_slowest_pcie():
    cluster = Cluster.from_yaml("nodes: [{devices: {A100: 1, T4: 1}}]")
    assert cluster.nodes[0].inner_link.bandwidth_bytes_per_s == 15.75e9


NODE = "nodes: [{devices: {T4: 1}}]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["expected a mapping"]),
        ("nodes: []", ["nodes", "at least one"]),
        ("nodes: T4", ["nodes", "'T4'"]),
        ("nodes: [T4]", ["nodes[0]", "'T4'"]),
        ("nodes: [{devices: [T4]}]", ["nodes[0]: devices", "['T4']"]),
        ("nodes: [{devices: {}}]", ["nodes[0]: devices", "none"]),
        ("nodes: [{devices: {T4: 0}}]", ["nodes[0]: devices: T4", "at least 1", "0"]),
        ("nodes: [{devices: {T4: two}}]", ["nodes[0]: devices: T4", "'two'"]),
        ("nodes: [{devices: {T4: 1}, count: 0}]", ["nodes[0]: count", "0"]),
        ("nodes: [{devices: {T4: 1}, speed: 1}]", ["nodes[0]", "unknown key 'speed'"]),
        ("nodes: [{devices: {RTX 4900: 1}}]", ["'RTX 4900'", "Did you mean", "RTX 4090"]),
        ("nodes: [{devices: {T4: 1}, link: 25}]", ["nodes[0]: link", "25", "GB/s"]),
        ("nodes: [{devices: {T4: 1}, link: 25 GB}]", ["nodes[0]: link", "'25 GB'"]),
        ("nodes: [{devices: {T4: 1}, link: -1 GB/s}]", ["nodes[0]: link", "'-1 GB/s'"]),
        (
            "nodes: [{devices: {T4: 1}, link: {bandwidth: 1 GB/s, latency: 3 GB}}]",
            ["nodes[0]: link: latency", "'3 GB'"],
        ),
        ("nodes: [{devices: {T4: 1}, link: {latency: 3 us}}]", ["missing 'bandwidth'"]),
        ("nodes: [{devices: {T4: 1}, host_memory: 20 GB/s}]", ["host_memory", "'20 GB/s'"]),
        ("nodes: [{devices: {T4: 1}, count: 2}]", ["between_nodes", "2 nodes", "100 Gb/s"]),
        (NODE + "between: 1 GB/s", ["unknown key 'between'", "between_nodes"]),
        (NODE + "between_nodes: fast", ["between_nodes", "'fast'"]),
        (NODE + "between_nodes: 1 gbps", ["'1 gbps'", "Did you mean GB/s or Gb/s?"]),
        (NODE + "between_nodes: 1e400 GB/s", ["a bandwidth that is finite", "'1e400 GB/s'"]),
        (NODE + NODE, ["the key 'nodes' is there twice", "line 2"]),
        ("nodes: [{devices: {T4: 1, T4: 2}}]", ["the key 'T4' is there twice", "line 1"]),
        (NODE + "devices: [X]", ["devices", "['X']"]),
        (NODE + "devices: {X: {memory: 20 GB/s}}", ["devices: X", "missing"]),
        (NODE + "devices: {T4: {memory: 20 GB/s}}", ["devices: T4: memory", "'20 GB/s'", "GiB"]),
        (NODE + "devices: {T4: {fp32: 8 TB/s}}", ["devices: T4: fp32", "'8 TB/s'"]),
        (NODE + "devices: {T4: {ram: 20 GB}}", ["devices: T4", "unknown key 'ram'"]),
        (NODE + "reserve: 1.5", ["reserve", "1.5"]),
        (NODE + "reserve: some", ["reserve", "'some'"]),
    ],
)
def test_a_bad_cluster_is_refused_by_name(tmp_path, text, words):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        Cluster.load(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_collectives_take_what_the_slowest_link_takes():
    one = Cluster.from_yaml("nodes: [{devices: {T4: 1}}]")
    assert one.gather_s(1e9) == 0.0
    node = Cluster.from_yaml(
        "nodes: [{devices: {T4: 4}, link: {bandwidth: 10 GB/s, latency: 0 s}}]"
    )
    assert node.gather_s(1e9) == pytest.approx(UNEVEN_FACTOR * 0.75 * 0.1)
    nodes = Cluster.from_yaml(
        "nodes: [{count: 2, devices: {T4: 4}, link: 10 GB/s}]\nbetween_nodes: 8 Gb/s"
    )
    # 2 levels inside at 10 us, 1 between at 30 us
    assert nodes.reduce_s(1e9) == pytest.approx(UNEVEN_FACTOR * (7 / 8 + 50e-6))


PAIRS = """
nodes:
  - {devices: {A100: 4}, link: {bandwidth: 100 GB/s, latency: 0 s}}
  - {count: 2, devices: {T4: 2}, link: {bandwidth: 10 GB/s, latency: 0 s}}
between_nodes:
  - [null, 8 GB/s, {bandwidth: 2 GB/s, latency: 1 ms}]
  - [8 GB/s, null, 4 GB/s]
  - [{bandwidth: 2 GB/s, latency: 1 ms}, 4 GB/s, null]
"""


def test_pairs_of_nodes_have_their_own_links():
    cluster = Cluster.from_yaml(PAIRS)
    network = cluster.network
    assert not network.is_uniform
    assert network.between_groups((0,), (2,)) == Link(2e9, 1e-3)
    assert network.between_groups((0, 1), (2,)) == Link(2e9, 1e-3)
    # a group of stages of one node: what they exchange stays inside
    assert network.between_groups((1,), (1,)) == network.inside[1]
    # a ring over all nodes passes the slowest link; one over the first two does not
    assert network.ring_s({0: 4, 1: 2, 2: 2}, 8e9) == pytest.approx(7 / 8 * 4 + 2 * 1e-3)
    assert network.ring_s({0: 4, 1: 2}, 6e9) == pytest.approx(5 / 6 * 6 / 8 + 30e-6)
    assert network.ring_s({1: 2}, 1e9) == pytest.approx(0.5 / 10)
    assert network.ring_s({1: 1}, 1e9) == 0.0
    ring_s = network.ring_s({0: 4, 1: 2, 2: 2}, 8e9)
    assert cluster.gather_s(8e9) == UNEVEN_FACTOR * ring_s
    # a node's sums cross to each other node, over its own link
    assert network.exchange_s(8e9) == pytest.approx(4 + 1e-3 + 2 + 30e-6)
    inside_s = network.ring_s({1: 2}, 8e9)
    assert cluster.gather_s(8e9, hybrid=True) == pytest.approx(UNEVEN_FACTOR * inside_s)
    reduced_s = UNEVEN_FACTOR * (inside_s + network.exchange_s(8e9))
    assert cluster.reduce_s(8e9, hybrid=True) == pytest.approx(reduced_s)
    faster = cluster.with_network_scaled(2).network
    assert faster.between_groups((0,), (1,)).bandwidth_bytes_per_s == 16e9


def test_one_link_for_all_pairs_is_the_matrix_of_it():
    one = Cluster.from_yaml("nodes: [{count: 3, devices: {T4: 4}}]\nbetween_nodes: 8 Gb/s")
    links = uniform(Link(1e9, 30e-6), 3)
    assert one.network == Network((one.nodes[0].inner_link,) * 3, links)
    assert one.network.is_uniform
    rows = "[[null, 8 Gb/s, 8 Gb/s], [8 Gb/s, null, 8 Gb/s], [8 Gb/s, 8000 Mb/s, null]]"
    matrix = Cluster.from_yaml(f"nodes: [{{count: 3, devices: {{T4: 4}}}}]\nbetween_nodes: {rows}")
    assert matrix.network == one.network
    assert matrix.gather_s(1e9) == one.gather_s(1e9)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            "[[null, 1 GB/s], [1 GB/s, null]]",
            ["square matrix", "3 rows of 3 links", "rows of [2, 2]"],
        ),
        (
            "[[null, 1 GB/s, 1 GB/s], [1 GB/s, null], [1 GB/s, 1 GB/s, null]]",
            ["square matrix", "rows of [3, 2, 3]"],
        ),
        ("[]", ["square matrix", "rows of []"]),
        ("[1 GB/s, 1 GB/s, 1 GB/s]", ["between_nodes[0]", "a list of links", "'1 GB/s'"]),
        (
            "[[null, 1 GB/s, 0 GB/s], [1 GB/s, null, 1 GB/s], [0 GB/s, 1 GB/s, null]]",
            ["between_nodes[0][2]", "greater than 0", "'0 GB/s'"],
        ),
        (
            "[[null, 1 GB/s, -2 GB/s], [1 GB/s, null, 1 GB/s], [-2 GB/s, 1 GB/s, null]]",
            ["between_nodes[0][2]", "greater than 0", "'-2 GB/s'"],
        ),
        (
            "[[null, 1 GB/s, 1], [1 GB/s, null, 1 GB/s], [1, 1 GB/s, null]]",
            ["between_nodes[0][2]", "such as '25 GB/s'", "1"],
        ),
        (
            "[[null, 1 GB/s, 2 GB/s], [1 GB/s, null, 1 GB/s], [3 GB/s, 1 GB/s, null]]",
            [
                "same link both ways",
                "nodes 0 and 2",
                "'2 GB/s' one way and '3 GB/s'",
                "slower",
            ],
        ),
        (
            "[[null, null, 1 GB/s], [null, null, 1 GB/s], [1 GB/s, 1 GB/s, null]]",
            ["between_nodes[0][1]", "a bandwidth", "None"],
        ),
        (
            "[[9 GB/s, 1 GB/s, 1 GB/s], [1 GB/s, null, 1 GB/s], [1 GB/s, 1 GB/s, null]]",
            ["expected null", "nodes 0 and 0 have '9 GB/s'", "'link'"],
        ),
        (
            "[[null, nan GB/s, 1 GB/s], [nan GB/s, null, 1 GB/s], [1 GB/s, 1 GB/s, null]]",
            ["between_nodes[0][1]", "'nan GB/s'"],
        ),
        (
            "[[null, .nan, 1 GB/s], [.nan, null, 1 GB/s], [1 GB/s, 1 GB/s, null]]",
            ["between_nodes[0][1]", "nan"],
        ),
        (
            "[[null, {bandwidth: 1 GB/s, latency: 1 ms}, 1 GB/s], [1 GB/s, null, 1 GB/s],"
            " [1 GB/s, 1 GB/s, null]]",
            [
                "same link both ways",
                "'latency': '1 ms'} one way",
                "'1 GB/s' the other",
            ],
        ),
    ],
)
def test_a_bad_matrix_of_bandwidths_is_refused_by_name(rows, words):
    text = f"nodes: [{{count: 3, devices: {{T4: 4}}}}]\nbetween_nodes: {rows}"
    with pytest.raises(PlanError) as caught:
        Cluster.from_yaml(text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.processes
def test_reading_a_cluster_does_not_load_torch():
    code = (
        "import sys; from lightning_cephalo.offline.estimate.cluster import Cluster;"
        "Cluster.from_yaml('nodes: [{devices: {T4: 1}}]');"
        "sys.exit('torch' in sys.modules or 'cvxpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
