"""Baselines: allocations that users would choose without a planner.

``cephalo compare`` shows them next to :func:`~lightning_cephalo.plan.solve`. The same cost function
prices both.

Every baseline takes a problem and returns a :class:`~lightning_cephalo.plan.Plan`. It raises
InfeasibleError if its allocation does not fit. Each rank runs its microbatches in its fastest mode
that fits, and a batch is cut into near-equal microbatches.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

from lightning_cephalo.common.errors import InfeasibleError
from lightning_cephalo.common.quantities import format_gib
from lightning_cephalo.offline.allocation import checked_plan, even_batches
from lightning_cephalo.offline.paper.planner import PublishedModel, published
from lightning_cephalo.plan.cost import (
    Mode,
    device_need,
    host_need,
    modes,
    predict,
    rank_plan,
    rank_work,
)
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.columns import group_types
from lightning_cephalo.plan.solver.state import share_state

_NO_TIME_S = 1e-12


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
    """Split batch and state evenly, as FSDP does.

    All ranks run the same number of microbatches: the fastest number that fits every rank. The
    first ranks get one remaining sample each.
    """
    started = time.perf_counter()
    share = 1 / len(problem.ranks)
    batches, limits = even_batches(problem), _beside_even_state(problem)
    found = [
        [replace(run, state_fraction=share) for run in runs]
        for runs in _equal_counts(problem, batches, limits)
    ]
    return _fastest(problem, found, batches, limits, "even batch, even state", started)


@_either_way
def proportional(problem: Problem) -> Plan:
    """Split the batch by speed and the state evenly, as Whale and Poplar do.

    A rank's speed is its highest rate in samples per second while it holds an even share of the
    state. The batch is dealt by largest remainder. Every rank chooses its own number of
    microbatches, unless the problem requires equal numbers.
    """
    started = time.perf_counter()
    share = 1 / len(problem.ranks)
    limits = _beside_even_state(problem)
    speeds = [
        _speed(problem, profile, limit)
        for profile, limit in zip(problem.ranks, limits, strict=True)
    ]
    batches = _dealt(problem.global_batch_size, speeds)
    choices: Iterable[list[RankPlan]] = (
        _equal_counts(problem, batches, limits)
        if problem.equal_microbatches
        else filter(None, [_runs(problem, batches, limits)])
    )
    found = [[replace(run, state_fraction=share) for run in runs] for runs in choices]
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
        for runs in _equal_counts(problem, batches, limits, lean=lean):
            used = [
                _bytes(problem, profile, run)
                for profile, run in zip(problem.ranks, runs, strict=True)
            ]
            if sum(limits) - sum(used) >= problem.state_bytes:
                fractions = share_state(problem.state_bytes, used, limits)
                found.append(
                    [
                        replace(run, state_fraction=fraction)
                        for run, fraction in zip(runs, fractions, strict=True)
                    ]
                )
    return _fastest(problem, found, batches, limits, "even batch, state by memory", started)


def compute_balance(problem: Problem, model: PublishedModel | None = None) -> Plan:
    """Run the published program with even state and one microbatch per rank.

    Only compute is balanced ("compute balance only").
    """
    return published(problem, model, even_state=True, accumulate_gradients=False)


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


def _beside_even_state(problem: Problem) -> list[float]:
    """Return the bytes that an even share of the state leaves on every rank."""
    share = problem.state_bytes / len(problem.ranks)
    return [profile.capacity_bytes - share for profile in problem.ranks]


def _speed(problem: Problem, profile: RankProfile, limit_bytes: float) -> float:
    """Return the highest samples per second of any single microbatch that fits."""
    sizes = range(problem.minimum_microbatch_size, profile.largest_microbatch_size + 1)
    runs = (_run(problem, profile, size, [1], limit_bytes) for size in sizes)
    return max(
        (run.batch_size / max(_seconds(problem, profile, run), _NO_TIME_S) for run in runs if run),
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


def _equal_counts(
    problem: Problem, batches: Sequence[int], limits: Sequence[float], *, lean: bool = False
) -> Iterator[list[RankPlan]]:
    """Yield what each rank runs, for every count that all ranks with samples can run."""
    for count in range(1, min((batch for batch in batches if batch), default=0) + 1):
        runs = _runs(problem, batches, limits, [count], lean=lean)
        if runs is not None:
            yield runs


def _runs(
    problem: Problem,
    batches: Sequence[int],
    limits: Sequence[float],
    counts: Sequence[int] | None = None,
    *,
    lean: bool = False,
) -> list[RankPlan] | None:
    """Return what each rank runs, or None if a rank cannot run; ``counts`` None: any count."""
    found: list[RankPlan | None] = [None] * len(batches)
    for kind in group_types(problem):
        known: dict[int, RankPlan | None] = {}
        for index in kind.members:
            batch = batches[index]
            if batch not in known:
                tried = counts or range(1, batch + 1)
                known[batch] = _run(problem, kind.profile, batch, tried, limits[index], lean=lean)
            found[index] = known[batch]
    runs = [run for run in found if run is not None]
    return runs if len(runs) == len(batches) else None


def _run(
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
        return idle if _bytes(problem, profile, idle) <= limit_bytes else None
    usable = []
    for count in counts:
        size, larger = divmod(batch, count)
        sizes = (size + 1,) * larger + (size,) * (count - larger)
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
                _bytes(problem, profile, run) <= limit_bytes
            ):
                usable.append(run)
    cost = _bytes if lean else _seconds
    return min(usable, key=lambda run: cost(problem, profile, run), default=None)


def _seconds(problem: Problem, profile: RankProfile, run: RankPlan) -> float:
    """Return the seconds of a step if this rank were alone and collectives took no time."""
    forward, backward, tail = rank_work(problem, profile, run.microbatch_sizes, Mode.of(run))
    return problem.units * (forward + backward) + tail


def _bytes(problem: Problem, profile: RankProfile, run: RankPlan) -> float:
    return device_need(problem, profile, Mode.of(run)).of(run.microbatch_sizes)


def _why_none(problem: Problem, batches: Sequence[int], limits: Sequence[float]) -> str:
    """Name the rank that cannot run its batch, or say that the state does not fit."""
    for index, (profile, batch, limit) in enumerate(
        zip(problem.ranks, batches, limits, strict=True)
    ):
        counts = range(1, batch + 1)
        if _run(problem, profile, batch, counts, limit) is not None:
            continue
        leanest = _run(problem, profile, batch, counts, float("inf"), lean=True)
        if leanest is None:
            needs = f"was profiled for no microbatch size that cuts {batch} samples"
        else:
            needs = f"needs {format_gib(_bytes(problem, profile, leanest))} for {batch} samples"
        return (
            f"rank {index} ({profile.name!r}) {needs}, and has {format_gib(max(limit, 0.0))} "
            f"next to its share of the state. Let solve() choose batches and state."
        )
    return (
        f"no number of microbatches fits all {len(batches)} ranks next to the state of "
        f"{format_gib(problem.state_bytes)}. Let solve() choose batches and state."
    )


# Keys are the names that a comparison shows.
BASELINES: MappingProxyType[str, Baseline] = MappingProxyType(
    {
        "even batch, even state (FSDP)": even,
        "batch by speed, even state (Whale, Poplar)": proportional,
        "even batch, state by memory": state_by_memory,
        "compute balance only": compute_balance,
        "published program": published,
    }
)
