"""Predicted against measured step time of the main job, on emulated CPU ranks.

    python benchmarks/predictions.py [--steps 14] [--repeats 2]

Each case is a run of ``examples/train.py`` that measures, solves and trains. The prediction and the
measurement are of one run, on one machine; of several repeats the range is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_cephalo import Plan

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "3:1, kept": ("cluster=three_to_one", "strategy.recompute=false"),
    "3:1, recompute": ("cluster=three_to_one", "strategy.recompute=true"),
    "1:1, kept": ("cluster=even", "strategy.recompute=false"),
    "4:2:2:1, kept": ("cluster=four_ranks", "strategy.recompute=false"),
}


def run(overrides: tuple[str, ...], steps: int, folder: Path) -> tuple[Plan, float, float]:
    """The plan of one run, and its predicted and measured step in seconds."""
    command = [sys.executable, "examples/train.py", "comparison=null", f"steps={steps}"]
    command += ["trainer.limit_val_batches=0", f"hydra.run.dir={folder}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    figures = json.loads((folder / "metrics.json").read_text())
    plan = Plan.load(folder / "plan.yaml")
    return plan, figures["predicted_step_s"], figures["median_step_s"]


def main() -> None:
    """Print one row per case and repeat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    table = Table(title="Step of the main job")
    for heading in ("speeds", "plan", "predicted", "measured", "difference"):
        table.add_column(heading, justify="right")
    for case, overrides in CASES.items():
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                plan, predicted_s, measured_s = run(overrides, options.steps, Path(folder))
            table.add_row(
                case,
                " : ".join(str(rank.batch_size) for rank in plan.ranks),
                f"{predicted_s:.3f} s",
                f"{measured_s:.3f} s",
                f"{measured_s / predicted_s - 1:+.1%}",
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
