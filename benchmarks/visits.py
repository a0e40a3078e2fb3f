"""Measures the overhead of visiting a unit: 48 units that do nothing, 8 microbatches.

    python benchmarks/visits.py [--units 48] [--microbatches 8] [--rounds 15] [--ranks 1 2]
    python benchmarks/visits.py --simulated
    python benchmarks/visits.py --collector [--rounds 200]
    python benchmarks/visits.py --beside ../older [--ranks 2] [--simulated]

A visit is one microbatch passing one unit once. The forward parks the microbatch, cuts the graph
and saves tensors for the backward. The backward recomputes, runs the unit's backward and passes the
gradients on. The same model runs in turns without cephalo, one microbatch after the other (its
forward twice if units are recomputed). The difference is the overhead of schedule and units. Times
are processor times of the rank's thread, and wall times for one rank.

On a simulated CUDA device (tests/simulated) the kernels that a visit launches are counted, too: the
host launches them, and a device with small kernels waits for that. What simulates a kernel counts
as processor time here.

``--collector`` shows what Python's garbage collector takes of a visit, before and after objects
that live as long as training are frozen. Medians leave it out: most steps have no full collection.

``--beside`` compares this checkout with another one, also on a busy machine (visiting/in_turn.py).
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("distributed", "simulated")]

from harness import make_executor  # noqa: E402
from launch import run_ranks, torchrun_environments  # noqa: E402
from visiting import in_turn  # noqa: E402

from lightning_cephalo.execution.step import MicrobatchCall  # noqa: E402

_VALUES = 8


class Nothing(nn.Module):
    """A unit whose compute is one addition."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(_VALUES))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.bias


