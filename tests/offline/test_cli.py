"""The command line as a newcomer meets it: answers, files, exit codes, and what errors say."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from launch import run_ranks
from rich.console import Console

from lightning_cephalo import Plan, Problem, RankProfile
from lightning_cephalo.offline import answers, cli, scenario
from lightning_cephalo.offline.answers import ComparisonRow
from lightning_cephalo.offline.cli import BAD_INPUT, DONE, INFEASIBLE, UNEXPECTED, UNSOLVED, main
from lightning_cephalo.plan import Links, SolverError, StateBytes, predict
from lightning_cephalo.plan.curves import Curves, CurveTable, save_measured

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
        ranks,
        units=24,
        links=Links(0.5),
        state=StateBytes(600),
        global_batch_size=16,
        update_overhead_s=1,
    ).save(path)
    return path


def test_plan_prints_a_table_and_writes_a_plan_that_trains(capsys, tmp_path):
    out = tmp_path / "plan.yaml"
    assert main(["plan", *MINE, *ASKED, "-o", str(out)]) == DONE
    said = capsys.readouterr()
    assert "2 × RTX 4090: times by estimate" in said.out
    assert "proven bound" in said.out
    assert said.out.splitlines()[0] == "gpt2, fp32, 64 tokens, global batch 24"
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
    assert "expected curves of 'gpt2', fp32, length 32" in capsys.readouterr().err
    table.write_text(yaml.safe_dump(yaml.safe_load(table.read_text()) | {"parameters": 1000}))
    assert main(["plan", *options]) == BAD_INPUT
    assert "those of 'gpt2', fp32, length 64, 1,000 parameters" in capsys.readouterr().err


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


def test_compare_shows_all_baselines_one_more_card_and_ours_last(capsys):
    options = ["compare", *MINE, *ASKED, "--add", "RTX 3090"]
    assert main([*options, "--json"]) == DONE
    rows = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in rows]
    assert names[0].startswith("even batch, even state")
    assert names[-2:] == ["cephalo and one more RTX 3090", "cephalo"]
    ours = rows[-1]["samples_per_s"]
    assert all(row["samples_per_s"] <= ours * 1.001 for row in rows[:-2])
    assert rows[-2]["samples_per_s"] > ours
    assert main(options) == DONE
    said = capsys.readouterr().out
    assert said.startswith("gpt2, fp32, 64 tokens, global batch 24\n2 × RTX 4090")
    assert "Comparison" in said and "100%" in said


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """A cluster whose one card cannot hold the model, and two of it can."""
    path = tmp_path / "cluster.yaml"
    card = "{memory: 110 MiB, fp32: 10 TFLOP/s, bandwidth: 300 GB/s}"
    path.write_text(f"nodes:\n- devices: {{Small: 1}}\ndevices:\n  Small: {card}\n")
    return ["--cluster", str(path), *ASKED]


def test_one_more_card_is_an_answer_where_ours_cannot_run(capsys, small):
    assert main(["compare", *small, "--add", "Small", "--json"]) == DONE
    *_, larger, ours = json.loads(capsys.readouterr().out)
    assert larger["name"] == "cephalo and one more Small" and larger["step_s"] > 0
    assert ours["name"] == "cephalo" and ours["step_s"] is None
    assert ours["reason"].startswith("Memory binds over all 1 ranks")
    assert main(["compare", *small, "--add", "Small"]) == DONE
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ cephalo")]
    assert "%" in rows[0]  # its fullest rank
    assert [cell.strip() for cell in rows[0].split("│")][4] == "–"
    assert "cannot run" in rows[1]


def test_nothing_fits_where_no_added_card_helps_either(capsys, small):
    options = ["--model-option", "n_embd=256", "--add", "Small"]
    assert main(["compare", *small, *options]) == INFEASIBLE
    said = capsys.readouterr()
    assert "Nothing fits: " in said.err and not said.out


def test_ours_without_a_plan_in_time_is_no_answer(capsys, problem, monkeypatch):
    def out_of_time(problem, *, time_limit_s):
        raise SolverError(f"no plan in {time_limit_s} s")

    monkeypatch.setattr(answers, "solve", out_of_time)
    assert main(["compare", "--problem", str(problem), "--time-limit", "0.5"]) == UNSOLVED
    assert "No plan yet: no plan in 0.5 s" in capsys.readouterr().err


def test_throughputs_have_no_exponents():
    rows = [ComparisonRow("even", 0.004, 12_500.3), ComparisonRow("cephalo", 0.002, 25_000.0)]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(answers.comparison_table(rows))
    assert "12,500" in capture.get() and "50%" in capture.get()


SUBJECTS = {
    "given": (["gpt2", *TINY, "--sequence-length", "64"], "gpt2, fp32, 64 tokens"),
    "default": (["gpt2", *TINY, "--dtype", "bf16"], "gpt2, bf16, 1024 tokens (default)"),
    "images": (
        ["vit", "--model-option", "num_hidden_layers=2", "--sequence-length", "5"],
        "vit, fp32, 197 tokens (its own, not 5)",
    ),
}


@pytest.mark.parametrize("case", SUBJECTS)
def test_the_first_line_says_what_is_planned_for(capsys, case):
    options, first = SUBJECTS[case]
    assert main(["plan", *MINE, "--batch-size", "3", "--model", *options]) == DONE
    assert capsys.readouterr().out.splitlines()[0] == f"{first}, global batch 3"


def test_a_step_that_takes_no_time(capsys, tmp_path):
    path = tmp_path / "problem.yaml"
    free = RankProfile("free", [0.0], [0.0], [0.0], [1.0], 1000)
    Problem([free], units=1, state=StateBytes(1), global_batch_size=4).save(path)
    for command in ("plan", "simulate", "compare"):
        assert main([command, "--problem", str(path)]) == DONE
    assert "inf" in capsys.readouterr().out


def test_the_first_line_of_a_saved_problem_is_its_file(capsys, problem):
    assert main(["simulate", "--problem", str(problem)]) == DONE
    assert capsys.readouterr().out.startswith(f"{problem}, 24 units, global batch 16\n")


def test_compare_says_what_cannot_run_and_why(capsys, tmp_path):
    path = tmp_path / "problem.yaml"
    ranks = [rank("large", 1, 1000), rank("small", 1, 100)]
    Problem(ranks, units=8, state=StateBytes(600), global_batch_size=8).save(path)
    assert main(["compare", "--problem", str(path), "--json"]) == DONE
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    even = rows["even batch, even state (FSDP)"]
    assert even["step_s"] is None and "even share of the state" in even["reason"]
    assert rows["cephalo"]["step_s"] > 0


def test_nothing_fits(capsys, tmp_path):
    path = tmp_path / "problem.yaml"
    Problem([rank("a", 1, 100)], units=8, state=StateBytes(600), global_batch_size=8).save(path)
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
    "option": (["plan", *MINE, *ASKED, "--model-option", "x"], "NAME=VALUE with a value in YAML"),
    "batch 0": (["plan", *MINE, *ASKED[:-1], "0"], "global_batch_size"),
    "no file": (["plan", "--problem", "nowhere.yaml"], "no such file"),
    "length 0": (["plan", *MINE, *ASKED, "--sequence-length", "0"], "sequence_length: expected"),
    "length -1": (["plan", *MINE, *ASKED, "--sequence-length", "-1"], "but got -1"),
    "no device": (["plan", "--devices", "0x T4", *ASKED], "count of 'T4': expected a whole"),
    "no such name": (["plan", "--devices", "3091", *ASKED], "but got '3091'. Did you mean"),
    "offload": (["plan", *MINE, *ASKED, "--offload"], "--devices gives none. Use --cluster"),
    "import path": (["plan", *MINE, "--model", ":X", "--batch-size", "4"], "but got ':X'"),
    "folder": (["plan", *MINE, *ASKED, "-o", "/no/p.yaml"], "/no/p.yaml: cannot be written: No"),
    "problem's": (["plan", *MINE, *ASKED, "--save-problem", "/no/p.json"], "cannot be written"),
    "trace's": (["simulate", *MINE, *ASKED, "--trace", "/no/a.json"], "/no/a.json: cannot be"),
    "figure's": (["simulate", *MINE, *ASKED, "--figure", "/no/a.png"], "/no/a.png: cannot be"),
    "memory's": (["simulate", *MINE, *ASKED, "--memory-figure", "/no/a.svg"], "/no/a.svg: cannot"),
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


MODEL_OPTIONS = {
    "a=[1": "a value in YAML",
    "dtype=fp16": "Use --dtype",
    "sequence_length=5": "Use --sequence-length",
    "model=x": "Use --model",
    "name=foo": "Use --model, which names it",
    "num_hidden_layers=abc": "gpt2 with n_layer=4, n_embd=64, n_head=2, num_hidden_layers='abc'",
    "num_attention_heads=7": "must be divisible by num_heads",
    "hidden_sise=8": "Did you mean hidden_size",
    "vocab_size=-1": "negative dimension -1",
}


@pytest.mark.parametrize("option", MODEL_OPTIONS)
def test_a_model_option_that_cannot_be_is_one_line_that_names_it(capsys, option):
    assert main(["plan", *MINE, *ASKED, "--model-option", option]) == BAD_INPUT
    said = capsys.readouterr()
    assert MODEL_OPTIONS[option] in said.err
    assert len(said.err.strip().splitlines()) == 1 and said.err.startswith("Wrong input: ")
    assert not said.out


DEVICES = {
    "2xRTX 4090": {"RTX 4090": 2},
    "2 x RTX 4090": {"RTX 4090": 2},
    "2× RTX 4090": {"RTX 4090": 2},
    "2X rtx4090": {"RTX 4090": 2},
    "2 RTX 4090": {"RTX 4090": 2},
    "12x T4, L4": {"T4": 12, "L4": 1},
    "3090": {"RTX 3090": 1},
    "3090ti": {"RTX 3090 Ti": 1},
    "1080 Ti": {"GTX 1080 Ti": 1},
    "6000 Ada": {"RTX 6000 Ada": 1},
    "2x 3090": {"RTX 3090": 2},
    "2x3090ti": {"RTX 3090 Ti": 2},
    "3 1080 Ti": {"GTX 1080 Ti": 3},
}


@pytest.mark.parametrize("words", DEVICES)
def test_devices_are_counted_however_they_are_written(words):
    (node,) = scenario.cluster_of(Namespace(cluster=None, devices=words)).nodes
    assert {device.name: count for device, count in node.devices} == DEVICES[words]


def test_offload_needs_host_memory(tmp_path, capsys):
    path = tmp_path / "cluster.yaml"
    options = ["plan", "--cluster", str(path), *ASKED, "--offload"]
    path.write_text("nodes:\n- devices: {T4: 2}\n")
    assert main(options) == BAD_INPUT
    assert f"{path} gives none" in capsys.readouterr().err
    path.write_text("nodes:\n- {devices: {T4: 2}, host_memory: 64 GiB}\n")
    assert main(options) == DONE
    capsys.readouterr()
    assert main([*options, "--recompute", "off"]) == BAD_INPUT
    assert "--recompute on or choose" in capsys.readouterr().err


MODULE = """
import torch
from helper_beside import WIDTH

