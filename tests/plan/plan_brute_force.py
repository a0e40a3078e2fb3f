"""Every plan of a small problem, tried: what solve() must agree with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_cephalo.plan import Problem, RankProfile
from lightning_cephalo.plan.cost import (
    device_need,
    host_need,
    modes,
    rank_work,
    reducing_need,
    step_time,
    updating_need,
)

_NEEDS = (device_need, reducing_need, updating_need)


class Way(NamedTuple):
    """How a rank may take samples, computed once for all plans that it is part of."""

    microbatches: int
    left_bytes: tuple[float, ...]
    work: Sequence[float]


def partitions(total: int, sizes: list[int]) -> list[tuple[int, ...]]:
    """All multisets of ``sizes`` that sum to ``total``."""
    if total == 0:
        return [()]
    return [
        (size, *rest)
        for index, size in enumerate(sizes)
        if size <= total
        for rest in partitions(total - size, sizes[index:])
    ]


def ways_of(problem: Problem, profile: RankProfile) -> dict[int, list[Way]]:
    """By number of samples, every way in which a rank can take them within its capacities."""
    sizes = list(range(problem.minimum_microbatch_size, profile.largest_microbatch_size + 1))
    runs = [partitions(own, sizes) for own in range(problem.global_batch_size + 1)]
    ways: dict[int, list[Way]] = {own: [] for own in range(len(runs))}
    for mode in modes(problem, profile):
        needs = [need(problem, profile, mode) for need in _NEEDS]
        host = host_need(problem, profile, mode)
        for own, run in ((own, run) for own, some in enumerate(runs) for run in some):
            left = tuple(profile.capacity_bytes - need.of(run) for need in needs)
            if min(left) >= 0 and host.of(run) <= profile.host_capacity_bytes:
                ways[own].append(Way(len(run), left, rank_work(problem, profile, run, mode)))
    return ways


def holds(problem: Problem, left_bytes: list[tuple[float, ...]]) -> bool:
    """Whether ranks with so much left at each moment can share the state."""
    states, full = problem.state.totals_bytes, max(problem.state.totals_bytes)
    rooms = [
        min(own * (full / s) if s else math.inf for own, s in zip(left, states, strict=True))
        for left in left_bytes
    ]
    return all(math.fsum(rooms[rank] for rank in own) >= full for own in problem.members)


def least_step(problem: Problem) -> float | None:
    """The shortest step of any feasible plan, or None when there is none."""
    found = _least_step(problem)
    if found is None and problem.no_idle_ranks:
        return _least_step(replace(problem, no_idle_ranks=False))
    return found


def _least_step(problem: Problem) -> float | None:
    if problem.reshard_after_forward == "auto":
        choices = [_least_step(replace(problem, reshard_after_forward=c)) for c in (True, False)]
        return min((step for step in choices if step is not None), default=None)
    batch = problem.global_batch_size
    options = [ways_of(problem, profile) for profile in problem.ranks]
    best = None
    for split in itertools.product(range(batch + 1), repeat=len(options)):
        if sum(split) != batch or (problem.no_idle_ranks and 0 in split):
            continue
        for choice in itertools.product(
            *(own[part] for own, part in zip(options, split, strict=True))
        ):
            if problem.single_microbatch and any(way.microbatches != 1 for way in choice):
                continue
            left = [way.left_bytes for way in choice]
            slowest = [max(part) for part in zip(*(way.work for way in choice), strict=True)]
            steps = []
            if holds(problem, left):
                steps.append(step_time(problem, *slowest))
            shares = [s / len(left) + problem.padded_bytes for s in problem.state.totals_bytes]
            if not problem.groups and all(
                own >= share for pair in left for own, share in zip(pair, shares, strict=True)
            ):
                steps.append(step_time(problem.with_even_shares(), *slowest))
            best = min([*steps, *([] if best is None else [best])], default=None)
    return best
