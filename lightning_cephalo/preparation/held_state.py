"""Corrects the plan for the state that the user's optimizers hold.

The plan is made before the optimizers, and counts on Adam's two moments. Where they hold another
amount, predictions follow. If a rank then lacks memory, or state in host memory has another size,
the plan is made anew, before training. So are gradients counted that no optimizer trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cephalo.adapters.dealt_loaders import DealtLoaders
from lightning_cephalo.adapters.held_state import held_per_parameter, untrained_bytes
from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Plan, Problem, predict
from lightning_cephalo.plan.reasons import reasons, surprises
from lightning_cephalo.preparation.prepare import Job, make_plan
from lightning_cephalo.preparation.session import Session
from lightning_cephalo.profiling.memory_model import largest_row, predicted
from lightning_cephalo.profiling.state_rates import planned_state_bytes, trained_sizes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_ROUNDING = 1e-6


def count_on_optimizers(
    job: Job,
    problem: Problem,
    session: Session,
    optimizers: Sequence[Optimizer],
    trainer: Trainer,
) -> Problem:
    """Let plan and predictions count on the optimizers' state, before they have any; collective."""
    control, model = session.control, session.model
    units_move = problem.optimizer_offload is not False or session.plan.moves_state
    own = held_per_parameter(optimizers, model, units_move=units_move)
    held: list[float] = control.gather(math.nan if own is None else own)
    planned = planned_state_bytes(model)
    each = planned if any(map(math.isnan, held)) else max(held)
    # where all state is on the devices, they take less than the state that counts for them
    stay = untrained_bytes(optimizers, model) if units_move and _gives_back(problem) else 0
    is_as_planned = math.isclose(each, planned, rel_tol=_ROUNDING)
    if is_as_planned and not stay:
        return problem
    counted = problem if is_as_planned else counted_on(problem, model, each)
    moving = counted.with_gradients_that_stay(stay)
    if job.plan is not None:
        return moving
    plan = fitting = still_fits(moving if session.plan.moves_state else counted, session.plan)
    # one that moves state has moved too little, or more than pays
    if plan is None or plan.moves_state:
        plan = _dealt(session, trainer, make_plan(job, moving, control), fitting)
    if plan is not fitting:
        said = _why_anew(each, planned, stay)
        session.notes = (*reasons(moving, plan), *surprises(moving, plan), said)
    # some hold rows from the beginning, such as Adagrad
    session.optimizers = [
        own for own in optimizers if any(isinstance(key, DTensor) for key in own.state)
    ]
    session.check_move(plan)
    predicting = moving if plan.moves_state else counted
    session.apply(plan, predicted(predicting, plan, model))
    return moving


def _why_anew(each: float, planned: float, stay: int) -> str:
    found = []
    if not math.isclose(each, planned, rel_tol=_ROUNDING):
        found.append(
            f"an optimizer that holds {each:g} bytes of state for each parameter; other plans count"
            f" on {planned:g} before it is known"
        )
    if stay:
        found.append(
            f"{format_mib(stay)} of gradients of parameters that no optimizer trains, which stay"
        )
    return f"Made anew for {', and for '.join(found)}."


def counted_on(problem: Problem, model: ShardedModel, each_bytes: float) -> Problem:
    """Return a problem whose optimizer holds so many bytes of state for each parameter."""
    planned = planned_state_bytes(model)
    counted = problem.with_moments(each_bytes, planned, sum(trained_sizes(model)))
    # a rank may hold a row more than its share
    row_bytes = max(0.0, each_bytes - planned) * largest_row(model)[0]
    return replace(counted, gathered_bytes=counted.gathered_bytes + row_bytes)


def _gives_back(problem: Problem) -> bool:
    """Return whether a plan counts on gradients that go as soon as they are used."""
    return problem.early_update or problem.sends_gradients


def still_fits(problem: Problem, plan: Plan) -> Plan | None:
    """Return a plan with this problem's predictions of memory; None: another one is needed."""
    parts = []
    found = predict(problem, plan).ranks
    for profile, rank, part in zip(problem.ranks, plan.ranks, found, strict=True):
        if part.memory_bytes > profile.capacity_bytes:
            return None
        moved_bytes = part.state_host_bytes if rank.moves_state else rank.state_host_bytes
        if (moved_bytes or 0.0) > (rank.state_host_bytes or 0.0):
            return None  # pieces of pinned memory are larger, so that the cap does not tell
        parts.append(replace(rank, memory_bytes=part.memory_bytes, state_host_bytes=moved_bytes))
    return replace(plan, ranks=tuple(parts))


def _dealt(session: Session, trainer: Trainer, plan: Plan, fitting: Plan | None) -> Plan:
    """Deal a plan's batches, and return it; if that is refused, the one that fits."""
    try:
        session.control.together("changing the loaders", partial(_deal, session, trainer, plan))
    except (UnsupportedError, RemoteRankError):
        if fitting is None:
            raise
        return fitting
    return plan


def _deal(session: Session, trainer: Trainer, plan: Plan) -> None:
    # they exist if configure_optimizers() has asked for the number of steps
    loaders = DealtLoaders(trainer)
    loaders.refuse_other_sizes(session.dealt_plan, plan)
    loaders.deal(plan, 0)
