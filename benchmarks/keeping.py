"""Measures what keeping a step costs the training, beside steps that are not kept.

    python benchmarks/keeping.py [--steps 160] [--rounds 2] [--ranks 1] [--beside CHECKOUT]

Ranks on one thread each train linear layers with AdamW; every second step is kept. Prints the
median of a step without keeping, and of what the next one takes more, of the slowest rank:
wall-clock time, CPU time of the thread that trains, and CPU time of the process, with its thread
that copies. What keeping takes depends on the tensors and their bytes, not on the samples. So the
last column is the step of which it is a fiftieth. Steps are short, as few milliseconds do not show
in long ones. ``--beside`` names a checkout of other code of this package: its runs alternate with
those of this one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARE = 0.02
KINDS = ("wall", "thread that trains", "process")
_FIRST = 8
"""Steps that are not counted."""


def train(out: Path, layers: int, width: int, samples: int, steps: int) -> None:
    """Train one rank, and write the seconds of each step, with and without keeping."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_cephalo import CephaloStrategy, Plan, RankPlan, Recovery

    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0]
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    times: list[tuple[float, float, float]] = []

    class Times(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            times.append((time.perf_counter(), time.thread_time(), time.process_time()))

    plan = Plan((RankPlan((samples // ranks,), 1 / ranks),) * ranks)
    data = TensorDataset(torch.randn(samples * (steps + _FIRST + 1), width))
    job = Recovery(every=2, job=f"benchmark of keeping, {os.environ['MASTER_PORT']}")
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=CephaloStrategy(plan=plan, recover=job, verbose=False),
        max_steps=steps + _FIRST + 1,
        callbacks=[Times()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(data, batch_size=samples // ranks))
    rows_bytes = sum(parameter.numel() for parameter in trainer.model.parameters()) * 12
    took = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(times)]
    # every second step is kept, behind this callback: the time until the next one has its cost
    told = {"with": took[_FIRST + 1 :: 2], "without": took[_FIRST::2], "rows_bytes": rows_bytes}
    out.write_text(json.dumps(told))


def _run(root: Path, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with the code of a checkout; return the seconds of the slowest rank at each step."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(arguments.ranks),
        "TORCHELASTIC_RUN_ID": "none",  # so that Lightning starts no ranks itself
        "GROUP_RANK": "0",
    }
    command = [sys.executable, __file__, "--train", str(folder), *sys.argv[1:]]
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(arguments.ranks)
    ]
    for rank, said in [(rank, rank.communicate()[1]) for rank in ranks]:
        if rank.returncode:
            raise SystemExit(said)
    told = [json.loads((folder / f"{r}.json").read_text()) for r in range(arguments.ranks)]
    return {
        **told[0],
        **{
            way: [
                [max(each) for each in zip(*step, strict=True)]
                for step in zip(*(one[way] for one in told), strict=True)
            ]
            for way in ("without", "with")
        },
    }


def main() -> None:
    """Train with each checkout in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=2, help="trainings of each checkout")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=128, help="samples of a step")
    parser.add_argument("--beside", type=Path, help="a checkout of other code")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        out = arguments.train / f"{os.environ['RANK']}.json"
        train(out, arguments.layers, arguments.width, arguments.samples, arguments.steps)
        return
    roots = {"this": ROOT}
    if arguments.beside is not None:
        roots = {"other": arguments.beside.resolve(), **roots}
    took: dict[str, dict[str, list[Any]]] = {c: {"without": [], "with": []} for c in roots}
    for _ in range(arguments.rounds):
        for code, root in roots.items():
            with tempfile.TemporaryDirectory() as folder:
                told = _run(root, arguments, Path(folder))
            for way, steps in took[code].items():
                steps += told[way]
    size = f"{told['rows_bytes'] / 2**20:.0f} MiB of rows and state, {arguments.ranks} rank(s)"
    pairs = len(took["this"]["with"])
    print(f"torch {importlib.metadata.version('torch')}, load {os.getloadavg()[0]:.1f}")
    print(f"{size}, {pairs} pairs of steps; ms in the median, and quartiles")
    print(f"{'code':6}{'time':20}{'step':>9}{'keeping it':>12}{'quartiles':>16}{'2 % from':>10}")
    for code, kind in itertools.product(roots, range(len(KINDS))):
        without, kept = ([1e3 * step[kind] for step in took[code][w]] for w in ("without", "with"))
        more = [b - a for a, b in zip(without, kept, strict=True)]
        low, cost, high = statistics.quantiles(more, n=4)
        print(
            f"{code:6}{KINDS[kind]:20}{statistics.median(without):9.1f}{cost:12.1f}"
            f"{f'{low:.1f} to {high:.1f}':>16}{cost / SHARE:10.0f}"
        )


if __name__ == "__main__":
    main()
