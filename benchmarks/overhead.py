"""Measures cephalo's overhead on equal ranks, against even sharding (FSDP2).

    python benchmarks/overhead.py [--ranks 2] [--rounds 12] [--microbatches 1 4]

There is nothing to gain on equal ranks. Lightning's ModelParallelStrategy leaves sharding to
torch's `fully_shard` and the step to plain autograd. Both train side by side in the same processes,
in alternating steps, so that other load on the machine affects both. Both use the same microbatches
and recompute no activations. Prints the medians over rounds and the median of the round-by-round
ratio: above 1, cephalo is slower. The first line is the time that registering the strategies' names
adds to every `import torch` in the environment.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
# the ranks' launcher and the raw loop come from the tests, the model from the main job
sys.path[:0] = [str(ROOT / "tests" / "distributed"), str(ROOT / "examples")]

from byte_gpt import ByteGPT  # noqa: E402
from harness import make_executor, sharded_step  # noqa: E402
from launch import run_ranks  # noqa: E402


def _loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _measure(
    rank: int, ranks: int, rounds: int, microbatches: int, samples: int, length: int, width: int
) -> list[tuple[float, float]]:
    def make() -> ByteGPT:
        torch.manual_seed(0)
        return ByteGPT(width=width, depth=7, heads=6, context=length)

    sharded, even = make(), make()
    executor = make_executor(sharded, [1 / ranks] * ranks, recompute=False)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in even.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(even, mesh=mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for m in (sharded, even)]
    tokens = torch.randint(0, 256, (samples * microbatches, length + 1))
    parts = [{"tokens": part} for part in tokens.split(samples)]

    def ours() -> None:
        sharded_step(executor, sharded, _loss, parts)
        optimizers[0].step()
        optimizers[0].zero_grad()

    def theirs() -> None:
        for index, part in enumerate(parts):
            # as users write accumulation: reduce with the last microbatch only
            even.set_requires_gradient_sync(index == len(parts) - 1)
            (_loss(even, part) / len(parts)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    times = []
    for index in range(rounds + 2):
        pair = []
        for step in (ours, theirs) if index % 2 else (theirs, ours):
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            pair.append(time.perf_counter() - start)
        times.append(tuple(pair) if index % 2 else tuple(reversed(pair)))
    return times[2:]


def _import_s() -> float:
    code = (
        "import time, logging\n"
        "start = time.perf_counter()\n"
        "import lightning_cephalo\n"
        "print(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", code]
    times = [float(subprocess.run(command, check=True, capture_output=True).stdout)
             for _ in range(5)]  # fmt: skip
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--samples", type=int, default=8, help="in one microbatch")
    parser.add_argument("--length", type=int, default=128, help="bytes in one sample")
    parser.add_argument("--width", type=int, default=192)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.ranks} ranks, one thread each, gloo")
    print(f"import of the package: {_import_s() * 1e3:.1f} ms")
    for microbatches in options.microbatches:
        results = run_ranks(
            options.ranks,
            _measure,
            options.ranks,
            options.rounds,
            microbatches,
            options.samples,
            options.length,
            options.width,
            timeout_s=1200,
        )
        ours = [pair[0] for pair in results[0]]
        theirs = [pair[1] for pair in results[0]]
        ratios = [a / b for a, b in results[0]]
        print(
            f"{microbatches} microbatches of {options.samples}:"
            f" cephalo {statistics.median(ours):.3f} s, fully_shard {statistics.median(theirs):.3f}"
            f" s, ratio {statistics.median(ratios):.3f}"
            f" (quartiles {statistics.quantiles(ratios, n=4)[0]:.3f}"
            f" to {statistics.quantiles(ratios, n=4)[2]:.3f})"
        )


if __name__ == "__main__":
    main()
