"""Searches for the fastest pipelines of node groups, with a proven bound.

Best first: a heap holds groupings and parts of cuts by seconds that none of their plans beats. A
grouping is refined to its orders, and a part of a cut by the choice of one more stage. When a cut
comes first, its stages are planned. The search ends when nothing that is left can be faster than
the fastest cut of planned stages.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.offline.pipeline.groups import (
    Partition,
    atoms_of,
    kinds_of,
    orders,
    partitions,
    tries_all_orders,
)
from lightning_cephalo.offline.pipeline.plan import Advice, Pipeline, PlannedStage
from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.offline.pipeline.stages import Stage, stage_problem
from lightning_cephalo.offline.pipeline.table import Choice, LeastTimes, Order, StageTable
from lightning_cephalo.plan import Plan, Problem
from lightning_cephalo.plan.cost import fixed_time
from lightning_cephalo.plan.moving import least_update_s, with_updates
from lightning_cephalo.plan.solver.bounds import time_bounds
from lightning_cephalo.plan.solver.columns import group_types
from lightning_cephalo.plan.solver.infeasible import certainly_infeasible
from lightning_cephalo.plan.solver.solve import solve_if_possible

# Pipelines within this fraction of the fastest count as equally fast: estimates of times are often
# off by a fifth.
GAP = 1e-2
# Seconds for one more plan, even if time is up.
_LEAST_S = 1.0
# Nodes that are kept when time is up, until there is any pipeline.
_LATE = 16


class Planned:
    """Plans of stages' waves, kept for searches on other bandwidths."""

    def __init__(self, planner: Callable[..., Plan | None] = solve_if_possible) -> None:
        self._planner = planner
        self._plans: dict[Problem, Plan | None] = {}

    def plan(self, problem: Problem, *, time_limit_s: float) -> Plan | None:
        """Return the plan of a wave; None if nothing fits, or none is found in time."""
        if problem not in self._plans:
            try:
                self._plans[problem] = self._planner(problem, time_limit_s=time_limit_s)
            except SolverError:
                self._plans[problem] = None
        return self._plans[problem]


