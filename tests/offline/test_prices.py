"""Prices of devices, and the cheapest mix of a cluster's devices."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import pytest

from lightning_cephalo import Problem, RankProfile
from lightning_cephalo.offline.answers import Deadline, compare
from lightning_cephalo.offline.cli import BAD_INPUT, DONE, main
from lightning_cephalo.offline.estimate.cluster import Cluster
from lightning_cephalo.offline.prices import mixes, price_of, prices_of
from lightning_cephalo.offline.scenario import Scenario
from lightning_cephalo.plan import InfeasibleError, Links, PlanError, StateBytes, solve

SPEEDS = {"A6000": 2.0, "L4": 1.0, "T4": 0.6}
PRICES = {"A6000": 0.8, "L4": 0.3, "T4": 0.25}
TINY = ["--model-option", "n_layer=2", "--model-option", "n_embd=64", "--model-option", "n_head=2"]
ASKED = ["--model", "gpt2", *TINY, "--sequence-length", "64", "--batch-size", "12"]


def problem_of(cluster: Cluster, hybrid: bool = False) -> Problem:
    """A job in which collectives take longer over two nodes, and one device has no room."""
    ranks = []
    for rank in cluster.ranks:
        speed, sizes = SPEEDS[rank.device.name], range(1, 5)
        times = [(0.2 + size) / speed for size in sizes]
        ranks.append(RankProfile(rank.device.name, times, times, times, list(sizes), 100.0))
    gather_s = 0.5 if len(cluster.nodes) == 1 else 2.0
    return Problem(
        ranks, units=4, links=Links(gather_s, gather_s), state=StateBytes(150), global_batch_size=12
    )


def scenario_of(text: str, **more) -> Scenario:
    cluster = Cluster.from_yaml(text)
    return Scenario(problem_of(cluster), "", cluster=cluster, problem_of=problem_of, **more)


def devices_of(cluster: Cluster) -> list[dict[str, int]]:
    return [{device.name: count for device, count in node.devices} for node in cluster.nodes]


def test_prices_are_of_the_option_and_then_of_the_cluster_file():
    cluster = Cluster.from_yaml(
        "nodes: [{devices: {A6000: 2, L4: 1}}]\n"
        "devices: {NVIDIA RTX A6000: {price: 0.8}, L4: {price: 0.7, memory: 20 GiB}}"
    )
    assert prices_of(None, cluster) == {"A6000": 0.8, "L4": 0.7}
    prices = prices_of("rtx a6000 = 1, T4=0", cluster)
    assert price_of(problem_of(cluster), prices) == 2 * 1 + 0.7
    assert price_of(problem_of(cluster), {}) is None
    # a price alone says nothing of the device's rates
    assert [device.source for device in cluster.devices] == [
        "NVIDIA RTX A6000 datasheet",
        "cluster.yaml",
    ]
    with pytest.raises(PlanError, match="but got none of 'L4'"):
        price_of(problem_of(cluster), {"A6000": 1.0})
    for text, words in (
        ("A6000", "A6000=0.8,L4=0.7"),
        ("A6000=x", "A6000: .*'x'"),
        ("L4=-1", "-1"),
    ):
        with pytest.raises(PlanError, match=words):
            prices_of(text, None)


def test_rows_have_what_they_cost():
    asked = scenario_of("nodes: [{devices: {A6000: 1, L4: 2}}]", tokens=512)
    rows = compare(asked, ["T4"], prices=PRICES)
    for row in rows:
        assert row.price_per_hour == pytest.approx(1.4 + 0.25 * ("one more T4" in row.name))
        assert row.cost_per_million_samples == pytest.approx(
            1e6 / row.samples_per_s / 3600 * row.price_per_hour
        )
        assert row.cost_per_million_tokens == row.cost_per_million_samples / 512
    assert all(row.price_per_hour is None for row in compare(asked))


def test_every_mix_is_there_once():
    (one,) = mixes(Cluster.from_yaml("nodes: [{devices: {T4: 1}}]"))
    assert devices_of(one) == [{"T4": 1}]
    node = Cluster.from_yaml("nodes: [{devices: {A6000: 2, T4: 1}}]")
    found = [Counter(rank.device.name for rank in mix.ranks) for mix in mixes(node)]
    assert len(found) == 5 and Counter(A6000=2, T4=1) in found
    alike = Cluster.from_yaml("nodes: [{count: 3, devices: {T4: 2}}]\nbetween_nodes: 1 GB/s")
    # 0 to 2 devices in each of three nodes, whichever they are
    assert len(list(mixes(alike))) == 10 - 1
    apart = Cluster.from_yaml(
        "nodes: [{count: 3, devices: {T4: 2}}]\n"
        "between_nodes: [[null, 1 GB/s, 2 GB/s], [1 GB/s, null, 3 GB/s], [2 GB/s, 3 GB/s, null]]"
    )
    found = list(mixes(apart))
    assert len(found) == 3**3 - 1
    rates = {mix.between[0][1].bandwidth_bytes_per_s for mix in found if len(mix.nodes) == 2}
    assert rates == {1e9, 2e9, 3e9}


def test_too_many_mixes_are_refused_by_their_number():
    # 81 parts of a node: choose 20 of them with repetition, without the empty one
    cluster = Cluster.from_yaml(
        "nodes: [{count: 20, devices: {A6000: 8, L4: 8}}]\nbetween_nodes: 1 GB/s"
    )
    with pytest.raises(PlanError, match=f"at most 64 mixes .* but got {math.comb(100, 20) - 1:,}"):
        next(mixes(cluster))


CLUSTER = """
nodes: [{devices: {A6000: 1, L4: 2}}, {devices: {T4: 2}}]
between_nodes: 1 GB/s
"""


@pytest.mark.parametrize("hours", [0.5, 0.75, 1.0, 1.5, 3.0, 100.0])
def test_the_cheapest_mix_is_that_of_brute_force(hours):
    samples = 1000
    best = (math.inf, None)
    for own in itertools.product(range(2), range(3), range(3)):
        counts = dict(zip(("A6000", "L4", "T4"), own, strict=True))
        first = {name: counts[name] for name in ("A6000", "L4") if counts[name]}
        nodes = [each for each in (first, {"T4": counts["T4"]} if counts["T4"] else {}) if each]
        if not nodes:
            continue
        mix = Cluster.from_yaml(json.dumps({"nodes": [{"devices": each} for each in nodes]}
                                           | {"between_nodes": "1 GB/s"}))  # fmt: skip
        try:
            plan = solve(problem_of(mix))
        except InfeasibleError:
            continue
        hours_needed = math.ceil(samples / 12) * plan.step_s / 3600
        price = sum(PRICES[name] * count for name, count in counts.items())
        if hours_needed <= hours:
            best = min(best, (hours_needed * price, price))
    asked = scenario_of(CLUSTER)
    *_, found, ours = compare(asked, prices=PRICES, deadline=Deadline(hours, samples))
    assert ours.name == "cephalo"
    assert found.name.startswith(f"cephalo, cheapest within {hours:g} h")
    if best[1] is None:
        assert found.step_s is None
        assert "of 17 mixes, no one trains 1,000 samples in time: the fastest" in found.reason
    else:
        assert found.price_per_hour == pytest.approx(best[1])
        assert f" h for {best[0]:,.2f})" in found.name


def test_compare_prints_costs_and_the_mix(capsys):
    devices = ["--devices", "A6000, 2x L4", "--price", "A6000=0.8,L4=0.7"]
    deadline = ["--deadline", "1000", "--samples", "100"]
    assert main(["compare", *devices, *ASKED, *deadline]) == DONE
    assert "tokens" in capsys.readouterr().out
    assert main(["compare", *devices, *ASKED, *deadline, "--json"]) == DONE
    *_, mix, ours = json.loads(capsys.readouterr().out)
    # with all the time there is, the mix with the cheapest samples
    assert mix["cost_per_million_tokens"] <= ours["cost_per_million_tokens"]
    assert ours["price_per_hour"] == pytest.approx(2.2)
    assert ours["cost_per_million_samples"] == 64 * ours["cost_per_million_tokens"]


WRONG = {
    "no samples": (["--deadline", "5", "--price", "L4=1"], "needs --samples"),
    "no deadline": (["--samples", "5", "--price", "L4=1"], "--deadline HOURS needs"),
    "no prices": (["--deadline", "5", "--samples", "5"], "needs prices"),
    "no time": (["--deadline", "0", "--samples", "5", "--price", "L4=1"], "greater than 0"),
    "no price": (["--price", "T4=1"], "but got none of 'L4'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_says_too_little_is_refused(capsys, case):
    options, words = WRONG[case]
    assert main(["compare", "--devices", "L4", *ASKED, *options]) == BAD_INPUT
    assert words in capsys.readouterr().err


def test_a_saved_problem_has_no_devices_to_mix(capsys, tmp_path):
    path = tmp_path / "problem.yaml"
    problem_of(Cluster.from_yaml("nodes: [{devices: {L4: 2}}]")).save(path)
    priced = ["compare", "--problem", str(path), "--price", "L4=0.5", "--json"]
    assert main(priced) == DONE
    assert json.loads(capsys.readouterr().out)[-1]["price_per_hour"] == 1.0
    assert main([*priced, "--deadline", "5", "--samples", "5"]) == BAD_INPUT
    assert "--deadline needs --cluster or --devices" in capsys.readouterr().err
