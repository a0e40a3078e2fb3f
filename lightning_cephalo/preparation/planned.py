"""A job with its problem and its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Plan, Problem
from lightning_cephalo.preparation.prepare import Job, make_plan


@dataclass(frozen=True)
class Planned:
    """What a job trains with.

    Attributes:
        job: The job.
        problem: What was measured.
        plan: The plan, with a predicted step time.
    """

    job: Job
    problem: Problem
    plan: Plan


def planned(job: Job, model: ShardedModel, measure: Callable[[Job], Problem]) -> Planned:
    """Measure a job and make its plan; collective."""
    problem = measure(job)
    return Planned(job, problem, make_plan(job, problem, model.control))
