"""NCCL, CUDA streams, and 16-mixed with its gradient scaler: on real GPUs, and on simulated ones.

On a real GPU each test runs a script in interpreters of its own, as CUDA does not survive a fork.
On simulated GPUs the same script runs in forks, and nothing may be out of order there.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from launch import run_script, torchrun_environments
from simulated_server import DEVICES, Server

SCRIPT = Path(__file__).parent / "gpu_script.py"
ONE = [[[3, 3, 2], 1.0]]
UNEVEN = [[[3, 3], 0.75], [[2], 0.25]]
IDLE = [[[4, 4], 0.0], [[], 1.0]]


@dataclass(frozen=True)
class Run:
    """A run of the script.

    Attributes:
        folder: Where it writes what it has found; it is new.
        ranks: Number of ranks.
        options: Of the script.
        epochs: Of four steps; 0: as many as is usual.
    """

    folder: Path
    ranks: int
    options: tuple[str, ...] = ()
    epochs: int = 0


class RealGpus:
    """This machine's GPUs."""

    is_real, epochs, layers = True, 2, 4

    @property
    def count(self) -> int:
        return torch.cuda.device_count()

    def run_each(self, runs: list[tuple[int, list[str]]]) -> None:
        """Run the script on as many ranks as each run wants, with its arguments."""
        for ranks, arguments in runs:
            self._run(ranks, arguments)

    def _run(self, ranks: int, arguments: list[str]) -> None:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        start = launcher if ranks > 1 else []
        run = subprocess.run(
            [sys.executable, *start, str(SCRIPT), *arguments],
            capture_output=True,
            text=True,
            timeout=250,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        )
        assert run.returncode == 0, run.stderr[-3000:]


class SimulatedGpus:
    """Devices of host memory, and a checker; they are slow.

    Args:
        server: Runs functions on ranks that have them.
    """

    is_real, epochs, layers, count = False, 1, 2, DEVICES

    def __init__(self, server: Server) -> None:
        self._server = server

    def run_each(self, runs: list[tuple[int, list[str]]]) -> None:
        """Run the script on as many ranks as each run wants; nothing may be out of order.

        Ranks start once for each number of them, and each backend.
        """
        together: dict[tuple[int, bool], list[list[str]]] = {}
        for ranks, arguments in runs:
            together.setdefault((ranks, "gloo" in arguments), []).append(arguments)
        for (ranks, _), each in together.items():
            environments = torchrun_environments(ranks)
            calls = [(arguments, environments) for arguments in each]
            for arguments, outcomes in zip(
                each, self._server.run_each(ranks, run_as_script, calls), strict=True
            ):
                for outcome in outcomes:
                    assert not outcome.findings, "\n".join([*arguments, *outcome.findings])


def run_as_script(rank: int, arguments: list[str], environments: list[dict[str, str]]) -> None:
    """Run the script in a rank that has simulated devices."""
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture(
    params=[
        pytest.param("real", marks=pytest.mark.gpu),
        pytest.param("simulated", marks=pytest.mark.simulated),
    ]
)
def gpus(request):
    """The GPUs to run on."""
    if request.param == "real":
        return RealGpus()
    return SimulatedGpus(request.getfixturevalue("simulated"))


def losses_of_each(gpus, runs: list[Run]) -> list[list[float]]:
    """For each run the losses of every step, the same on all ranks."""
    for run in runs:
        run.folder.mkdir()
    epochs = [run.epochs or gpus.epochs for run in runs]
    given = ["--accelerator", "gpu", "--layers", str(gpus.layers)]
    gpus.run_each(
        [
            (run.ranks, [str(run.folder), *given, "--epochs", str(each), *run.options])
            for run, each in zip(runs, epochs, strict=True)
        ]
    )
    return [
        said_losses(run.folder, run.ranks, 4 * each) for run, each in zip(runs, epochs, strict=True)
    ]


def losses_on_the_cpu(folder: Path, ranks: int, *options: str) -> list[float]:
    folder.mkdir()
    runpy.run_path(str(SCRIPT))  # what it imports, its forks need not
    run_script(SCRIPT, [folder, "--epochs", "1", *options], torchrun_environments(ranks))
    return said_losses(folder, ranks, steps=4)


def said_losses(folder: Path, ranks: int, steps: int) -> list[float]:
    said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(one["losses"] == pytest.approx(said[0]["losses"], rel=1e-6) for one in said)
    found: list[float] = said[0]["losses"]
    assert len(found) == steps
    return found


def check_times(folder: Path, ranks: int, layers: int) -> None:
    """What was measured and recorded makes sense: times in order and of the right size."""
    collectives = (2 * layers, layers + 1) if ranks > 1 else (0, 0)
    said = json.loads((folder / "0.json").read_text())
    assert len(said["busy_s"]) == ranks and min(said["busy_s"]) > 0
    entries = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for rank in range(ranks):
        events = [e for e in entries if e["ph"] == "X" and e["pid"] == rank]
        count = Counter(event["cat"] for event in events)
        # the root unit has a forward for each loss, and no backward of its own
        assert count["forward"] - count["loss"] == count["backward"] > 0
        assert (count["gather"], count["reduce"]) == collectives
        compute = [e for e in events if e["cat"] in ("forward", "loss", "backward", "update")]
        assert compute[-1]["cat"] == "update"
        for before, after in pairwise(compute):
            assert before["ts"] + before["dur"] <= after["ts"] + 1
        assert max(e["ts"] + e["dur"] for e in events) < 60e6


