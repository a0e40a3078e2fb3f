"""Optimizer state in host memory: policies side by side on emulated ranks, predicted and measured.

    python benchmarks/optimizer_offload.py [--record FILE.md] [--figure FILE.png]
                                           [--only policies | depths]

Ranks of unequal speed, two and four, have a link in each direction and a host that updates, all in
virtual time: no figure depends on this machine. Each policy is a plan of the same microbatches,
which training follows. A second table has the deepest model that trains on memories 3:1, with as
much memory again on hosts.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests", "tests/distributed", "tests/lightning", "tests/profiling", "examples")
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", *FOLDERS)]
# forked ranks hang in OpenMP if this process has ever run it with several threads
torch.set_num_threads(1)

from lightning.pytorch import Callback  # noqa: E402
from profiled import GPT, RankFailure, fit, in_ranks, loader  # noqa: E402
from torch import nn  # noqa: E402

from lightning_cephalo.adapters.moved_state import MovedState  # noqa: E402
from lightning_cephalo.common.errors import TooLittleMemoryError  # noqa: E402
from lightning_cephalo.offline import figures  # noqa: E402
from lightning_cephalo.plan import (  # noqa: E402
    InfeasibleError,
    Plan,
    Problem,
    StateBytes,
    predict,
    solve,
)
from lightning_cephalo.preparation import prepare as planning  # noqa: E402

MODEL = {"width": 64, "depth": 12}
SPEEDS = {2: (2.0, 1.0), 4: (4.0, 2.0, 2.0, 1.0)}
# of one kind of matrix product a second, of a link, and of a host
EMULATION = {"link_bytes_per_s": 2e8, "host_updates_per_s": 2e7}
FLOPS_PER_S = 1.5e10
BATCHES = {2: (6, 12, 24), 4: (12, 24, 48)}
STEPS = 4
# What ranks may take for all policies of a case, on a machine that has other work.
_PATIENCE_S = 3600.0
ROOMY = 2**30
# Part of the optimizer state for which devices have room in the policies that fill them.
FILLED = 0.5
DEPTHS = range(8, 129)
MEMORIES, HOST_MEMORY_BYTES = (9_000_000, 3_000_000), 6_000_000
BLOCKING = "static, all on host, blocking"
POLICIES = (
    "all on device",
    BLOCKING,
    "static, all on host",
    "filled, then static",
    "every second on the host",
    "planned, late",
    "planned, early",
)


@dataclass(frozen=True)
class Row:
    """One policy: predictions and measurements, of the fullest rank."""

    ranks: int
    batch: int
    policy: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float
    predicted_host_bytes: float
    measured_host_bytes: float

    def cells(self, resident_s: float) -> list[str]:
        """Return the row's texts; the step's ratio is that to all state on the devices."""
        step = _beside(self.predicted_s * 1e3, self.measured_s * 1e3, "{:.2f}")
        device = _beside(self.predicted_bytes / 2**20, self.measured_bytes / 2**20, "{:.3f}")
        host = [
            *_beside(self.predicted_host_bytes / 2**20, self.measured_host_bytes / 2**20, "{:.3f}")
        ]
        ratio = f"{self.measured_s / resident_s:.2f}"
        return [str(self.ranks), str(self.batch), self.policy, *step, ratio, *device, *host[:2]]


def _beside(predicted: float, measured: float, form: str) -> list[str]:
    error = f"{predicted / measured - 1:+.1%}" if measured else "–"
    return [form.format(predicted), form.format(measured), error]


def _profiled(batch: int, ranks: int) -> Problem:
    """Return the problem that training of this batch measures."""
    found: list[Problem] = []
    make = planning.measure_or_load

    def keeping(*arguments: Any, **more: Any) -> Problem:
        found.append(make(*arguments, **more))
        return found[-1]

    import lightning_cephalo.preparation.training as own

    own.measure_or_load = keeping
    try:
        _fit(batch, ranks, 0, {"optimizer_offload": "auto"})
    finally:
        own.measure_or_load = make
    return found[0]


def _fit(
    batch: int,
    ranks: int,
    steps: int,
    strategy: dict[str, Any],
    depth: int | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Any:
    return fit(
        GPT(**(MODEL if depth is None else {**MODEL, "depth": depth})),
        loader(samples=batch * max(steps, 1), batch_size=batch // ranks),
        world_size=ranks,
        speeds=SPEEDS[ranks],
        capacity_bytes=(ROOMY,) * ranks if depth is None else MEMORIES,
        total_flops_per_s=FLOPS_PER_S * ranks / 2,
        emulation=EMULATION,
        is_time_shared=depth is None,  # ranks that run out of memory would wait for shared time
        max_steps=steps,
        callbacks=callbacks,
        strategy={"replan": False, "budget_s": 5.0, **strategy},
        **options,
    )


class Blocking(Callback):
    """Lets copies and the host's updates wait for each other, unit by unit."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        moves = trainer.strategy.session.model.executor.updates
        moves.mover = _InLine(moves.mover)


