"""Counts the bytes of a step that the root of a language model moves, whole and cut.

    python benchmarks/vocabulary.py                     # as root, for a network of its own
    python benchmarks/vocabulary.py --tokens 32768 --scale 1

Two ranks, with shares 3:1 of state and samples, train the root of Llama-3.2-1B (tied, 128,256
tokens, width 2,048) and two small blocks. Vocabulary, width and tokens of a step are divided by
``--scale``, which leaves ratios of bytes as they are. The network's own counters say what has
travelled, headers included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn import functional

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.execution.sharded_model import ShardedModel, UnitOptions
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.ranks.groups import Groups

VOCABULARY, WIDTH = 128256, 2048
FRACTIONS = (0.75, 0.25)
MICROBATCHES = 4
STEPS = 2
_INSIDE = "CEPHALO_OWN_NETWORK"


class Root(nn.Module):
    """A tied embedding and head, with two blocks in between that weigh nothing."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        width = WIDTH // scale
        self.embed = nn.Embedding(VOCABULARY // scale, width)
        self.blocks = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY // scale, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).float(), tokens)


def moved_bytes() -> int:
    """Return the bytes that this machine's ranks have sent one another."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise SystemExit("found no loopback device in /proc/net/dev")


def _rank(
    rank: int, folder: str, scale: int, tokens: int, dtype: torch.dtype | None, cuts: bool
) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=600)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout
    )
    torch.manual_seed(1)
    model = ShardedModel(
        Root(scale),
        Groups.create(timeout, 0),
        accelerator_of(torch.device("cpu")),
        FRACTIONS,
        UnitOptions(types=(nn.LayerNorm,)),
        dtype,
        recompute=True,
        cuts_vocabulary=cuts,
    )
    share = int(tokens // scale * FRACTIONS[rank]) // MICROBATCHES
    calls = [
        MicrobatchCall(
            partial(model.module, torch.randint(VOCABULARY // scale, (share,))),
            lambda loss: (loss, float(share)),
            samples=1,
        )
        for _ in range(MICROBATCHES)
    ]
    counts = []
    for _ in range(STEPS):  # the first traces
        dist.barrier()
        before = moved_bytes()
        model.executor.forward(calls)
        model.executor.backward()
        dist.barrier()
        counts.append(moved_bytes() - before)
    held = sum(pool.held_bytes for pool in model.buffer_pools)
    if rank == 0:
        Path(folder, "found").write_text(f"{counts[-1]} {held}")
    dist.destroy_process_group()


def measure(scale: int, tokens: int, dtype: torch.dtype | None, cuts: bool) -> tuple[int, int]:
    """Return the bytes of a step, and those of gathered parameters and gradients on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, scale, tokens, dtype, cuts)
        torch.multiprocessing.spawn(_rank, given, nprocs=2)
        moved, held = Path(folder, "found").read_text().split()
    return int(moved), int(held)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 98304])
    parser.add_argument("--scale", type=int, default=8)
    options = parser.parse_args()
    if _INSIDE not in os.environ:
        own = " ".join(["ip link set lo up && exec", sys.executable, *sys.argv])
        environment = {**os.environ, _INSIDE: "1"}
        command = ["unshare", "--net", "sh", "-c", own]
        raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)
    print("tokens of a step | gathered in | whole | cut | cut of whole | buffers whole | cut (MB)")
    for tokens in options.tokens:
        for dtype in (torch.bfloat16, torch.float32):
            whole, held = measure(options.scale, tokens, dtype, cuts=False)
            cut, held_cut = measure(options.scale, tokens, dtype, cuts=True)
            print(
                f"{tokens:,} | {str(dtype).removeprefix('torch.')} | {whole / 1e6:.1f} |"
                f" {cut / 1e6:.1f} | {cut / whole:.0%} | {held / 1e6:.1f} | {held_cut / 1e6:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
