"""Times steps whose embedding and head are gathered apart, beside steps that gather them as one.

    python benchmarks/root_ends.py [--mbit-per-s 1000] [--rounds 8] [--depth 4] [--tokens 64]

Two ranks, with shares 3:1 of state and samples, train a language model whose embedding and head are
two tables (128,256 tokens of Llama 3, width 2,048, both divided by ``--scale``), with ``--depth``
blocks in between. A round is a step of each kind, in the same processes, so that other load on the
machine affects both. Prints the medians of rank 0's steps, the median of the rounds' ratios (below
1, apart is faster), and the most bytes that rank 0 holds in a step in addition to its shards.

Each rank has a network namespace of its own behind a shaped link, which needs root.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from side_by_side import links
from torch import Tensor, nn
from torch.nn import functional

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.execution.sharded_model import ShardedModel, UnitOptions
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.observe.memory import MemoryMeter
from lightning_cephalo.ranks.groups import Groups

VOCABULARY, WIDTH = 128256, 2048
SHARES = (0.75, 0.25)
MICROBATCHES = (3, 1)


class Block(nn.Module):
    """As many parameters as a block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(width, 6 * width), nn.ReLU())
        self.out = nn.Linear(6 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.inside(x))


class Language(nn.Module):
    """A language model with two tables."""

    def __init__(self, scale: int, depth: int) -> None:
        super().__init__()
        width, vocabulary = WIDTH // scale, VOCABULARY // scale
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x), tokens)


def _run_rank(rank: int, folder: str, names: tuple[str, ...], options: argparse.Namespace) -> None:
    links.enter(names[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = links.INTERFACE
    torch.set_num_threads(1)
    timeout = timedelta(seconds=600)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout
    )
    models = {kind: _model(kind, timeout, options) for kind in ("apart", "whole")}
    tokens = torch.randint(VOCABULARY // options.scale, (options.tokens,))
    found: dict[str, Any] = {"seconds": [], "bytes": {}}
    for number in range(-1, options.rounds):  # the first round traces
        taken = {}
        for kind in models if number % 2 else reversed(models):
            dist.barrier()
            begun_s = time.perf_counter()
            _step(models[kind], tokens, rank)
            taken[kind] = time.perf_counter() - begun_s
        if number >= 0:
            found["seconds"].append(taken)
    for kind, model in models.items():
        meter = MemoryMeter(None)
        with meter.measuring(*[flat.full for flat in model.flats], *model.buffers()):
            _step(model, tokens, rank)
        found["bytes"][kind] = meter.peak_bytes
    if not rank:
        torch.save(found, f"{folder}/found")
    dist.destroy_process_group()


def _model(kind: str, timeout: timedelta, options: argparse.Namespace) -> ShardedModel:
    torch.manual_seed(1)
    model = ShardedModel(
        Language(options.scale, options.depth),
        Groups.create(timeout, 0),
        accelerator_of(torch.device("cpu")),
        SHARES,
        UnitOptions(types=(Block,)),
        None,
        recompute=True,
    )
    if kind == "whole":
        model.executor.ends_policy.gather_as_one()
    return model


def _step(model: ShardedModel, tokens: Tensor, rank: int) -> None:
    call = MicrobatchCall(partial(model.module, tokens), lambda loss: (loss, 1.0), samples=1)
    model.executor.forward([call] * MICROBATCHES[rank])
    model.executor.backward()
    for flat in model.flats:
        flat.forget_gradient()


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit-per-s", type=float, nargs="+", default=[250, 1000])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of a microbatch")
    options = parser.parse_args()
    print(
        "| Mbit/s | apart, s | whole, s | apart / whole: median (quartiles) | MiB apart | whole |"
    )
    print("|---|---|---|---|---|---|")
    for rate in options.mbit_per_s:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            names = stack.enter_context(links.ShapedHosts(2, rate, burst_kb=16))
            torch.multiprocessing.spawn(_run_rank, (folder, names, options), nprocs=2)
            found = torch.load(Path(folder) / "found")
        rounds, held = found["seconds"], found["bytes"]
        medians = [statistics.median(each[kind] for each in rounds) for kind in ("apart", "whole")]
        ratios = [each["apart"] / each["whole"] for each in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        mib = [held[kind] / 2**20 for kind in ("apart", "whole")]
        print(
            f"| {rate:g} | {medians[0]:.2f} | {medians[1]:.2f} | {middle:.3f} ({low:.3f} to"
            f" {high:.3f}) | {mib[0]:.0f} | {mib[1]:.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
