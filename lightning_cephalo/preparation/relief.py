"""Makes room for a step in which a rank ran out of memory: another plan, from that step on.

Rank 0 solves anew, with less memory for those ranks (``plan/memory_pressure.py``). Samples are
loaded, so shares and modes change first, and batches from the first step that no rank has loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_cephalo.common.errors import PlanError, RemoteRankError, SolverError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.memory_errors import OutOfMemoryInStepError
from lightning_cephalo.plan import Plan, Problem, solve
from lightning_cephalo.plan.memory_pressure import with_less_memory
from lightning_cephalo.plan.solver.solve import solve_if_possible
from lightning_cephalo.preparation.plan_change import REFUSALS, PlanChanges

_LIMIT_S = 30.0


@dataclass(frozen=True)
class Relief:
    """Plans that take less memory: for the batches that are loaded, and for those behind them."""

    rank: int
    problem: Problem
    now: Plan
    later: Plan


@dataclass(frozen=True)
class _Failure:
    """A rank's error: what it held if it lacks memory, and why the step cannot be repeated."""

    held_bytes: float | None
    is_expected: bool
    refused: str


def make_room(changes: PlanChanges, problem: Problem, error: Exception, refused: str) -> Relief:
    """Follow a plan that takes less memory, or raise the error on every rank; collective."""
    session, control = changes.session, changes.session.control
    held_bytes = None
    if isinstance(error, OutOfMemoryInStepError):
        figures = session.model.accelerator.memory
        held_bytes = math.inf if figures is None else float(figures.peak_bytes)
    is_expected = held_bytes is not None or isinstance(error, RemoteRankError)
    failures = control.gather(_Failure(held_bytes, is_expected, refused))
    held = [each.held_bytes for each in failures]
    if not any(held) or not all(each.is_expected for each in failures):
        raise error
    found: Relief | str = next((each.refused for each in failures if each.refused), "")
    if not found:
        found = control.broadcast(_solved(problem, session.plan, held) if control.rank == 0 else "")
    if isinstance(found, Relief):
        try:
            changes.follow_now(found.now)
            return found
        except REFUSALS as failure:
            found = f"A plan that takes less memory was refused. {failure}"
    error.args = (f"{error}\n{found}",)
    raise error


def _solved(problem: Problem, old: Plan, held: Sequence[float | None]) -> Relief | str:
    """Return plans for less memory, or why there are none."""
    short = [rank for rank, held_bytes in enumerate(held) if held_bytes is not None]
    batches = [rank.batch_size for rank in old.ranks]
    try:
        capped = with_less_memory(problem, old, held)
        plan = solve(capped, time_limit_s=_LIMIT_S)
        now: Plan | None = plan
        if [rank.batch_size for rank in plan.ranks] != batches:
            now = solve_if_possible(capped, time_limit_s=_LIMIT_S, batches=batches)
    except (PlanError, SolverError) as failure:
        return f"No other plan was found that takes less memory there. {failure}"
    if now is None:
        limits = [
            f"{format_mib(capped.ranks[rank].capacity_bytes)} on rank {rank}" for rank in short
        ]
        return (
            f"A plan for {', '.join(limits)} was found, but the samples of this step are loaded"
            f" already, and the batches {batches} do not fit."
        )
    return Relief(short[0], capped, now, plan)
