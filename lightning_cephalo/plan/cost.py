"""Step time and memory of a given allocation: the one source of truth for solver, report and
simulator.

A gather is a rendezvous: every rank waits there for the slowest. So per unit and pass the slowest
rank counts, and forward, backward and tail each have their own slowest (DESIGN, "Step time")::

    T = U * (max(G, max_i F_i) + max(G + R, max_i B_i)) + max_i tail_i + optimizer + overhead

with F_i, B_i, tail_i the sums over rank i's microbatches. A rank holds its share of the state, the
gathered buffers, the peak of its largest microbatch, and one boundary per unit for every sample of
its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import PlanError
from .plan import RankPlan
from .problem import Problem, RankProfile


@dataclass(frozen=True)
class RankPrediction:
    """What one rank does in a step: seconds per unit (tail: per step) over its microbatches, and
    its peak bytes.
    """

    forward_s: float
    backward_s: float
    tail_s: float
    memory_bytes: float


@dataclass(frozen=True)
class StepPrediction:
    """The whole step in seconds, and every rank's part in rank order."""

    step_s: float
    ranks: tuple[RankPrediction, ...]


def predict(problem: Problem, ranks: Sequence[RankPlan]) -> StepPrediction:
    """Predict one step of an allocation. Batch, capacity and fractions are not judged here, only
    priced.

    Args:
        problem: what there is.
        ranks: one :class:`RankPlan` per rank of the problem, in rank order; ``plan.ranks`` will do.

    Raises:
        PlanError: another number of ranks, or a microbatch size that was not profiled.
    """
    if len(ranks) != len(problem.ranks):
        raise PlanError(
            f"Expected one rank plan for each of the problem's {len(problem.ranks)} ranks, "
            f"but got {len(ranks)}."
        )
    predictions = []
    for index, (profile, rank) in enumerate(zip(problem.ranks, ranks, strict=True)):
        for size in rank.microbatch_sizes:
            if size > profile.largest_microbatch_size:
                raise PlanError(
                    f"rank {index} ({profile.name!r}): microbatch size {size} was not profiled, "
                    f"the largest is {profile.largest_microbatch_size}. "
                    f"Use smaller microbatches or profile larger ones."
                )
        work = rank_work(profile, rank.microbatch_sizes)
        held = rank.state_fraction * problem.state_bytes
        memory = held + working_bytes(problem, profile, rank.microbatch_sizes)
        predictions.append(RankPrediction(*work, memory_bytes=memory))
    step_s = step_time(
        problem,
        max(rank.forward_s for rank in predictions),
        max(rank.backward_s for rank in predictions),
        max(rank.tail_s for rank in predictions),
    )
    return StepPrediction(step_s=step_s, ranks=tuple(predictions))


def step_time(problem: Problem, forward_s: float, backward_s: float, tail_s: float) -> float:
    """Seconds of a step whose slowest rank needs ``forward_s`` and ``backward_s`` per unit and
    ``tail_s`` once.
    """
    forward = max(problem.gather_s, forward_s)
    backward = max(problem.gather_s + problem.reduce_s, backward_s)
    beside = problem.optimizer_s + problem.step_overhead_s
    return problem.units * (forward + backward) + tail_s + beside


def rank_work(profile: RankProfile, microbatch_sizes: Sequence[int]) -> tuple[float, float, float]:
    """Seconds of one unit's forward and backward, and of the tail, over all microbatches."""
    forward, backward, tail = (
        # fsum is exact, so that the order of the microbatches cannot change a figure.
        math.fsum(curve[size - 1] for size in microbatch_sizes)
        for curve in (profile.forward_s, profile.backward_s, profile.tail_s)
    )
    return forward, backward, tail


def working_bytes(problem: Problem, profile: RankProfile, microbatch_sizes: Sequence[int]) -> float:
    """Bytes of a rank beside its share of the state."""
    peak = max((profile.compute_bytes[size - 1] for size in microbatch_sizes), default=0.0)
    boundaries = problem.boundary_bytes * problem.units * sum(microbatch_sizes)
    return problem.gathered_bytes + peak + boundaries
