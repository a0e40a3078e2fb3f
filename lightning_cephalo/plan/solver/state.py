"""Shares the training state among ranks in proportion to their free memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_cephalo.plan.cost import DEVICE_NEEDS, Mode, device_bytes
from lightning_cephalo.plan.plan import RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.updates import shortest_update_s


def kept_from_state(problem: Problem, capacity: float, *needed: Any) -> Any:
    """Return the part of a rank's capacity that no state can have.

    It is counted in bytes of ``Problem.full_state_bytes``: what is left of the capacity, divided
    by those, is the largest share of the state that the rank can hold. Each moment of a step limits
    it.
    """
    full, states = problem.full_state_bytes, problem.states_bytes
    if problem.has_even_state or math.isinf(capacity) or min(states) == full:
        return functools.reduce(np.maximum, needed)
    kept = []
    for state, amount in zip(states, needed, strict=True):
        stretched = capacity - (capacity - np.asarray(amount)) * (full / state if state else 1.0)
        if not state:
            stretched = np.where(np.asarray(amount) > capacity, amount, -np.inf)
        kept.append(amount if state == full else stretched)
    return functools.reduce(np.maximum, kept)


def kept_by_runs(
    problem: Problem, runs: Sequence[RankPlan], capacity_bytes: Sequence[float]
) -> list[float]:
    """Return the same for what every rank runs, in rank order.

    The state fits if the capacities less these bytes sum to ``Problem.full_state_bytes``.
    """
    found = []
    for profile, run, capacity in zip(problem.ranks, runs, capacity_bytes, strict=True):
        needs = [need(problem, profile, Mode.of(run)) for need in DEVICE_NEEDS]
        needed = [need.of(run.microbatch_sizes) for need in needs]
        found.append(float(kept_from_state(problem, capacity, *needed)))
    return found


def with_state(
    problem: Problem,
    runs: Sequence[RankPlan],
    capacity_bytes: Sequence[float],
    update_s: float = math.inf,
) -> list[RankPlan]:
    """Return what ranks run, each with its fraction of the state.

    See :func:`share_state`, whose conditions the caller ensures.

    Args:
        problem: ranks and work of the step.
        runs: what each rank runs.
        capacity_bytes: the bytes that each rank may hold.
        update_s: the most that a rank's updates may take (``plan/updates.py``), no less than
            :func:`quickest_update_s`.
    """
    used = kept_by_runs(problem, runs, capacity_bytes)
    fractions = [0.0] * len(used)
    for members in problem.groups:
        shares = share_state(
            problem.full_state_bytes,
            [used[rank] for rank in members],
            [capacity_bytes[rank] for rank in members],
        )
        if math.isfinite(update_s):
            rooms = [_room(problem, used[rank], capacity_bytes[rank]) for rank in members]
            rates = [problem.ranks[rank].updated_parameters_per_s for rank in members]
            most = [update_s * r / problem.parameters if math.isfinite(r) else 1.0 for r in rates]
            shares = _limited(shares, rooms, most)
        for rank, share in zip(members, shares, strict=True):
            fractions[rank] = share
    return [
        replace(run, state_fraction=to_the_byte(problem, profile, run, fraction, capacity))
        for profile, run, fraction, capacity in zip(
            problem.ranks, runs, fractions, capacity_bytes, strict=True
        )
    ]


def quickest_update_s(
    problem: Problem, runs: Sequence[RankPlan], capacity_bytes: Sequence[float]
) -> float:
    """Return the least time of the slowest rank's updates, by shares that have room."""
    used = kept_by_runs(problem, runs, capacity_bytes)
    rooms = [_room(problem, *pair) for pair in zip(used, capacity_bytes, strict=True)]
    return max(
        shortest_update_s(problem, members, [rooms[rank] for rank in members])
        for members in problem.groups
    )


def _room(problem: Problem, used: float, capacity: float) -> float:
    """Return the largest share of the state that a rank can hold, 1 at most."""
    full = problem.full_state_bytes
    if not full or math.isinf(capacity):
        return 1.0
    return min(1.0, max(0.0, (capacity - used) / full))


def _limited(
    shares: Sequence[float], rooms: Sequence[float], most: Sequence[float]
) -> tuple[float, ...]:
    """Return shares of at most so much; others take the rest, by the room that they have left."""
    found = np.minimum(shares, most)
    left = np.maximum(np.minimum(rooms, most) - found, 0.0)
    missing, total = 1.0 - float(found.sum()), float(left.sum())
    if missing > 0 and total > 0:
        found = found + left * min(1.0, missing / total)
    return tuple(found.tolist())


def to_the_byte(
    problem: Problem,
    profile: RankProfile,
    run: RankPlan,
    fraction: float,
    capacity: float,
    moved_bytes: float = 0.0,
) -> float:
    """Return the fraction, less what rounding has added to it."""
    mode = Mode.of(run)
    for _ in range(64):
        held = device_bytes(problem, profile, run.microbatch_sizes, mode, fraction, moved_bytes)
        if held <= capacity or not fraction:
            break
        less = fraction - (held - capacity) / problem.full_state_bytes
        fraction = max(0.0, min(math.nextafter(fraction, 0.0), less))
    return fraction


def share_state(
    state_bytes: float, used_bytes: Sequence[float], capacity_bytes: Sequence[float]
) -> tuple[float, ...]:
    """Return the state fraction of each rank, from its other memory use and its capacity.

    Every rank gives the same part of its free memory to state. So a state that fits in total fits
    on each rank, and headroom shrinks equally on all ranks. A state that is small compared with the
    memory still spreads over all ranks. (Filling all ranks to one level would put such a state on
    the one rank with the most room, which makes every gather a broadcast.) Ranks without a limit
    share all of the state evenly.

    No rank exceeds its capacity, even by rounding, so the fractions may sum to 1 within rounding
    only.

    The caller ensures that the state fits: ``sum(capacity - used) >= state_bytes``, and no rank
    uses more than its own capacity.
    """
    used = np.asarray(used_bytes, dtype=float)
    capacity = np.asarray(capacity_bytes, dtype=float)
    ranks = len(used)
    if state_bytes == 0:
        return (1.0 / ranks,) * ranks
    unlimited = np.isinf(capacity)
    if unlimited.any():
        return tuple((unlimited / unlimited.sum()).tolist())
    free = np.maximum(capacity - used, 0.0)
    total = float(free.sum())
    if total == 0:
        return (1.0 / ranks,) * ranks
    fractions = (free / total).tolist()
    return tuple(
        _within(fraction, state_bytes, rank_used, limit)
        for fraction, rank_used, limit in zip(
            fractions, used.tolist(), capacity.tolist(), strict=True
        )
    )


def _within(fraction: float, state_bytes: float, used: float, capacity: float) -> float:
    fraction = min(fraction, 1.0)
    for _ in range(64):
        excess = fraction * state_bytes + used - capacity
        if excess <= 0:
            return fraction
        fraction = max(0.0, min(math.nextafter(fraction, 0.0), fraction - excess / state_bytes))
    return 0.0
