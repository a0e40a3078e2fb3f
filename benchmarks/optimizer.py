"""Measures an optimizer's step over DTensors, and over this rank's rows as plain tensors.

    python benchmarks/optimizer.py [--tensors 288] [--width 64] [--rounds 12]

Two ranks share small matrices and vectors 3:1. One round is a step over DTensors and one over rows,
side by side in the same processes, so that other load on the machine affects both. Both include the
strategy's own work around a step. Prints the slower rank's medians and the median of the
round-by-round ratio: above 1, DTensors are slower.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "distributed")]

from harness import make_executor  # noqa: E402
from launch import run_ranks  # noqa: E402

from lightning_cephalo.adapters.optimizer import clip_by_norm, local_update  # noqa: E402

Pairs = dict[str, list[tuple[float, float]]]
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
}


class _Block(nn.Module):
    def __init__(self, width: int, linears: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(linears))


def _measure(rank: int, tensors: int, width: int, rounds: int) -> Pairs:
    model = nn.Module()
    model.blocks = nn.ModuleList(_Block(width, 6) for _ in range(tensors // 12))
    make_executor(model, [0.75, 0.25], recompute=False)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def stepping(optimizer: torch.optim.Optimizer, over_rows: bool) -> Callable[[], None]:
        def step() -> None:
            with local_update(optimizer) if over_rows else nullcontext():
                optimizer.step()

        return step

    def clipping(clip: Callable[..., object]) -> Callable[[], None]:
        def step() -> None:
            clip(parameters, 1.0)

        return step

    contests = {
        name: (stepping(make(parameters), False), stepping(make(parameters), True))
        for name, make in OPTIMIZERS.items()
    }
    contests["clipping by norm"] = (clipping(nn.utils.clip_grad_norm_), clipping(clip_by_norm))
    return {name: _contest(pair, rounds) for name, pair in contests.items()}


def _contest(
    pair: tuple[Callable[[], None], Callable[[], None]], rounds: int
) -> list[tuple[float, float]]:
    times = []
    for index in range(rounds + 2):
        seconds = [0.0, 0.0]
        for side in (0, 1) if index % 2 else (1, 0):
            dist.barrier()
            start_s = time.perf_counter()
            pair[side]()
            dist.barrier()
            seconds[side] = time.perf_counter() - start_s
        times.append((seconds[0], seconds[1]))
    return times[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensors", type=int, default=288, help="a multiple of 12, from 24")
    parser.add_argument("--width", type=int, default=64, help="of the square matrices")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    ranks = run_ranks(2, _measure, options.tensors, options.width, options.rounds, timeout_s=600)
    print(f"torch {torch.__version__}, 2 ranks at 3:1, gloo, {options.tensors} tensors,"
          f" matrices of {options.width} x {options.width}")  # fmt: skip
    for name in ranks[0]:
        rounds = zip(*(rank[name] for rank in ranks), strict=True)
        slower = [tuple(map(max, *pairs)) for pairs in rounds]
        dtensors, rows = (statistics.median(side) for side in zip(*slower, strict=True))
        ratio = statistics.median(a / b for a, b in slower)
        print(f"{name:17s} DTensors {dtensors * 1e3:7.2f} ms, rows {rows * 1e3:7.2f} ms,"
              f" ratio {ratio:5.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
