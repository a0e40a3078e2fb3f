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


class RealGpus:
    """This machine's GPUs."""

    is_real = True

    @property
    def count(self) -> int:
        return torch.cuda.device_count()

    def run(self, ranks: int, arguments: list[str]) -> None:
        """Run the script on every rank."""
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
    """Devices of host memory, and a checker.

    Args:
        server: Runs functions on ranks that have them.
    """

    is_real, count = False, DEVICES

    def __init__(self, server: Server) -> None:
        self._server = server

    def run(self, ranks: int, arguments: list[str]) -> None:
        """Run the script on every rank; nothing may be out of order."""
        environments = torchrun_environments(ranks)
        for outcome in self._server.run(ranks, run_as_script, arguments, environments):
            assert not outcome.findings, "\n".join(outcome.findings)


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


def losses(gpus, folder: Path, ranks: int, *options: str, steps: int = 8) -> list[float]:
    """The losses of every step, the same on all ranks."""
    folder.mkdir()
    gpus.run(ranks, [str(folder), "--accelerator", "gpu", *options])
    return said_losses(folder, ranks, steps)


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


def check_times(folder: Path, ranks: int) -> None:
    """What was measured and recorded makes sense: times in order and of the right size."""
    said = json.loads((folder / "0.json").read_text())
    assert len(said["busy_s"]) == ranks and min(said["busy_s"]) > 0
    entries = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for rank in range(ranks):
        events = [e for e in entries if e["ph"] == "X" and e["pid"] == rank]
        count = Counter(event["cat"] for event in events)
        # the root unit has a forward for each loss, and no backward of its own
        assert count["forward"] - count["loss"] == count["backward"] > 0
        assert (count["gather"], count["reduce"]) == ((8, 5) if ranks > 1 else (0, 0))
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
    check_times(tmp_path / "two", 2)
    check_held(tmp_path / "two", step=2)
    assert losses_on_the_cpu(tmp_path / "solved", 2, *given, "--solve") == pytest.approx(
        wanted, rel=1e-5
    )
    options = ["--clip", "0.5", "--plan", json.dumps(ONE), "--stay", "--no-syncs"]
    assert losses_on_the_cpu(tmp_path / "stay", 1, *options) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "kept"])
def test_one_rank_on_nccl_equals_plain_lightning(gpus, tmp_path, keep):
    wanted = losses(gpus, tmp_path / "plain", 1)
    options = ["--plan", json.dumps(ONE), *(["--keep"] if keep else [])]
    assert losses(gpus, tmp_path / "ours", 1, *options) == pytest.approx(wanted, rel=1e-5)
    check_held(tmp_path / "ours", step=None)


@pytest.mark.parametrize("option", ["--keep", "--offload", "--stay", None])
def test_the_host_waits_for_the_device_nowhere_in_a_step(gpus, tmp_path, option):
    options = ["--plan", json.dumps(ONE), "--clip", "0.5", "--no-syncs"]
    losses(gpus, tmp_path / "ours", 1, *options, *([option] if option else []))


def test_a_plan_is_measured_solved_and_held(gpus, tmp_path):
    alone = gpus.count < 2
    options = ["--solve"]
    options += ["--backend", "gloo", "--share-one-device"] if alone else []
    wanted = losses(gpus, tmp_path / "plain", 1)
    assert losses(gpus, tmp_path / "ours", 2, *options) == pytest.approx(wanted, rel=1e-5)
    check_held(tmp_path / "ours", step=None)


def test_offloading_changes_nothing(gpus, tmp_path):
    options = ["--plan", json.dumps(ONE)]
    wanted = losses(gpus, tmp_path / "kept", 1, *options)
    assert losses(gpus, tmp_path / "moved", 1, *options, "--offload") == wanted


@pytest.mark.parametrize("option", ["--keep", "--offload", "--stay", None])
def test_reserved_memory_is_flat_over_many_steps(gpus, tmp_path, option):
    epochs = 50 if gpus.is_real else 3  # a simulated device is slow, and has no fragments
    options = ["--plan", json.dumps(ONE), "--epochs", str(epochs)]
    options += [option] if option else []
    losses(gpus, tmp_path / "ours", 1, *options, steps=4 * epochs)
    reserved = json.loads((tmp_path / "ours" / "0.json").read_text())["reserved_bytes"]
    assert set(reserved[5:]) == {reserved[-1]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_times_are_read_off_the_device(gpus, tmp_path, ranks):
    alone = gpus.count < 2
    options = ["--trace", "--plan", json.dumps([ONE, UNEVEN][ranks - 1])]
    options += ["--backend", "gloo", "--share-one-device"] if alone and ranks > 1 else []
    losses(gpus, tmp_path / "ours", ranks, *options)
    check_times(tmp_path / "ours", ranks)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_follows_plain_lightning(gpus, tmp_path, precision):
    options = ["--precision", precision]
    wanted = losses(gpus, tmp_path / "plain", 1, *options)
    found = losses(gpus, tmp_path / "ours", 1, *options, "--plan", json.dumps(ONE))
    # half precision rounds each microbatch where the whole batch would be rounded once
    assert found == pytest.approx(wanted, rel=2e-2)


@pytest.mark.parametrize("plan", [UNEVEN, IDLE], ids=["uneven", "idle rank, no state"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks_equal_one(gpus, tmp_path, plan, backend):
    alone = gpus.count < 2
    if backend == "nccl" and alone:
        pytest.skip("NCCL wants a GPU for each rank")
    options = ["--backend", backend, "--plan", json.dumps(plan)]
    if alone:
        options.append("--share-one-device")
    wanted = losses(gpus, tmp_path / "plain", 1)
    assert losses(gpus, tmp_path / "ours", 2, *options) == pytest.approx(wanted, rel=1e-5)
