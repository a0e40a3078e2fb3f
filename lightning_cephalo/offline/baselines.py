"""Baselines: allocations that users would choose without a planner.

The solver chooses the microbatches of each rank, and the cost function prices them, as those of
:func:`~lightning_cephalo.plan.solve`. InfeasibleError: the allocation does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_cephalo.common.errors import InfeasibleError
from lightning_cephalo.common.quantities import format_gib
from lightning_cephalo.plan.cost import device_bytes, modes, rank_work, work_s
from lightning_cephalo.plan.even import even_batches, even_state_plan, with_even_state
from lightning_cephalo.plan.plan import Plan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.columns import usable_sizes
from lightning_cephalo.plan.solver.infeasible import most_samples

_NO_TIME_S = 1e-12

Baseline = Callable[..., Plan]


def even(problem: Problem, *, time_limit_s: float = 60.0) -> Plan:
    """Split batch and state evenly, as FSDP does."""
    return _planned(problem, "even batch, even state", even_batches(problem), time_limit_s)


def proportional(problem: Problem, *, time_limit_s: float = 60.0) -> Plan:
    """Split the batch by speed and the state evenly, as Whale and Poplar do.

    A rank's speed is its highest rate in samples per second beside an even share of the state.
    """
    batches = _batches_by_speed(with_even_state(problem))
    return _planned(problem, "batch by speed, even state", batches, time_limit_s)


def _planned(problem: Problem, backend: str, batches: Sequence[int], time_limit_s: float) -> Plan:
    plan = even_state_plan(problem, batches, backend=backend, time_limit_s=time_limit_s)
    if plan is None:
        raise InfeasibleError(_why_none(with_even_state(problem), batches))
    return plan


def _batches_by_speed(problem: Problem) -> list[int]:
    """Deal the batch in proportion to speeds, in whole samples, by largest remainder."""
    speeds = [_speed(problem, profile) for profile in problem.ranks]
    # where no rank can take a sample, the refusal says why
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
    rates = (
        size / max(work_s(problem, *rank_work(problem, profile, [size], mode)), _NO_TIME_S)
        for mode in modes(problem, profile)
        for size in usable_sizes(problem, profile, mode)
    )
    return max(rates, default=0.0)


def _why_none(problem: Problem, batches: Sequence[int]) -> str:
    """Name a rank that has no room for its batch."""
    share = problem.state.most_bytes / min(map(len, problem.members))
    beside = f"next to an even share of the state ({format_gib(share)})"
    for index, (profile, batch) in enumerate(zip(problem.ranks, batches, strict=True)):
        most = most_samples(problem, profile)
        if most < batch or device_bytes(problem, profile, ()) > profile.capacity_bytes:
            return (
                f"Rank {index} ({profile.name!r}) with {format_gib(profile.capacity_bytes)} of "
                f"memory cannot run {batch} samples ({most:.0f} at most) {beside}. Let solve() "
                f"choose batches and state."
            )
    return (
        f"No microbatches of the batches {list(batches)} fit {beside}. Let solve() choose batches "
        f"and state."
    )


# Keys are the names that a comparison shows.
BASELINES: dict[str, Baseline] = {
    "even batch, even state (FSDP)": even,
    "batch by speed, even state (Whale, Poplar)": proportional,
}
