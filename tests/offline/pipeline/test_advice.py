"""The advice as users meet it: tables, sentences, JSON and figures of the command line."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from pipeline_cases import problem_of, rank
from rich.console import Console

from lightning_cephalo import Plan
from lightning_cephalo.offline.answers import compare
from lightning_cephalo.offline.cli import BAD_INPUT, DONE, INFEASIBLE, main
from lightning_cephalo.offline.estimate.cluster import Cluster
from lightning_cephalo.offline.pipeline.crossover import Crossover, Point, find_crossover
from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.offline.pipeline.search import advise
from lightning_cephalo.offline.pipeline.text import (
    ADVICE_ONLY,
    advice_lines,
    crossover_text,
    pipeline_table,
)
from lightning_cephalo.offline.scenario import Scenario
from lightning_cephalo.plan import solve

CLUSTER = """
nodes:
  - {devices: {RTX 3090: 2}, link: 25 GB/s}
  - {devices: {T4: 2}, link: 12 GB/s}
between_nodes: 1 Mb/s
"""
# a small vocabulary: the first and the last stage share the root, which crosses the network too
SIZES = ("n_layer=4", "n_embd=64", "n_head=2", "vocab_size=64")
TINY = [word for size in SIZES for word in ("--model-option", size)]
ASKED = ["--model", "gpt2", *TINY, "--sequence-length", "64", "--batch-size", "8"]


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return ["--cluster", str(path)]


def test_plan_gives_advice_beside_the_plan_that_trains(capsys, tmp_path, cluster):
    figure, out = tmp_path / "pipeline.svg", tmp_path / "plan.yaml"
    options = ["plan", *cluster, *ASKED, "--pipeline", "--figure", str(figure), "-o", str(out)]
    assert main([*options, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)["pipeline"]
    drawn = figure.read_text()
    assert "units on" in drawn and "fastest pipeline" in drawn and "$" not in drawn
    # the plan that is written is today's: one stage of all ranks
    assert Plan.load(out).world_size == 4
    assert "stage" not in out.read_text()
    assert found["wins"] and found["best"]["step_s"] < found["today_s"]
    assert found["bound_s"] <= found["best"]["step_s"]
    assert found["advice_only"] == ADVICE_ONLY
    stages = found["best"]["stages"]
    assert stages[0]["units"][0] == 1 and stages[-1]["units"][1] == 4
    below = float(found["wins_below_bytes_per_s"])  # JSON has "inf" where it always wins
    assert below > 0.125e6
    for point in found["by_bandwidth"]:
        wins = point["pipeline_s"] < point["today_s"]
        assert wins == (point["bandwidth_bytes_per_s"] <= below * 1.0001)


def test_a_plan_of_hybrid_sharding_is_the_row_of_compare_and_is_simulated(
    capsys, tmp_path, cluster
):
    out = tmp_path / "plan.yaml"
    options = [*cluster, *ASKED, "--json"]
    assert main(["compare", *options]) == DONE
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    hybrid = rows["cephalo, hybrid sharding by node (over gloo)"]
    # one exchange in fp32 in place of two gathers and a reduce
    assert hybrid["step_s"] < 0.8 * rows["cephalo"]["step_s"]
    assert main(["plan", *options, "--hybrid-sharding", "-o", str(out)]) == DONE
    chosen = json.loads(capsys.readouterr().out)
    assert chosen["groups"] == [0, 0, 1, 1] and chosen["step_s"] == hybrid["step_s"]
    assert main(["simulate", *options, "--plan", str(out)]) == DONE
    played = json.loads(capsys.readouterr().out)
    assert played["predicted_s"] == pytest.approx(hybrid["step_s"])
    assert played["simulated_s"] == pytest.approx(played["predicted_s"], rel=1e-9)


def test_hybrid_sharding_that_has_no_room_leaves_the_other_way(capsys, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "nodes: [{devices: {A100: 1}}, {devices: {Tiny: 1}}]\nbetween_nodes: 1 Mb/s\n"
        "devices: {Tiny: {memory: 3 MiB, fp32: 10 TFLOP/s, bandwidth: 300 GB/s}}"
    )
    asked = ["--cluster", str(path), *ASKED]
    assert main(["compare", *asked, "--json"]) == DONE
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    hybrid = rows["cephalo, hybrid sharding by node (over gloo)"]
    assert rows["cephalo"]["step_s"] > 0
    assert hybrid["step_s"] is None and "each of 2 groups holds the whole" in hybrid["reason"]
    assert main(["plan", *asked, "--hybrid-sharding"]) == INFEASIBLE
    assert "each of 2 groups holds the whole state" in " ".join(capsys.readouterr().err.split())


def test_compare_has_a_row_for_the_pipeline_before_ours(tmp_path, cluster):
    nodes = [[rank(2.0, 3000)] * 2, [rank(1.0, 3000)] * 2]

    def problem_at(where: Cluster) -> PipelineProblem:
        link = where.between[0][1]
        return problem_of(*nodes, batch=8, between=link.bandwidth_bytes_per_s)

    where = Cluster.load(cluster[1])
    where = where.with_network_scaled(0.5 / where.between[0][1].bandwidth_bytes_per_s)
    problem = problem_at(where).whole
    hybrid = replace(problem, groups=(0, 0, 1, 1))
    asked = Scenario(
        problem,
        "",
        cluster=where,
        problem_of=lambda where, is_hybrid: hybrid,
        pipeline_of=problem_at,
    )
    rows = compare(asked)
    assert rows[-1].name == "cephalo"
    assert rows[-3].name == "cephalo, hybrid sharding by node (over gloo)"
    assert rows[-3].step_s and len(rows[-3].memory) == 4
    assert rows[-2].name.startswith("pipeline of 2 stages, units ")
    assert "(advice only: a pipeline wins below about" in rows[-2].name
    assert rows[-2].samples_per_s > rows[-1].samples_per_s
    assert len(rows[-2].memory) == 4


def test_tables_and_sentences_say_what_was_found_and_that_it_is_advice():
    slow, fast = (
        advise(problem, solve(problem.whole).step_s)
        for rate in (0.5, 1000.0)
        for problem in [problem_of([rank(2.0, 3000)] * 2, [rank(1.0, 3000)], between=rate)]
    )
    said = " ".join(advice_lines(slow))
    assert said.startswith("A pipeline would be ") and said.endswith(ADVICE_ONLY)
    assert "among pipelines of all ranks" in said
    assert advice_lines(fast)[0].startswith("No pipeline is needed")
    console = Console(width=200, file=io.StringIO())
    console.print(pipeline_table(slow, slow.best))
    table = console.file.getvalue()
    for word in ("Pipeline (advice only)", "node 0", "node 1", "once", "%"):
        assert word in table


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--devices", "2x T4", *ASKED, "--pipeline"], "a cluster of at least two nodes"),
        (["--devices", "2x T4", *ASKED, "--figure", "a.png"], "give --pipeline too"),
        (["--devices", "2x T4", *ASKED, "--hybrid-sharding"], "with several nodes"),
        (
            ["--hybrid-sharding", "--optimizer-offload", "auto"],
            "expected --optimizer-offload off, but got auto",
        ),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused(capsys, options, words):
    assert main(["plan", *options]) == BAD_INPUT
    assert words in " ".join(capsys.readouterr().err.split())


def test_the_crossover_is_between_a_point_that_wins_and_one_that_does_not():
    nodes = [[rank(2.0, 3000)] * 2, [rank(1.0, 3000)] * 2]
    crossover = find_crossover(lambda factor: problem_of(*nodes, batch=8, between=5.0 * factor))
    rate = crossover.bandwidth_bytes_per_s
    wins = [p.bandwidth_bytes_per_s for p in crossover.points if p.pipeline_wins]
    loses = [p.bandwidth_bytes_per_s for p in crossover.points if not p.pipeline_wins]
    assert max(wins) == pytest.approx(rate)
    assert rate < min(loses) < 1.1 * rate


def test_what_wins_always_or_never_is_said():
    points = (Point(1e6, 2.0, 1.0), Point(2e12, 2.0, 1.0))
    assert "at all bandwidths between nodes up to 2000 GB/s" in crossover_text(
        Crossover(math.inf, points)
    )
    assert "down to 1 MB/s" in crossover_text(Crossover(0.0, points))
    assert crossover_text(Crossover(7.93e9, points)).endswith("below about 7.9 GB/s between nodes")
