"""Times steps whose units are updated inside the backward, beside updates behind it.

    python benchmarks/early_update.py [--rounds 6] [--steps 20] [--width 512] [--samples 1 16]

Two ranks share the blocks 3:1. A round is a short fit of each kind, in the same processes, so that
other load on the machine affects both. Prints the medians of rank 0's steps, and the median of the
rounds' ratios: below 1, early ones are faster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import CephaloStrategy, Plan, RankPlan

_DEPTH = 6
# of a fit, that are not timed
_FIRST = 3


class Blocks(LightningModule):
    """Blocks of two linear layers with AdamW: much to update, little to compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(_DEPTH)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Times(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun_s = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begun_s)


def _fit(is_early: bool, width: int, samples: int, steps: int) -> float:
    """Return the median seconds of a step."""
    times = _Times()
    plan = Plan((RankPlan((samples,), 0.75), RankPlan((samples,), 0.25)))
    late = {} if is_early else {"early_update": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CephaloStrategy(plan, verbose=False, replan=False, recover=False, **late),
        callbacks=[times],
        max_steps=_FIRST + steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(2 * samples * (_FIRST + steps), width)
    trainer.fit(Blocks(width), DataLoader(TensorDataset(rows), batch_size=samples))
    return statistics.median(times.seconds[_FIRST:])


def _run_rank(rank: int, folder: str, port: int, options: argparse.Namespace) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="early",
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[int, list[tuple[float, float]]] = {}
    for samples in options.samples:
        _fit(True, options.width, samples, 1)
        for number in range(options.rounds):
            kinds = (True, False) if number % 2 else (False, True)
            taken = {k: _fit(k, options.width, samples, options.steps) for k in kinds}
            found.setdefault(samples, []).append((taken[True], taken[False]))
    if not rank:
        torch.save(found, f"{folder}/times")


def main() -> int:
    """Print a row for each number of samples."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 16, 256])
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    port = 20_000 + os.getpid() % 10_000
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run_rank, args=(rank, folder, port, options))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            print("a rank failed", file=sys.stderr)
            return 1
        found = torch.load(Path(folder) / "times")
    numel = 2 * _DEPTH * (options.width + 1) * options.width
    print(f"{numel / 1e6:.1f} million parameters, AdamW, shares 3:1, {options.rounds} rounds")
    print("| samples of a rank | early, ms a step | late, ms | early / late: median (quartiles) |")
    print("|---|---|---|---|")
    for samples, pairs in found.items():
        early, late = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
        ratios = [one / other for one, other in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"| {samples} | {early:.1f} | {late:.1f} | {middle:.3f} ({low:.3f} to {high:.3f}) |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
