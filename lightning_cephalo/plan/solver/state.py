"""Shares the training state among ranks in proportion to their free memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np

from lightning_cephalo.plan.cost import DEVICE_NEEDS, Mode, device_bytes
from lightning_cephalo.plan.plan import RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile


def kept_from_state(problem: Problem, capacity: float, *needed: Any) -> Any:
    """Return the part of a rank's capacity that no state can have.

    What is left, divided by ``Problem.state.most_bytes``, is the largest share that it can hold.
    """
    full, states = problem.state.most_bytes, problem.state.totals_bytes
    if problem.has_even_state or math.isinf(capacity) or min(states) == full:
        return reduce(np.maximum, needed)
    kept = []
    for state, amount in zip(states, needed, strict=True):
        stretched = capacity - (capacity - np.asarray(amount)) * (full / state if state else 1.0)
        if not state:
            stretched = np.where(np.asarray(amount) > capacity, amount, -np.inf)
        kept.append(amount if state == full else stretched)
    return reduce(np.maximum, kept)


def kept_by_runs(
    problem: Problem, runs: Sequence[RankPlan], capacity_bytes: Sequence[float]
) -> list[float]:
    """Return the same for what every rank runs, in rank order."""
    found = []
    for profile, run, capacity in zip(problem.ranks, runs, capacity_bytes, strict=True):
        needs = [need(problem, profile, Mode.of(run)) for need in DEVICE_NEEDS]
        needed = [need.of(run.microbatch_sizes) for need in needs]
        found.append(float(kept_from_state(problem, capacity, *needed)))
    return found


def with_state(
    problem: Problem, runs: Sequence[RankPlan], capacity_bytes: Sequence[float]
) -> list[RankPlan]:
    """Return what ranks run, each with its fraction of the state (:func:`share_state`)."""
    used = kept_by_runs(problem, runs, capacity_bytes)
    fractions = [0.0] * len(used)
    for members in problem.members:
        own_used, own_capacity = (
            [each[rank] for rank in members] for each in (used, capacity_bytes)
        )
        shares = share_state(problem.state.most_bytes, own_used, own_capacity)
        for rank, share in zip(members, shares, strict=True):
            fractions[rank] = share
    return [
        replace(run, state_fraction=to_the_byte(problem, profile, run, fraction, capacity))
        for profile, run, fraction, capacity in zip(
            problem.ranks, runs, fractions, capacity_bytes, strict=True
        )
    ]


def filled_up(shares: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Return shares that sum to 1: ranks get what is missing by the room that they have left."""
    left = [max(limit - share, 0.0) for share, limit in zip(shares, limits, strict=True)]
    missing, total = 1.0 - math.fsum(shares), math.fsum(left)
    part = min(1.0, missing / total) if missing > 0 and total > 0 else 0.0
    return [share + part * room for share, room in zip(shares, left, strict=True)]


def to_the_byte(
    problem: Problem,
    profile: RankProfile,
    run: RankPlan,
    fraction: float,
    capacity: float,
    moved_bytes: float = 0.0,
) -> float:
    """Return the fraction, less what rounding has added to it."""

    def excess_bytes(share: float) -> float:
        sizes, mode = run.microbatch_sizes, Mode.of(run)
        return device_bytes(problem, profile, sizes, mode, share, moved_bytes) - capacity

    return _less_rounding(fraction, problem.state.most_bytes, excess_bytes)


def share_state(
    state_bytes: float, used_bytes: Sequence[float], capacity_bytes: Sequence[float]
) -> tuple[float, ...]:
    """Return the state fraction of each rank, from its other memory use and its capacity.

    Every rank gives the same part of its free memory to state: headroom shrinks equally, and a
    small state still spreads over all ranks. (If ranks filled to one level, the one with the most
    room would hold it all, and every gather would be a broadcast.) Ranks without a limit share all
    of the state evenly. No rank exceeds its capacity, even by rounding.

    The caller ensures that the state fits: ``sum(capacity - used) >= state_bytes``, and no rank
    uses more than its own capacity.
    """
    ranks = len(used_bytes)
    unlimited = [math.isinf(capacity) for capacity in capacity_bytes]
    if any(unlimited) and state_bytes:
        return tuple(each / sum(unlimited) for each in unlimited)
    pairs = list(zip(used_bytes, capacity_bytes, strict=True))
    free = np.array([max(capacity - used, 0.0) for used, capacity in pairs])
    total = float(free.sum())
    if state_bytes == 0 or total == 0:
        return (1.0 / ranks,) * ranks
    shares = np.minimum(free / total, 1.0).tolist()
    return tuple(
        _less_rounding(share, state_bytes, partial(_excess_bytes, state_bytes, *pair))
        for share, pair in zip(shares, pairs, strict=True)
    )


def _excess_bytes(state_bytes: float, used: float, capacity: float, share: float) -> float:
    return share * state_bytes + used - capacity


def _less_rounding(
    share: float, state_bytes: float, excess_bytes: Callable[[float], float]
) -> float:
    """Return a share of the state, less what rounding has added to it."""
    for _ in range(64):
        excess = excess_bytes(share)
        if excess <= 0 or not share:
            break
        share = max(0.0, min(math.nextafter(share, 0.0), share - excess / state_bytes))
    return share
