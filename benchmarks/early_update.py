"""Times steps whose units are updated inside the backward, beside updates behind it.

    python benchmarks/early_update.py [--rounds 6] [--steps 20] [--width 512] [--samples 1 16]
    python benchmarks/early_update.py --mbit-per-s 300
    python benchmarks/early_update.py --samples 1 --other-samples 128 --share 0.95
    python benchmarks/early_update.py --samples 1 --other-samples 15 --share 1.0 --speeds 8 1

Two ranks share the blocks 3:1, or as ``--share`` says. A round is a short fit of each kind, in the
same processes, so that other load on the machine affects both. Prints medians of rank 0's steps,
and the median of the rounds' ratios: below 1, early ones are faster. With a rate, each rank has a
network namespace of its own behind a shaped link, which needs root: there ranks wait for the link,
and updates may hide. With more samples on the other rank, or at a lower speed of it, rank 0 waits
for it. Speeds are emulated: a slow rank sleeps, and takes no processor from the other one.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from side_by_side import links
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import CephaloStrategy, Plan, RankPlan
from lightning_cephalo.emulation import Emulation

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


def _fit(is_early: bool, options: argparse.Namespace, samples: int, steps: int) -> float:
    """Return the median seconds of a step."""
    times, width = _Times(), options.width
    other, share = options.other_samples or samples, options.share
    plan = Plan((RankPlan((samples,), share), RankPlan((other,), 1 - share)))
    late = {} if is_early else {"early_update": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CephaloStrategy(plan, verbose=False, replan=False, recover=False, **late),
        callbacks=[times, *([Emulation(options.speeds)] if options.speeds else [])],
        max_steps=_FIRST + steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn((samples + other) * (_FIRST + steps), width)
    trainer.fit(Blocks(width), DataLoader(TensorDataset(rows), batch_size=(samples + other) // 2))
    return statistics.median(times.seconds[_FIRST:])


def _run_rank(
    rank: int, folder: str, port: int, namespaces: tuple[str, ...], options: argparse.Namespace
) -> None:
    if namespaces:
        links.enter(namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = links.INTERFACE
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0",
        MASTER_ADDR=links.address(0) if namespaces else "127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="early",
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[int, list[tuple[float, float]]] = {}
    for samples in options.samples:
        _fit(True, options, samples, 1)
        for number in range(options.rounds):
            kinds = (True, False) if number % 2 else (False, True)
            taken = {k: _fit(k, options, samples, options.steps) for k in kinds}
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
    parser.add_argument("--other-samples", type=int, help="of rank 1; default: as rank 0")
    parser.add_argument("--share", type=float, default=0.75, help="of the state, on rank 0")
    parser.add_argument("--mbit-per-s", type=float)
    parser.add_argument("--speeds", type=float, nargs=2, help="emulated, of both ranks")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    port = 20_000 + os.getpid() % 10_000
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        names: tuple[str, ...] = ()
        if options.mbit_per_s:
            names = stack.enter_context(links.ShapedHosts(2, options.mbit_per_s, burst_kb=16))
        ranks = [
            context.Process(target=_run_rank, args=(rank, folder, port, names, options))
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
    print(f"{numel / 1e6:.1f} million parameters, {options.share:.0%} on rank 0, AdamW")
    print("| samples of rank 0 | early, ms a step | late, ms | early / late: median (quartiles) |")
    print("|---|---|---|---|")
    for samples, pairs in found.items():
        early, late = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
        ratios = [one / other for one, other in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"| {samples} | {early:.1f} | {late:.1f} | {middle:.3f} ({low:.3f} to {high:.3f}) |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
