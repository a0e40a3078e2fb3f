"""Baselines: allocations that users would choose without a planner.

The cost function that prices :func:`~lightning_cephalo.plan.solve` prices them, too. Each rank runs
near-equal microbatches in its fastest mode that fits. InfeasibleError: the allocation does not fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lightning_cephalo.common.errors import InfeasibleError
from lightning_cephalo.common.quantities import format_gib
from lightning_cephalo.plan.cost import predict
from lightning_cephalo.plan.even import (
    all_runs,
    equal_counts,
    even_batches,
    fastest_run,
    run_bytes,
    run_seconds,
)
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.solve import priced
from lightning_cephalo.plan.state_groups import even_shares

_NO_TIME_S = 1e-12
# Rounding can push an even share slightly over the capacity of a full rank.
_ROUNDING = 1 + 1e-9

Baseline = Callable[[Problem], Plan]


def even(problem: Problem) -> Plan:
    """Split batch and state evenly, as FSDP does, in the fastest equal number of microbatches."""
    return _fastest(problem, "even batch, even state", even_batches, equal_counts)


def proportional(problem: Problem) -> Plan:
    """Split the batch by speed and the state evenly, as Whale and Poplar do.

    A rank's speed is its highest rate in samples per second beside an even share of the state.
    """
    counts = [1] if problem.single_microbatch else None

    def fastest_of_each_rank(
        problem: Problem, batches: list[int], limits: list[float]
    ) -> list[list[RankPlan]]:
        runs = all_runs(problem, batches, limits, counts)
        return [] if runs is None else [runs]

    backend = "batch by speed, even state"
    return _fastest(problem, backend, _batches_by_speed, fastest_of_each_rank)


def _fastest(
    problem: Problem,
    backend: str,
    deal: Callable[[Problem], list[int]],
    runs_of: Callable[[Problem, list[int], list[float]], Iterable[list[RankPlan]]],
) -> Plan:
    """Return the fastest plan of these runs with even state, resharding or not."""
    started = time.perf_counter()
    limits = [profile.capacity_bytes for profile in problem.ranks]
    shares = even_shares(problem.active_groups, len(problem.ranks))
    plans: list[Plan] = []
    refusals = []
    for choice in problem.reshard_choices:
        chosen = replace(problem, has_even_state=True).resharding(choice)
        batches = deal(chosen)
        found = [
            [replace(run, state_fraction=share) for run, share in zip(runs, shares, strict=True)]
            for runs in runs_of(chosen, batches, limits)
        ]
        try:
            if not found:
                raise InfeasibleError(f"{backend}: {_why_none(chosen, batches)}")
            times_s = [predict(chosen, ranks).step_s for ranks in found]
            best = found[times_s.index(min(times_s))]
            plans.append(checked_plan(chosen, best, backend=backend, started_s=started))
        except InfeasibleError as error:
            refusals.append(error)
    if not plans:
        raise refusals[0]
    return min(plans, key=lambda plan: plan.step_s or 0.0)


def checked_plan(
    problem: Problem, ranks: Sequence[RankPlan], *, backend: str, started_s: float
) -> Plan:
    """Return the plan of this allocation with every prediction filled in."""
    plan = replace(priced(problem, ranks, backend=backend), solve_s=time.perf_counter() - started_s)
    counts = {len(rank.microbatch_sizes) for rank in ranks}
    if problem.single_microbatch and counts != {1}:
        raise InfeasibleError(
            f"{backend}: every rank runs one microbatch (single_microbatch: True), but it chooses "
            f"{sorted(counts)}. Let solve() choose."
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


def _batches_by_speed(problem: Problem) -> list[int]:
    """Deal the batch in proportion to speeds, in whole samples, by largest remainder."""
    speeds = [_speed(problem, profile) for profile in problem.ranks]
    # where no rank can take a sample, the check of the runs says why
    speeds = speeds if any(speeds) else [1.0] * len(speeds)
    total, batch = sum(speeds), problem.global_batch_size
    exact = [batch * speed / total for speed in speeds]
    dealt = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: dealt[index] - exact[index])
    for index in by_remainder[: batch - sum(dealt)]:
        dealt[index] += 1
    return dealt


def _speed(problem: Problem, profile: RankProfile) -> float:
    """Return the highest samples per second of any single microbatch that fits."""
    sizes = range(problem.minimum_microbatch_size, profile.largest_microbatch_size + 1)
    runs = (fastest_run(problem, profile, size, [1], profile.capacity_bytes) for size in sizes)
    rates = (
        run.batch_size / max(run_seconds(problem, profile, run), _NO_TIME_S) for run in runs if run
    )
    return max(rates, default=0.0)


def _why_none(problem: Problem, batches: Sequence[int]) -> str:
    """Name the rank that cannot run its batch, or say that the state does not fit."""
    for index, (profile, batch) in enumerate(zip(problem.ranks, batches, strict=True)):
        counts, limit = range(1, batch + 1), profile.capacity_bytes
        if fastest_run(problem, profile, batch, counts, limit) is not None:
            continue
        leanest = fastest_run(problem, profile, batch, counts, float("inf"), lean=True)
        if leanest is None:
            needs = f"was profiled for no microbatch size that cuts {batch} samples"
        else:
            needs = f"needs {format_gib(run_bytes(problem, profile, leanest))} for {batch} samples"
        return (
            f"rank {index} ({profile.name!r}) {needs}, and has {format_gib(max(limit, 0.0))} "
            f"next to its share of the state. Let solve() choose batches and state."
        )
    return (
        f"no number of microbatches fits all {len(batches)} ranks next to the state of "
        f"{format_gib(problem.full_state_bytes)}. Let solve() choose batches and state."
    )


# Keys are the names that a comparison shows.
BASELINES: dict[str, Baseline] = {
    "even batch, even state (FSDP)": even,
    "batch by speed, even state (Whale, Poplar)": proportional,
}
