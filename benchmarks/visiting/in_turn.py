"""Compares visits of units in two checkouts: a step of one, a step of the other, in turn.

    python benchmarks/visits.py --beside ../older [--ranks 2] [--simulated]

Each rank of each checkout runs in a process of its own, with the model of ``visits.py``. Each step
is counted in processor time of rank 0's thread. The minimum over all rounds is printed, without the
compute of the units: on a busy machine it is what other processes disturb least, and both checkouts
meet the same disturbance. On a simulated CUDA device (tests/simulated of this checkout) this is the
time of the host that launches.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_MEASURED = (("recomputed", True), ("kept", False))


def _steps(root: Path, options: argparse.Namespace) -> None:
    """Run in the process of a rank of a checkout: a step for each line on the standard input."""
    sys.path[:0] = [str(root), str(root / "tests" / "distributed"), str(ROOT / "benchmarks")]
    if options.simulated:  # before the first import of torch
        sys.path.append(str(ROOT / "tests" / "simulated"))
        import simulated_cuda

        simulated_cuda.start(options.ranks)
    import harness  # noqa: F401  that of the checkout, before visits.py imports another
    import torch
    import torch.distributed as dist
    from visits import Chain

    import lightning_cephalo
    from lightning_cephalo.accelerator import accelerator_of
    from lightning_cephalo.execution.executor import Executor
    from lightning_cephalo.execution.step import MicrobatchCall
    from lightning_cephalo.ranks.control import ControlGroup
    from lightning_cephalo.sharding.discovery import find_units
    from lightning_cephalo.sharding.layout import Divider
    from lightning_cephalo.sharding.placement import default_mesh
    from lightning_cephalo.sharding.unit import Unit

    assert Path(lightning_cephalo.__file__).is_relative_to(root), lightning_cephalo.__file__
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):  # as tests/distributed/launch.py does
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    ranks, rank = options.ranks, options.rank
    backend, device = "gloo", torch.device("cpu")
    if options.simulated:
        backend, device = "nccl", torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{options.store}", rank=rank, world_size=ranks
    )
    groups = [dist.new_group(), dist.new_group(), dist.new_group(backend="gloo")]
    samples = [torch.ones(8, device=device) for _ in range(options.microbatches)]

    def stepper(recompute: bool) -> tuple[Any, ...]:
        model, plain = Chain(options.units), Chain(options.units).to(device)
        mesh = default_mesh(device.type)
        try:
            from lightning_cephalo.sharding.context import ShardingContext

            context: Any = ShardingContext(device, mesh, groups[0], groups[1])
        except ModuleNotFoundError:  # a tree from before 28 November 2026
            older = importlib.import_module("lightning_cephalo.sharding.flat")
            routes = importlib.import_module("lightning_cephalo.sharding.routes")
            routing = routes.Routing([0] * ranks)
            context = older.ShardingContext(device, mesh, groups[0], groups[1], routing)
        divider = Divider([1 / ranks] * ranks)
        units = [Unit(members, divider, context) for members in find_units(model)]
        executor = Executor(units, ControlGroup(groups[2]), accelerator_of(device), recompute)
        executor.hooks.install()
        calls = [
            MicrobatchCall(lambda part=part: model(part), lambda loss: (loss, 1.0))
            for part in samples
        ]

        def plain_forward() -> list[torch.Tensor]:
            return [plain(part) for part in samples]

        return executor, calls, plain_forward

    steppers = {name: stepper(recompute) for name, recompute in _MEASURED}
    print("ready", flush=True)
    for line in sys.stdin:
        name = line.strip()
        executor, calls, plain_forward = steppers[name]
        times_s = [time.thread_time()]
        executor.forward(calls)
        times_s.append(time.thread_time())
        executor.backward()
        times_s.append(time.thread_time())
        losses = plain_forward()
        times_s.append(time.thread_time())
        if name == "recomputed":
            losses = plain_forward()
        for loss in losses:
            loss.backward()
        times_s.append(time.thread_time())
        print(*(end_s - start_s for start_s, end_s in pairwise(times_s)), flush=True)


def _start(root: Path, options: argparse.Namespace) -> list[subprocess.Popen[str]]:
    """Start the ranks of a checkout, and wait until they are ready."""
    command = [sys.executable, __file__, str(root), "--store", tempfile.mktemp()]
    for name in ("units", "microbatches", "ranks"):
        command += [f"--{name}", str(getattr(options, name))]
    if options.simulated:
        command.append("--simulated")
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(options.ranks)
    ]
    for process in ranks:
        said = _line_of(process)
        if said != "ready":
            raise SystemExit(f"A rank of {root} has ended. Expected 'ready', got {said!r}.")
    return ranks


def compare(
    older: Path, *, ranks: int, units: int, microbatches: int, rounds: int, simulated: bool
) -> None:
    """Print the overhead of a visit in both checkouts."""
    options = argparse.Namespace(
        ranks=ranks, units=units, microbatches=microbatches, simulated=simulated
    )
    checkouts = {root: _start(root, options) for root in (older.resolve(), ROOT)}
    found: dict[tuple[Path, str], list[list[float]]] = {}
    for index in range(rounds + 3):
        for name, _ in _MEASURED:
            for root, started in checkouts.items():
                for process in started:
                    assert process.stdin is not None
                    process.stdin.write(name + "\n")
                    process.stdin.flush()
                times = [[float(each) for each in _line_of(process).split()] for process in started]
                if index >= 3:  # the first steps trace the order and allocate
                    found.setdefault((root, name), []).append(times[0])
    for started in checkouts.values():
        for process in started:
            assert process.stdin is not None
            process.stdin.close()
        for process in started:
            process.wait()
    visits = units * microbatches
    for name, _ in _MEASURED:
        sums_us = []
        for root in checkouts:
            columns = zip(*found[root, name], strict=True)
            forward, backward, plain_f, plain_b = (1e6 * min(each) / visits for each in columns)
            which = "this" if root == ROOT else "older"
            sums_us.append(forward - plain_f + backward - plain_b)
            print(
                f"{name:>10}, {which:>5}: forward {forward - plain_f:5.1f} µs a visit beside the"
                f" compute of {plain_f:.1f}, backward {backward - plain_b:5.1f} µs beside"
                f" {plain_b:.1f}"
            )
        older_us, this_us = sums_us
        print(f"{name:>10}: {this_us:.1f} of {older_us:.1f} µs, {this_us / older_us:.2f} of it")


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _rank() -> None:
    """Run as a rank of a checkout; :func:`_start` calls this file so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    for name in ("units", "microbatches", "ranks", "rank"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--store")
    options = parser.parse_args()
    _steps(options.root, options)


if __name__ == "__main__":
    _rank()
