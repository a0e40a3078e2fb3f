"""The command line as a newcomer meets it: answers, files, exit codes, and what errors say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_cephalo import Plan, Problem, RankProfile, cli
from lightning_cephalo.cli import BAD_INPUT, DONE, INFEASIBLE, UNSOLVED, main
from lightning_cephalo.plan import SolverError, predict

TINY = ["--model-option", "n_layer=4", "--model-option", "n_embd=64", "--model-option", "n_head=2"]
MINE = ["--devices", "2x RTX 4090, rtx3090"]
ASKED = ["--model", "gpt2", *TINY, "--sequence-length", "64", "--batch-size", "24"]


def rank(name: str, speed: float, capacity: float = 1000.0) -> RankProfile:
    size = range(1, 5)
    return RankProfile(
        name,
        [(0.2 + own) / speed for own in size],
        [(0.4 + 2 * own) / speed for own in size],
        [own / speed for own in size],
        [10.0 * own for own in size],
        capacity,
    )


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    ranks = [rank("fast", 3), rank("slow", 1)]
    path = tmp_path / "problem.yaml"
    Problem(
        ranks, units=24, gather_s=0.5, state_bytes=600, global_batch_size=16, optimizer_s=1
    ).save(path)
    return path


def test_plan_prints_a_table_and_writes_a_plan_that_trains(capsys, tmp_path):
    out = tmp_path / "plan.yaml"
    assert main(["plan", *MINE, *ASKED, "-o", str(out)]) == DONE
    said = capsys.readouterr()
    assert "2 × RTX 4090: times by estimate" in said.out
    assert "no plan is faster" in said.out
    assert f"Wrote {out}" in said.err.replace("\n", "")
    plan = Plan.load(out)
    plan.check(world_size=3, global_batch_size=24)
    assert plan.gap == 0
    batches = [one.batch_size for one in plan.ranks]
    assert batches[0] == batches[1] > batches[2]


def test_plan_as_json_is_all_of_standard_output(capsys):
    assert main(["plan", *MINE, *ASKED, "--json"]) == DONE
    said = json.loads(capsys.readouterr().out)
    assert [one["device"] for one in said["sources"]] == ["RTX 4090", "RTX 4090", "RTX 3090"]
    assert sum(sum(one["microbatch_sizes"]) for one in said["ranks"]) == 24


def test_a_cluster_file_and_a_table_of_measured_curves(capsys, tmp_path):
    cluster, table = tmp_path / "cluster.yaml", tmp_path / "table.yaml"
    cluster.write_text(
        "nodes:\n- {devices: {RTX 3090: 1}}\n- {count: 2, devices: {T4: 1}}\n"
        "between_nodes: 10 Gb/s\n"
    )
    curve = [0.001 * size for size in range(1, 9)]
    table.write_text(
        yaml.safe_dump(
            {
                "model": "gpt2",
                "dtype": "fp32",
                "sequence_length": 64,
                "curves": [{"device": "T4", "forward_s": curve, "backward_s": curve}],
            }
        )
    )
    options = ["--cluster", str(cluster), *ASKED, "--table", str(table)]
    assert main(["plan", *options]) == DONE
    said = capsys.readouterr().out
    assert "2 × T4: times by table" in said and "1 × RTX 3090: times by estimate" in said
    assert main(["plan", *options, "--sequence-length", "32"]) == BAD_INPUT
    assert "expected curves of 'gpt2', fp32, sequence length 32" in capsys.readouterr().err


def test_a_saved_problem_gives_the_same_plan(capsys, tmp_path):
    saved, first, second = (tmp_path / name for name in ("problem.yaml", "a.yaml", "b.yaml"))
    assert main(["plan", *MINE, *ASKED, "--save-problem", str(saved), "-o", str(first)]) == DONE
    assert main(["plan", "--problem", str(saved), "-o", str(second)]) == DONE
    assert Plan.load(first).ranks == Plan.load(second).ranks


def test_simulate_writes_what_was_asked_for(capsys, tmp_path, problem):
    plan = tmp_path / "plan.json"
    assert main(["plan", "--problem", str(problem), "-o", str(plan)]) == DONE
    files = [tmp_path / name for name in ("trace.json", "timeline.png", "memory.svg")]
    options = ["--plan", str(plan), "--trace", str(files[0]), "--figure", str(files[1])]
    options += ["--memory-figure", str(files[2])]
    capsys.readouterr()
    assert main(["simulate", "--problem", str(problem), *options, "--json"]) == DONE
    assert all(path.stat().st_size > 1000 for path in files)
    said = json.loads(capsys.readouterr().out)
    predicted = predict(Problem.load(problem), Plan.load(plan).ranks).step_s
    assert said["predicted_s"] == predicted
    assert said["simulated_s"] == pytest.approx(predicted, rel=0.03)
    assert [one["name"] for one in said["ranks"]] == ["fast", "slow"]
    assert main(["simulate", "--problem", str(problem)]) == DONE
    assert "from the closed form's" in capsys.readouterr().out.replace("\n", " ")


def test_compare_shows_all_baselines_one_more_card_and_ours_last(capsys, tmp_path):
    figure = tmp_path / "compare.png"
    options = ["compare", *MINE, *ASKED, "--add", "RTX 3090", "--figure", str(figure)]
    assert main([*options, "--json"]) == DONE
    rows = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in rows]
    assert names[0].startswith("even batch, even state")
    assert names[-2:] == ["cephalo and one more RTX 3090", "cephalo"]
    ours = rows[-1]["samples_per_s"]
    assert all(row["samples_per_s"] <= ours * 1.001 for row in rows[:-2])
    assert rows[-2]["samples_per_s"] > ours
    assert figure.stat().st_size > 1000
    assert main(options) == DONE
    assert "Comparison" in capsys.readouterr().out


def test_compare_says_what_cannot_run_and_why(capsys, tmp_path):
    path = tmp_path / "problem.yaml"
    ranks = [rank("large", 1, 1000), rank("small", 1, 100)]
    Problem(ranks, units=8, state_bytes=600, global_batch_size=8).save(path)
    assert main(["compare", "--problem", str(path), "--json"]) == DONE
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    even = rows["even batch, even state (FSDP)"]
    assert even["step_s"] is None and "out of memory" in even["reason"]
    assert rows["cephalo"]["step_s"] > 0


def test_nothing_fits(capsys, tmp_path):
    path = tmp_path / "problem.yaml"
    Problem([rank("a", 1, 100)], units=8, state_bytes=600, global_batch_size=8).save(path)
    for command in ("plan", "simulate", "compare"):
        assert main([command, "--problem", str(path)]) == INFEASIBLE
        said = capsys.readouterr()
        assert "Nothing fits: Memory binds" in said.err and "add 6 more 'a'" in said.err
        assert "samples/s" not in said.out


def test_a_solver_without_time(capsys, problem, monkeypatch):
    def out_of_time(problem, *, time_limit_s):
        raise SolverError(f"no plan in {time_limit_s} s")

    monkeypatch.setattr(cli, "solve", out_of_time)
    assert main(["plan", "--problem", str(problem), "--time-limit", "0.5"]) == UNSOLVED
    assert "No plan yet: no plan in 0.5 s" in capsys.readouterr().err


WRONG = {
    "no cluster": (["plan", *ASKED], "one of --cluster cluster.yaml and --devices"),
    "both": (["plan", *MINE, "--cluster", "c.yaml", *ASKED], "but got both"),
    "no model": (["plan", *MINE], "Expected --model"),
    "no batch": (["plan", *MINE, "--model", "gpt2"], "Expected --batch-size"),
    "unknown device": (["plan", "--devices", "RTX 4091", *ASKED], "Did you mean RTX 4090"),
    "devices": (["plan", "--devices", ", T4", *ASKED], "expected a list such as"),
    "unknown model": (["plan", *MINE, "--model", "gtp2", "--batch-size", "4"], "'gtp2'"),
    "option": (["plan", *MINE, *ASKED, "--model-option", "x"], "NAME=VALUE, but got 'x'"),
    "batch 0": (["plan", *MINE, *ASKED[:-1], "0"], "global_batch_size"),
    "no file": (["plan", "--problem", "nowhere.yaml"], "no such file"),
    "more": (["compare", *MINE, *ASKED, "--add", "H1000"], "--add: expected a known device"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_that_names_it(capsys, case):
    arguments, part = WRONG[case]
    assert main(arguments) == BAD_INPUT
    said = capsys.readouterr()
    assert part in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not said.out


def test_a_problem_and_a_cluster_contradict_each_other(capsys, problem):
    assert main(["plan", "--problem", str(problem), *MINE]) == BAD_INPUT
    assert "--devices was given as well" in capsys.readouterr().err
    assert main(["compare", "--problem", str(problem), "--add", "T4"]) == BAD_INPUT
    assert "--add needs --cluster or --devices" in capsys.readouterr().err


def test_a_plan_of_other_ranks_is_not_simulated(capsys, tmp_path, problem):
    plan = tmp_path / "plan.yaml"
    assert main(["plan", *MINE, *ASKED, "-o", str(plan)]) == DONE
    assert main(["simulate", "--problem", str(problem), "--plan", str(plan)]) == BAD_INPUT
    assert "The plan is for 3 ranks" in capsys.readouterr().err


def test_help_is_for_newcomers():
    command = [sys.executable, "-m", "lightning_cephalo.cli"]
    for arguments in ([], ["plan"], ["simulate"], ["compare"]):
        said = subprocess.run(
            [*command, *arguments, "--help"], capture_output=True, text=True, check=True
        ).stdout
        assert "exit codes: 0 done" in said and "cephalo plan --devices" in said
    wrong = subprocess.run([*command, "paln"], capture_output=True, text=True)
    assert wrong.returncode == BAD_INPUT and "invalid choice: 'paln'" in wrong.stderr


PROFILES = Path(__file__).resolve().parents[2] / "shared" / "data" / "cephalo-profiles"


@pytest.mark.skipif(not PROFILES.exists(), reason="the published profiles are not here")
def test_published_profiles(capsys):
    devices = ["--devices", "2x L4, A6000, P40", "--published", str(PROFILES)]
    asked = ["--model", "deepspeedgpt_2.7b", "--batch-size", "64"]
    assert main(["compare", *devices, *asked, "--json"]) == DONE
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["cephalo"]["step_s"] <= rows["published program"]["step_s"] * 1.001
    assert main(["plan", *devices, *asked]) == DONE
    assert "2 × L4: times by table: published profiles of deepspeedgpt_2.7b" in (
        capsys.readouterr().out
    )
    assert main(["plan", *devices, *asked, "--recompute", "off"]) == BAD_INPUT
    assert main(["plan", *devices, "--model", "gpt5", "--batch-size", "64"]) == BAD_INPUT
    assert "gpt5" in capsys.readouterr().err
