"""Searches for the fastest pipelines of node groups, with a proven bound.

Best first: a heap holds groupings, orders and cuts by seconds that none of their plans beats. A
grouping is refined to its orders, an order to its best cut, and a cut whose stages are bounds to
the same with these stages planned. The search ends when the first is a cut of planned stages.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import InfeasibleError, PlanError, SolverError
from lightning_cephalo.offline.pipeline.bounds import LeastTimes, StageTable, least_pipelines_s
from lightning_cephalo.offline.pipeline.cuts import Cut, Order
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
from lightning_cephalo.offline.pipeline.stages import Stage, planned_times, stage_problem
from lightning_cephalo.offline.pipeline.times import Crossing, Gathering
from lightning_cephalo.plan import Plan, Problem, solve
from lightning_cephalo.plan.cost import fixed_time
from lightning_cephalo.plan.moving import least_update_s, with_updates
from lightning_cephalo.plan.solver.bounds import time_bounds
from lightning_cephalo.plan.solver.columns import group_types
from lightning_cephalo.plan.solver.infeasible import certainly_infeasible
from lightning_cephalo.plan.solver.solve import solve_if_possible

# Pipelines within this fraction of the fastest count as equally fast: estimates of times are often
# off by a fifth.
GAP = 1e-2
# Groupings that are planned before the search, so that it can leave out what is slower.
_FIRST = 4
# Seconds for one more plan, even if time is up.
_LEAST_S = 1.0


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
    *,
    time_limit_s: float = 60.0,
    gap: float = GAP,
    most_stages: int | None = None,
    planned: Planned | None = None,
    today: Plan | None = None,
) -> Advice:
    """Find the fastest pipeline of node groups and compare it with today's plan.

    All ranks take part. Stages are one or more whole blocks. Units, ways to gather and waves are
    chosen too. Inside a stage, :func:`~lightning_cephalo.plan.solve` divides a wave so that it is
    as short as possible.
    """
    least_s = least_step_s(problem.whole)
    if today is None:
        try:
            today = solve(problem.whole, time_limit_s=time_limit_s)
        except InfeasibleError:
            least_s = math.inf
        except SolverError:
            pass  # the bound of today's plan takes its place
    best, bound_s, covers = fastest(
        problem, time_limit_s=time_limit_s, gap=gap, most_stages=most_stages, planned=planned
    )
    return Advice(problem, today, least_s, best, bound_s, covers)


def fastest(
    problem: PipelineProblem,
    *,
    time_limit_s: float = 60.0,
    gap: float = GAP,
    most_stages: int | None = None,
    planned: Planned | None = None,
) -> tuple[Pipeline | None, float, str]:
    """Return the fastest pipeline, seconds that none beats, and what was tried."""
    limit = records.real("time_limit_s", time_limit_s, above_minimum=True, infinite=True)
    gap = records.real("gap", gap)
    if most_stages is not None:
        records.whole("most_stages", most_stages, minimum=1)
        if most_stages > problem.units:
            raise PlanError(
                f"most_stages: expected at most the {problem.units} units of the model, as a stage "
                f"has at least one, but got {most_stages}. Ask for fewer stages."
            )
    deadline = time.perf_counter() + limit
    search = _Search(problem, deadline, gap, most_stages or problem.units, planned or Planned())
    search.run()
    return search.best, search.bound_s, search.covers()


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


class _Search:
    def __init__(
        self,
        problem: PipelineProblem,
        deadline: float,
        gap: float,
        most_stages: int,
        planned: Planned,
    ) -> None:
        self.problem, self.deadline, self.gap = problem, deadline, gap
        self.most_stages, self.planned = most_stages, planned
        self.atoms = atoms_of(problem)
        self.kinds = kinds_of(problem, self.atoms)
        self.least = LeastTimes(problem)
        self._tables: dict[Stage, StageTable] = {}
        self.best: Pipeline | None = None
        self.bound_s = math.inf

    def covers(self) -> str:
        merged = max(map(len, self.atoms), default=1)
        counts = ", ".join(map(str, wave_counts(self.problem.batch)))
        together = f"groups of up to {merged} blocks" if merged > 1 else "whole blocks"
        return (
            f"pipelines of all ranks, whose stages are {together} (the ranks of one device in one"
            f" node), in {counts} waves"
        )

    def run(self) -> None:
        """Find the fastest pipeline, and seconds that none beats."""
        counter = itertools.count()
        screened = ((bound_s, next(counter), (group, n)) for bound_s, group, n in self._screened())
        heap: list[tuple[float, int, tuple[Partition, int] | Order]] = [
            entry for entry in screened if entry[0] < math.inf
        ]
        heapq.heapify(heap)
        found = self._first(heap)
        below_s = found[1].step_s * (1 - self.gap) if found else math.inf
        open_s = math.inf
        while heap:
            bound_s, _, what = heapq.heappop(heap)
            if bound_s >= below_s:
                break
            if time.perf_counter() > self.deadline:
                open_s = min(open_s, bound_s)
                break
            if isinstance(what, tuple):
                partition, waves = what
                if not tries_all_orders(len(partition)):
                    open_s = min(open_s, bound_s)
                for order in self._orders(partition, waves):
                    least_s = max(bound_s, order.least_s())
                    if least_s < below_s:
                        heapq.heappush(heap, (least_s, next(counter), order))
                continue
            cut = what.best(below_s)
            if cut is None:
                continue
            if cut.step_s > bound_s * (1 + 1e-9) and heap and cut.step_s > heap[0][0]:
                heapq.heappush(heap, (cut.step_s, next(counter), what))
                continue
            planned = self._plan(what, cut)
            now = _priced(what, cut)
            if now is not None and (found is None or now.step_s < found[1].step_s):
                found, below_s = (what, now), now.step_s * (1 - self.gap)
            if not planned:
                heapq.heappush(heap, (cut.step_s, next(counter), what))
        self.bound_s = min(open_s, below_s)
        self.best = None if found is None else self._pipeline(*found)

    def _first(self, heap: Sequence[tuple[float, int, Any]]) -> tuple[Order, Cut] | None:
        """Return a pipeline to begin with: the best of some groupings with the least bounds."""
        found: tuple[Order, Cut] | None = None
        for _, _, (partition, waves) in heapq.nsmallest(_FIRST, heap):
            order = next(self._orders(partition, waves))
            cut = order.best(found[1].step_s if found else math.inf)
            if cut is not None:
                self._plan(order, cut)
                now = _priced(order, cut)
                if now is not None and (found is None or now.step_s < found[1].step_s):
                    found = order, now
        return found

    def _screened(self) -> Iterator[tuple[float, Partition, int]]:
        """Yield every grouping and number of waves, with seconds that none of its plans beats."""
        groupings = [
            one
            for one in partitions(range(len(self.atoms)), self.kinds)
            if 2 <= len(one) <= self.most_stages
        ]
        if not groupings:
            return
        samples = self.problem.batch
        waves = np.array(wave_counts(samples))
        sizes = -(-samples // waves)
        groups = sorted({group for grouping in groupings for group in grouping})
        place = {group: index for index, group in enumerate(groups)}
        nothing = np.full((1, 2, len(waves)), np.inf)
        wave_s = np.concatenate(
            [[self.least.wave_s(self._blocks(group))[:, sizes - 1] for group in groups], nothing]
        )
        widest = max(map(len, groupings))
        none = [len(groups)] * widest
        rows = np.array([([place[group] for group in each] + none)[:widest] for each in groupings])
        stages = np.array([len(grouping) for grouping in groupings])
        best = self._best_crossing()
        for column, (count, size) in enumerate(zip(waves.tolist(), sizes.tolist(), strict=True)):
            cross_s = size * best.wave_s
            unit_s, tail_s = wave_s[rows, :, column].transpose(2, 0, 1)
            least = least_pipelines_s(unit_s, tail_s, self.problem.units, count)
            least = np.maximum(least, 2 * (count - 1) * cross_s)
            least += 2 * (stages - 1) * (cross_s + best.latency_s)
            yield from zip(least.tolist(), groupings, itertools.repeat(count))

    def _best_crossing(self) -> Crossing:
        """Return what one sample takes at least between two stages."""
        found = [
            self.problem.crossing((one,), (other,), 1)
            for a, b in itertools.combinations(self.atoms, 2)
            for one in a
            for other in b
        ]
        return Crossing(min(one.wave_s for one in found), min(one.latency_s for one in found))

    def _orders(self, grouping: Partition, waves: int) -> Iterator[Order]:
        size = math.ceil(self.problem.batch / waves)
        for order in orders(grouping, self.kinds):
            groups = [self._blocks(group) for group in order]
            tables = tuple(
                self._table(
                    Stage(own, 1, Gathering.HOLD, not at, at == len(groups) - 1, waves, size)
                )
                for at, own in enumerate(groups)
            )
            crossings = tuple(
                self.problem.crossing(one, other, size) for one, other in itertools.pairwise(groups)
            )
            yield Order(self.problem, tables, crossings, waves)

    def _table(self, stage: Stage) -> StageTable:
        if stage not in self._tables:
            self._tables[stage] = StageTable(self.least, stage)
        return self._tables[stage]

    def _blocks(self, group: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(block for atom in group for block in self.atoms[atom]))

    def _plan(self, order: Order, cut: Cut) -> bool:
        """Plan the stages of a cut; return whether all of them were planned already."""
        done = True
        for table, choice in zip(order.tables, cut.choices, strict=True):
            if choice not in table.planned:
                done = False
                stage = table.stage_of(*choice)
                plan = self._plan_of(stage)
                times = None if plan is None else planned_times(self.problem, stage, plan)
                table.plan(*choice, times)
        return done

    def _plan_of(self, stage: Stage) -> Plan | None:
        left_s = max(self.deadline - time.perf_counter(), _LEAST_S)
        return self.planned.plan(stage_problem(self.problem, stage), time_limit_s=left_s)

    def _pipeline(self, order: Order, cut: Cut) -> Pipeline:
        planned = []
        for table, choice, seconds in zip(
            order.tables, cut.choices, order.times(cut.choices), strict=True
        ):
            stage = table.stage_of(*choice)
            plan = self._plan_of(stage)
            assert plan is not None
            planned.append(PlannedStage(stage, plan, seconds))
        return Pipeline(tuple(planned), order.crossings)


def _priced(order: Order, cut: Cut) -> Cut | None:
    """Return a cut with the seconds of its stages' plans; None if a stage has none."""
    pairs = zip(order.tables, cut.choices, strict=True)
    has_none = any(math.isinf(table.seconds[0][choice]) for table, choice in pairs)
    return None if has_none else order.cut(cut.choices)
