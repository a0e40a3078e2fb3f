"""Every plan of a small problem, tried: what solve() must agree with."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from lightning_cephalo.plan import Problem, RankProfile
from lightning_cephalo.plan.cost import (
    Mode,
    device_need,
    host_need,
    modes,
    rank_work,
    step_time,
)

Way = tuple[tuple[int, ...], Mode]


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


def least_step(problem: Problem) -> float | None:
    """The shortest step of any feasible plan, or None when there is none."""
    if problem.reshard_after_forward == "auto":
        choices = [least_step(replace(problem, reshard_after_forward=c)) for c in (True, False)]
        return min((step for step in choices if step is not None), default=None)
    batch = problem.global_batch_size

    def ways(profile: RankProfile) -> dict[int, list[Way]]:
        sizes = list(range(problem.minimum_microbatch_size, profile.largest_microbatch_size + 1))
        return {
            own: [
                (run, mode)
                for run in partitions(own, sizes)
                for mode in modes(problem, profile)
                if device_need(problem, profile, mode).of(run) <= profile.capacity_bytes
                and host_need(problem, profile, mode).of(run) <= profile.host_capacity_bytes
            ]
            for own in range(batch + 1)
        }

    options = [ways(profile) for profile in problem.ranks]
    best = None
    for split in itertools.product(range(batch + 1), repeat=len(options)):
        if sum(split) != batch:
            continue
        for choice in itertools.product(
            *(own[part] for own, part in zip(options, split, strict=True))
        ):
            if problem.equal_microbatches and len({len(run) for run, _ in choice}) > 1:
                continue
            left = [
                profile.capacity_bytes - device_need(problem, profile, mode).of(run)
                for profile, (run, mode) in zip(problem.ranks, choice, strict=True)
            ]
            work = [
                rank_work(problem, profile, run, mode)
                for profile, (run, mode) in zip(problem.ranks, choice, strict=True)
            ]
            slowest = [max(part) for part in zip(*work, strict=True)]
            steps = []
            if math.fsum(left) >= problem.state_bytes:
                steps.append(step_time(problem, *slowest))
            if min(left) >= problem.state_bytes / len(left) + problem.padded_bytes:
                steps.append(step_time(problem.with_even_shares(), *slowest))
            best = min([*steps, *([] if best is None else [best])], default=None)
    return best
