"""Splits the work evenly, as plain sharding does: what a plan is compared with.

Batches and state are even. Each rank runs its microbatches in its fastest mode that fits, and its
batch is cut into near-equal microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_cephalo.plan.cost import (
    Mode,
    device_bytes,
    host_need,
    modes,
    predict,
    rank_plan,
    rank_work,
    work_s,
)
from lightning_cephalo.plan.plan import RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.columns import group_types
from lightning_cephalo.plan.state_groups import even_shares

_COUNTS = 8


def even_split(samples: int, parts: int) -> tuple[int, ...]:
    """Return nearly equal parts, the larger ones first."""
    each, rest = divmod(samples, parts)
    return (each + 1,) * rest + (each,) * (parts - rest)


def even_batches(problem: Problem) -> list[int]:
    """Deal the global batch evenly; the first ranks get one remaining sample each."""
    return list(even_split(problem.global_batch_size, len(problem.ranks)))


def equal_counts(
    problem: Problem, batches: Sequence[int], limits: Sequence[float]
) -> Iterator[list[RankPlan]]:
    """Yield what each rank runs, for every count that all ranks with samples can run."""
    for count in range(1, min((batch for batch in batches if batch), default=0) + 1):
        runs = all_runs(problem, batches, limits, [count])
        if runs is not None:
            yield runs


def all_runs(
    problem: Problem,
    batches: Sequence[int],
    limits: Sequence[float],
    counts: Sequence[int] | None = None,
) -> list[RankPlan] | None:
    """Return what each rank runs, or None if a rank cannot run; ``counts`` None: any count."""
    found: list[RankPlan | None] = [None] * len(batches)
    for kind in group_types(problem):
        known: dict[int, RankPlan | None] = {}
        for index in kind.members:
            batch = batches[index]
            if batch not in known:
                tried = counts or range(1, batch + 1)
                known[batch] = fastest_run(problem, kind.profile, batch, tried, limits[index])
            found[index] = known[batch]
    runs = [run for run in found if run is not None]
    return runs if len(runs) == len(batches) else None


def fastest_run(
    problem: Problem,
    profile: RankProfile,
    batch: int,
    counts: Iterable[int],
    limit_bytes: float,
    *,
    lean: bool = False,
) -> RankPlan | None:
    """Return the fastest way for one rank to run its batch within ``limit_bytes``, without state.

    With ``lean``, the way that needs the least memory. None if there is none.
    """
    if not batch:
        idle = RankPlan((), 0.0)
        return idle if run_bytes(problem, profile, idle) <= limit_bytes else None
    usable = []
    for count in counts:
        sizes = even_split(batch, count)
        if (
            sizes[-1] < problem.minimum_microbatch_size
            or sizes[0] > profile.largest_microbatch_size
        ):
            continue
        for mode in modes(problem, profile):
            run = rank_plan(profile, sizes, mode)
            on_host = host_need(problem, profile, mode).of(sizes)
            # written so that it also holds if both sides are infinite
            if not on_host > profile.host_capacity_bytes and (
                run_bytes(problem, profile, run) <= limit_bytes
            ):
                usable.append(run)
    cost = run_bytes if lean else run_seconds
    return min(usable, key=lambda run: cost(problem, profile, run), default=None)


def run_seconds(problem: Problem, profile: RankProfile, run: RankPlan) -> float:
    """Return the seconds of a step if this rank were alone and collectives took no time."""
    return work_s(problem, *rank_work(problem, profile, run.microbatch_sizes, Mode.of(run)))


def run_bytes(problem: Problem, profile: RankProfile, run: RankPlan) -> float:
    """Return the bytes that a rank needs for a run, without its state."""
    return device_bytes(problem, profile, run.microbatch_sizes, Mode.of(run))


def even_step_s(problem: Problem) -> float | None:
    """Return the predicted seconds of a step with even batches and even state, as under FSDP.

    With hybrid sharding that is HSDP: even state in each group.

    None if that does not fit every rank. The best number of microbatches is nearly always the
    least that fits, so only the first few that fit are tried.
    """
    batches, shares = even_batches(problem), even_shares(problem.active_groups, len(problem.ranks))
    found = []
    for choice in problem.reshard_choices:
        chosen = replace(problem.resharding(choice), has_even_state=True)
        runs = equal_counts(chosen, batches, [rank.capacity_bytes for rank in chosen.ranks])
        for ranks in itertools.islice(runs, _COUNTS):
            even = [
                replace(rank, state_fraction=share)
                for rank, share in zip(ranks, shares, strict=True)
            ]
            found.append(predict(chosen, even).step_s)
    return min(found, default=None)
