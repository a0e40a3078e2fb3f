"""Finds the fastest plan, with a proven lower bound of its step (``docs/design/planner.md``).

``boxes`` chooses what ranks run. Here they get their shares of the state: by free memory, as far as
the time of their updates and moves allows, which may take half of a thousandth of the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import InfeasibleError, PlanError, SolverError
from lightning_cephalo.plan.cost import PLAIN, Mode, modes, predict, rank_plan
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.boxes import Choice, fastest
from lightning_cephalo.plan.solver.columns import Columns, RankType, group_types
from lightning_cephalo.plan.solver.infeasible import certainly_infeasible, refuse
from lightning_cephalo.plan.solver.search import EQUAL
from lightning_cephalo.plan.solver.state import Room, filled_up, needed_by, share_state, to_the_byte
from lightning_cephalo.plan.state_groups import even_shares

_ROUNDING = 1e-9


def solve(
    problem: Problem, *, time_limit_s: float = 60.0, batches: Sequence[int] | None = None
) -> Plan:
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
        batches: samples of every rank; None: the plan decides.

    Returns:
        The plan, with every prediction filled in by :func:`~lightning_cephalo.plan.predict`. Its
        ``gap`` is 0 when ``bound_s`` is proven: a gap of up to a thousandth counts as proof.

    Raises:
        InfeasibleError: there is no plan; the message names the resource that binds and changes
            that would help.
        SolverError: the solver failed, or found no plan in time.
        PlanError: an argument is invalid.
    """
    plan = solve_if_possible(problem, time_limit_s=time_limit_s, batches=batches)
    if plan is None and batches is not None:
        raise InfeasibleError(
            f"No plan has room for the batches {list(batches)}. Leave batches out, to have them"
            " planned, or raise the ranks' capacity_bytes."
        )
    if plan is None:
        refuse(replace(problem, no_idle_ranks=False), _fits)  # which needs less memory
    return plan


def _fits(problem: Problem, deadline: float) -> bool:
    """Return whether there is a plan; False if that is not known."""
    try:
        return fastest(problem, deadline)[0] is not None
    except SolverError:
        return False


def solve_if_possible(
    problem: Problem, *, time_limit_s: float = 60.0, batches: Sequence[int] | None = None
) -> Plan | None:
    """Return the plan of :func:`solve`, or None where there is none: the reason takes longer."""
    if not isinstance(problem, Problem):
        raise PlanError(f"solve: expected a Problem, but got {records.shortened(problem)}.")
    if batches is not None and (len(batches), sum(batches)) != (
        len(problem.ranks),
        problem.global_batch_size,
    ):
        raise PlanError(
            f"solve: expected batches of {len(problem.ranks)} ranks that sum to"
            f" {problem.global_batch_size}, but got {list(batches)}."
        )
    started = time.perf_counter()
    limit_s = records.real("solve: time_limit_s", time_limit_s, above_minimum=True, infinite=True)
    plan = _solved(problem, started + limit_s, batches)
    if plan is None and problem.no_idle_ranks:  # then some rank has no room for samples
        idle = replace(problem, no_idle_ranks=False)
        plan = _solved(idle, started + limit_s, batches)
    if plan is None:
        return None
    return replace(plan, solve_s=time.perf_counter() - started)


def _solved(problem: Problem, deadline: float, batches: Sequence[int] | None) -> Plan | None:
    if not problem.can_move_state and certainly_infeasible(problem, group_types(problem)):
        return None
    choice, bound_s = fastest(problem, deadline, batches)
    if choice is None:
        return None
    runs = _runs(choice.problem, choice.types, choice.found.columns, choice.found.chosen)
    bare = [rank_plan(profile, *run) for profile, run in zip(problem.ranks, runs, strict=True)]
    ranks = _with_shares(choice, bare)
    even = choice.problem.are_even([rank.state_fraction for rank in ranks])
    plan = priced(
        problem.resharding(choice.problem.reshard_after_forward is True),
        ranks,
        backend="cvxpy/HiGHS",
        # shares that are even by chance may leave no room for padding
        padded=choice.problem.padded_bytes < problem.padded_bytes if even else None,
    )
    assert plan.step_s is not None
    gap = (choice.step_s - bound_s) / choice.step_s if choice.step_s > 0 else 0.0
    return replace(
        plan,
        bound_s=min(bound_s, plan.step_s),
        gap=0.0 if gap <= EQUAL * (1 + _ROUNDING) else gap,
    )


def _with_shares(choice: Choice, runs: Sequence[RankPlan]) -> list[RankPlan]:
    """Return what ranks run, each with its share of the state, and where that lives.

    Devices are filled first; each rank moves as little as its share allows.
    """
    problem, stays = choice.problem, replace(choice.problem, optimizer_offload=False)
    backward_s = (float(choice.found.columns.times_s[:, 1].max()),) * 2
    exposed_s = choice.exposed_s + EQUAL / 2 * choice.step_s
    room, resident = (Room(each, exposed_s, backward_s) for each in (problem, stays))
    unlimited = Room(stays, most_share=math.inf)
    may_stay = problem.optimizer_offload is not True or not problem.can_move_state
    pairs = list(zip(problem.ranks, runs, strict=True))
    needed = [needed_by(problem, profile, run) for profile, run in pairs]
    shares = list(even_shares(problem.groups, len(runs)))
    for members in problem.members if not choice.even else ():
        free, least, most = (
            [float(own.held_bytes(problem.ranks[rank], needed[rank])) for rank in members]
            for own in (unlimited, resident, room)
        )
        least, most = ([held / room.whole_bytes for held in own] for own in (least, most))
        least = least if may_stay else [0.0] * len(members)
        if math.fsum(least) >= 1:
            least = list(map(min, share_state(free), least))
        for rank, share in zip(members, filled_up(least, most), strict=True):
            shares[rank] = share
    found = []
    for (profile, run), share, own in zip(pairs, shares, needed, strict=True):
        moved = room.least_moved(profile, own, share)
        share = to_the_byte(problem, profile, run, share, moved.device_bytes(problem))
        found.append(
            replace(
                run,
                state_fraction=share,
                resident_fraction=moved.resident_fraction,
                host_update_fraction=moved.host_update_fraction,
            )
        )
    return found


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
        groups=problem.groups,
    )
    prediction = predict(problem, plan)
    filled = tuple(
        replace(
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
    return replace(plan, ranks=filled, step_s=prediction.step_s)
