"""Baselines: allocations that users would choose without a planner.

The cost function that prices :func:`~lightning_cephalo.plan.solve` prices them, too. Each rank runs
near-equal microbatches in its fastest mode that fits. InfeasibleError: the allocation does not fit.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

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
from lightning_cephalo.plan.solver.state import kept_by_runs, with_state
from lightning_cephalo.plan.state_groups import even_shares

_NO_TIME_S = 1e-12
# Rounding can push an even share slightly over the capacity of a full rank.
_ROUNDING = 1 + 1e-9

Baseline = Callable[[Problem], Plan]


def _either_way(baseline: Baseline) -> Baseline:
    """Run a baseline once per resharding choice of the problem, and keep its fastest plan."""

    @functools.wraps(baseline)
    def chosen(problem: Problem) -> Plan:
        default, *others = problem.reshard_choices
        best = baseline(problem.resharding(default))
        for choice in others:
            try:
                plan = baseline(problem.resharding(choice))
            except InfeasibleError:
                continue
            assert plan.step_s is not None and best.step_s is not None
            best = plan if plan.step_s < best.step_s else best
        return best

    return chosen


@_either_way
def even(problem: Problem) -> Plan:
    """Split batch and state evenly, as FSDP does, in the fastest equal number of microbatches."""
    started = time.perf_counter()
    problem = replace(problem, has_even_state=True)
    batches, limits = even_batches(problem), [rank.capacity_bytes for rank in problem.ranks]
    found = [_with_even_state(problem, runs) for runs in equal_counts(problem, batches, limits)]
    return _fastest(problem, found, batches, limits, "even batch, even state", started)


def _with_even_state(problem: Problem, runs: Sequence[RankPlan]) -> list[RankPlan]:
    shares = even_shares(problem.active_groups, len(runs))
    return [replace(run, state_fraction=share) for run, share in zip(runs, shares, strict=True)]


@_either_way
def proportional(problem: Problem) -> Plan:
    """Split the batch by speed and the state evenly, as Whale and Poplar do.

    A rank's speed is its highest rate in samples per second beside an even share of the state.
    """
    started = time.perf_counter()
    problem = replace(problem, has_even_state=True)
    limits = [rank.capacity_bytes for rank in problem.ranks]
    speeds = [
        _speed(problem, profile, limit)
        for profile, limit in zip(problem.ranks, limits, strict=True)
    ]
    batches = _dealt(problem.global_batch_size, speeds)
    counts = [1] if problem.single_microbatch else None
    runs = all_runs(problem, batches, limits, counts)
    found = [] if runs is None else [_with_even_state(problem, runs)]
    return _fastest(problem, found, batches, limits, "batch by speed, even state", started)


@_either_way
def state_by_memory(problem: Problem) -> Plan:
    """Split the batch evenly and the state by free memory; otherwise as :func:`even`."""
    started = time.perf_counter()
    batches = even_batches(problem)
    limits = [profile.capacity_bytes for profile in problem.ranks]
    found = []
    # the fastest modes may leave too little room for the state
    for lean in (False, True):
        for runs in equal_counts(problem, batches, limits, lean=lean):
            used = kept_by_runs(problem, runs, limits)
            left = [limit - own for limit, own in zip(limits, used, strict=True)]
            if all(
                sum(left[rank] for rank in members) >= problem.full_state_bytes
                for members in problem.groups
            ):
                found.append(with_state(problem, runs, limits))
    return _fastest(problem, found, batches, limits, "even batch, state by memory", started)


def _fastest(
    problem: Problem,
    found: Sequence[list[RankPlan]],
    batches: Sequence[int],
    limits: Sequence[float],
    backend: str,
    started_s: float,
) -> Plan:
    if not found:
        raise InfeasibleError(f"{backend}: {_why_none(problem, batches, limits)}")
    best = min(found, key=lambda ranks: predict(problem, ranks).step_s)
    return checked_plan(problem, best, backend=backend, started_s=started_s)


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


def _speed(problem: Problem, profile: RankProfile, limit_bytes: float) -> float:
    """Return the highest samples per second of any single microbatch that fits."""
    sizes = range(problem.minimum_microbatch_size, profile.largest_microbatch_size + 1)
    runs = (fastest_run(problem, profile, size, [1], limit_bytes) for size in sizes)
    return max(
        (
            run.batch_size / max(run_seconds(problem, profile, run), _NO_TIME_S)
            for run in runs
            if run
        ),
        default=0.0,
    )


def _dealt(batch: int, speeds: Sequence[float]) -> list[int]:
    """Deal the batch in proportion to ``speeds``, in whole samples, by largest remainder."""
    total = sum(speeds)
    if not total:
        # no rank can take a sample: the check of the runs says why
        speeds, total = [1.0] * len(speeds), float(len(speeds))
    exact = [batch * speed / total for speed in speeds]
    dealt = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: dealt[index] - exact[index])
    for index in by_remainder[: batch - sum(dealt)]:
        dealt[index] += 1
    return dealt


def _why_none(problem: Problem, batches: Sequence[int], limits: Sequence[float]) -> str:
    """Name the rank that cannot run its batch, or say that the state does not fit."""
    for index, (profile, batch, limit) in enumerate(
        zip(problem.ranks, batches, limits, strict=True)
    ):
        counts = range(1, batch + 1)
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
BASELINES: MappingProxyType[str, Baseline] = MappingProxyType(
    {
        "even batch, even state (FSDP)": even,
        "batch by speed, even state (Whale, Poplar)": proportional,
        "even batch, state by memory": state_by_memory,
    }
)