def wave_counts(samples: int) -> list[int]:
    """Return the numbers of waves to try: 1, 2, 3, 4, 6, 8, 12, ... and those of equal waves.

    Where they do not divide the batch, the last waves have less and are priced as whole.
    """
    powers = itertools.takewhile(lambda n: n <= samples, (2**n for n in itertools.count()))
    tried = {count * part // 2 for count in powers for part in (2, 3)} | {samples}
    sizes = {math.ceil(samples / count) for count in tried if count <= samples}
    return sorted({math.ceil(samples / size) for size in sizes})


def advise(
    problem: PipelineProblem,
    today_s: float,
    *,
    time_limit_s: float = 60.0,
    gap: float = GAP,
    planned: Planned | None = None,
) -> Advice:
    """Find the fastest pipeline of node groups, to compare it with today's plan.

    All ranks take part. Stages are one or more whole blocks. Units, ways to gather and waves are
    chosen too. Inside a stage, :func:`~lightning_cephalo.plan.solve` divides a wave so that it is
    as short as possible.
    """
    limit_s = records.real("time_limit_s", time_limit_s, above_minimum=True, infinite=True)
    gap = records.real("gap", gap)
    search = _Search(problem, time.perf_counter() + limit_s, gap, planned or Planned())
    best, bound_s = search.run()
    return Advice(problem, today_s, best, bound_s, search.covers())


def least_step_s(problem: Problem) -> float:
    """Return seconds that no plan of today's problem beats, without a solver."""
    problem = with_updates(problem, least_update_s(problem))
    fixed_s = fixed_time(problem)
    choices = [problem.resharding(choice) for choice in problem.reshard_choices]
    # Even shares may travel faster, and the bound holds for them too.
    fitting = (
        time_bounds(choice.with_even_shares(), group_types(choice)).step_s
        for choice in choices
        if not certainly_infeasible(choice, group_types(choice))
    )
    return fixed_s + min(fitting, default=math.inf)


_Cut = tuple[Order, tuple[Choice, ...]]
"""An order of stages, with choices for all of them or for the first ones."""
_Nodes = Iterator[tuple[float, Callable[[float], "_Nodes"]]]
"""Seconds that no plan of a node beats, and what takes them and yields the nodes inside."""


class _Search:
    def __init__(
        self, problem: PipelineProblem, deadline: float, gap: float, planned: Planned
    ) -> None:
        self.problem, self.deadline, self.gap, self.planned = problem, deadline, gap, planned
        self.atoms = atoms_of(problem)
        self.kinds = kinds_of(problem, self.atoms)
        self.least = LeastTimes(problem)
        self._tables: dict[Stage, StageTable] = {}
        self._best: _Cut | None = None
        self._best_s = self._below_s = self._open_s = math.inf

    def covers(self) -> str:
        merged = max(map(len, self.atoms), default=1)
        counts = ", ".join(map(str, wave_counts(self.problem.batch)))
        together = f"groups of up to {merged} blocks" if merged > 1 else "whole blocks"
        return (
            f"pipelines of all ranks, whose stages are {together} (the ranks of one device in one"
            f" node), in {counts} waves"
        )

    def run(self) -> tuple[Pipeline | None, float]:
        """Return the fastest pipeline, and seconds that none beats."""
        heap: list[tuple[float, int, Callable[[float], _Nodes]]] = []
        counter = itertools.count()
        nodes = self._groupings()
        while True:
            for least_s, refine in nodes:
                if least_s < self._below_s:
                    heapq.heappush(heap, (least_s, next(counter), refine))
            if not heap or heap[0][0] >= self._below_s:
                break
            bound_s, _, refine = heapq.heappop(heap)
            if time.perf_counter() > self.deadline:
                self._open_s = min(self._open_s, bound_s)
                if self._best is not None:
                    break
                heap = heapq.nsmallest(_LATE, heap)
            nodes = refine(bound_s)
        best = None if self._best is None else _pipeline(*self._best)
        return best, min(self._open_s, self._below_s)

    def _groupings(self) -> _Nodes:
        """Yield all groupings and numbers of waves.

        Suppose that units could be cut anywhere, and that a wave takes ``r_s`` seconds for one unit
        in stage s. Within t seconds it passes ``t x sum of 1 / r_s`` units of the k fastest stages.
        So no cut of U units beats the least over k of ``(k + waves - 1) x U / (sum of 1 / r_s)``.
        The tail counts as the fewest units that any stage could run in the meantime.
        """
        problem = self.problem
        waves = np.array(wave_counts(problem.batch))
        samples = -(-problem.batch // waves)
        pairs = itertools.combinations(range(len(problem.blocks)), 2)
        links = [problem.crossing((a,), (b,), problem.crossing_bytes) for a, b in pairs]
        cross_s = samples * min((link.wave_s for link in links), default=0.0)
        latency_s = min((link.latency_s for link in links), default=0.0)
        slowest_s = functools.cache(lambda own: self.least.slowest_s(self._blocks(own), samples))
        for groups in partitions(range(len(self.atoms)), self.kinds):
            if not 2 <= len(groups) <= problem.units:
                continue
            # (waves, stages)
            forward_s, backward_s, tail_s = np.array([slowest_s(group) for group in groups]).T
            unit_s = np.where(np.isfinite(forward_s), forward_s + backward_s, np.nan)
            units = problem.units + (tail_s / unit_s).min(axis=1)
            speeds = np.cumsum(1 / np.sort(unit_s, axis=1), axis=1)
            stages = np.arange(len(groups))
            least_s = ((stages + waves[:, None]) * units[:, None] / speeds).min(axis=1)
            least_s = np.maximum(least_s, 2 * (waves - 1) * cross_s)
            least_s += 2 * stages[-1] * (cross_s + latency_s)
            for each_s, count in zip(least_s.tolist(), waves.tolist(), strict=True):
                yield each_s, functools.partial(self._orders, groups, count)

    def _orders(self, grouping: Partition, waves: int, bound_s: float) -> _Nodes:
        """Yield the choices for the first stage of each order of a grouping."""
        if not tries_all_orders(len(grouping)):
            self._open_s = min(self._open_s, bound_s)
        samples = math.ceil(self.problem.batch / waves)
        nbytes = samples * self.problem.crossing_bytes
        for order in orders(grouping, self.kinds):
            groups = [self._blocks(group) for group in order]
            last = len(groups) - 1
            tables = []
            for at, own in enumerate(groups):
                stage = Stage(own, 1, False, at == 0, at == last, waves, samples)
                if stage not in self._tables:
                    slowest_s = self.least.slowest_s(own, samples)
                    self._tables[stage] = StageTable(self.problem, stage, slowest_s.tolist())
                tables.append(self._tables[stage])
            pairs = itertools.pairwise(groups)
            crossings = tuple(self.problem.crossing(*pair, nbytes) for pair in pairs)
            yield from self._cuts(Order(self.problem, tuple(tables), crossings, waves), ())

    def _cuts(self, order: Order, choices: tuple[Choice, ...], bound_s: float = 0.0) -> _Nodes:
        """Yield one choice more. If there is none, plan the cut unless its seconds have changed."""
        if len(choices) < len(order.tables):
            for least_s, more in order.refined(choices, self._below_s):
                yield least_s, functools.partial(self._cuts, order, more)
        elif order.step_s(choices) > bound_s:
            yield order.step_s(choices), functools.partial(self._cuts, order, choices)
        else:
            for table, choice in zip(order.tables, choices, strict=True):
                if choice not in table.plans:
                    left_s = max(self.deadline - time.perf_counter(), _LEAST_S)
                    wave = stage_problem(self.problem, table.stage(choice))
                    table.replace(choice, self.planned.plan(wave, time_limit_s=left_s))
            if order.step_s(choices) < self._best_s:
                self._best, self._best_s = (order, choices), order.step_s(choices)
                self._below_s = self._best_s * (1 - self.gap)

    def _blocks(self, group: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(block for atom in group for block in self.atoms[atom]))


def _pipeline(order: Order, choices: tuple[Choice, ...]) -> Pipeline:
    planned = []
    for table, choice, times in zip(order.tables, choices, order.times(choices), strict=True):
        plan = table.plans[choice]
        assert plan is not None
        planned.append(PlannedStage(table.stage(choice), plan, times))
    return Pipeline(tuple(planned), order.crossings)
