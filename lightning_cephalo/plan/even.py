"""Plans with given batches and even shares of the state, as plain sharding has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_cephalo.plan.plan import Plan
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.solve import priced, solve_if_possible


def even_batches(problem: Problem) -> list[int]:
    """Deal the global batch evenly; the first ranks get one remaining sample each."""
    each, rest = divmod(problem.global_batch_size, len(problem.ranks))
    return [each + (rank < rest) for rank in range(len(problem.ranks))]


def with_even_state(problem: Problem) -> Problem:
    """Return the problem with even shares of the state, whose updates leave nothing to choose."""
    return replace(
        problem,
        has_even_state=True,
        no_idle_ranks=False,
        optimizer_offload=False,
        unit_parameters=(),
        moment_bytes=0.0,
    )


def even_state_plan(
    problem: Problem, batches: Sequence[int], *, backend: str = "", time_limit_s: float = 60.0
) -> Plan | None:
    """Return the fastest plan with these batches and even shares of the state; None: no room.

    With hybrid sharding, shares are even in each group. SolverError: none was found in time.
    """
    even = with_even_state(problem)
    plan = solve_if_possible(even, batches=batches, time_limit_s=time_limit_s)
    if plan is None:
        return None
    chosen = problem.resharding(plan.reshard_after_forward is True)
    found = priced(chosen, plan.ranks, backend=backend, padded=plan.padded)
    return replace(found, solve_s=plan.solve_s)
