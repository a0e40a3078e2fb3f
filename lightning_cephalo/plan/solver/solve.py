"""The fastest plan, proven: columns per type of rank, two small mixed-integer programs, and the
state shared last.

1. Bounds below the step time without a solver (``_bounds``), which also say how large a rank's
   batch can get.
2. Columns (``_columns``): how one rank of a type may run a batch, within a limit on the step time.
3. ``fastest``: choose columns for all ranks. First with *at least* the global batch, where a column
   with fewer samples and no less cost is of no use: few columns remain, and the optimum is a bound.
   Only if the exact batch cannot be had within the three slowest times found (curves that fall with
   size), again with the exact batch.
4. ``cheapest``: within those slowest times, stretched by a thousandth, the exact batch with the
   most even memory headroom (``_headroom``).
5. The state in proportion to what memory is then free (``_state``).
6. Again without offloading where that makes the step no longer.

Where even shares travel faster than uneven ones, all of this is done a second time with an equal
share of the state on every rank, and the better plan is taken. Likewise where units may stay
gathered from the forward to the backward, once with and once without.

The limit of step 2 starts just above the bound and is raised until the optimum lies within it, so
that what it cuts off is provably slower.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import InfeasibleError, PlanError, SolverError
from lightning_cephalo.plan.cost import (
    PLAIN,
    Mode,
    collective_times,
    fixed_time,
    modes,
    predict,
    working_bytes,
)
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.columns import RankType, group_types
from lightning_cephalo.plan.solver.infeasible import refuse, refuse_early
from lightning_cephalo.plan.solver.search import EQUAL, ROOMIER, Found, Search
from lightning_cephalo.plan.solver.state import share_state

_EXACT = 1e-9
# Kinds of ranks of which each is tried without offloading by itself.
_MOST_KINDS = 8


def solve(problem: Problem, *, time_limit_s: float = 60.0) -> Plan:
    """The plan with the shortest step: the global batch exactly, every rank within its capacity.

    Decides for every rank its microbatch sizes and their number (none is allowed: a rank that only
    holds state), whether it recomputes and offloads where its profile leaves that open, and its
    share of the state; for all of them together, whether units are given back after the forward,
    where the problem leaves that open. Of the plans within a thousandth of that step time, one with
    even memory headroom is taken, and every rank gives the same part of its free memory to state.
    While the combinations are few, microbatches of a rank may be of any sizes; otherwise of one
    size with a ragged last one, or an even split. The optimum, and ``bound_s``, are among those.

    Args:
        problem: what there is.
        time_limit_s: after this long, the best plan so far is returned with its gap.

    Returns:
        The plan, with every prediction filled in by :func:`~lightning_cephalo.plan.predict`;
        ``gap`` is 0 when ``bound_s`` is proven to be the fastest step there is.

    Raises:
        InfeasibleError: there is no plan; the message says which resource binds and what would
            help.
        SolverError: the solver failed, or found no plan in time.
        PlanError: the arguments are not what is expected.
    """
    started = time.perf_counter()
    if not isinstance(problem, Problem):
        raise PlanError(f"solve: expected a Problem, but got {records.shortened(problem)}.")
    limit = records.real("solve: time_limit_s", time_limit_s, above_minimum=True, infinite=True)
    deadline = started + limit
    plan = _fastest(problem, started, deadline)
    if any(rank.offload for rank in plan.ranks):
        plan = _without_needless_offload(problem, plan, started, deadline)
    return plan


def _without_needless_offload(
    problem: Problem, plan: Plan, started: float, deadline: float
) -> Plan:
    """As fast a plan whose ranks offload only where that is needed.

    Headroom alone would have them offload wherever the copies are hidden, and copies that are
    hidden are not free: they take the host's memory and its bus.
    """
    longest_s = _step_s(plan) * (1 + EQUAL + _EXACT)
    bound_s, gap = plan.bound_s, plan.gap
    with_host = list(dict.fromkeys(r for r in problem.ranks if r.host_capacity_bytes > 0))
    for stripped in (with_host, *([profile] for profile in with_host[:_MOST_KINDS])):
        if time.perf_counter() > deadline or not any(rank.offload for rank in plan.ranks):
            break
        ranks = tuple(
            dataclasses.replace(rank, host_capacity_bytes=0.0) if rank in stripped else rank
            for rank in problem.ranks
        )
        lean = dataclasses.replace(problem, ranks=ranks)
        try:
            other = _fastest(lean, started, deadline)
        except (InfeasibleError, SolverError):
            continue
        if _step_s(other) <= longest_s:
            problem, plan = lean, other
    return dataclasses.replace(
        plan, bound_s=bound_s, gap=gap, solve_s=time.perf_counter() - started
    )


def _fastest(problem: Problem, started: float, deadline: float) -> Plan:
    types = group_types(problem)
    refuse_early(problem, types)
    candidates: list[_Candidate] = []
    bound_s, failure = math.inf, None
    least_s = math.inf
    for variant, search in _searches(problem, deadline):
        # what is provably no equal of the best, or what there is no time for
        if candidates and (
            search.bound_s > least_s * (1 + EQUAL + _EXACT) or time.perf_counter() > deadline
        ):
            bound_s = min(bound_s, search.bound_s)
            continue
        try:
            found = search.run()
        except SolverError as error:
            failure = error
            bound_s = min(bound_s, search.bound_s)
            continue
        if found is not None:
            bound_s, least_s = min(bound_s, found.bound_s), min(least_s, found.step_s)
            candidates.append(_Candidate(variant, search.types, found))
    if not candidates:
        if failure is not None:
            raise failure
        refuse(problem, types)
    return _best_plan(problem, candidates, bound_s, started)


@dataclass(frozen=True)
class _Variant:
    """A problem to search; with ``even``, one without state whose ranks have lost an equal share of
    it from their capacity.
    """

    problem: Problem
    even: bool


@dataclass(frozen=True)
class _Candidate:
    """What was found for a variant with these types of ranks."""

    variant: _Variant
    types: Sequence[RankType]
    found: Found


def _best_plan(
    problem: Problem, candidates: Sequence[_Candidate], bound_s: float, started: float
) -> Plan:
    """The fastest plan, or one with more headroom among those within a thousandth of it."""
    fixed_s = fixed_time(problem)
    fastest_s = min(candidate.found.step_s for candidate in candidates) + fixed_s
    bound_s += fixed_s
    plans = [_as_plan(problem, candidate) for candidate in candidates]
    equals = [plan for plan in plans if _step_s(plan) <= fastest_s * (1 + EQUAL + _EXACT)]
    best = min(equals, key=_step_s)
    for plan in equals:
        if _headroom(plan) > _headroom(best) + ROOMIER:
            best = plan
    gap = (fastest_s - bound_s) / fastest_s if fastest_s > 0 else 0.0
    return dataclasses.replace(
        best,
        bound_s=min(bound_s, _step_s(best)),
        gap=0.0 if gap <= _EXACT else gap,
        solve_s=time.perf_counter() - started,
    )


def _step_s(plan: Plan) -> float:
    assert plan.step_s is not None
    return plan.step_s


def _headroom(plan: Plan) -> float:
    """The part of its capacity that the fullest rank keeps free."""
    return min(
        1 - (rank.memory_bytes or 0.0) / (rank.capacity_bytes or math.inf) for rank in plan.ranks
    )


def _searches(problem: Problem, deadline: float) -> list[tuple[_Variant, Search]]:
    """What to search, the most promising first."""
    found = []
    for variant in _variants(problem):
        asked = variant.problem
        search = Search(asked, group_types(asked), deadline)
        may_stay = problem.reshard_after_forward == "auto" and not asked.reshard_after_forward
        # where every plan's backward hides a gather as well, units need not stay for that
        if may_stay and search.backward_floor_s >= asked.gather_s + asked.reduce_s:
            continue
        found.append((variant, search))
    return sorted(found, key=lambda pair: pair[1].bound_s)


def _variants(problem: Problem) -> list[_Variant]:
    if problem.reshard_after_forward == "auto":
        choices = [dataclasses.replace(problem, reshard_after_forward=c) for c in (True, False)]
        return [variant for choice in choices for variant in _variants(choice)]
    variants = [_Variant(problem, even=False)]
    gather_s, reduce_s = collective_times(problem, even=True)
    share = problem.state_bytes / len(problem.ranks)
    fixed = share + problem.fixed_bytes
    fits = all(fixed <= rank.capacity_bytes > share for rank in problem.ranks)
    if fits and (gather_s < problem.gather_s or reduce_s < problem.reduce_s):
        ranks = tuple(
            dataclasses.replace(rank, capacity_bytes=rank.capacity_bytes - share)
            for rank in problem.ranks
        )
        even = dataclasses.replace(
            problem, ranks=ranks, state_bytes=0.0, gather_s=gather_s, reduce_s=reduce_s
        )
        variants.append(_Variant(even, even=True))
    return variants


def _as_plan(problem: Problem, best: _Candidate) -> Plan:
    found, reshard = best.found, best.variant.problem.reshard_after_forward
    problem = dataclasses.replace(problem, reshard_after_forward=reshard)
    runs: list[tuple[tuple[int, ...], Mode]] = [((), PLAIN)] * len(problem.ranks)
    for index, kind in enumerate(best.types):
        rows = np.flatnonzero((found.pool.kind == index) & (found.chosen > 0))
        rows = rows[np.lexsort((found.pool.count[rows], -found.pool.batch[rows]))]
        members = iter(kind.members)
        known = modes(problem, kind.profile)
        for row in rows:
            place = int(found.pool.row[row])
            columns = found.columns[index]
            run = (columns.sizes(place), known[int(columns.mode[place])])
            for _ in range(int(found.chosen[row])):
                runs[next(members)] = run
    if best.variant.even:
        fractions: tuple[float, ...] = (1 / len(runs),) * len(runs)
    else:
        used = [
            working_bytes(problem, profile, sizes, mode)
            for profile, (sizes, mode) in zip(problem.ranks, runs, strict=True)
        ]
        capacities = [profile.capacity_bytes for profile in problem.ranks]
        fractions = share_state(problem.state_bytes, used, capacities)
    bare = [
        RankPlan(sizes, fraction, recompute=mode.recompute, offload=mode.offload)
        for (sizes, mode), fraction in zip(runs, fractions, strict=True)
    ]
    return priced(problem, bare, backend="cvxpy/HiGHS")


def priced(problem: Problem, ranks: Sequence[RankPlan], *, backend: str) -> Plan:
    """A plan of these parts, with every prediction filled in; it says what it was priced with.

    Args:
        problem: what there is. Where it leaves that open, units are given back after the forward.
        ranks: microbatches, fractions and modes, in rank order.
        backend: what chose them.

    Raises:
        PlanError: as :func:`~lightning_cephalo.plan.predict` and :class:`Plan` do.
    """
    prediction = predict(problem, ranks)
    filled = tuple(
        dataclasses.replace(
            rank,
            name=profile.name,
            forward_s=part.forward_s,
            backward_s=part.backward_s,
            tail_s=part.tail_s,
            memory_bytes=part.memory_bytes,
            capacity_bytes=profile.capacity_bytes,
            host_bytes=part.host_bytes if rank.offload else None,
        )
        for rank, profile, part in zip(ranks, problem.ranks, prediction.ranks, strict=True)
    )
    return Plan(
        filled,
        step_s=prediction.step_s,
        backend=backend,
        reshard_after_forward=problem.reshard_after_forward is not False,
    )
