"""Measures how well emulated devices keep their rates on this machine, by its own clock.

    python benchmarks/emulation.py [--speeds 2 1] [--rounds 6]

The tests check the emulation's rules on virtual time. Here ranks compute real matrix products and
really wait. Prints, for each rank, the median over rounds of its time over the time by its rate:
alone, in lock step with equal work, in lock step with work by speed, and with a broadcast under
way. The figures are about 1.00 on an otherwise idle machine.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "distributed")]

from launch import run_ranks  # noqa: E402

from lightning_cephalo.accelerator.emulated.rate import (  # noqa: E402
    emulated_flops_per_s,
    measure_flops_per_s,
    usable_processors,
)
from lightning_cephalo.emulation import EmulatedDevice  # noqa: E402

WIDTH = 192
PRODUCT_FLOPS = 2 * WIDTH**3
STEP_S = 0.2

Step = Callable[[EmulatedDevice, int], None]


def _products(count: int) -> None:
    # products average equal numbers and never become subnormal, which is ten times as slow on some
    # processors
    left = right = torch.full((WIDTH, WIDTH), 1 / WIDTH)
    for _ in range(count):
        left = left @ right


def _alone(device: EmulatedDevice, count: int) -> None:
    _products(count)
    device.synchronize()


def _lock_step(device: EmulatedDevice, count: int) -> None:
    _products(count)
    dist.all_reduce(torch.zeros(16))


def _in_flight(device: EmulatedDevice, count: int) -> None:
    work = dist.broadcast(torch.zeros(16), src=0, async_op=True)
    _products(count - count // 2)
    work.wait()
    _products(count // 2)
    dist.all_reduce(torch.zeros(16))


def _median_s(
    rank: int, step: Step, flops_per_s: Sequence[float], counts: Sequence[int], rounds: int
) -> float:
    torch.set_num_threads(1)
    times = []
    with EmulatedDevice(flops_per_s=flops_per_s[rank]) as device:
        for _ in range(1 + rounds):
            device.synchronize()
            dist.barrier()
            start_s = time.perf_counter()
            step(device, counts[rank])
            times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--speeds", type=float, nargs="+", default=[2, 1])
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    ranks, processors = len(options.speeds), usable_processors()
    core_flops_per_s = measure_flops_per_s(min(processors, ranks))
    rates = emulated_flops_per_s(options.speeds, core_flops_per_s, processors)
    print(f"torch {torch.__version__}, {processors} processors of {core_flops_per_s / 1e9:.0f}"
          f" GFLOP/s, ranks of {' '.join(f'{rate / 1e9:.1f}' for rate in rates)}")  # fmt: skip
    by_speed = [round(STEP_S * rate / PRODUCT_FLOPS) for rate in rates]
    equal = [min(by_speed)] * ranks
    for title, step, counts in (
        ("alone", _alone, by_speed),
        ("lock step, equal work", _lock_step, equal),
        ("lock step, work by speed", _lock_step, by_speed),
        ("broadcast under way", _in_flight, by_speed),
    ):
        found_s = run_ranks(ranks, _median_s, step, rates, counts, options.rounds)
        own_s = [count * PRODUCT_FLOPS / rate for count, rate in zip(counts, rates, strict=True)]
        expected_s = own_s if step is _alone else [max(own_s)] * ranks
        ratios = [found / wanted for found, wanted in zip(found_s, expected_s, strict=True)]
        print(f"{title:26s}" + " ".join(f"{ratio:6.3f}" for ratio in ratios))


if __name__ == "__main__":
    main()