def check_held(folder: Path, step: int | None) -> None:
    """What ranks say they held against arithmetic."""
    said = json.loads((folder / "0.json").read_text())
    state = [rank.pop("state_bytes") for rank in said["held"]]
    # without gradients, but for those of the units whose update has not begun
    assert 12 * said["parameters"] <= sum(state) <= 16 * said["parameters"]
    for held, state_bytes in zip(said["held"], state, strict=True):
        assert held.pop("step") == step
        peak_bytes = held.pop("peak_bytes")
        assert all(size >= 0 for size in held.values())
        assert held["gathered_bytes"] > 0 and held["gradients_bytes"] > 0
        assert state_bytes < peak_bytes <= state_bytes + sum(held.values())


@pytest.mark.slow
def test_the_script_itself_on_the_cpu(tmp_path):
    wanted = losses_on_the_cpu(tmp_path / "one", 1, "--clip", "0.5")
    given = ["--clip", "0.5", "--share-one-device"]
    options = [*given, "--plan", json.dumps(UNEVEN), "--trace", "--offload"]
    assert losses_on_the_cpu(tmp_path / "two", 2, *options) == pytest.approx(wanted, rel=1e-5)
    check_times(tmp_path / "two", 2, layers=4)
    check_held(tmp_path / "two", step=2)
    assert losses_on_the_cpu(tmp_path / "solved", 2, *given, "--solve") == pytest.approx(
        wanted, rel=1e-5
    )
    options = ["--clip", "0.5", "--plan", json.dumps(ONE), "--stay", "--no-syncs"]
    assert losses_on_the_cpu(tmp_path / "stay", 1, *options) == pytest.approx(wanted, rel=1e-5)


MODES = ["--keep", "--offload", "--stay", None]


def with_modes(folder: Path, options: list[str], epochs: int) -> list[Run]:
    """A run on one rank for each mode."""
    return [
        Run(folder / str(mode), 1, (*options, *([mode] if mode else [])), epochs) for mode in MODES
    ]


def test_one_rank_on_nccl_equals_plain_lightning(gpus, tmp_path):
    given = ("--plan", json.dumps(ONE))
    wanted, recomputed, kept, moved = losses_of_each(
        gpus,
        [
            Run(tmp_path / "plain", 1),
            Run(tmp_path / "recomputed", 1, given),
            Run(tmp_path / "kept", 1, (*given, "--keep")),
            Run(tmp_path / "moved", 1, (*given, "--offload")),
        ],
    )
    assert recomputed == pytest.approx(wanted, rel=1e-5)
    assert kept == pytest.approx(wanted, rel=1e-5)
    assert moved == recomputed, "offloading changes nothing"
    check_held(tmp_path / "recomputed", step=None)
    check_held(tmp_path / "kept", step=None)


def test_the_host_waits_for_the_device_nowhere_in_a_step(gpus, tmp_path):
    options = ["--plan", json.dumps(ONE), "--clip", "0.5", "--no-syncs"]
    losses_of_each(gpus, with_modes(tmp_path, options, epochs=2))


def test_reserved_memory_is_flat_over_many_steps(gpus, tmp_path):
    epochs = 50 if gpus.is_real else 2  # a simulated device is slow, and has no fragments
    runs = with_modes(tmp_path, ["--plan", json.dumps(ONE)], epochs)
    losses_of_each(gpus, runs)
    for run in runs:
        reserved = json.loads((run.folder / "0.json").read_text())["reserved_bytes"]
        assert set(reserved[5:]) == {reserved[-1]}, run.folder.name


def test_a_plan_is_measured_solved_and_held(gpus, tmp_path):
    alone = gpus.count < 2
    options = ["--solve"]
    options += ["--backend", "gloo", "--share-one-device"] if alone else []
    wanted, found = losses_of_each(
        gpus, [Run(tmp_path / "plain", 1), Run(tmp_path / "ours", 2, tuple(options))]
    )
    assert found == pytest.approx(wanted, rel=1e-5)
    check_held(tmp_path / "ours", step=None)


def test_times_are_read_off_the_device(gpus, tmp_path):
    options = ["--trace", "--plan"]
    alone = ["--backend", "gloo", "--share-one-device"] if gpus.count < 2 else []
    runs = [
        Run(tmp_path / "one", 1, (*options, json.dumps(ONE))),
        Run(tmp_path / "two", 2, (*options, json.dumps(UNEVEN), *alone)),
    ]
    losses_of_each(gpus, runs)
    for run in runs:
        check_times(run.folder, run.ranks, gpus.layers)


def test_mixed_precision_follows_plain_lightning(gpus, tmp_path):
    runs = []
    for precision in ("16-mixed", "bf16-mixed"):
        options = ("--precision", precision)
        runs.append(Run(tmp_path / f"{precision}, plain", 1, options))
        runs.append(Run(tmp_path / precision, 1, (*options, "--plan", json.dumps(ONE))))
    found = losses_of_each(gpus, runs)
    for wanted, ours in zip(found[::2], found[1::2], strict=True):
        # half precision rounds each microbatch where the whole batch would be rounded once
        assert ours == pytest.approx(wanted, rel=2e-2)


def test_two_ranks_equal_one(gpus, tmp_path):
    alone = gpus.count < 2
    runs = [Run(tmp_path / "plain", 1)]
    for backend in ["gloo", "nccl"]:
        for name, plan in {"uneven": UNEVEN, "idle rank, no state": IDLE}.items():
            if not gpus.is_real and (backend, plan) == ("nccl", UNEVEN):
                continue  # tests/simulated has it
            options = ["--backend", backend, "--plan", json.dumps(plan)]
            options += ["--share-one-device"] if alone else []
            runs.append(Run(tmp_path / f"{name}, {backend}", 2, tuple(options)))
    wanted, *each = losses_of_each(gpus, runs)
    for run, found in zip(runs[1:], each, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5), run.folder.name
