"""Trains a model that even sharding cannot hold, on two emulated ranks with memories 3:1.

    python benchmarks/memory.py

The same model runs under Lightning's own even sharding (FSDP2, one sample per rank) and under
cephalo (four), each in two ranks. The emulated devices refuse allocations above their memory, as a
GPU does. Prints every rank's memory, the plan's prediction, and the measured peak.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests", "tests/distributed", "tests/lightning", "tests/profiling", "examples")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
# forked ranks hang in OpenMP if this process has ever run it with several threads
torch.set_num_threads(1)

from uneven_memory import (  # noqa: E402
    LARGE,
    Outcome,
    model,
    under_cephalo,
    under_even_sharding,
)

from lightning_cephalo.common.quantities import format_bytes  # noqa: E402


def _add(table: Table, name: str, outcomes: list[Outcome]) -> None:
    for rank, (outcome, capacity_bytes) in enumerate(
        zip(outcomes, LARGE.capacities_bytes, strict=True)
    ):
        ended = f"{outcome.steps} steps"
        if outcome.failure:
            ended = f"{outcome.failure} after {ended}"
        table.add_row(
            name if rank == 0 else "",
            str(rank),
            format_bytes(capacity_bytes),
            f"{outcome.state_fraction:.0%}",
            format_bytes(outcome.predicted_bytes),
            format_bytes(outcome.peak_bytes),
            ended,
        )


def main() -> None:
    parameters = sum(parameter.numel() for parameter in model(LARGE.depth).parameters())
    table = Table(
        title=f"{parameters:,} parameters, {format_bytes(16 * parameters)} of state",
        caption="The rank without memory fails; the other loses it.",
    )
    table.add_column("sharding")
    for name in ("rank", "memory", "state", "predicted", "held", "ended"):
        table.add_column(name, justify="right")
    _add(table, "even (FSDP2)", under_even_sharding(LARGE))
    _add(table, "cephalo", under_cephalo(LARGE))
    Console().print(table)


if __name__ == "__main__":
    main()
