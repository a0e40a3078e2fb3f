"""Plans anew for a rank that ran out of memory. Pure.

A rank that runs out needs more than its profile says, by an unknown amount. So it is planned with
four fifths of what it held, or of what its plan predicted if that is less. Batches that are loaded
already keep their sizes: ``solve(problem, batches=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_cephalo.plan.cost import predict
from lightning_cephalo.plan.plan import Plan
from lightning_cephalo.plan.problem import Problem

_ROOM = 0.8


def lower_capacity(planned_bytes: float, capacity_bytes: float) -> float:
    """Return the bytes that a rank may use in another plan, as that of before has not sufficed."""
    return _ROOM * min(planned_bytes, capacity_bytes)


def with_less_memory(problem: Problem, plan: Plan, held_bytes: Sequence[float | None]) -> Problem:
    """Return a problem in which ranks that ran out of memory may use less.

    ``held_bytes`` has what each of them held at most, infinite if unknown; None for the others.
    """
    predicted = predict(problem, plan).ranks
    ranks = []
    for profile, rank, held in zip(problem.ranks, predicted, held_bytes, strict=True):
        if held is not None:
            held = lower_capacity(min(held, rank.memory_bytes), profile.capacity_bytes)
            profile = replace(profile, capacity_bytes=held)
        ranks.append(profile)
    return replace(problem, ranks=tuple(ranks))
