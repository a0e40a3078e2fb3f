"""Measures how fast this machine is, and derives the rates that it can emulate."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional

from lightning_cephalo.accelerator.emulated.device import EmulatedDevice

_LARGEST_SHARE_OF_MACHINE = 0.5
_LARGEST_SHARE_OF_CORE = 0.8
_MEASURED_REPETITIONS = 5


def emulated_flops_per_s(
    speeds: Sequence[float], core_flops_per_s: float, processors: int
) -> tuple[float, ...]:
    """Returns the largest rates in the ratio of ``speeds`` that a machine can hold steadily.

    The sum of the rates is at most half of the real rate of all processors. The fastest is at most
    0.8 of one processor. Above these limits the ranks disturb each other and the ratios break
    (20:10:10:5 GFLOP/s held on two cores of 50, 40:20:20:10 did not).
    """
    total = min(
        _LARGEST_SHARE_OF_MACHINE * processors * core_flops_per_s,
        _LARGEST_SHARE_OF_CORE * core_flops_per_s * sum(speeds) / max(speeds),
    )
    return tuple(total * speed / sum(speeds) for speed in speeds)


def measure_flops_per_s(
    busy_processors: int = 1, now: Callable[[], float] = time.perf_counter
) -> float:
    """Measures the FLOPs per second of one processor on a small transformer block.

    The block runs forward and backward. A bare matrix product would not do: norms, activations and
    torch's own overhead cost real time but no FLOPs. An emulated rank has to do them within its
    virtual time as well. The fastest of a few repetitions counts, since noise only slows down.

    Takes a fraction of a second, sets one torch thread per processor meanwhile, and does not change
    torch's random state.
    """
    threads = torch.get_num_threads()
    start = threading.Barrier(busy_processors, timeout=60)  # a failed thread must not hang the rest
    try:
        with ThreadPoolExecutor(busy_processors) as pool:
            threaded = [
                pool.submit(_measure_one_thread, start, now) for _ in range(busy_processors)
            ]
            rates = [thread.result() for thread in threaded]
        return sum(rates) / busy_processors
    finally:
        torch.set_num_threads(threads)


def usable_processors() -> int:
    """Returns the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _measure_one_thread(start: threading.Barrier, now: Callable[[], float]) -> float:
    torch.set_num_threads(1)
    with torch.enable_grad(), EmulatedDevice() as device:
        weights, batch = _block_inputs()
        _run_block(weights, batch)
        best_s = float("inf")
        start.wait()
        for _ in range(_MEASURED_REPETITIONS):
            before_flops, before_s = device.flops, now()
            _run_block(weights, batch)
            best_s = min(best_s, now() - before_s)
        return (device.flops - before_flops) / best_s


def _block_inputs(
    width: int = 256, samples: int = 4, length: int = 128
) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    weights = [(torch.randn(shape, generator=generator) / 16).requires_grad_() for shape in shapes]
    return weights, torch.randn(samples, length, width, generator=generator)


def _run_block(weights: list[torch.Tensor], batch: torch.Tensor, head_width: int = 64) -> None:
    into_heads, out_of_heads, up, down = weights
    samples, length, width = batch.shape
    normed = functional.layer_norm(batch, (width,))
    heads = functional.linear(normed, into_heads).view(samples, length, 3, -1, head_width)
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = batch + functional.linear(mixed.transpose(1, 2).flatten(2), out_of_heads)
    normed = functional.layer_norm(hidden, (width,))
    hidden = hidden + functional.linear(functional.gelu(functional.linear(normed, up)), down)
    torch.autograd.grad(hidden.square().mean(), weights)
