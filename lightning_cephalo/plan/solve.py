"""The fastest plan, proven: columns per type of rank, two small mixed-integer programs, and the
state shared last.

1. Bounds below the step time without a solver (``_bounds``), which also say how large a rank's
batch can get. 2. Columns (``_columns``): how one rank of a type may run a batch, within a limit on
the step time. 3. ``fastest``: choose columns for all ranks. First with *at least* the global batch,
where a column with fewer samples
   and no less cost is of no use: few columns remain, and the optimum is a bound. Only if the exact
   batch cannot be had within the three slowest times found (curves that fall with size), again with
   the exact batch.
4. ``cheapest``: within those slowest times, the exact batch with the most even memory headroom.
5. The state in proportion to what memory is then free (``_state``).

The limit of step 2 starts just above the bound and is raised until the optimum lies within it, so
that what it cuts off is provably slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from . import _fields
from ._columns import RankType, group_types
from ._infeasible import refuse, refuse_early
from ._search import Found, Search
from ._state import share_state
from .cost import predict, working_bytes
from .errors import PlanError
from .plan import Plan, RankPlan
from .problem import Problem

_EXACT = 1e-9


def solve(problem: Problem, *, time_limit_s: float = 60.0) -> Plan:
    """The plan with the shortest step: the global batch exactly, every rank within its capacity.

    Decides for every rank its microbatch sizes and their number (none is allowed: a rank that only
    holds state) and its share of the state. Of the plans with that step time, one with even memory
    headroom is taken, and every rank gives the same part of its free memory to state. While the
    combinations are few, microbatches of a rank may be of any sizes; otherwise of one size with a
    ragged last one, or an even split. The optimum, and ``bound_s``, are among those.

    Args:
        problem: what there is.
        time_limit_s: after this long, the best plan so far is returned with its gap.

    Returns:
        The plan, with every prediction filled in by :func:`~lightning_cephalo.plan.predict`, and
        ``gap`` 0 when it is proven the fastest.

    Raises:
        InfeasibleError: there is no plan; the message says which resource binds and what would
            help.
        SolverError: the solver failed, or found no plan in time.
        PlanError: the arguments are not what is expected.
    """
    started = time.perf_counter()
    if not isinstance(problem, Problem):
        raise PlanError(f"solve: expected a Problem, but got {_fields.shortened(problem)}.")
    limit = _fields.real("solve: time_limit_s", time_limit_s, above_minimum=True, infinite=True)
    types = group_types(problem)
    refuse_early(problem, types)
    found = Search(problem, types, started + limit).run()
    if found is None:
        refuse(problem, types)
    return _as_plan(problem, types, found, started)


def _as_plan(
    problem: Problem,
    types: Sequence[RankType],
    found: Found,
    started: float,
) -> Plan:
    sizes: list[tuple[int, ...]] = [()] * len(problem.ranks)
    for index, kind in enumerate(types):
        rows = np.flatnonzero((found.pool.kind == index) & (found.chosen > 0))
        rows = rows[np.lexsort((found.pool.count[rows], -found.pool.batch[rows]))]
        members = iter(kind.members)
        for row in rows:
            run = found.columns[index].sizes(int(found.pool.row[row]))
            for _ in range(int(found.chosen[row])):
                sizes[next(members)] = run
    used = [
        working_bytes(problem, profile, run)
        for profile, run in zip(problem.ranks, sizes, strict=True)
    ]
    fractions = share_state(
        problem.state_bytes, used, [profile.capacity_bytes for profile in problem.ranks]
    )
    bare = [RankPlan(run, fraction) for run, fraction in zip(sizes, fractions, strict=True)]
    prediction = predict(problem, bare)
    ranks = tuple(
        RankPlan(
            run,
            fraction,
            name=profile.name,
            forward_s=part.forward_s,
            backward_s=part.backward_s,
            tail_s=part.tail_s,
            memory_bytes=part.memory_bytes,
            capacity_bytes=profile.capacity_bytes,
        )
        for run, fraction, profile, part in zip(
            sizes, fractions, problem.ranks, prediction.ranks, strict=True
        )
    )
    beside = problem.optimizer_s + problem.step_overhead_s
    step = prediction.step_s
    gap = (found.step_s - found.bound_s) / found.step_s if found.step_s > 0 else 0.0
    gap = 0.0 if gap <= _EXACT else gap
    return Plan(
        ranks,
        step_s=step,
        bound_s=min(found.bound_s + beside, step) if gap else step,
        gap=gap,
        solve_s=time.perf_counter() - started,
        backend="cvxpy/HiGHS",
    )
