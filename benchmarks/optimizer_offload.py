"""Optimizer state in host memory: policies side by side on emulated ranks, predicted and measured.

    python benchmarks/optimizer_offload.py [--record FILE.md]

Two ranks of unequal speed have a link in each direction and a host that updates, all in virtual
time: no figure depends on this machine. Each policy is a plan of the same microbatches, which
training follows. The last table finds the deepest model that trains on memories 3:1.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests", "tests/distributed", "tests/lightning", "tests/profiling", "examples")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
# forked ranks hang in OpenMP if this process has ever run it with several threads
torch.set_num_threads(1)

from profiled import GPT, fit, in_ranks, loader  # noqa: E402

from lightning_cephalo.plan import (  # noqa: E402
    InfeasibleError,
    Plan,
    Problem,
    predict,
    solve,
)
from lightning_cephalo.preparation import prepare as planning  # noqa: E402

MODEL = {"width": 64, "depth": 12}
SPEEDS = (2.0, 1.0)
# of one kind of matrix product a second, of a link, and of a host
EMULATION = {"link_bytes_per_s": 2e8, "host_updates_per_s": 2e7}
FLOPS_PER_S = 1.5e10
BATCHES = (6, 12, 24)
STEPS = 4
ROOMY = (2**30, 2**30)
# Part of the optimizer state for which devices have room in the policies that fill them.
FILLED = 0.5
DEPTHS = (12, 16, 20, 24, 28, 32, 36)
MEMORIES = (9_000_000, 3_000_000)
STAYS = {"resident_fraction": 1.0, "host_update_fraction": 0.0}


@dataclass(frozen=True)
class Row:
    """One policy: predictions and measurements, of the fullest rank."""

    batch: int
    policy: str
    predicted_s: float
    measured_s: float | None = None
    predicted_bytes: float = 0.0
    measured_bytes: float = 0.0
    predicted_host_bytes: float = 0.0
    measured_host_bytes: float = 0.0

    def cells(self, resident_s: float) -> list[str]:
        """Return the row's texts; the step's ratio is that to all state on the devices."""
        if self.measured_s is None:
            return [str(self.batch), self.policy, f"{1e3 * self.predicted_s:.2f}", *["–"] * 7]
        step = _beside(self.predicted_s * 1e3, self.measured_s * 1e3, "{:.2f}")
        device = _beside(self.predicted_bytes / 2**20, self.measured_bytes / 2**20, "{:.3f}")
        host = [
            *_beside(self.predicted_host_bytes / 2**20, self.measured_host_bytes / 2**20, "{:.3f}")
        ]
        ratio = f"{self.measured_s / resident_s:.2f}"
        return [str(self.batch), self.policy, *step, ratio, *device, *host[:2]]


def _beside(predicted: float, measured: float, form: str) -> list[str]:
    error = f"{predicted / measured - 1:+.1%}" if measured else "–"
    return [form.format(predicted), form.format(measured), error]


def _profiled(batch: int, **strategy: Any) -> Problem:
    """Return the problem that training of this batch measures."""
    found: list[Problem] = []
    make = planning.measure_or_load

    def keeping(*arguments: Any, **more: Any) -> Problem:
        found.append(make(*arguments, **more))
        return found[-1]

    import lightning_cephalo.strategy as own

    own.measure_or_load = keeping
    try:
        _fit(batch, 0, {"optimizer_offload": "auto", **strategy})
    finally:
        own.measure_or_load = make
    return found[0]


def _fit(
    batch: int,
    steps: int,
    strategy: dict[str, Any],
    depth: int | None = None,
    capacities: Sequence[int] = ROOMY,
) -> Any:
    return fit(
        GPT(**(MODEL if depth is None else {**MODEL, "depth": depth})),
        loader(samples=batch * max(steps, 1), batch_size=batch // 2),
        speeds=SPEEDS,
        capacity_bytes=tuple(capacities),
        total_flops_per_s=FLOPS_PER_S,
        emulation=EMULATION,
        is_time_shared=depth is None,  # ranks that run out of memory would wait for shared time
        max_steps=steps,
        strategy={"replan": False, "profile_budget_s": 5.0, **strategy},
    )


def policies(problem: Problem) -> dict[str, tuple[Plan, bool]]:
    """Return plans with the same microbatches by name, and whether updates are early."""
    early = problem
    late = _late(problem)
    base = solve(replace(early, optimizer_offload=False))

    def given(plan: Plan, resident: float, on_host: float, is_early: bool) -> tuple[Plan, bool]:
        ranks = [
            replace(rank, resident_fraction=resident, host_update_fraction=on_host)
            for rank in plan.ranks
        ]
        return replace(plan, ranks=tuple(ranks), early_update=is_early or None), is_early

    def chosen(case: Problem, is_early: bool) -> tuple[Plan, bool]:
        """Let the planner fill devices that have room for a part of the moments."""
        moments = case.moment_bytes * sum(case.unit_parameters)
        ranks = [
            replace(
                profile,
                capacity_bytes=part.memory_bytes
                - part.state_fraction * moments * (1 - FILLED)
                + (0 if is_early else part.state_fraction * sum(case.unit_parameters) * 4),
            )
            for profile, part in zip(case.ranks, base.ranks, strict=True)
        ]
        return solve(replace(case, ranks=tuple(ranks), optimizer_offload="auto")), is_early

    return {
        "all on device": given(base, 1.0, 0.0, True),
        "static, all on host": given(base, 0.0, 1.0, False),
        "filled, then static": given(base, FILLED, 1 - FILLED, False),
        "every second on the host": given(base, 0.0, 0.5, False),
        "planned, late": chosen(late, False),
        "planned, early": chosen(early, True),
    }


def _late(problem: Problem) -> Problem:
    """Return the problem with updates behind the backward, which hold all gradients."""
    gradients = problem.element_bytes * sum(problem.unit_parameters)
    reducing = problem.reducing_state_bytes
    late = problem.with_late_update(problem.state_bytes + gradients + reducing)
    return replace(late, unit_update_s=0.0)


def blocking_s(problem: Problem, plan: Plan) -> float:
    """Return the step if copies and the host's updates of all state waited for each other."""
    parameters = sum(problem.unit_parameters)
    waits = [
        rank.state_fraction
        * parameters
        * (
            problem.element_bytes / profile.to_host_bytes_per_s
            + 1 / profile.host_updated_parameters_per_s
            + problem.element_bytes / profile.to_device_bytes_per_s
        )
        for rank, profile in zip(plan.ranks, problem.ranks, strict=True)
    ]
    still = replace(plan, ranks=tuple(replace(rank, **STAYS) for rank in plan.ranks))
    return predict(problem, still).step_s + max(waits)


