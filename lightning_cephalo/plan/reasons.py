"""Says in a few sentences why a measured plan divides the work as it does, and what it gains.

Such a plan leaves a rank without samples only if nothing else fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.common.quantities import format_bytes, format_seconds
from lightning_cephalo.plan.cost import as_planned, predict, work_s
from lightning_cephalo.plan.even import even_batches, even_state_plan
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.solve import solve_if_possible
from lightning_cephalo.plan.windows import backward_collectives_s

# A rank counts as busy all the time if its work takes this part of the slowest rank's; its memory
# counts as full from this part of its capacity on.
_BUSY, _FULL = 0.9, 0.95
# A gain below this is none.
_GAIN = 0.02
# Devices of one name are as fast as each other, but for this factor.
_ALIKE = 1.25
_RANKS_IN_FULL = 4
# Leaving ranks without samples is worth saying from this part of a step on. It is looked for with
# so many ranks at most, for so long.
_WORTHWHILE, _FEW_RANKS, _SEARCH_S = 0.05, 16, 5.0
# What moving state adds to a step shows from this part of it on.
_HIDDEN = 1e-3
# Twice the samples in less than this many times the time: starting operations takes the time.
_FLAT = 1.1


def reasons(problem: Problem, plan: Plan) -> list[str]:
    """Return why the plan divides the work as it does, one reason in each sentence."""
    return [
        *_gain(problem, plan),
        *_division(problem, plan),
        *_moving(problem, plan),
        *_launching(problem, plan),
        *_left_out(problem, plan),
        *_unlike(problem),
    ]


def _left_out(problem: Problem, plan: Plan) -> list[str]:
    """Say how much shorter a step would be without the samples of some ranks, if it is worth it."""
    given = all(rank.microbatch_sizes for rank in plan.ranks)
    if not (problem.no_idle_ranks and given and 1 < plan.world_size <= _FEW_RANKS and plan.step_s):
        return []
    try:
        other = solve_if_possible(replace(problem, no_idle_ranks=False), time_limit_s=_SEARCH_S)
    except SolverError:
        return []
    if other is None or other.step_s is None:
        return []
    gain = 1 - other.step_s / plan.step_s
    if gain < _WORTHWHILE:
        return []
    idle = [index for index, rank in enumerate(other.ranks) if not rank.microbatch_sizes]
    batches = [rank.batch_size for rank in other.ranks]
    return [
        f"Without samples on {_named(idle).lower()} a step would be {gain:.0%} shorter (batches"
        f" {batches}). Leave such ranks out, or give a plan whose microbatch_sizes are empty there."
    ]


def _gain(problem: Problem, plan: Plan) -> list[str]:
    if plan.world_size == 1 or not plan.step_s:
        return []
    try:
        even = even_state_plan(problem, even_batches(problem), time_limit_s=_SEARCH_S)
    except SolverError:
        return []
    if even is None or even.step_s is None:
        return ["Even batches and even state, as under FSDP, do not fit every rank."]
    how = f"even batches and even state, as under FSDP ({format_seconds(even.step_s)})"
    if even.step_s < (1 + _GAIN) * plan.step_s:
        return [f"As fast as {how}: these ranks gain nothing from an uneven plan."]
    return [f"{even.step_s / plan.step_s:.2f} times as fast as {how}."]


def _division(problem: Problem, plan: Plan) -> list[str]:
    if plan.world_size == 1:
        return []
    priced, ranks = as_planned(problem, plan), predict(problem, plan).ranks
    work = [work_s(problem, rank.forward_s, rank.backward_s, rank.tail_s) for rank in ranks]
    slowest = max(work)
    waiting = [index for index, seconds in enumerate(work) if seconds < _BUSY * slowest]
    idle = [index for index in waiting if not plan.ranks[index].microbatch_sizes]
    full = [index for index in waiting if index not in idle and _is_full(plan.ranks[index])]
    forward_s, backward_s = max(r.forward_s for r in ranks), max(r.backward_s for r in ranks)
    said = []
    if forward_s < priced.links.gather_s and backward_s < backward_collectives_s(priced):
        said.append(
            "Communication takes longer than computing on every rank, so the split of the samples"
            " matters little. A larger global batch uses the devices better."
        )
    elif not waiting:
        said.append(
            f"Samples go by speed: every rank is busy for {min(work) / slowest:.0%} or more of the"
            " slowest one's time."
        )
    if full:
        said.append(f"{_named(full)}: memory is full, though more samples would be faster.")
    if idle:
        few = problem.global_batch_size < plan.world_size
        why = "more ranks than samples" if few else "no room for samples"
        share = sum(plan.ranks[index].state_fraction for index in idle)
        said.append(f"{_named(idle)}: {why}; {share:.0%} of the state is here.")
    if waiting and not said:
        said.append(f"{_named(waiting)}: idle at times, as one more sample would take longer.")
    return said


def _is_full(rank: RankPlan) -> bool:
    return (rank.memory_bytes or 0.0) >= _FULL * (rank.capacity_bytes or math.inf)


def _moving(problem: Problem, plan: Plan) -> list[str]:
    """Say how much optimizer state is in host memory, and what that costs."""
    held = {i: rank.state_host_bytes for i, rank in enumerate(plan.ranks) if rank.state_host_bytes}
    if not held:
        return []
    exposed_s = max(rank.exposed_s for rank in predict(problem, plan).ranks)
    cost = "hides behind the backward"
    if exposed_s > _HIDDEN * (plan.step_s or math.inf):
        cost = f"adds {format_seconds(exposed_s)} to the step"
    amount = format_bytes(sum(held.values()))
    return [f"{_named(list(held))}: {amount} of optimizer state in host memory. It {cost}."]


def _launching(problem: Problem, plan: Plan) -> list[str]:
    """Name the ranks that take as long for half of a microbatch."""
    flat = []
    for index, (rank, planned) in enumerate(zip(problem.ranks, plan.ranks, strict=True)):
        times_s, size = _times_s(problem, rank), max(planned.microbatch_sizes, default=0)
        if 2 <= size <= len(times_s) and times_s[size - 1] < _FLAT * times_s[size // 2 - 1]:
            flat.append(index)
    if not flat:
        return []
    # the run without waits at units that is timed has the waits for other ranks in it
    shorter = " Steps may be shorter than predicted." if plan.world_size > 1 else ""
    return [
        f"{_named(flat)}: half of a microbatch takes as long, as starting operations takes longer"
        f" than computing them.{shorter}"
    ]


def _unlike(problem: Problem) -> list[str]:
    """Name devices of one name that took different times."""
    found = []
    names: dict[str, list[tuple[float, int]]] = {}
    for index, rank in enumerate(problem.ranks):
        rates = [seconds / size for size, seconds in enumerate(_times_s(problem, rank), 1)]
        if rank.name and rates:
            names.setdefault(rank.name, []).append((min(rates), index))
    for name, members in names.items():
        (quick_s, quick), (slow_s, slow) = min(members), max(members)
        if slow_s > _ALIKE * quick_s > 0:
            found.append(
                f"Ranks {quick} and {slow} are both {name!r}, but rank {slow} took"
                f" {slow_s / quick_s:.1f} times as long for a sample while it was measured: another"
                " program may have used it. CephaloStrategy(planner=Planner(remeasure=True))"
                " measures again."
            )
    return found


def _times_s(problem: Problem, rank: RankProfile) -> list[float]:
    """Return the seconds of a step's own work with one microbatch, by its size."""
    curves = zip(rank.forward_s, rank.backward_s, rank.tail_s, strict=True)
    return [work_s(problem, *times_s) for times_s in curves]


def _named(ranks: Sequence[int]) -> str:
    """Return ``Rank 3``, or ``Ranks 0, 2–5``."""
    in_rows = groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    runs = [[index for _, index in run] for _, run in in_rows]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    shown = texts if len(texts) <= _RANKS_IN_FULL else [*texts[:_RANKS_IN_FULL], "others"]
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {', '.join(shown)}"
