"""Makes room for a step in which a rank ran out of memory: another plan, from that step on.

Rank 0 solves anew, with less memory for those ranks (``plan/memory_pressure.py``). Samples are
loaded, so shares and modes change first, and batches from the first step that no rank has loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from lightning_cephalo.common.errors import PlanError, RemoteRankError, SolverError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.memory_errors import OutOfMemoryInStepError
from lightning_cephalo.plan import Plan, Problem, solve
from lightning_cephalo.plan.memory_pressure import plan_for_batches, with_less_memory
from lightning_cephalo.preparation.plan_change import REFUSALS, PlanChanges

_LIMIT_S = 30.0


@dataclass(frozen=True)
class Relief:
    """A plan that takes less memory, and has taken effect."""

    rank: int
    problem: Problem
    plan: Plan
    now: Plan
    is_requested: bool


@dataclass(frozen=True)
class _Said:
    """What a rank says of its error."""

    is_memory: bool
    is_told: bool
    held_bytes: float
    refused: str


def make_room(changes: PlanChanges, problem: Problem, error: Exception, refused: str) -> Relief:
    """Follow a plan that takes less memory, or raise the error on every rank; collective."""
    session, control = changes.session, changes.session.control
    figures = session.model.accelerator.memory
    own = _Said(
        isinstance(error, OutOfMemoryInStepError),
        isinstance(error, RemoteRankError),
        math.inf if figures is None else float(figures.peak_bytes),
        refused,
    )
    said: list[_Said] = control.gather(own)
    short = [rank for rank, one in enumerate(said) if one.is_memory]
    if not short or not all(one.is_memory or one.is_told for one in said):
        raise error
    why = next((one.refused for one in said if one.refused), "")
    if why:
        _refuse(error, why)
    batches = [rank.batch_size for rank in session.plan.ranks]
    answer = None
    if control.rank == 0:
        answer = _solved(problem, session.plan, said, batches)
    found: tuple[Problem, Plan, Plan] | str = control.broadcast(answer)
    if isinstance(found, str):
        _refuse(error, found)
    capped, plan, now = found
    try:
        changes.follow_now(now, capped)
    except REFUSALS as failure:
        _refuse(error, f"A plan that takes less memory was refused. {failure}")
    is_requested = plan != now and _request(changes, plan, capped)
    return Relief(short[0], capped, plan, now, is_requested)


def _solved(
    problem: Problem, old: Plan, said: Sequence[_Said], batches: Sequence[int]
) -> tuple[Problem, Plan, Plan] | str:
    """Return a problem with less memory, its solution, and that for loaded batches; or why not."""
    held = [one.held_bytes if one.is_memory else None for one in said]
    try:
        capped = with_less_memory(problem, old, held)
        limits = ", ".join(
            f"{format_mib(capped.ranks[rank].capacity_bytes)} on rank {rank}"
            for rank, one in enumerate(said)
            if one.is_memory
        )
        plan = solve(capped, time_limit_s=_LIMIT_S)
    except (PlanError, SolverError) as failure:
        return f"No other plan was found that takes less memory there. {failure}"
    now = plan_for_batches(capped, plan, batches)
    if now is None:
        return (
            f"A plan for {limits} was found, but the samples of this step are loaded already, and"
            f" the batches {list(batches)} do not fit."
        )
    return capped, plan, now


def _request(changes: PlanChanges, plan: Plan, problem: Problem) -> bool:
    try:
        return changes.request(plan, problem, by_user=False)
    except REFUSALS:
        return False  # the batches stay, as the loaders cannot deal others


def _refuse(error: Exception, why: str) -> NoReturn:
    """Raise an error that also says why the step is not repeated."""
    error.args = (f"{error}\n{why}",)
    raise error