def _side_by_side(batch: int) -> list[Row]:
    problem = _profiled(batch)
    rows = []
    for name, (plan, is_early) in policies(problem).items():
        case = problem if is_early else _late(problem)
        predicted = predict(case, plan)
        early: dict[str, Any] = {"early_update": "auto" if is_early else False}
        bare = replace(plan, ranks=tuple(replace(r, memory_bytes=None) for r in plan.ranks))
        strategy = _fit(batch, STEPS, {"plan": bare, **early}).strategy
        held = strategy.measured_memory
        if name == "static, all on host":
            rows.append(Row(batch, "static, all on host, blocking", blocking_s(case, plan)))
        fullest = max(range(len(held)), key=lambda rank: predicted.ranks[rank].memory_bytes)
        part = predicted.ranks[fullest]
        rows.append(
            Row(
                batch,
                name,
                predicted.step_s,
                strategy.measured_step_s,
                part.memory_bytes,
                held[fullest].peak_bytes,
                part.host_bytes + part.state_host_bytes,
                held[fullest].host_bytes,
            )
        )
    return rows


def _deepest(offload: Any) -> tuple[int, str]:
    """Return the deepest model that trains, and what the next one is refused with."""
    best, said = 0, ""
    for depth in DEPTHS:
        try:
            _fit(6, 2, {"optimizer_offload": offload}, depth, MEMORIES)
        except (InfeasibleError, RuntimeError) as failure:
            said = str(failure).split(":")[0]
            break
        best = depth
    return best, said


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table in Markdown."""
    head = ["batch", "policy", "step, ms", "measured", "error", "to all on device"]
    head += ["device, MiB", "measured", "error", "host, MiB", "measured"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        resident_s = next(
            each.measured_s
            for each in rows
            if each.batch == row.batch and each.policy == "all on device"
        )
        cells = row.cells(resident_s or 1.0)
        lines.append(f"| {' | '.join(cells + ['–'] * (len(head) - len(cells)))} |")
    return lines


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--record", type=Path)
    given = arguments.parse_args()
    lines = [f"# Optimizer state in host memory, {datetime.date.today().isoformat()}", ""]
    rows = [row for batch in BATCHES for row in in_ranks(2, _side_by_side, batch)[0]]
    lines += [*table(rows), ""]
    lines += ["| optimizer_offload | deepest model that trains on 3:1 |", "|---|---|"]
    for offload in (False, "auto"):
        depth, _ = in_ranks(2, _deepest, offload)[0]
        parameters = sum(p.numel() for p in GPT(**{**MODEL, "depth": depth}).parameters())
        lines.append(f"| {offload} | {depth} blocks, {parameters:,} parameters |")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.record:
        given.record.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
