"""Every plan of a small problem, tried: what solve() must agree with."""

from __future__ import annotations

import itertools
import math

from lightning_cephalo.plan import Problem, RankProfile
from lightning_cephalo.plan.cost import rank_work, step_time, working_bytes


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
    batch = problem.global_batch_size

    def runs(profile: RankProfile) -> dict[int, list[tuple[int, ...]]]:
        sizes = list(range(problem.minimum_microbatch_size, profile.largest_microbatch_size + 1))
        return {
            own: [
                run
                for run in partitions(own, sizes)
                if working_bytes(problem, profile, run) <= profile.capacity_bytes
            ]
            for own in range(batch + 1)
        }

    options = [runs(profile) for profile in problem.ranks]
    best = None
    for split in itertools.product(range(batch + 1), repeat=len(options)):
        if sum(split) != batch:
            continue
        for choice in itertools.product(
            *(own[part] for own, part in zip(options, split, strict=True))
        ):
            if problem.equal_microbatches and len({len(run) for run in choice}) > 1:
                continue
            room = math.fsum(
                profile.capacity_bytes - working_bytes(problem, profile, run)
                for profile, run in zip(problem.ranks, choice, strict=True)
            )
            if room < problem.state_bytes:
                continue
            work = [
                rank_work(profile, run) for profile, run in zip(problem.ranks, choice, strict=True)
            ]
            step = step_time(problem, *(max(part) for part in zip(*work, strict=True)))
            best = step if best is None else min(best, step)
    return best
