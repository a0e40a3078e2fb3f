"""Chooses whether the vocabulary stays cut, where the user leaves that to the plan.

The job is measured and planned both ways. The shorter step wins; a way that does not fit, or that
the user's step does not allow, leaves the other one.
"""

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
from lightning_cephalo.common.quantities import format_seconds
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Plan, Problem
from lightning_cephalo.plan.program import ROOT
from lightning_cephalo.preparation.prepare import Job, make_plan
from lightning_cephalo.profiling.memory_model import check_capacities
from lightning_cephalo.ranks.crash_report import is_lost_connection

# A gain below this is none: a plan cannot take such a choice back by itself.
GAIN = 0.02


@dataclass(frozen=True)
class Planned:
    """What a job trains with.

    Attributes:
        job: The job; whether its vocabulary stays cut is settled.
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


def measured_and_planned(
    job: Job, model: ShardedModel, measure: Callable[[Job], Problem]
) -> Planned:
    """Measure a job and make its plan, both ways where the plan may choose; collective.

    Args:
        job: The job, without a plan.
        model: The sharded model. Afterwards its vocabulary is as the plan wants it.
        measure: Measures a job, or loads an earlier measurement; collective.

    Raises:
        CephaloError: If the job cannot be planned. If it can be neither way, it is the error with a
            whole vocabulary.
    """
    if job.options.vocabulary_sharding != "auto":
        return planned(job, model, measure)
    whole = _tried_whole_or_cut(job, False, model, measure)
    if not model.units[ROOT].vocabulary:
        return noted(whole, "The vocabulary is gathered whole: no embedding can stay cut.")
    cut = _tried_whole_or_cut(job, True, model, measure)
    if isinstance(cut, CephaloError):
        model.cut_vocabulary(False)
        return noted(whole, f"The vocabulary is gathered whole. Cut, it fails: {summary(cut)}")
    if isinstance(whole, CephaloError):
        return noted(cut, f"The vocabulary stays cut. Whole, it fails: {summary(whole)}")
    is_cut = cut.step_s < (1.0 - GAIN) * whole.step_s
    model.cut_vocabulary(is_cut)
    whole_s, cut_s = format_seconds(whole.step_s), format_seconds(cut.step_s)
    if is_cut:
        return noted(cut, f"The vocabulary stays cut: {cut_s} a step, and {whole_s} whole.")
    return noted(whole, f"The vocabulary is gathered whole: {whole_s} a step, and {cut_s} cut.")


def as_planned(job: Job, model: ShardedModel) -> Job:
    """Return a job whose given plan says whether the vocabulary stays cut, if the user does not.

    Args:
        job: The job, with a plan.
        model: The sharded model; its vocabulary follows.
    """
    if job.options.vocabulary_sharding != "auto":
        return job
    assert job.plan is not None
    is_cut = job.plan.vocabulary_sharding is True
    model.cut_vocabulary(is_cut)
    return _settled(job, is_cut)


def _settled(job: Job, is_cut: bool) -> Job:
    return replace(job, options=replace(job.options, vocabulary_sharding=is_cut))


def planned(job: Job, model: ShardedModel, measure: Callable[[Job], Problem]) -> Planned:
    """Measure a job and make its plan, with the model as it is; collective."""
    problem = measure(job)
    return Planned(job, problem, make_plan(job, problem, model.control))


def _tried_whole_or_cut(
    job: Job, is_cut: bool, model: ShardedModel, measure: Callable[[Job], Problem]
) -> Planned | CephaloError:
    model.cut_vocabulary(is_cut)
    # the session has looked at the capacities of the other way
    return tried(_settled(job, is_cut), model, measure, checks=not is_cut)


def tried(
    job: Job, model: ShardedModel, measure: Callable[[Job], Problem], *, checks: bool
) -> Planned | CephaloError:
    """Return what comes of one way, or the error that all ranks have with it; collective.

    Args:
        job: The job, with the choice made.
        model: The sharded model, as the choice wants it.
        measure: As for :func:`measured_and_planned`.
        checks: Whether to compare what every rank must hold with its capacity first.
    """
    try:
        if checks:
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
