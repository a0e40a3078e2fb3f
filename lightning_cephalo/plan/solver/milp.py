"""The mixed-integer program, stated in CVXPY and solved by HiGHS.

``x[c]`` is the number of ranks that run column ``c``. :class:`Needs` holds the constraints over all
ranks; :class:`Slack` says which of them may be missed, at a price.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.solver.columns import Columns

_TOLERANCE = 1e-9
_TRIES = 5
# Further ranks of one type, at most.
_MOST_RANKS = 256
# HiGHS has none of its own at a time limit: CVXPY gives zeros then.
_FEASIBLE = 2


@dataclass(frozen=True)
class Needs:
    """Constraints that a choice of columns must meet."""

    ranks: np.ndarray
    batch: int
    shared: np.ndarray


@dataclass(frozen=True)
class Slack:
    """Needs that may be missed, at a price of 1 per sample or rank."""

    fewer: bool = False
    more: bool = False
    further: int | None = None
    brings: np.ndarray | float = 0.0


TIGHT = Slack()


@dataclass(frozen=True)
class Outcome:
    """Result of the solver: how many ranks run each column; None: none was found.

    Attributes:
        bound: Lower bound of the cost.
        is_proven: Whether the cost is proven to be the least; without values, that there are none.
    """

    values: np.ndarray | None
    bound: float
    is_proven: bool


def choose(
    columns: Columns,
    needs: Needs,
    *,
    cost: np.ndarray | None = None,
    ladders: Sequence[np.ndarray] = (),
    slack: Slack = TIGHT,
    gap: float = 0.0,
    time_limit_s: float,
) -> Outcome:
    """Choose how many ranks run each column, at the least cost.

    The cost is ``cost`` (columns,) of every rank, the largest value of each of ``ladders``
    (columns,), and the slack. Costs are near 1: the solver's tolerances are absolute.
    """
    shared = needs.shared
    for _ in range(_TRIES):
        outcome, further = _solved(columns, needs, shared, cost, ladders, slack, gap, time_limit_s)
        if outcome.values is None:
            return outcome
        excess = outcome.values @ columns.used - needs.shared - further * slack.brings
        if not (excess > 0).any():
            return outcome
        # The solver meets a row only within its tolerance: many bytes on a large cluster.
        shared = np.where(excess > 0, shared - 2 * excess, shared)
    return Outcome(None, math.inf, is_proven=True)  # only within rounding


def _solved(
    columns: Columns,
    needs: Needs,
    shared: np.ndarray,
    cost: np.ndarray | None,
    ladders: Sequence[np.ndarray],
    slack: Slack,
    gap: float,
    time_limit_s: float,
) -> tuple[Outcome, int]:
    """Solve one program; return its outcome and the number of further ranks."""
    cvxpy = load_solver()
    size, kinds = len(columns), np.arange(len(needs.ranks))
    is_further = kinds == slack.further
    most = (needs.ranks + _MOST_RANKS * is_further)[columns.kind].astype(float)
    x = cvxpy.Variable(size, integer=True, bounds=[np.zeros(size), most])
    larger = int(columns.batch.max(initial=0))
    limits = (needs.batch - 1) * slack.fewer, larger * slack.more, _MOST_RANKS * is_further.any()
    fewer, more, further = (cvxpy.Variable(integer=True, bounds=[0, each]) for each in limits)
    of_kinds = _matrix(np.ones(size), columns.kind, np.arange(size), (len(kinds), size))
    rows = [
        of_kinds @ x - is_further.astype(float) * further == needs.ranks,
        columns.batch @ x + fewer - more == needs.batch,
    ]
    brings = np.broadcast_to(slack.brings, shared.shape)
    for used, limit, brought in zip(columns.used.T, shared, brings, strict=True):
        if math.isfinite(limit):
            scale = max(limit, float(used.max(initial=0.0)), 1.0)
            rows.append((used / scale) @ x - brought / scale * further <= limit / scale)
    price = fewer + more + further
    if cost is not None:
        price = price + cost @ x
    for values in ladders:
        climbed, own = _ladder(values, columns, x, needs.ranks)
        price, rows = price + climbed, [*rows, *own]
    program = cvxpy.Problem(cvxpy.Minimize(price), rows)
    options = {
        "time_limit": max(time_limit_s, 0.01),
        "mip_rel_gap": gap,
        "mip_abs_gap": max(_TOLERANCE, gap),
        "mip_feasibility_tolerance": _TOLERANCE,
        "primal_feasibility_tolerance": _TOLERANCE,
        "dual_feasibility_tolerance": _TOLERANCE,
        "random_seed": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a solution within the time limit
        try:
            program.solve(solver=cvxpy.HIGHS, **options)
        except (cvxpy.error.SolverError, ValueError) as error:
            raise SolverError(f"HiGHS failed: {error}") from error
    is_proven = program.status in ("optimal", "infeasible", "infeasible_or_unbounded")
    info = program.solver_stats.extra_stats if x.value is not None else None
    if info is None or info.primal_solution_status != _FEASIBLE:
        return Outcome(None, math.inf if is_proven else 0.0, is_proven), 0
    bound = max(float(info.mip_dual_bound), 0.0)
    values = np.rint(np.asarray(x.value)).astype(int)
    return Outcome(values, bound, is_proven), int(values.sum() - needs.ranks.sum())


def _ladder(
    values: np.ndarray, columns: Columns, x: Any, ranks: np.ndarray
) -> tuple[Any, list[Any]]:
    """Return the largest of the values of chosen columns, and its rows: a binary for each level.

    A column may be used only when its level is climbed. A whole type shares one row per level,
    which makes the relaxation far tighter than a row per column.
    """
    levels, at = np.unique(np.r_[0.0, values], return_inverse=True)
    at = at.reshape(-1)[1:]
    if len(levels) == 1:
        return 0.0, []
    climbed = load_solver().Variable(len(levels) - 1, boolean=True)
    reaching: list[np.ndarray] = []
    kinds, steps = [], []
    for kind in range(len(ranks)):
        own = np.flatnonzero((columns.kind == kind) & (at > 0))
        for level in np.unique(at[own]):
            reaching.append(own[at[own] >= level])
            kinds.append(kind)
            steps.append(level - 1)
    lengths = np.array([len(each) for each in reaching])
    every, flat = np.arange(len(reaching)), np.concatenate(reaching)
    uses = _matrix(np.ones(len(flat)), np.repeat(every, lengths), flat, (len(every), len(columns)))
    allows = _matrix(
        ranks[kinds].astype(float), every, np.array(steps), (len(every), len(levels) - 1)
    )
    rows = [uses @ x <= allows @ climbed]
    if len(levels) > 2:
        rows.append(climbed[1:] <= climbed[:-1])
    return np.diff(levels) @ climbed, rows


def _matrix(values: np.ndarray, rows: Any, columns: Any, shape: tuple[int, int]) -> Any:
    from scipy import sparse

    return sparse.csr_matrix((values, (rows, columns)), shape=shape)


def load_solver() -> Any:
    """Import cvxpy, a second or more the first time: no run that only reads a plan pays for it."""
    import cvxpy

    return cvxpy
