"""Turns an allocation into a checked plan: the last step of every baseline."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from lightning_cephalo.common.errors import InfeasibleError
from lightning_cephalo.common.quantities import format_gib
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.solve import priced

# Rounding can push an even share slightly over the capacity of a full rank.
_ROUNDING = 1 + 1e-9


def checked_plan(
    problem: Problem, ranks: Sequence[RankPlan], *, backend: str, started_s: float
) -> Plan:
    """Return the plan of this allocation with every prediction filled in.

    Args:
        problem: the problem that the allocation is for.
        ranks: microbatch sizes, state fraction and mode of every rank, in rank order.
        backend: name of the planner that chose the allocation.
        started_s: ``time.perf_counter()`` when choosing began.

    Raises:
        InfeasibleError: a rank would exceed its device or host memory, or ranks run different
            numbers of microbatches although the problem requires equal ones.
    """
    plan = dataclasses.replace(
        priced(problem, ranks, backend=backend), solve_s=time.perf_counter() - started_s
    )
    counts = {len(rank.microbatch_sizes) for rank in ranks}
    if problem.equal_microbatches and len(counts) > 1:
        raise InfeasibleError(
            f"{backend}: equal_microbatches=True wants as many microbatches on every rank, but it "
            f"chooses {sorted(counts)}. Let solve() choose."
        )
    for index, (rank, profile) in enumerate(zip(plan.ranks, problem.ranks, strict=True)):
        for kind, needed, capacity in (
            ("", rank.memory_bytes or 0.0, profile.capacity_bytes),
            ("host ", rank.host_bytes or 0.0, profile.host_capacity_bytes),
        ):
            if needed > capacity * _ROUNDING:
                raise InfeasibleError(
                    f"{backend}: rank {index} ({profile.name!r}) would hold "
                    f"{format_gib(needed)} of {kind}memory, but its capacity is "
                    f"{format_gib(capacity)}. Let solve() choose batches and state."
                )
    return plan
