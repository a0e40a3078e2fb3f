"""The mixed-integer programs, stated in CVXPY and solved by HiGHS.

Columns of all types lie one after the other; ``x[c]`` counts the ranks that run column ``c``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.solver.pool import Needs, Pool

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Outcome:
    """``status`` is "optimal", "infeasible" or "limit"; ``chosen`` (columns,) is None without a
    solution; ``bound`` is below the objective of every solution; ``reason`` is what the solver
    said; ``slowest_s`` (3,) are the slowest times of the columns chosen.
    """

    status: str
    chosen: np.ndarray | None
    objective: float
    bound: float
    reason: str = ""
    slowest_s: np.ndarray | None = None


def fastest(
    pool: Pool, needs: Needs, *, units: int, floors_s: np.ndarray, time_limit_s: float
) -> Outcome:
    """Least units * (slowest forward + slowest backward) + slowest tail, each slowest at least its
    floor.

    Each maximum climbs a ladder: one binary per level that any column reaches, and a column may be
    used only when its level is climbed. A whole type shares one row per level, which makes the
    relaxation far tighter than a row per column.
    """
    scales = np.array([units, units, 1.0])
    base = float((scales * floors_s).sum())
    raised = np.maximum(pool.times_s, floors_s)
    # The solver's tolerances are absolute: costs are given as parts of the longest step among the
    # columns.
    unit = float((raised * scales).sum(axis=1).max()) or 1.0
    size = len(pool.batch)
    costs, rows = [np.zeros(size)], _Rows()
    used = size
    for kind in range(3):
        levels, level = np.unique(np.r_[floors_s[kind], raised[:, kind]], return_inverse=True)
        level = level.reshape(-1)[1:]
        steps = len(levels) - 1
        costs.append(np.diff(levels) * scales[kind] / unit)
        for step in range(1, steps):
            rows.add([used + step, used + step - 1], [1.0, -1.0], 0.0)
        for group in range(len(pool.ranks)):
            members = np.flatnonzero((pool.kind == group) & (level > 0))
            for step in np.unique(level[members]):
                above = members[level[members] >= step]
                ranks = float(pool.ranks[group])
                rows.add([*above, used + step - 1], [*np.ones(len(above)), -ranks], 0.0)
        used += steps
    cost = np.concatenate(costs)
    upper = np.r_[pool.ranks[pool.kind], np.ones(used - size)].astype(float)
    outcome = _solve(cost, upper, rows, pool, needs, time_limit_s, gap=0.0)
    slowest = None
    if outcome.chosen is not None:
        slowest = raised[outcome.chosen > 0].max(axis=0)
    return Outcome(
        outcome.status,
        outcome.chosen,
        base + unit * outcome.objective,
        base + unit * max(outcome.bound, 0.0),
        outcome.reason,
        slowest,
    )


def cheapest(
    pool: Pool, needs: Needs, *, cost: np.ndarray, gap: float, time_limit_s: float
) -> Outcome:
    """Least sum of ``cost`` (columns,) over all ranks, to within the relative ``gap``."""
    upper = pool.ranks[pool.kind].astype(float)
    return _solve(cost, upper, _Rows(), pool, needs, time_limit_s, gap=gap)


class _Rows:
    """Rows of ``matrix @ variables <= right`` as they are found."""

    def __init__(self) -> None:
        self.columns: list[int] = []
        self.values: list[float] = []
        self.lengths: list[int] = []
        self.right: list[float] = []

    def add(
        self,
        columns: Sequence[int] | np.ndarray,
        values: Sequence[float] | np.ndarray,
        right: float,
    ) -> None:
        self.columns.extend(columns)
        self.values.extend(values)
        self.lengths.append(len(columns))
        self.right.append(right)

    def matrix(self, width: int) -> Any:
        from scipy import sparse

        starts = np.r_[0, np.cumsum(self.lengths)].astype(int)
        shape = (len(self.lengths), width)
        return sparse.csr_matrix((self.values, self.columns, starts), shape=shape)


def _solve(
    cost: np.ndarray,
    upper: np.ndarray,
    at_most: _Rows,
    pool: Pool,
    needs: Needs,
    time_limit_s: float,
    gap: float,
) -> Outcome:
    # Importing cvxpy takes a second, which who only reads a plan should not pay.
    import cvxpy

    size = len(pool.batch)
    equal = _Rows()
    for group, ranks in enumerate(pool.ranks):
        members = np.flatnonzero(pool.kind == group)
        equal.add(members, np.ones(len(members)), float(ranks))
    if math.isfinite(needs.used_bytes):
        scale = max(needs.used_bytes, float(pool.used_bytes.max(initial=0.0)), 1.0)
        at_most.add(np.arange(size), pool.used_bytes / scale, needs.used_bytes / scale)
    if needs.exact:
        equal.add(np.arange(size), pool.batch, float(needs.batch))
    else:
        at_most.add(np.arange(size), -pool.batch, -float(needs.batch))
    if needs.equal_counts:
        counts = np.unique(pool.count)
        first = len(cost)
        cost = np.r_[cost, np.zeros(len(counts))]
        upper = np.r_[upper, np.ones(len(counts))]
        for place, count in enumerate(counts):
            for group, ranks in enumerate(pool.ranks):
                members = np.flatnonzero((pool.kind == group) & (pool.count == count))
                ones = np.ones(len(members))
                equal.add([*members, first + place], [*ones, -float(ranks)], 0.0)

    variables = cvxpy.Variable(len(cost), integer=True, bounds=[np.zeros(len(cost)), upper])
    constraints = [equal.matrix(len(cost)) @ variables == np.array(equal.right)]
    if at_most.right:
        constraints.append(at_most.matrix(len(cost)) @ variables <= np.array(at_most.right))
    program = cvxpy.Problem(cvxpy.Minimize(cost @ variables), constraints)
    started = time.perf_counter()
    # Step by step rather than program.solve(), which turns a time limit into a warning and hides
    # the solver's bound.
    data, chain, inverse = program.get_problem_data(cvxpy.HIGHS)
    options = {
        "time_limit": max(time_limit_s - (time.perf_counter() - started), 0.01),
        "mip_rel_gap": gap,
        "mip_abs_gap": _TOLERANCE,
        "mip_feasibility_tolerance": _TOLERANCE,
        "primal_feasibility_tolerance": _TOLERANCE,
        "dual_feasibility_tolerance": _TOLERANCE,
        "random_seed": 0,
    }
    try:
        raw = chain.solve_via_data(program, data, solver_opts=options)
    except (cvxpy.error.SolverError, ValueError) as error:
        raise SolverError(f"HiGHS failed: {error}") from error
    status, info = raw["model_status"], raw["info"]
    if status in ("kInfeasible", "kUnboundedOrInfeasible"):
        return Outcome("infeasible", None, math.inf, math.inf, status)
    bound = float(info.mip_dual_bound)
    if status not in ("kOptimal", "kTimeLimit"):
        raise SolverError(f"HiGHS stopped with {status}, expected an optimum or a time limit.")
    if not math.isfinite(info.objective_function_value) or info.primal_solution_status != 2:
        return Outcome("limit", None, math.inf, bound, status)
    program.unpack(chain.invert(raw, inverse))
    values = np.asarray(variables.value)
    chosen = np.rint(values[:size]).astype(int)
    objective = float(info.objective_function_value)
    return Outcome("optimal" if status == "kOptimal" else "limit", chosen, objective, bound, status)
