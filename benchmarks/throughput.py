"""Compares throughput on unequal ranks: cephalo against FSDP and DDP, with the losses of each.

    python benchmarks/throughput.py [--quick] [--speeds 3:1 ...] [--links fast slow]
        [--microbatches 1 8] [--rounds 8] [--record FILE.md FILE.json] [--figure FILE.png]

All use one model, one global batch, fp32, and the same emulated CPU ranks and links. They take
steps in turn in the same processes. The slow link needs root (network namespaces). If it is not
available, its rows are left out and the reason is printed. docs/performance.md explains the table.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import shlex
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import lightning
import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
# the ranks' launcher and the raw loop come from the tests, the model from the main job
sys.path[:0] = [str(ROOT / "tests" / "distributed"), str(ROOT / "examples")]

from launch import run_ranks  # noqa: E402
from side_by_side import cases, report  # noqa: E402
from side_by_side.contenders import ModelSize  # noqa: E402
from side_by_side.links import LinkError, ShapedHosts  # noqa: E402
from side_by_side.measuring import Setup, run_rank  # noqa: E402
from side_by_side.results import Result, combine  # noqa: E402

from lightning_cephalo.accelerator.emulated.rate import (  # noqa: E402
    emulated_flops_per_s,
    measure_flops_per_s,
    usable_processors,
)

# Microbatches of one sample reach fewer FLOPs per second than the measured block. The emulated
# ranks must not ask for more than the machine can do of such microbatches.
_SHARE_OF_MEASURED = 0.55


def main() -> int:
    """Print the table; return 1 if nothing could be measured."""
    options = _options()
    # namespaces must not outlive this process: turn the signal into an exception
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    core_flops_per_s = (
        options.core_gflops * 1e9 or run_ranks(1, _core_flops_per_s, process_group=False)[0]
    )
    model = ModelSize(recompute=options.recompute)
    console = Console(width=max(200, Console().width))
    results: list[Result] = []
    notes: list[str] = []
    for link in options.links:
        for speeds in options.speeds:
            try:
                measured = _measure(speeds, link, model, core_flops_per_s, options)
            except LinkError as error:
                notes.append(f"{link} link skipped: {error}")
                break
            results += measured
            for result in measured:
                console.print(" | ".join(report.rows([result])[0]), highlight=False)
    notes += report.reasons(results)
    header = _header(options, core_flops_per_s)
    if results:
        console.print(report.table(results), highlight=False)
    for line in (*header, *map(str, report.claims(results)), *notes):
        console.print(line, highlight=False)
    for path in options.record if results else ():
        write = report.dump if path.suffix == ".json" else report.markdown
        path.write_text(write(results, header, notes))
    if options.figure and results:
        report.figure(results, options.figure)
    return 0 if results else 1


def _measure(
    speeds: tuple[int, ...],
    link: str,
    model: ModelSize,
    core_flops_per_s: float,
    options: argparse.Namespace,
) -> list[Result]:
    """Measure all cases of one set of speeds and one link, in one process group.

    Raises:
        LinkError: If the link is not available.
    """
    chosen = tuple(
        cases.Case(speeds, link, count, cases.samples_per_microbatch(len(speeds), count))
        for count in options.microbatches
    )
    with ExitStack() as stack:
        namespaces: tuple[str, ...] = ()
        if link == cases.SLOW:
            namespaces = stack.enter_context(ShapedHosts(len(speeds), options.slow_mbit))
        setup = Setup(
            cases=chosen,
            flops_per_s=emulated_flops_per_s(speeds, core_flops_per_s, usable_processors()),
            namespaces=namespaces,
            folder=stack.enter_context(tempfile.TemporaryDirectory()),
            model=model,
            rounds=options.rounds,
            least_rounds=min(options.rounds, options.least_rounds),
            case_s=options.case_s,
        )
        ranks = run_ranks(len(speeds), run_rank, setup, timeout_s=900, process_group=False)
    return [
        combine(case, [records[index] for records in ranks]) for index, case in enumerate(chosen)
    ]


def _core_flops_per_s(rank: int) -> float:
    return _SHARE_OF_MEASURED * measure_flops_per_s(usable_processors())


def _header(options: argparse.Namespace, core_flops_per_s: float) -> list[str]:
    command = " ".join(["python benchmarks/throughput.py", *map(shlex.quote, sys.argv[1:])])
    return [
        f"{datetime.date.today()}: side by side on {usable_processors()} cores",
        f"`{command}`: torch {torch.__version__}, lightning {lightning.__version__}, gloo, Python"
        f" {platform.python_version()}; emulated ranks at {core_flops_per_s / 1e9:.0f} GFLOP/s for"
        f" each core; fast link: loopback, slow link: {options.slow_mbit:g} Mbit/s for each rank;"
        f" activations {'recomputed' if options.recompute else 'kept'} in all.",
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--speeds", type=cases.parse_speeds, nargs="+", default=list(cases.SPEEDS))
    parser.add_argument("--links", choices=cases.LINKS, nargs="+", default=list(cases.LINKS))
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(cases.MICROBATCHES))
    parser.add_argument("--rounds", type=int, default=8, help="most rounds of a case")
    parser.add_argument("--least-rounds", type=int, default=3, help="whatever they take")
    parser.add_argument("--case-s", type=float, default=20.0, help="seconds for a case's rounds")
    parser.add_argument("--slow-mbit", type=float, default=200.0, help="of the slow link")
    parser.add_argument("--core-gflops", type=float, default=0.0, help="by default measured")
    parser.add_argument("--recompute", action="store_true", help="in all of them, not kept")
    parser.add_argument("--quick", action="store_true", help="3:1 only, two rounds")
    parser.add_argument("--record", type=Path, nargs="+", default=[], help="FILE.md, FILE.json")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.speeds, options.rounds = [(3, 1)], 2
    return options


if __name__ == "__main__":
    sys.exit(main())
