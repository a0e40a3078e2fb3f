"""Chooses whether each node holds the whole state, where the user leaves that to the plan.

The job is measured and planned both ways. What a device computes does not depend on it: the second
time only the network and the update are measured. The shorter step wins. Hybrid sharding that has
no room, or that could not be faster if its transfers took no time, leaves the other way.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

from lightning_cephalo.common.errors import CephaloError
from lightning_cephalo.common.quantities import format_seconds
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Plan, Problem
from lightning_cephalo.plan.solver.solve import solve_if_possible
from lightning_cephalo.plan.state_groups import groups_by_node
from lightning_cephalo.preparation.first_shares import shares_by_memory
from lightning_cephalo.preparation.planned import GAIN, Planned, noted, planned, summary, tried
from lightning_cephalo.preparation.prepare import HOW_NODES_DIFFER, Job


class Measure(Protocol):
    """Measures a job, or loads an earlier measurement; collective."""

    def __call__(self, job: Job, known: Problem | None = None) -> Problem:
        """Return the problem of a job.

        Args:
            job: The job.
            known: A problem of the same ranks, of which only the network and the update are
                measured again.
        """
        ...


_TOGETHER = "All ranks hold the state together"


def measured_and_planned(job: Job, model: ShardedModel, measure: Measure) -> Planned:
    """Measure a job and make its plan, in all ways that the plan may choose; collective.

    Args:
        job: The job, without a plan.
        model: The sharded model, on which no optimizer has been made. Afterwards the ranks that the
            plan wants hold the state together.
        measure: Measures a job, or loads an earlier measurement.

    Raises:
        CephaloError: If the job cannot be planned with the state on all ranks together, which
            needs the least memory.
    """
    together = planned(job, model, measure)
    if job.options.hybrid_sharding != "auto":
        return together
    together = replace(together, job=_settled(together.job, False))
    why = _why_not(together, model)
    if why is not None:
        return noted(together, f"{_TOGETHER}: {why}")
    grouped_job = replace(_settled(together.job, True), state_groups=groups_by_node(job.nodes))
    together_s = format_seconds(together.step_s)
    least_s = _least_step_s(together.problem, grouped_job.state_groups, model)
    if least_s is not None and least_s >= (1.0 - GAIN) * together.step_s:
        return noted(
            together,
            f"{_TOGETHER}: {together_s} a step, and with hybrid sharding"
            f" {format_seconds(least_s)} or more.",
        )
    before = model.fractions
    model.group_state(grouped_job.state_groups, _shares_of(grouped_job, model))
    # state is counted anew
    known = together.problem.with_late_update(together.problem.state_bytes)
    grouped = tried(grouped_job, model, partial(measure, known=known))
    if not isinstance(grouped, CephaloError) and grouped.step_s < (1.0 - GAIN) * together.step_s:
        return noted(
            replace(grouped, notes=together.notes),
            f"Each node holds the whole state (hybrid sharding): {format_seconds(grouped.step_s)} a"
            f" step, and {together_s} with all ranks together.",
        )
    model.group_state((), before)
    if isinstance(grouped, CephaloError):
        return noted(together, f"{_TOGETHER}. With hybrid sharding it fails: {summary(grouped)}")
    grouped_s = format_seconds(grouped.step_s)
    return noted(
        together, f"{_TOGETHER}: {together_s} a step, and {grouped_s} with hybrid sharding."
    )


def _settled(job: Job, is_hybrid: bool) -> Job:
    return replace(job, options=replace(job.options, hybrid_sharding=is_hybrid))


def _why_not(together: Planned, model: ShardedModel) -> str | None:
    """Return why hybrid sharding is no choice, as a sentence; None: it is one; collective."""
    job = together.job
    if len(job.nodes) == 1:
        return "there is one rank."
    if len(set(job.nodes)) == 1:
        return f"all {len(job.nodes)} ranks are on one node. {HOW_NODES_DIFFER}"
    if model.backend.runs_on_device:
        return "hybrid sharding adds up gradients over gloo only so far."
    if job.options.optimizer_offload is not False:
        return "optimizer_offload does not work with hybrid sharding so far."
    if not _has_room(job, model):
        return "a node has no room for the whole state."
    return None


def _has_room(job: Job, model: ShardedModel) -> bool:
    """Return whether every rank can hold its part of its node's parameters; collective."""
    grouped = replace(job, state_groups=groups_by_node(job.nodes))
    rank = model.control.rank
    needed = model.gathered_bytes + _held_bytes(model) * _shares_of(grouped, model)[rank]
    return model.control.all(needed < job.limits[rank].device.capacity_bytes)


def _shares_of(job: Job, model: ShardedModel) -> list[float]:
    return shares_by_memory(job, model.gathered_bytes, _held_bytes(model))


def _held_bytes(model: ShardedModel) -> int:
    return sum(flat.numel * flat.master_dtype.itemsize for flat in model.flats)


def _least_step_s(
    problem: Problem, state_groups: tuple[int, ...], model: ShardedModel
) -> float | None:
    """Return the seconds of a step with hybrid sharding if its transfers took no time; collective.

    None: no plan of it fits in what was counted for the other way.
    """
    free = replace(
        problem,
        hybrid_sharding=True,
        state_groups=state_groups,
        gather_s=0.0,
        reduce_s=0.0,
        gather_and_reduce_s=None,
        root_gather_s=0.0,
        root_reduce_s=0.0,
        last_gather_s=0.0,
        last_reduce_s=0.0,
        fill_s=0.0,
        even_gather_s=None,
        even_reduce_s=None,
        even_gather_and_reduce_s=None,
        padded_bytes=0.0,
        by_node=False,
    )

    def solved() -> Plan | None:
        return solve_if_possible(free) if model.control.rank == 0 else None

    plan = model.control.broadcast(model.control.together("solving for the plan", solved))
    return None if plan is None else plan.step_s
