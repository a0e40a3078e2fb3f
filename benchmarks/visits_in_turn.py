"""Compares visits of units in two checkouts: a step of one, a step of the other, in turn.

    python benchmarks/visits_in_turn.py ../older [--units 48] [--microbatches 8] [--rounds 20]

Both run in processes of their own, on one rank, with the model of ``visits.py``. Each step is
counted in processor time of the rank's thread. The minimum over all rounds is printed, without the
compute of the units: on a busy machine it is what other processes disturb least, and both checkouts
meet the same disturbance.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
_MEASURED = (("recomputed", True), ("kept", False))


def _steps(root: Path, units: int, microbatches: int) -> None:
    """Run in the process of one checkout: a step for each line on the standard input."""
    sys.path[:0] = [str(root), str(root / "tests" / "distributed"), str(ROOT / "benchmarks")]
    from harness import make_executor
    from visits import Chain

    import lightning_cephalo
    from lightning_cephalo.execution.step import MicrobatchCall

    assert Path(lightning_cephalo.__file__).is_relative_to(root), lightning_cephalo.__file__
    store = tempfile.mktemp()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    samples = [torch.ones(8) for _ in range(microbatches)]

    def stepper(recompute: bool) -> tuple[Any, ...]:
        model, plain = Chain(units), Chain(units)
        executor = make_executor(model, [1.0], recompute)
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


def main() -> None:
    """Print the overhead of a visit in both checkouts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("older", type=Path, help="the other checkout")
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps:
        torch.set_num_threads(1)
        _steps(options.older, options.units, options.microbatches)
        return
    processes = {}
    for root in (options.older.resolve(), ROOT):
        command = [sys.executable, __file__, str(root), "--steps", "--units", str(options.units)]
        processes[root] = subprocess.Popen(
            [*command, "--microbatches", str(options.microbatches)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert _line_of(processes[root]) == "ready"
    found: dict[tuple[Path, str], list[list[float]]] = {}
    for index in range(options.rounds + 3):
        for name, _ in _MEASURED:
            for root, process in processes.items():
                assert process.stdin is not None
                process.stdin.write(name + "\n")
                process.stdin.flush()
                times = [float(each) for each in _line_of(process).split()]
                if index >= 3:  # the first steps trace the order and allocate
                    found.setdefault((root, name), []).append(times)
    for process in processes.values():
        process.communicate()
    visits = options.units * options.microbatches
    for name, _ in _MEASURED:
        for root in processes:
            columns = zip(*found[root, name], strict=True)
            forward, backward, plain_f, plain_b = (1e6 * min(each) / visits for each in columns)
            which = "this" if root == ROOT else "older"
            print(
                f"{name:>10}, {which:>5}: forward {forward - plain_f:5.1f} µs a visit beside the"
                f" compute of {plain_f:.1f}, backward {backward - plain_b:5.1f} µs beside"
                f" {plain_b:.1f}"
            )


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


if __name__ == "__main__":
    main()
