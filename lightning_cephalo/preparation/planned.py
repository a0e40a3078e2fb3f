"""A job with its problem and its plan, and ways to try one."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_cephalo.common.errors import (
    CephaloError,
    InfeasibleError,
    ProfilingError,
    RemoteRankError,
)
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Plan, Problem
from lightning_cephalo.preparation.prepare import Job, make_plan
from lightning_cephalo.profiling.memory_model import check_capacities
from lightning_cephalo.ranks.crash_report import is_lost_connection

# A gain below this is none: a plan cannot take such a choice back by itself.
GAIN = 0.02


@dataclass(frozen=True)
class Planned:
    """What a job trains with.

    Attributes:
        job: The job, with all choices settled.
        problem: What was measured.
        plan: The plan, with a predicted step time.
        notes: Sentences that say what was chosen, and why.
    """

    job: Job
    problem: Problem
    plan: Plan
    notes: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """The predicted seconds of a step."""
        assert self.plan.step_s is not None, "every plan that is solved has them"
        return self.plan.step_s


def planned(job: Job, model: ShardedModel, measure: Callable[[Job], Problem]) -> Planned:
    """Measure a job and make its plan, with the model as it is; collective."""
    problem = measure(job)
    return Planned(job, problem, make_plan(job, problem, model.control))


def tried(
    job: Job, model: ShardedModel, measure: Callable[[Job], Problem]
) -> Planned | CephaloError:
    """Return what comes of one way, or the error that all ranks have with it; collective.

    Args:
        job: The job, with the choice made.
        model: The sharded model, as the choice wants it.
        measure: Measures a job, or loads an earlier measurement; collective.
    """
    try:
        capacity_bytes = job.limits[model.control.rank].device.capacity_bytes
        check_capacities(model, capacity_bytes, job.keeps_gradients)
        return planned(job, model, measure)
    except (InfeasibleError, ProfilingError, RemoteRankError) as error:
        if is_lost_connection(error.__cause__ or error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold what the step has held
        return error


def noted(planned: Planned | CephaloError, note: str) -> Planned:
    """Return what a job trains with, with one more note; raise an error in place of it."""
    if isinstance(planned, CephaloError):
        raise planned
    return replace(planned, notes=(*planned.notes, note))


def summary(error: CephaloError) -> str:
    """Return the first line of an error."""
    return str(error).partition("\n")[0]