class _InLine:
    """Moves state as another mover does, and awaits each unit's update before the next begins."""

    def __init__(self, mover: MovedState) -> None:
        self._mover = mover

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def update(self, parameters: Sequence[nn.Parameter], on_host: bool) -> list[bool]:
        updated = self._mover.update(parameters, on_host)
        if on_host and any(updated):
            self._mover.store(self._mover.unit_of[id(parameters[0])])
        return updated


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
        BLOCKING: given(base, 0.0, 1.0, False),
        "static, all on host": given(base, 0.0, 1.0, False),
        "filled, then static": given(base, FILLED, 1 - FILLED, False),
        "every second on the host": given(base, 0.0, 0.5, False),
        "planned, late": chosen(late, False),
        "planned, early": chosen(early, True),
    }


def _late(problem: Problem) -> Problem:
    """Return the problem with updates behind the backward, which hold all gradients."""
    gradients = problem.element_bytes * sum(problem.unit_parameters)
    held = problem.state.held_bytes + gradients + problem.state.reducing_bytes
    return replace(problem, early_update=False, state=StateBytes(held))


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
    stays = {"resident_fraction": 1.0, "host_update_fraction": 0.0}
    still = replace(plan, ranks=tuple(replace(rank, **stays) for rank in plan.ranks))
    return predict(problem, still).step_s + max(waits)


def _row(batch: int, problem: Problem, name: str, plan: Plan, is_early: bool) -> Row:
    case = problem if is_early else _late(problem)
    predicted = predict(case, plan)
    early: dict[str, Any] = {"early_update": "auto" if is_early else False}
    bare = replace(plan, ranks=tuple(replace(r, memory_bytes=None) for r in plan.ranks))
    callbacks = [Blocking()] if name == BLOCKING else []
    ranks = len(plan.ranks)
    strategy = _fit(batch, ranks, STEPS, {"plan": bare, **early}, callbacks=callbacks).strategy
    held = strategy.report.memory
    fullest = max(range(len(held)), key=lambda rank: predicted.ranks[rank].memory_bytes)
    part = predicted.ranks[fullest]
    return Row(
        ranks,
        batch,
        name,
        blocking_s(case, plan) if name == BLOCKING else predicted.step_s,
        strategy.report.step_s,
        part.memory_bytes,
        held[fullest].peak_bytes,
        part.host_bytes + part.state_host_bytes,
        held[fullest].host_bytes,
    )


def _all_rows(batch: int, problem: Problem, plans: dict[str, tuple[Plan, bool]]) -> list[Row]:
    """Return one row for each policy, which train one after the other in this rank."""
    rows = []
    for name, (plan, is_early) in plans.items():
        rows.append(_row(batch, problem, name, plan, is_early))
        if int(os.environ["RANK"]) == 0:
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def rows_of(ranks: int, batch: int) -> list[Row]:
    """Return one row for each policy."""
    problem = in_ranks(ranks, _profiled, batch, ranks, timeout_s=_PATIENCE_S)[0]
    # a solver that has run here would hang in forked ranks
    plans = in_ranks(1, policies, problem, timeout_s=_PATIENCE_S)[0]
    return in_ranks(ranks, _all_rows, batch, problem, plans, timeout_s=_PATIENCE_S)[0]


def _trains(depth: int, offload: Any) -> str:
    """Return the sentence with which a model is refused; empty: it trains."""
    given = {"optimizer_offload": offload, "host_memory_cap": HOST_MEMORY_BYTES}
    try:
        _fit(6, 2, 2, given, depth)
    except (InfeasibleError, TooLittleMemoryError, RuntimeError) as failure:
        return f"{type(failure).__name__}: {str(failure).split('. ')[0]}"
    return ""


@dataclass(frozen=True)
class Depth:
    """The deepest model that trains.

    Attributes:
        offload: The option ``optimizer_offload``.
        deepest: Its blocks; 0: none trains.
        refused: Blocks of the least deep model that is known not to train.
        said: What that is refused with.
    """

    offload: Any
    deepest: int
    refused: int
    said: str

    def line(self) -> str:
        """Return a row of the table."""
        held, next_one = (_state_bytes(depth) / 1e6 for depth in (self.deepest, self.refused))
        room = sum(MEMORIES) / 1e6
        away = 0.0 if self.offload is False else len(MEMORIES) * HOST_MEMORY_BYTES / 1e6
        return (
            f"| {self.offload} | {self.deepest} blocks, {_parameters(self.deepest):,} parameters"
            f" | {held:.1f} MB | {room + away:.1f} MB"
            f" | {self.refused} blocks, {next_one:.1f} MB: {self.said} |"
        )


