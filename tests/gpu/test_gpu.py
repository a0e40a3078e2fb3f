"""On real GPUs: NCCL, CUDA streams, and 16-mixed with its gradient scaler. Skipped without one.

What each does is a script in interpreters of its own, as CUDA does not survive a fork; the script
itself is tested on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "gpu_script.py"
ONE = [[[3, 3, 2], 1.0]]
UNEVEN = [[[3, 3], 0.75], [[2], 0.25]]
IDLE = [[[4, 4], 0.0], [[], 1.0]]


def losses(folder: Path, ranks: int, *options: str) -> list[float]:
    """The losses of every step, the same on all ranks."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    start = launcher if ranks > 1 else []
    run = subprocess.run(
        [sys.executable, *start, str(SCRIPT), str(folder), *options],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(one["losses"] == pytest.approx(said[0]["losses"], rel=1e-6) for one in said)
    found: list[float] = said[0]["losses"]
    assert len(found) == 8
    return found


@pytest.mark.slow
def test_the_script_itself_on_the_cpu(tmp_path):
    wanted = losses(tmp_path / "one", 1)
    options = ["--plan", json.dumps(UNEVEN), "--share-one-device"]
    assert losses(tmp_path / "two", 2, *options) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "kept"])
def test_one_rank_on_nccl_equals_plain_lightning(tmp_path, keep):
    wanted = losses(tmp_path / "plain", 1, "--accelerator", "gpu")
    options = ["--accelerator", "gpu", "--plan", json.dumps(ONE), *(["--keep"] if keep else [])]
    assert losses(tmp_path / "ours", 1, *options) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_follows_plain_lightning(tmp_path, precision):
    options = ["--accelerator", "gpu", "--precision", precision]
    wanted = losses(tmp_path / "plain", 1, *options)
    found = losses(tmp_path / "ours", 1, *options, "--plan", json.dumps(ONE))
    # half precision rounds each microbatch where the whole batch would be rounded once
    assert found == pytest.approx(wanted, rel=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [UNEVEN, IDLE], ids=["uneven", "idle rank, no state"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks_equal_one(tmp_path, plan, backend):
    alone = torch.cuda.device_count() < 2
    if backend == "nccl" and alone:
        pytest.skip("NCCL wants a GPU for each rank")
    options = ["--accelerator", "gpu", "--backend", backend, "--plan", json.dumps(plan)]
    if alone:
        options.append("--share-one-device")
    wanted = losses(tmp_path / "plain", 1, "--accelerator", "gpu")
    assert losses(tmp_path / "ours", 2, *options) == pytest.approx(wanted, rel=1e-5)
