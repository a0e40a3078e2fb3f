"""Finds the fastest plan, with a proven lower bound of its step (``docs/design/planner.md``).

A larger share of the state takes its device longer to update. Searches count the least that the
slowest rank's updates can take (``plan/updates.py``). If shares by free memory then take longer
than a thousandth of the step allows, ranks with slow updates get less. If memory does not allow
that, plans are searched whose shares take so much time (``offload``).

Where optimizer state may live in host memory, plans that move it are searched, too (``offload``).
All of this runs once for each choice for all ranks together (``search.variants``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import PlanError, SolverError
from lightning_cephalo.plan.cost import (
    PLAIN,
    Mode,
    fixed_time,
    modes,
    predict,
    rank_plan,
)
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.columns import Columns, RankType, group_types
from lightning_cephalo.plan.solver.infeasible import certainly_infeasible, refuse
from lightning_cephalo.plan.solver.offload import (
    fastest_moving,
    least_step_s,
    with_moved_state,
)
from lightning_cephalo.plan.solver.search import EQUAL, ROOMIER, Found, Search, variants
from lightning_cephalo.plan.solver.state import quickest_update_s, with_state
from lightning_cephalo.plan.state_groups import even_shares
from lightning_cephalo.plan.updates import least_update_s, with_updates
from lightning_cephalo.plan.windows import backward_windows

_EXACT = 1e-9
# Seconds in which to find out whether state in host memory would do.
_REASON_S = 3.0


def solve(problem: Problem, *, time_limit_s: float = 60.0) -> Plan:
    """Return the plan with the shortest step.

    The plan places exactly the global batch, and every rank stays within its capacity.

    For every rank, the plan decides the microbatch sizes and their number, and the share of the
    state. A rank without microbatches only holds state. ``no_idle_ranks`` allows it only if
    nothing else fits. The plan also decides whether the rank
    recomputes and offloads, where its profile leaves that open. For all ranks together, it decides
    whether units are resharded after the forward, if the problem leaves that open.

    Plans within a thousandth of the shortest step count as equally fast. Of these, the result is
    one that offloads little and leaves room. Every rank gives the same part of its free memory to
    state.

    While the combinations are few, a rank's microbatches may have any sizes. Otherwise they are,
    for a batch and a largest size, those that take the least time. The optimum and ``bound_s`` are
    among those.

    Args:
        problem: ranks and work of the step.
        time_limit_s: after this long, the best plan so far is returned with its gap.

    Returns:
        The plan, with every prediction filled in by :func:`~lightning_cephalo.plan.predict`. Its
        ``gap`` is 0 when ``bound_s`` is proven: a gap of up to a thousandth counts as proof.

    Raises:
        InfeasibleError: there is no plan; the message names the resource that binds and changes
            that would help.
        SolverError: the solver failed, or found no plan in time.
        PlanError: an argument is invalid.
    """
    plan = solve_if_possible(problem, time_limit_s=time_limit_s)
    if plan is None:
        deadline = time.perf_counter() + _REASON_S
        problem = dataclasses.replace(problem, no_idle_ranks=False)  # which needs less memory
        refuse(problem, group_types(problem), functools.partial(_moving_fits, deadline=deadline))
    return plan


def _moving_fits(problem: Problem, deadline: float) -> bool:
    """Return whether there is a plan with state in host memory; False if that is not known."""
    try:
        return fastest_moving(problem, deadline, math.inf)[0] is not None
    except SolverError:
        return False


def solve_if_possible(problem: Problem, *, time_limit_s: float = 60.0) -> Plan | None:
    """Return the plan of :func:`solve`, or None where there is none: the reason takes longer."""
    if not isinstance(problem, Problem):
        raise PlanError(f"solve: expected a Problem, but got {records.shortened(problem)}.")
    plan = _solved(problem, time_limit_s)
    if plan is None and problem.no_idle_ranks:  # then some rank has no room for samples
        plan = _solved(dataclasses.replace(problem, no_idle_ranks=False), time_limit_s)
    return plan


def _solved(problem: Problem, time_limit_s: float) -> Plan | None:
    started = time.perf_counter()
    limit = records.real("solve: time_limit_s", time_limit_s, above_minimum=True, infinite=True)
    plan = None
    if problem.optimizer_offload is not True or not problem.can_move_state:
        plan = _resident(problem, started + limit)
    # shares of each of several groups are not searched
    is_gap = plan is not None and (plan.gap or 0.0) > EQUAL and len(problem.groups) == 1
    waits = problem.can_move_state or (problem.shares_take_time and is_gap)
    if waits:
        plan = _or_moving(problem, plan, started + limit)
    if plan is None:
        return None
    return dataclasses.replace(plan, solve_s=time.perf_counter() - started)


def _resident(problem: Problem, deadline: float) -> Plan | None:
    """Return the plan with all optimizer state on the devices."""
    if certainly_infeasible(problem, group_types(problem)):
        return None
    found, bound_s = _searched(problem, deadline)
    return _best_plan(problem, found, bound_s) if found else None


def _or_moving(problem: Problem, plan: Plan | None, deadline: float) -> Plan | None:
    """Return the plan, or a faster one whose shares of the state are chosen by their time."""
    limit_s = math.inf if plan is None else _step_s(plan) * (1 - EQUAL)
    if least_step_s(problem) >= limit_s:
        return plan
    try:
        moving, bound_s = fastest_moving(problem, deadline, limit_s)
    except SolverError:
        if plan is None:
            raise
        return _proven(plan, min(plan.bound_s or 0.0, least_step_s(problem)))
    if plan is not None:  # both bounds hold for the same plans, unless state may move
        bound_s = (min if problem.can_move_state else max)(bound_s, plan.bound_s or 0.0)
    if moving is None or moving.step_s > limit_s:
        return None if plan is None else _proven(plan, bound_s)
    types, columns = moving.types, moving.found.columns
    runs = _runs(moving.problem, types, columns, moving.found.chosen)
    bare = with_moved_state(
        moving,
        [rank_plan(profile, *run) for profile, run in zip(problem.ranks, runs, strict=True)],
    )
    asked = problem.resharding(moving.problem.reshard_after_forward is True)
    padded = moving.even and problem.padded_bytes > 0
    even = problem.are_even([rank.state_fraction for rank in bare])
    found = priced(asked, bare, backend="cvxpy/HiGHS", padded=padded if even else None)
    return found if plan is not None and _step_s(found) > limit_s else _proven(found, bound_s)


def _proven(plan: Plan, bound_s: float) -> Plan:
    """Return a plan with this bound of all plans, and how far that is."""
    step_s = _step_s(plan)
    bound_s = min(bound_s, step_s)
    gap = (step_s - bound_s) / step_s if step_s > 0 else 0.0
    return dataclasses.replace(plan, bound_s=bound_s, gap=0.0 if gap <= EQUAL else gap)


@dataclass(frozen=True)
class _Variant:
    """A problem to search, in which all choices for all ranks together are made.

    All ranks take the least time for updates that any plan takes on its slowest one.
    """

    search: Search
    even: bool

    @property
    def problem(self) -> Problem:
        return self.search.problem

    @functools.cached_property
    def fixed_s(self) -> float:
        """Seconds of a step that no search changes; even shares have a shorter fill."""
        return fixed_time(self.problem)

    @property
    def bound_s(self) -> float:
        """Lower bound of the step of all plans."""
        return self.search.bounds.step_s + self.fixed_s


_Candidates = list[tuple[_Variant, Found]]


def _searched(problem: Problem, deadline: float) -> tuple[_Candidates, float]:
    """Search the variants and return their results and a lower bound of all plans' steps.

    Raises SolverError when time is up without any plan.
    """
    found: _Candidates = []
    bound_s, least_s, failure = math.inf, math.inf, None
    # the most promising first
    for variant in sorted(_variants(problem, deadline), key=lambda each: each.bound_s):
        if found and (
            variant.bound_s > least_s * (1 + EQUAL + _EXACT) or time.perf_counter() > deadline
        ):
            bound_s = min(bound_s, variant.bound_s)
            continue
        try:
            own = variant.search.run()
        except SolverError as error:
            failure = error
            bound_s = min(bound_s, variant.bound_s)
            continue
        if own is not None:
            bound_s = min(bound_s, own.bound_s + variant.fixed_s)
            least_s = min(least_s, own.step_s + variant.fixed_s)
            found.append((variant, own))
    if failure is not None and not found:
        raise failure
    return found, bound_s


def _variants(problem: Problem, deadline: float) -> Iterator[_Variant]:
    for variant, even in variants(problem, has_even_state=True):
        variant = with_updates(variant, least_update_s(variant))
        search = Search(variant, group_types(variant), deadline)
        # if every plan's backward hides the gathers too, keeping units gathered gains nothing
        is_second = variant.reshard_after_forward != problem.reshard_choices[0]
        if not is_second or search.bounds.floors_s[1] < _longest_with_gathers_s(variant):
            yield _Variant(search, even)


def _longest_with_gathers_s(problem: Problem) -> float:
    """Return the longest window of the backward that gathers make longer; 0 for none."""
    with_gathers, without = (backward_windows(problem.resharding(each)) for each in (True, False))
    pairs = zip(with_gathers, without, strict=True)
    longer = (own_s for (own_s, count), (less_s, _) in pairs if count and own_s > less_s)
    return max(longer, default=0.0)


def _best_plan(problem: Problem, found: _Candidates, bound_s: float) -> Plan:
    """Return what offloads least within a thousandth of the fastest, and of that the roomiest."""
    fastest_s = min(own.step_s + variant.fixed_s for variant, own in found)
    plans = [_as_plan(problem, variant, own, fastest_s) for variant, own in found]
    if problem.shares_take_time:  # they may all have less room than the fastest updates need
        least_s = min(map(_step_s, plans))
        fastest_s = fastest_s if least_s <= fastest_s * (1 + EQUAL + _EXACT) else least_s
    equals = [plan for plan in plans if _step_s(plan) <= fastest_s * (1 + EQUAL + _EXACT)]
    best = min(equals, key=_step_s)
    for plan in equals:
        if (-_offloaded(plan), _headroom(plan)) > (-_offloaded(best), _headroom(best) + ROOMIER):
            best = plan
    gap = (fastest_s - bound_s) / fastest_s if fastest_s > 0 else 0.0
    return dataclasses.replace(
        best, bound_s=min(bound_s, _step_s(best)), gap=0.0 if gap <= EQUAL else gap
    )


def _step_s(plan: Plan) -> float:
    assert plan.step_s is not None
    return plan.step_s


def _offloaded(plan: Plan) -> float:
    return sum(rank.host_bytes or 0.0 for rank in plan.ranks)


def _headroom(plan: Plan) -> float:
    """Return the fraction of its capacity that the fullest rank keeps free."""
    return min(
        1 - (rank.memory_bytes or 0.0) / (rank.capacity_bytes or math.inf) for rank in plan.ranks
    )


def _as_plan(problem: Problem, variant: _Variant, found: Found, fastest_s: float) -> Plan:
    problem = problem.resharding(variant.problem.reshard_after_forward is True)
    runs = _runs(problem, variant.search.types, found.columns, found.chosen)
    even = even_shares(variant.problem.active_groups, len(runs))
    bare = [
        rank_plan(profile, sizes, mode, share if variant.even else 0.0)
        for profile, (sizes, mode), share in zip(problem.ranks, runs, even, strict=True)
    ]
    if variant.even:
        return _of_shares(problem, variant, bare)
    capacities = [profile.capacity_bytes for profile in problem.ranks]
    plan = _of_shares(problem, variant, with_state(problem, bare, capacities))
    left_s = fastest_s * (1 + EQUAL) - _step_s(plan)
    if not problem.shares_take_time or left_s >= 0:
        return plan
    least_s = quickest_update_s(problem, bare, capacities)
    quickest = _of_shares(problem, variant, with_state(problem, bare, capacities, least_s))
    left_s = fastest_s * (1 + EQUAL) - _step_s(quickest)
    if left_s <= 0:
        return quickest
    # no step grows by more than its updates
    roomier = with_state(problem, bare, capacities, least_s + left_s)
    return _of_shares(problem, variant, roomier)


def _of_shares(problem: Problem, variant: _Variant, ranks: Sequence[RankPlan]) -> Plan:
    """Return the plan of ranks whose shares of the state are chosen."""
    are_even = variant.problem.are_even([rank.state_fraction for rank in ranks])
    # shares that are even by chance may leave no room for padding
    padded = variant.even and problem.padded_bytes > 0 if are_even else None
    return priced(problem, ranks, backend="cvxpy/HiGHS", padded=padded)


def _runs(
    problem: Problem, types: Sequence[RankType], columns: Columns, chosen: np.ndarray
) -> list[tuple[tuple[int, ...], Mode]]:
    """Return the microbatches and the mode of every rank, in rank order."""
    runs: list[tuple[tuple[int, ...], Mode]] = [((), PLAIN)] * len(problem.ranks)
    members = [iter(kind.members) for kind in types]
    for row in np.lexsort((columns.count, -columns.batch)).tolist():
        kind = int(columns.kind[row])
        mode = modes(problem, types[kind].profile)[int(columns.mode[row])]
        for _ in range(int(chosen[row])):
            runs[next(members[kind])] = (columns.sizes(row), mode)
    return runs


def priced(
    problem: Problem, ranks: Sequence[RankPlan], *, backend: str, padded: bool | None = None
) -> Plan:
    """Return a plan of these parts, with every prediction filled in.

    If the problem leaves resharding open, units are resharded after the forward.

    Args:
        problem: ranks and work of the step.
        ranks: microbatches, fractions and modes, in rank order.
        backend: name of what chose the parts.
        padded: the plan's choice.
    """
    reshard = problem.reshard_after_forward is not False
    plan = Plan(
        tuple(ranks),
        backend=backend,
        reshard_after_forward=reshard,
        padded=padded,
        early_update=problem.early_update or None,
        state_groups=problem.active_groups,
    )
    prediction = predict(problem, plan)
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
            state_host_bytes=part.state_host_bytes if rank.moves_state else None,
        )
        for rank, profile, part in zip(ranks, problem.ranks, prediction.ranks, strict=True)
    )
    return dataclasses.replace(plan, ranks=filled, step_s=prediction.step_s)
