"""Compares losses, gradients and updates with those of one device.

    python benchmarks/gradient_equality.py

Runs every model of the tests' zoo under every plan, with and without recomputation, and with units
that stay gathered from forward to backward. Three AdamW steps with clipping on gloo ranks are
compared with the same steps in one process, in fp32. Prints the largest relative error over the
three steps: of the loss, of the whole gradient (norm of the difference over the norm), of the
clipped norm, and of all parameters at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

# models, plans and the comparison come from the tests
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "distributed"))

from harness import ALLOCATIONS, batch_size_of
from launch import run_ranks
from test_gradients import compare, one_device
from zoo import ZOO

CASES = [(plan, recompute, True) for plan in ALLOCATIONS for recompute in (True, False)]
CASES += [(plan, recompute, False) for plan in ("3:1", "no data") for recompute in (True, False)]


def main() -> None:
    table = Table(title="Largest relative error against one device, fp32")
    for heading in ("model", "plan", "recompute"):
        table.add_column(heading)
    kinds = ("loss", "gradient", "norm", "parameters")
    for heading in kinds:
        table.add_column(heading, justify="right")
    worst = dict.fromkeys(kinds, 0.0)
    for name in ZOO:
        for plan, recompute, reshard in CASES:
            allocation = ALLOCATIONS[plan]
            one_device(name, batch_size_of(allocation))  # once for all ranks of all cases
            found = run_ranks(
                allocation.world_size,
                compare,
                name,
                allocation,
                recompute,
                reshard,
                timeout_s=300,
            )
            errors = {kind: max(row[kind] for row in found) for kind in kinds}
            worst = {kind: max(worst[kind], errors[kind]) for kind in kinds}
            table.add_row(
                name,
                plan if reshard else f"{plan}, stay",
                "on" if recompute else "off",
                *[f"{errors[kind]:.1e}" for kind in kinds],
            )
    table.add_row("worst", "", "", *[f"{worst[kind]:.1e}" for kind in kinds], style="bold")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