class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(1, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, batch):
        for block in self.blocks:
            batch = block(batch)
        return batch
"""


@pytest.mark.processes
def test_a_class_of_the_current_folder_is_found_by_an_installed_script(tmp_path):
    (tmp_path / "mymod.py").write_text(MODULE)
    (tmp_path / "helper_beside.py").write_text("WIDTH = 16\n")

    def script(rank: int) -> tuple[int, str]:
        os.chdir(tmp_path)
        # as an installed script has it, which does not import from the current folder
        sys.path[:] = [folder for folder in sys.path if folder and Path(folder) != tmp_path]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            asked = ["plan", *MINE, "--model", "mymod:Blocks", "--batch-size", "4"]
            return main(asked), said.getvalue()

    ((code, said),) = run_ranks(1, script, process_group=False)
    assert code == DONE
    assert said.splitlines()[0] == (
        "Blocks, fp32, 512 tokens (default) unless its example_input_array has others, "
        "global batch 4"
    )


def test_the_import_path_is_as_before(capsys):
    before = list(sys.path)
    assert main(["plan", *MINE, "--model", "no.such:Class", "--batch-size", "4"]) == BAD_INPUT
    assert sys.path == before


def test_an_unexpected_error_is_a_traceback_and_never_means_that_nothing_fits(
    capsys, problem, monkeypatch
):
    def breaks(problem, *, time_limit_s):
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(cli, "solve", breaks)
    assert main(["plan", "--problem", str(problem)]) == UNEXPECTED
    assert UNEXPECTED not in (DONE, INFEASIBLE, BAD_INPUT, UNSOLVED)
    said = capsys.readouterr().err
    assert "Traceback" in said and "KeyError: 'a mistake of ours'" in said


@pytest.mark.parametrize(
    "option",
    [
        ["--devices", "T4"],
        ["--model", "gpt2"],
        ["--batch-size", "4"],
        ["--sequence-length", "64"],
        ["--dtype", "fp32"],
        ["--recompute", "on"],
        ["--table", "table.yaml"],
        ["--offload"],
        ["--model-option", "n_layer=2"],
    ],
    ids=lambda option: option[0],
)
def test_a_problem_contradicts_what_it_says_already(capsys, problem, option):
    assert main(["plan", "--problem", str(problem), *option]) == BAD_INPUT
    assert f"but {option[0]} was given as well" in capsys.readouterr().err


def test_a_saved_problem_has_no_cluster_to_add_to(capsys, problem):
    assert main(["compare", "--problem", str(problem), "--add", "T4"]) == BAD_INPUT
    assert "--add needs --cluster or --devices" in capsys.readouterr().err


def test_a_plan_of_other_ranks_is_not_simulated(capsys, tmp_path, problem):
    plan = tmp_path / "plan.yaml"
    assert main(["plan", *MINE, *ASKED, "-o", str(plan)]) == DONE
    assert main(["simulate", "--problem", str(problem), "--plan", str(plan)]) == BAD_INPUT
    assert "The plan is for 3 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["plan"], ["simulate"], ["compare"]])
def test_help_is_for_newcomers(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == DONE
    said = capsys.readouterr().out
    assert "exit codes: 0 done" in said and "70 an unexpected error" in said
    assert "cephalo plan --devices" in said


@pytest.mark.processes
def test_a_wrong_command_is_named_by_the_module():
    def module(rank: int) -> tuple[object, str]:
        sys.argv = ["cli", "paln"]
        with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
            runpy.run_path(cli.__file__, run_name="__main__")
        return ended.value.code, said.getvalue()

    ((code, said),) = run_ranks(1, module, process_group=False)
    assert code == BAD_INPUT and "invalid choice: 'paln'" in said


def test_measured_times_of_another_length_are_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_CEPHALO_CACHE", str(tmp_path))
    curves = (Curves("RTX 4090", (1.0,), (2.0,), source="measured"),)
    save_measured(CurveTable("gpt2", "fp32", 32, curves))
    assert main(["plan", *MINE, *ASKED]) == DONE
    said = capsys.readouterr()
    assert "Left out: times of 'gpt2' that were measured at fp32, length 32: this is" in said.err
    assert "times by measured" not in said.out
    assert main(["plan", *MINE, *ASKED, "--sequence-length", "32"]) == DONE
    said = capsys.readouterr()
    assert "Left out" not in said.err and "2 × RTX 4090: times by measured" in said.out
