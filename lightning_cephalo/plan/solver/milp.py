"""The mixed-integer programs, stated in CVXPY and solved by HiGHS.

In each program, ``x[c]`` is the number of ranks that run column ``c``, and :class:`Needs` holds the
constraints over all ranks. Programs differ in what they minimise, and in the needs that may be
missed at a price.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
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
_Indices = Sequence[int] | np.ndarray


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
class Maximum:
    """Price of the largest value among the chosen columns: ``max(floor, values)``."""

    values: np.ndarray
    floor: float = 0.0
    resolution: float = 0.0

    @property
    def above(self) -> np.ndarray:
        """Values above the floor, of shape (columns,)."""
        above = np.maximum(self.values - self.floor, 0.0)
        if self.resolution > 0:
            above = np.floor(above / self.resolution) * self.resolution
        return above


@dataclass(frozen=True)
class Outcome:
    """Result of the solver."""

    status: str
    values: np.ndarray | None
    bound: float
    reason: str = ""


def choose(
    columns: Columns,
    needs: Needs,
    *,
    maxima: Sequence[Maximum] = (),
    cost: np.ndarray | None = None,
    slack: Slack = TIGHT,
    limited: Sequence[Maximum] = (),
    most: float = math.inf,
    gap: float = 0.0,
    time_limit_s: float,
) -> Outcome:
    """Choose how many ranks run each column, at the least cost.

    The cost is the sum of ``maxima``, ``cost`` (columns,) and ``slack``. The sum of ``limited`` is
    ``most`` at most.
    """
    allowed = needs
    for _ in range(_TRIES):
        program = _Program()
        chosen = program.choice(columns, allowed, cost, slack)
        for maximum in maxima:
            program.base += float(maximum.floor)
            for variable, price in program.ladder(maximum, columns, chosen, needs.ranks):
                program.cost[variable] = price
        if limited:
            ladders = [program.ladder(each, columns, chosen, needs.ranks) for each in limited]
            program.limit([step for ladder in ladders for step in ladder], most)
        outcome = program.solve(gap, time_limit_s)
        if outcome.values is None:
            return outcome
        further = outcome.values[chosen].sum() - needs.ranks.sum()
        excess = outcome.values[chosen] @ columns.used - needs.shared - further * slack.brings
        if not (excess > 0).any():
            return dataclasses.replace(outcome, values=outcome.values[chosen])
        # The solver meets a row only within its tolerance: many bytes on a large cluster.
        tighter = np.where(excess > 0, allowed.shared - 2 * excess, allowed.shared)
        allowed = dataclasses.replace(allowed, shared=tighter)
    return Outcome("infeasible", None, math.inf, "only within rounding")


class _Program:
    """Integer variables and rows, added one after the other."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.base = 0.0
        self._equal = _Rows()
        self._at_most = _Rows()

    def variables(self, cost: Sequence[float] | np.ndarray, upper: Any) -> np.ndarray:
        """Add variables from 0 to ``upper`` and return their indices."""
        first = len(self.cost)
        self.cost.extend(cost)
        self.upper.extend(np.broadcast_to(upper, len(cost)))
        return np.arange(first, len(self.cost))

    def choice(
        self, columns: Columns, needs: Needs, cost: np.ndarray | None, slack: Slack
    ) -> np.ndarray:
        """Add a variable per column, within ``needs``, and return their indices."""
        size = len(columns)
        upper = needs.ranks + _MOST_RANKS * (np.arange(len(needs.ranks)) == slack.further)
        chosen = self.variables(np.zeros(size) if cost is None else cost, upper[columns.kind])
        further = self.variables([1.0] * (slack.further is not None), _MOST_RANKS)
        fewer = self.variables([1.0] * slack.fewer, needs.batch - 1)
        more = self.variables([1.0] * slack.more, math.inf)
        members = [np.flatnonzero(columns.kind == kind) for kind in range(len(needs.ranks))]
        for kind, own in enumerate(members):
            added = further if kind == slack.further else further[:0]
            row = [*np.ones(len(own)), *-np.ones(len(added))]
            self._equal.add([*chosen[own], *added], row, needs.ranks[kind])
        row = [*columns.batch, *np.ones(len(fewer)), *-np.ones(len(more))]
        self._equal.add([*chosen, *fewer, *more], row, needs.batch)
        brings = np.broadcast_to(slack.brings, needs.shared.shape)
        for used, total, brought in zip(columns.used.T, needs.shared, brings, strict=True):
            if math.isfinite(total):
                # the solver's tolerances are absolute
                scale = max(total, float(used.max(initial=0.0)), 1.0)
                row = [*(used / scale), *np.full(len(further), -brought / scale)]
                self._at_most.add([*chosen, *further], row, total / scale)
        return chosen

    def limit(self, steps: Sequence[tuple[int, float]], most: float) -> None:
        """Let the prices of climbed steps of ladders sum to so much at most."""
        self._at_most.add([variable for variable, _ in steps], [price for _, price in steps], most)

    def ladder(
        self, maximum: Maximum, columns: Columns, chosen: np.ndarray, ranks: np.ndarray
    ) -> list[tuple[int, float]]:
        """Add a binary variable per level above the floor; return each with its price.

        A column may be used only when its level is climbed. A whole type shares one row per level,
        which makes the relaxation far tighter than a row per column.
        """
        levels, level = np.unique(np.r_[0.0, maximum.above], return_inverse=True)
        level = level.reshape(-1)[1:]
        climbed = self.variables(np.zeros(len(levels) - 1), 1.0)
        for lower, upper in itertools.pairwise(climbed):
            self._at_most.add([upper, lower], [1.0, -1.0], 0.0)
        for kind, count in enumerate(ranks):
            own = np.flatnonzero((columns.kind == kind) & (level > 0))
            for step in np.unique(level[own]):
                reaching = own[level[own] >= step]
                self._at_most.add(
                    [*chosen[reaching], climbed[step - 1]],
                    [*np.ones(len(reaching)), -float(count)],
                    0.0,
                )
        return list(zip(climbed, np.diff(levels), strict=True))

    def solve(self, gap: float, time_limit_s: float) -> Outcome:
        """Return the solution of the least cost, or the best found within the time."""
        cvxpy = load_solver()
        width = len(self.cost)
        cost, upper = np.array(self.cost), np.array(self.upper, dtype=float)
        # The solver's tolerances are absolute: costs are divided by the largest one.
        unit = max(self.base, float(cost.max(initial=0.0))) or 1.0
        variables = cvxpy.Variable(width, integer=True, bounds=[np.zeros(width), upper])
        constraints = [self._equal.matrix(width) @ variables == np.array(self._equal.right)]
        if self._at_most.right:
            matrix = self._at_most.matrix(width)
            constraints.append(matrix @ variables <= np.array(self._at_most.right))
        program = cvxpy.Problem(cvxpy.Minimize(cost / unit @ variables), constraints)
        started = time.perf_counter()
        # These steps replace program.solve(), which turns a time limit into a warning and hides
        # the solver's bound.
        data, chain, inverse = program.get_problem_data(cvxpy.HIGHS)
        options = {
            "time_limit": max(time_limit_s - (time.perf_counter() - started), 0.01),
            "mip_rel_gap": gap,
            "mip_abs_gap": max(_TOLERANCE, gap * self.base / unit),
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
            return Outcome("infeasible", None, math.inf, status)
        if status not in ("kOptimal", "kTimeLimit"):
            raise SolverError(f"HiGHS stopped with {status}, expected an optimum or a time limit.")
        bound = self.base + unit * max(float(info.mip_dual_bound), 0.0)
        if not math.isfinite(info.objective_function_value) or info.primal_solution_status != 2:
            return Outcome("limit", None, bound, status)
        program.unpack(chain.invert(raw, inverse))
        values = np.rint(np.asarray(variables.value)).astype(int)
        return Outcome("optimal" if status == "kOptimal" else "limit", values, bound, status)


class _Rows:
    """Rows of ``matrix @ variables`` and their right-hand sides."""

    def __init__(self) -> None:
        self.right: list[float] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._lengths: list[int] = []

    def add(self, columns: _Indices, values: Sequence[float] | np.ndarray, right: float) -> None:
        self._columns.extend(columns)
        self._values.extend(values)
        self._lengths.append(len(columns))
        self.right.append(float(right))

    def matrix(self, width: int) -> Any:
        from scipy import sparse

        starts = np.r_[0, np.cumsum(self._lengths)].astype(int)
        shape = (len(self._lengths), width)
        return sparse.csr_matrix((self._values, self._columns, starts), shape=shape)


def load_solver() -> Any:
    """Import cvxpy, a second or more the first time: no run that only reads a plan pays for it."""
    import cvxpy

    return cvxpy