class Chain(nn.Module):
    """Units one after the other."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(_VALUES))
        self.units = nn.ModuleList(Nothing() for _ in range(units))

    def forward(self, value: Tensor) -> Tensor:
        value = value + self.first
        for unit in self.units:
            value = unit(value)
        return value.sum()


def _timed(clock: Callable[[], float], function: Callable[[], object]) -> float:
    start_s = clock()
    function()
    return clock() - start_s


def _measure(
    rank: int, units: int, microbatches: int, rounds: int, recompute: bool, profile: bool
) -> dict[str, list[tuple[float, ...]]]:
    ranks = torch.distributed.get_world_size()
    model, plain = Chain(units), Chain(units)
    executor = make_executor(model, [1 / ranks] * ranks, recompute)
    parts = [torch.ones(_VALUES) for _ in range(microbatches)]
    calls = [
        MicrobatchCall(lambda part=part: model(part), lambda loss: (loss, 1.0)) for part in parts
    ]
    losses: list[Tensor] = []

    def plain_forward() -> None:
        losses[:] = [plain(part) for part in parts]

    def plain_backward() -> None:
        if recompute:
            losses[:] = [plain(part) for part in parts]
        for loss in losses:
            loss.backward()

    found: dict[str, list[tuple[float, ...]]] = {"processor": [], "wall": []}
    for name, clock in (("processor", time.thread_time), ("wall", time.perf_counter)):
        for index in range(rounds + 2):
            times = (
                _timed(clock, lambda: executor.forward(calls)),
                _timed(clock, plain_forward),
                _timed(clock, executor.backward),
                _timed(clock, plain_backward),
            )
            if index >= 2:  # the first step traces the order of the units
                found[name].append(times)
    if profile:  # on all ranks, as they synchronise in every unit
        with cProfile.Profile() as watched:
            for _ in range(rounds):
                executor.forward(calls)
                executor.backward()
        if not rank:
            pstats.Stats(watched).sort_stats("tottime").print_stats(45)
    return found


def _on_device(
    rank: int, environment: dict[str, str], units: int, microbatches: int, steps: int, way: str
) -> float:
    """Return the least processor seconds of a step on a simulated device."""
    os.environ.update(environment, OMP_NUM_THREADS="1")
    device, recompute = torch.device("cuda", 0), way == "recomputed"
    parts = [torch.ones(_VALUES, device=device) for _ in range(microbatches)]
    if way.startswith("plain"):
        plain = Chain(units).to(device)

        def step() -> None:
            losses = [plain(part) for part in parts]
            if way == "plain, recomputed":
                losses = [plain(part) for part in parts]
            for loss in losses:
                loss.backward()
    else:
        torch.distributed.init_process_group("nccl")
        model = Chain(units)
        executor = make_executor(model, [1.0], recompute, device=device)
        calls = [
            MicrobatchCall(lambda part=part: model(part), lambda loss: (loss, 1.0))
            for part in parts
        ]

        def step() -> None:
            executor.forward(calls)
            executor.backward()

    return min(_timed(time.thread_time, step) for _ in range(steps))


def _collections(rank: int, units: int, microbatches: int, rounds: int) -> list[float]:
    """Return the seconds that the collector takes before objects are frozen, and after."""
    import lightning.pytorch  # noqa: F401  what a training has loaded

    # visiting/in_turn.py imports this file with older packages
    from lightning_cephalo.common.lasting_objects import LastingObjects

    gc.unfreeze()  # what starts the ranks has frozen all
    model, lasting = Chain(units), LastingObjects()
    executor = make_executor(model, [1.0], True)
    part = torch.ones(_VALUES)
    calls = [MicrobatchCall(lambda: model(part), lambda loss: (loss, 1.0))] * microbatches
    taken: list[float] = []
    started_s = 0.0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal started_s
        if phase == "start":
            started_s = time.perf_counter()
        else:
            taken[-1] += time.perf_counter() - started_s

    gc.callbacks.append(watch)
    for _ in range(2):
        taken.append(0.0)
        for _ in range(rounds):
            executor.forward(calls)
            executor.backward()
        taken.append(0.0)  # of the collection here
        lasting.begin()
        gc.collect()
        lasting.between_steps()
    gc.callbacks.remove(watch)
    lasting.end()
    return taken[::2]


def _print_simulated(units: int, microbatches: int, rounds: int) -> None:
    import simulated_cuda
    from simulated_server import Server

    missing = simulated_cuda.unavailable()
    if missing is not None:
        raise SystemExit(f"No simulated device: {missing}.")
    visits = units * microbatches
    (environment,) = torchrun_environments(1)
    with tempfile.TemporaryFile() as log, contextlib.closing(Server(log)) as server:

        def run(way: str) -> tuple[float, float]:
            """Return microseconds and kernels of a visit."""
            outcomes = [
                server.run(1, _on_device, environment, units, microbatches, steps, way)[0]
                for steps in (2, 2 + rounds)
            ]
            first, last = (sum(outcome.kernels.values()) for outcome in outcomes)
            return 1e6 * outcomes[1].value / visits, (last - first) / rounds / visits

        for way in ("recomputed", "kept"):
            plain_us, plain_kernels = run("plain, recomputed" if way == "recomputed" else "plain")
            own_us, own_kernels = run(way)
            print(
                f"simulated device, {way:>10}: {own_us:5.1f} µs a visit, forward and backward"
                f" (plain {plain_us:4.1f}), {own_kernels:4.2f} kernels (plain"
                f" {plain_kernels:4.2f}); beside the compute {own_us - plain_us:5.1f} µs and"
                f" {own_kernels - plain_kernels:4.2f} kernels"
            )


def main() -> None:
    """Print the overhead of a visit, forward and backward."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--profile", action="store_true", help="say which functions it goes to")
    parser.add_argument("--collector", action="store_true", help="what collecting garbage takes")
    parser.add_argument("--simulated", action="store_true", help="on a simulated CUDA device")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="compare with another one")
    options = parser.parse_args()
    if options.beside is not None:
        in_turn.compare(
            options.beside,
            ranks=options.ranks[0] if options.ranks else 1,
            units=options.units,
            microbatches=options.microbatches,
            rounds=options.rounds,
            simulated=options.simulated,
        )
        return
    if options.simulated:
        _print_simulated(options.units, options.microbatches, options.rounds)
        return
    visits = options.units * options.microbatches
    if options.collector:
        arguments = (options.units, options.microbatches, options.rounds)
        (taken,) = run_ranks(1, _collections, *arguments, timeout_s=600)
        for name, taken_s in zip(("all objects", "frozen ones"), taken, strict=True):
            taken_us = 1e6 * taken_s / visits / options.rounds
            print(f"collector, {name:>11}: {taken_us:5.2f} µs a visit")
        return
    for ranks in options.ranks:
        for recompute in (True, False):
            arguments = (options.units, options.microbatches, options.rounds, recompute)
            results = run_ranks(ranks, _measure, *arguments, options.profile, timeout_s=600)
            for kind, times in results[0].items():
                forward, plain_f, backward, plain_b = (
                    1e6 * statistics.median(column) / visits for column in zip(*times, strict=True)
                )
                print(
                    f"{ranks} rank(s), {'recomputed' if recompute else 'kept':>10}, {kind:>9} time:"
                    f" forward {forward:5.1f} µs a visit (plain {plain_f:4.1f}),"
                    f" backward {backward:5.1f} µs (plain {plain_b:4.1f}); beside the compute"
                    f" {forward - plain_f:5.1f} and {backward - plain_b:5.1f} µs"
                )


if __name__ == "__main__":
    main()
