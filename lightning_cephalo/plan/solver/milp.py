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
    """Constraints that a choice of columns must meet: ``limits`` are those of ``Columns.used``."""

    ranks: np.ndarray
    batch: int
    limits: np.ndarray


@dataclass(frozen=True)
class Slack:
    """Needs that may be missed, at a price of 1 per sample or rank."""

    fewer: bool = False
    more: bool = False
    further: int | None = None


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
    cost: np.ndarray | float = 0.0,
    ladders: Sequence[np.ndarray] = (),
    slack: Slack = TIGHT,
    gap: float = 0.0,
    time_limit_s: float,
) -> Outcome:
    """Choose how many ranks run each column, at the least cost.

    The cost is ``cost`` (columns,) of every rank, the largest value of each of ``ladders``
    (columns,), and the slack. Costs are near 1: the solver's tolerances are absolute.
    """
    cvxpy = load_solver()
    size, kinds = len(columns), np.arange(len(needs.ranks))
    is_further = (kinds == slack.further).astype(float)
    ranks = needs.ranks + _MOST_RANKS * is_further
    x = cvxpy.Variable(size, integer=True, bounds=[np.zeros(size), ranks[columns.kind]])
    larger = int(columns.batch.max(initial=0)) * int(needs.ranks.sum())
    most = (needs.batch - 1) * slack.fewer, larger * slack.more, _MOST_RANKS * is_further.any()
    fewer, more, further = (cvxpy.Variable(integer=True, bounds=[0, each]) for each in most)
    of_kinds = _matrix(np.ones(size), columns.kind, np.arange(size), (len(kinds), size))
    rows = [
        of_kinds @ x - is_further * further == needs.ranks,
        columns.batch @ x + fewer - more == needs.batch,
    ]
    price = fewer + more + further + np.broadcast_to(cost, size) @ x
    for values in ladders:
        climbed, own = _ladder(values, columns, x, needs.ranks)
        price, rows = price + climbed, [*rows, *own]
    limits = needs.limits
    for _ in range(_TRIES):
        shared = [
            (used / scale) @ x <= limit / scale
            for used, limit in zip(columns.used.T, limits, strict=True)
            if math.isfinite(limit)
            for scale in [max(abs(limit), float(np.abs(used).max(initial=0.0))) or 1.0]
        ]
        program = cvxpy.Problem(cvxpy.Minimize(price), [*rows, *shared])
        outcome = _solved(program, x, gap, time_limit_s)
        if outcome.values is None:
            return outcome
        excess = outcome.values @ columns.used - needs.limits
        if not (excess > 0).any():
            return outcome
        # The solver meets a row only within its tolerance: many bytes on a large cluster.
        limits = np.where(excess > 0, limits - 2 * excess, limits)
    return Outcome(None, math.inf, is_proven=True)  # only within rounding


def _solved(program: Any, x: Any, gap: float, time_limit_s: float) -> Outcome:
    cvxpy = load_solver()
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
        return Outcome(None, math.inf if is_proven else 0.0, is_proven)
    bound = max(float(info.mip_dual_bound), 0.0)
    return Outcome(np.rint(np.asarray(x.value)).astype(int), bound, is_proven)


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
    # a row for each level of each type: its columns from there on
    pairs = np.unique(np.column_stack([columns.kind, at])[at > 0], axis=0)
    kinds, steps = pairs.T
    reach = [np.flatnonzero((columns.kind == kind) & (at >= step)) for kind, step in pairs]
    every, lengths = np.arange(len(pairs)), [len(own) for own in reach]
    shape = (len(pairs), len(columns))
    uses = _matrix(np.ones(sum(lengths)), np.repeat(every, lengths), np.concatenate(reach), shape)
    allows = _matrix(ranks[kinds], every, steps - 1, (len(pairs), len(levels) - 1))
    rows = [uses @ x <= allows @ climbed]
    if len(levels) > 2:
        rows.append(climbed[1:] <= climbed[:-1])
    return np.diff(levels) @ climbed, rows


def _matrix(values: Any, rows: Any, columns: Any, shape: tuple[int, int]) -> Any:
    from scipy import sparse

    return sparse.csr_matrix((np.asarray(values, dtype=float), (rows, columns)), shape=shape)


def load_solver() -> Any:
    """Import cvxpy, a second or more the first time: no run that only reads a plan pays for it."""
    import cvxpy

    return cvxpy