def _parameters(depth: int) -> int:
    return sum(p.numel() for p in GPT(**{**MODEL, "depth": depth}).parameters())


def _state_bytes(depth: int) -> int:
    """Return the bytes of parameters and moments, which live on devices and hosts."""
    return 12 * _parameters(depth)


def _deepest(offload: Any, least: int = DEPTHS.start, most: int = DEPTHS.stop) -> Depth:
    """Return the deepest model that trains: twice as deep until one does not, then halfway."""
    best, refused, said = 0, most, "not looked for"
    depth = least
    while depth < refused:
        try:
            answer = in_ranks(2, _trains, depth, offload, timeout_s=_PATIENCE_S)[0]
        except RankFailure as failure:  # it has a limit of its own
            answer = f"no answer: {str(failure).splitlines()[-1]}"
        print(offload, depth, answer or "trains", file=sys.stderr, flush=True)
        if answer:
            refused, said = depth, answer
        else:
            best = depth
        bound = refused if said != "not looked for" else min(refused, 4 * best)
        depth = (best + bound) // 2
        if depth == best:
            break
    return Depth(offload, best, refused, said)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table in Markdown."""
    head = ["ranks", "batch", "policy", "step, ms", "measured", "error", "to all on device"]
    head += ["device, MiB", "measured", "error", "host, MiB", "measured"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        resident_s = next(
            each.measured_s
            for each in rows
            if (each.ranks, each.batch, each.policy) == (row.ranks, row.batch, "all on device")
        )
        lines.append(f"| {' | '.join(row.cells(resident_s))} |")
    return lines


def figure(rows: Sequence[Row], path: Path) -> None:
    """Draw the policies' steps as parts of that with all state on the devices."""
    cases = list(dict.fromkeys((row.ranks, row.batch) for row in rows))
    names = list(dict.fromkeys(row.policy for row in rows))
    colours = [figures.INK, figures.GREY, figures.SKY, figures.BLUE, figures.PURPLE]
    colours += [figures.ORANGE, figures.GREEN]
    width = 0.8 / len(names)
    with figures.drawing(path, 3.6) as (axes,):
        for column, case in enumerate(cases):
            own = [row for row in rows if (row.ranks, row.batch) == case]
            resident_s = next(row.measured_s for row in own if row.policy == "all on device")
            for row in own:
                index = names.index(row.policy)
                at = column - 0.4 + (index + 0.5) * width
                label = row.policy if column == 0 else None
                height = row.measured_s / resident_s
                axes.bar(at, height, 0.9 * width, color=colours[index], label=label)
                axes.plot(at, row.predicted_s / resident_s, marker="_", color=figures.VERMILION)
        axes.axhline(1.0, color=figures.INK, linewidth=0.6)
        axes.set_xticks(
            range(len(cases)), [f"{ranks} ranks, batch {batch}" for ranks, batch in cases]
        )
        axes.set_ylabel("step, to all on device")
        figures.add_title(
            axes,
            "Where optimizer state lives, and what it costs",
            "bars are measured on emulated ranks in virtual time, red dashes are predicted; no"
            " schedule beats the line",
        )
        axes.figure.legend(loc="outside lower center", ncols=4)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--record", type=Path)
    arguments.add_argument("--figure", type=Path)
    arguments.add_argument("--only", choices=("policies", "depths"), help="one of the tables")
    given = arguments.parse_args()
    lines = [f"# Optimizer state in host memory, {datetime.date.today().isoformat()}", ""]
    rows: list[Row] = []
    if given.only in (None, "policies"):
        for ranks, batches in BATCHES.items():
            for batch in batches:
                rows += rows_of(ranks, batch)
        lines += [*table(rows), ""]
    if given.only in (None, "depths"):
        lines += [
            "| optimizer_offload | deepest model that trains on 3:1 | its parameters and moments"
            " | memory that may hold them | the next one |",
            "|---|---|---|---|---|",
        ]
        lines += [_deepest(offload).line() for offload in (False, "auto")]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.record:
        given.record.write_text(text, encoding="utf-8")
    if given.figure and rows:
        figure(rows, given.figure)


if __name__ == "__main__":
    main()
