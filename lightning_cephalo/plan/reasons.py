"""Says in a few sentences why a plan divides the work as it does, and what it gains.

Pure: everything follows from the problem and the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.common.quantities import format_seconds
from lightning_cephalo.plan.cost import as_planned, modes, predict, work_s
from lightning_cephalo.plan.even import even_batches, even_state_plan
from lightning_cephalo.plan.moving import moved_by
from lightning_cephalo.plan.plan import Plan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.columns import usable_sizes
from lightning_cephalo.plan.solver.solve import solve_if_possible
from lightning_cephalo.plan.state_homes import StateHome
from lightning_cephalo.plan.windows import backward_collectives_s

# A rank counts as busy all the time if its work takes this part of the slowest rank's; its memory
# counts as full from this part of its capacity on.
_BUSY, _FULL = 0.9, 0.95
# A gain below this is none.
_GAIN = 0.02
# Devices of one name are as fast as each other, but for this factor.
_ALIKE = 1.25
# A rank without samples is a surprise if it is less than this many times slower than the fastest.
_MUCH_SLOWER = 8.0
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
    ]


def left_out(problem: Problem, plan: Plan) -> list[str]:
    """Say how much shorter a step would be without the samples of some ranks, if it is worth it."""
    given = all(rank.microbatch_sizes for rank in plan.ranks)
    if not (problem.no_idle_ranks and given and 1 < plan.world_size <= _FEW_RANKS and plan.step_s):
        return []
    try:
        other = solve_if_possible(replace(problem, no_idle_ranks=False), time_limit_s=_SEARCH_S)
    except SolverError:
        return []
    gain = 0.0 if other is None or other.step_s is None else 1 - other.step_s / plan.step_s
    if other is None or gain < _WORTHWHILE:
        return []
    idle = [index for index, rank in enumerate(other.ranks) if not rank.microbatch_sizes]
    batches = [rank.batch_size for rank in other.ranks]
    return [
        f"Without samples on {_named(idle).lower()} a step would be {gain:.0%} shorter (batches"
        f" {batches}). Leave such ranks out, or give a plan whose microbatch_sizes are empty there."
    ]


def _moving(problem: Problem, plan: Plan) -> list[str]:
    """Say how much optimizer state is in host memory, and what that costs."""
    if not plan.moves_state:
        return []
    found = predict(problem, plan).ranks
    kinds: dict[str, list[int]] = {}
    for index, rank in enumerate(plan.ranks):
        moved = moved_by(problem, rank)
        if rank.moves_state and rank.state_fraction:
            units = [unit for unit, size in enumerate(moved.sizes) if size]
            away = [unit for unit in units if moved.is_away(unit)]
            on_host = sum(moved.homes[unit] is StateHome.HOST for unit in away)
            how = f", which updates {on_host} of them" if on_host else ""
            text = f"optimizer state of {len(away)} of {len(units)} units in host memory{how}"
            kinds.setdefault(text, []).append(index)
    said = [f"{_named(own)} {_verb(own, 'keeps', 'keep')} {text}" for text, own in kinds.items()]
    exposed_s = max(rank.exposed_s for rank in found)
    cost = "hides behind the backward"
    if exposed_s > _HIDDEN * (plan.step_s or math.inf):
        cost = f"adds {format_seconds(exposed_s)} to the step"
    asked = problem.optimizer_offload is True
    why = "as optimizer_offload=True says" if asked else "whose devices need the room"
    return [f"{'; '.join(said)}, {why}. It {cost}."]


def _launching(problem: Problem, plan: Plan) -> list[str]:
    """Name the ranks that take as long for half of a microbatch."""
    flat = [
        index
        for index, (rank, planned) in enumerate(zip(problem.ranks, plan.ranks, strict=True))
        if _is_flat(problem, rank, max(planned.microbatch_sizes, default=0))
    ]
    if not flat:
        return []
    # the run without waits at units that is timed has the waits for other ranks in it
    shorter = " Steps may be shorter than predicted." if plan.world_size > 1 else ""
    return [
        f"{_named(flat)} {_verb(flat, 'takes', 'take')} as long for half of a microbatch: its time"
        f" is that of starting operations, not of computing them.{shorter}"
    ]


def _is_flat(problem: Problem, rank: RankProfile, size: int) -> bool:
    if not 2 <= size <= len(rank.forward_s):
        return False
    half_s, whole_s = (
        work_s(problem, rank.forward_s[at - 1], rank.backward_s[at - 1], rank.tail_s[at - 1])
        for at in (size // 2, size)
    )
    return whole_s < _FLAT * half_s


def surprises(problem: Problem, plan: Plan) -> list[str]:
    """Return what in the measurements looks wrong, for warnings; see :func:`reasons`."""
    fastest = [_sample_s(problem, rank) for rank in problem.ranks]
    found = []
    names: dict[str, list[int]] = {}
    for index, rank in enumerate(problem.ranks):
        if fastest[index] is not None:
            names.setdefault(rank.name, []).append(index)
    for name, members in names.items():
        order = sorted(members, key=lambda index: fastest[index] or 0.0)
        quick, slow = order[0], order[-1]
        factor = (fastest[slow] or 0.0) / (fastest[quick] or 1.0)
        if name and factor > _ALIKE:
            found.append(
                f"Ranks {quick} and {slow} are both {name!r}, but rank {slow} took {factor:.1f}"
                " times as long for a sample while it was measured: another program may have used"
                " it. CephaloStrategy(planner=Planner(remeasure=True)) measures again."
            )
    best = min((seconds for seconds in fastest if seconds), default=None)
    for index, planned in enumerate(plan.ranks):
        own = fastest[index]
        if planned.microbatch_sizes or not own or not best or own > _MUCH_SLOWER * best:
            continue
        if problem.global_batch_size < 2 * plan.world_size or not _has_room(problem, index):
            continue
        found.append(
            f"Rank {index} ({problem.ranks[index].name!r}) gets no samples although it took only"
            f" {own / best:.1f} times as long for one as the fastest rank. If the machine was busy"
            " while it was measured, CephaloStrategy(planner=Planner(remeasure=True)) measures"
            " again."
        )
    return found


def _gain(problem: Problem, plan: Plan) -> list[str]:
    if plan.world_size == 1 or not plan.step_s:
        return []
    try:
        even = even_state_plan(problem, even_batches(problem), time_limit_s=_SEARCH_S)
    except SolverError:
        return []
    if even is None or even.step_s is None:
        return ["Even batches and even state, as under FSDP, do not fit every rank."]
    even_s, step_s = even.step_s, plan.step_s
    how = f"even batches and even state, as under FSDP ({format_seconds(even_s)})"
    if even_s < (1 + _GAIN) * step_s:
        return [f"As fast as {how}: these ranks gain nothing from an uneven plan."]
    return [f"{even_s / step_s:.2f} times as fast as {how}."]


def _division(problem: Problem, plan: Plan) -> list[str]:
    if plan.world_size == 1:
        return []
    priced, ranks = as_planned(problem, plan), predict(problem, plan).ranks
    work = [work_s(problem, rank.forward_s, rank.backward_s, rank.tail_s) for rank in ranks]
    slowest = max(work)
    busy = [seconds >= _BUSY * slowest for seconds in work]
    idle = [index for index, rank in enumerate(plan.ranks) if not rank.microbatch_sizes]
    full = [i for i, is_busy in enumerate(busy) if not is_busy and _is_full(plan, i)]
    waiting = [i for i, is_busy in enumerate(busy) if not is_busy and i not in {*idle, *full}]
    forward_s, backward_s = max(r.forward_s for r in ranks), max(r.backward_s for r in ranks)
    said = []
    if forward_s < priced.links.gather_s and backward_s < backward_collectives_s(priced):
        said.append(
            "Communication takes longer than computing on every rank, so the split of the samples"
            " matters little. A larger global batch uses the devices better."
        )
    elif all(busy):
        said.append(
            f"Samples go by speed: every rank is busy for {min(work) / slowest:.0%} or more of the"
            " slowest one's time."
        )
    if full:
        said.append(
            f"{_named(full)} could compute more, but {_verb(full, 'its', 'their')} memory is full."
        )
    small = [index for index in idle if not _has_room(problem, index)]
    slow = [index for index in idle if index not in small]
    if small:
        have = _verb(small, "has", "have")
        said.append(f"{_named(small)} {have} no room for a sample, and {_holds(small, plan)}.")
    if slow:
        said.append(f"{_named(slow)} would slow the others down, and {_holds(slow, plan)}.")
    if waiting and not said:
        wait = _verb(waiting, "waits", "wait")
        said.append(f"{_named(waiting)} {wait}: one more sample would make the step longer.")
    return said


def _has_room(problem: Problem, index: int) -> bool:
    """Whether a rank has room for a microbatch if it holds no state."""
    profile = problem.ranks[index]
    return any(usable_sizes(problem, profile, mode) for mode in modes(problem, profile))


def _is_full(plan: Plan, index: int) -> bool:
    rank = plan.ranks[index]
    if rank.memory_bytes is None or rank.capacity_bytes is None:
        return False
    return rank.memory_bytes >= _FULL * rank.capacity_bytes


def _sample_s(problem: Problem, rank: RankProfile) -> float | None:
    """Return the seconds of one sample at the rank's best size; None if it was not measured."""
    curves = enumerate(zip(rank.forward_s, rank.backward_s, rank.tail_s, strict=True), 1)
    return min((work_s(problem, *times_s) / size for size, times_s in curves), default=None)


def _named(ranks: Sequence[int]) -> str:
    """Return ``Rank 3``, or ``Ranks 0, 2–5``."""
    in_rows = groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    runs = [[index for _, index in run] for _, run in in_rows]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    shown = texts if len(texts) <= _RANKS_IN_FULL else [*texts[:_RANKS_IN_FULL], "others"]
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {', '.join(shown)}"


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _holds(ranks: Sequence[int], plan: Plan) -> str:
    share = sum(plan.ranks[index].state_fraction for index in ranks)
    if share:
        return f"{_verb(ranks, 'holds', 'hold')} {share:.0%} of the state"
    return f"{_verb(ranks, 'takes', 'take')} no part in computing"
