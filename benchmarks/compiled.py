"""Measures the effect of `torch.compile` of each block on a step, under cephalo and on one device.

    python benchmarks/compiled.py [--ranks 2] [--rounds 8] [--microbatches 4]

Two models with the same weights train side by side in the same processes, in alternating steps. The
blocks of one are compiled (inductor). Their gradients are compared first. Prints the median of the
round-by-round ratio of step times, eager over compiled: above 1, compiling helps. The same
measurement without cephalo on one rank shows how much there is to gain.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "distributed"), str(ROOT / "examples")]

from byte_gpt import ByteGPT  # noqa: E402
from harness import full_gradients, make_executor, relative_error, sharded_step  # noqa: E402
from launch import run_ranks  # noqa: E402

Part = dict[str, torch.Tensor]


def _loss(model: torch.nn.Module, batch: Part) -> torch.Tensor:
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _make(compiled: bool, width: int, length: int) -> ByteGPT:
    torch.manual_seed(0)
    model = ByteGPT(width=width, depth=6, heads=6, context=length)
    if compiled:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block)
    return model


def _alternated(steps: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Return the ratio of the first step's time to the second's, round by round."""
    ratios = []
    for index in range(rounds + 2):
        times_s = [0.0, 0.0]
        for which in (0, 1) if index % 2 else (1, 0):
            if dist.is_initialized():
                dist.barrier()
            start_s = time.perf_counter()
            steps[which]()
            if dist.is_initialized():
                dist.barrier()
            times_s[which] = time.perf_counter() - start_s
        ratios.append(times_s[0] / times_s[1])
    return ratios[2:]  # the first rounds compile


def _alone(rank: int, parts: list[Part], width: int, length: int, rounds: int) -> list[float]:
    def step_of(compiled: bool) -> Callable[[], None]:
        model = _make(compiled, width, length)

        def step() -> None:
            for part in parts:
                (_loss(model, part) / len(parts)).backward()
            model.zero_grad()

        return step

    return _alternated([step_of(False), step_of(True)], rounds)


def _sharded(
    rank: int, parts: list[Part], width: int, length: int, rounds: int, recompute: bool
) -> tuple[list[float], float]:
    ranks = dist.get_world_size()
    steps, gradients = [], []
    for compiled in (False, True):
        model = _make(compiled, width, length)
        executor = make_executor(model, [1 / ranks] * ranks, recompute)

        def step(executor=executor, model=model) -> None:
            sharded_step(executor, model, _loss, parts)

        step()
        named = full_gradients(model)
        gradients.append({k.replace("._orig_mod", ""): v for k, v in named.items()})
        steps.append(step)
    return _alternated(steps, rounds), relative_error(gradients[1], gradients[0])


def _said(ratios: list[float]) -> str:
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"eager / compiled {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f})"


def main() -> None:
    """Print one line for one device and one for each way of recomputing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="in one microbatch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=192)
    options = parser.parse_args()
    torch.manual_seed(1)
    tokens = torch.randint(0, 256, (options.samples * options.microbatches, options.length + 1))
    parts = [{"tokens": part} for part in tokens.split(options.samples)]
    shared = (parts, options.width, options.length, options.rounds)
    print(f"torch {torch.__version__}, {options.microbatches} microbatches of {options.samples}")
    (alone,) = run_ranks(1, _alone, *shared, process_group=False, timeout_s=600)
    print(f"one device, plain:       {_said(alone)}")
    for recompute in (False, True):
        results = run_ranks(options.ranks, _sharded, *shared, recompute, timeout_s=600)
        ratios, error = results[0]
        label = "recomputed" if recompute else "kept"
        print(
            f"{options.ranks} ranks, {label:>10}:     {_said(ratios)},"
            f" relative difference of the gradient {error:.1e}"
        )


if __name__ == "__main__":
    main()
