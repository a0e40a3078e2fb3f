"""The pure parts of benchmarks/update_logs.py: what logs say, and how it is predicted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RATE = 2e10  # bytes per second of each rank's part of the host's memory


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def log(folder: Path, model: str, every: int, update_s: float, options: str = "1-flush_async1"):
    folder.mkdir(exist_ok=True)
    name = f"log-{model}-tp1-dp4-l2-ratio0.5-subg1-prefetch{options}-opt_gaps{every}.log"
    steps = [9 * update_s, 5 * update_s, update_s, 1.02 * update_s, update_s]
    text = " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 4000000000\n"
    for step_s in steps:
        text += f"[Rank 0] time (ms) | fwd: 1.0 | bwd: 2.0 | step: {1e3 * step_s:.4f}\n"
    (folder / name).write_text(text)


def test_update_times_of_logs_follow_from_one_rate(tmp_path):
    from update_logs import fitted, lines, read

    def update_s(every: int) -> float:  # half of 1e9 parameters of a rank, 30 bytes each or 24
        return 0.5e9 * (30 - 6 / every) / RATE

    with pytest.raises(SystemExit, match="no logs"):
        lines(tmp_path)
    runs = [("7B", 2), ("7B", 5), ("20B", 3)]
    for model, every in runs:
        log(tmp_path / f"act-output-{model}-scale-gaps-a100", model, every, update_s(every))
    folder = tmp_path / "act-output-7B-scale-gaps-a100"
    log(folder, "7B", 4, 99.0, "0-flush_async1")  # no piece is updated by the device
    log(folder, "7B", 0, 99.0)
    found = list(read(tmp_path))
    assert {(run.model, run.every) for run in found} == set(runs)
    assert fitted(found) == pytest.approx(RATE)
    assert all(math.isclose(run.memory_s(RATE), run.update_s, rel_tol=1e-6) for run in found)
    log(folder, "7B", 8, 1.25 * update_s(8))
    said = lines(tmp_path)
    assert said[-1] == (
        "- A100: 4 update times, 20.0 GB/s for each rank: mean error 5.0%, median 0.0%, largest"
        " 20.0%. With the rate of the other models only: mean 5.0%."
    )
    assert sum("| -20.0% |" in line for line in said) == 1
