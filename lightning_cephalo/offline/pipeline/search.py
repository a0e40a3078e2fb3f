"""Searches for the fastest pipelines of node groups, with a proven bound.

Best first: a heap holds groupings, orders and cuts by seconds that none of their plans beats. A
grouping is refined to its orders, an order to its best cut, and a cut whose stages are bounds to
the same with these stages planned. The search ends when the first is a cut of planned stages. Two
parallel pipelines are tried where both bounds and the sum of their gradients leave room.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import InfeasibleError, PlanError, SolverError
from lightning_cephalo.offline.pipeline.bounds import (
    LeastTimes,
    StageTable,
    least_pipelines_s,
)
from lightning_cephalo.offline.pipeline.cuts import Cut, Order
from lightning_cephalo.offline.pipeline.groups import (
    Atom,
    Partition,
    atoms_of,
    kinds_of,
    orders,
    partitions,
    tries_all_orders,
)
from lightning_cephalo.offline.pipeline.plan import (
    Advice,
    Pipeline,
    PipelinePlan,
    PlannedStage,
)
from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.offline.pipeline.stages import (
    Stage,
    planned_times,
    stage_problem,
)
from lightning_cephalo.offline.pipeline.times import Crossing, Gathering
from lightning_cephalo.plan import Plan, Problem, solve
from lightning_cephalo.plan.cost import fixed_time
from lightning_cephalo.plan.solver.columns import group_types
from lightning_cephalo.plan.solver.infeasible import certainly_infeasible
from lightning_cephalo.plan.solver.search import Search
from lightning_cephalo.plan.solver.solve import solve_if_possible
from lightning_cephalo.plan.updates import least_update_s, with_updates

# Pipelines within this fraction of the fastest count as equally fast: estimates of times are often
# off by a fifth.
GAP = 1e-2
# Parallel pipelines divide the batch into parts of at least this fraction.
_PARTS = 32
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
    """Find the fastest pipelines of node groups and compare them with today's plan.

    All ranks take part. Stages are one or more whole blocks, in one or two parallel pipelines.
    Units, ways to gather, waves and the samples of parallel pipelines are chosen too. Inside a
    stage, :func:`~lightning_cephalo.plan.solve` divides a wave so that it is as short as possible.
    """
    limit = records.real("time_limit_s", time_limit_s, above_minimum=True, infinite=True)
    gap = records.real("gap", gap)
    if most_stages is not None:
        records.whole("most_stages", most_stages, minimum=1)
        if most_stages > problem.units:
            raise PlanError(
                f"most_stages: expected at most the {problem.units} units of the model, as a stage "
                f"has at least one, but got {most_stages}. Ask for fewer stages."
            )
    least_s = least_step_s(problem.whole)
    if today is None:
        try:
            today = solve(problem.whole, time_limit_s=limit)
        except InfeasibleError:
            least_s = math.inf
        except SolverError:
            pass  # the bound of today's plan takes its place
    deadline = time.perf_counter() + limit
    search = _Search(problem, deadline, gap, most_stages, planned or Planned())
    search.run(least_s if today is None or today.step_s is None else today.step_s)
    return Advice(
        problem,
        today,
        least_s,
        search.best,
        search.bound_s,
        search.covers(),
    )


def least_step_s(problem: Problem) -> float:
    """Return seconds that no plan of today's problem beats, without a solver."""
    problem = with_updates(problem, least_update_s(problem))
    fixed_s = fixed_time(problem)
    choices = [problem.resharding(choice) for choice in problem.reshard_choices]
    # Even shares may travel faster, and the bound holds for them too.
    fitting = (
        Search(choice.with_even_shares(), group_types(choice), math.inf).bounds.step_s
        for choice in choices
        if not certainly_infeasible(choice, group_types(choice))
    )
    return fixed_s + min(fitting, default=math.inf)


@dataclass(frozen=True)
class _Found:
    """A cut whose stages are all planned."""

    order: Order
    cut: Cut
    samples: int


class _Search:
    def __init__(
        self,
        problem: PipelineProblem,
        deadline: float,
        gap: float,
        most_stages: int | None,
        planned: Planned,
    ) -> None:
        self.problem, self.deadline, self.gap = problem, deadline, gap
        self.planned = planned
        self.most_stages = min(most_stages or problem.units, problem.units)
        self.atoms: tuple[Atom, ...] = atoms_of(problem)
        self.kinds = kinds_of(problem, self.atoms)
        self.least = LeastTimes(problem)
        self._tables: dict[Stage, StageTable] = {}
        self._partitions: dict[tuple[int, ...], list[Partition]] = {}
        self.best: PipelinePlan | None = None
        self.bound_s = math.inf

    def run(self, today_s: float) -> None:
        """Search single pipelines, then pairs that might be faster than those and today's plan."""
        everything = tuple(range(len(self.atoms)))
        if len(everything) < 2:
            return
        found, self.bound_s = self.fastest(everything, self.problem.batch, math.inf, 2)
        if found is not None:
            self.best = PipelinePlan((self._pipeline(found),))
        self._pairs(today_s)

    def covers(self) -> str:
        merged = max((len(atom) for atom in self.atoms), default=1)
        counts = wave_counts(self.problem.batch)
        together = f"groups of up to {merged} blocks" if merged > 1 else "whole blocks"
        return (
            f"one or two parallel pipelines of all ranks, whose stages are {together} (the ranks "
            f"of one device in one node), in {', '.join(map(str, counts))} waves"
        )

    def fastest(
        self,
        atoms: tuple[int, ...],
        samples: int,
        below_s: float,
        least_stages: int,
        sync: Sync | None = None,
    ) -> tuple[_Found | None, float]:
        """Return the fastest single pipeline of some atoms, and seconds that none beats."""
        counter = itertools.count()
        heap: list[tuple[float, int, object]] = []
        for bound_s, partition, waves in self._screened(atoms, samples, least_stages):
            if bound_s < below_s:
                heap.append((bound_s, next(counter), (partition, waves)))
        heapq.heapify(heap)
        asked_s = below_s
        best = self._first(heap, samples, below_s, sync)
        if best is not None:
            below_s = best.cut.step_s * (1 - self.gap)
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
                for order in self._orders(partition, samples, waves):
                    least_s = max(bound_s, order.least_s())
                    if least_s < below_s:
                        heapq.heappush(heap, (least_s, next(counter), order))
                continue
            assert isinstance(what, Order)
            limits = None if sync is None else sync.most_units(what)
            cut = what.best(below_s, limits)
            if cut is None:
                continue
            if cut.step_s > bound_s * (1 + 1e-9) and heap and cut.step_s > heap[0][0]:
                heapq.heappush(heap, (cut.step_s, next(counter), what))
                continue
            planned = self._plan(what, cut)
            now = _priced(what, cut)
            if now is not None and now.step_s < (best.cut.step_s if best else asked_s):
                best, below_s = _Found(what, now, samples), now.step_s * (1 - self.gap)
            if not planned:
                heapq.heappush(heap, (cut.step_s, next(counter), what))
        return best, min(open_s, below_s)

    def _first(
        self,
        heap: Sequence[tuple[float, int, object]],
        samples: int,
        below_s: float,
        sync: Sync | None,
    ) -> _Found | None:
        """Return a pipeline to begin with: the best of some groupings with the least bounds."""
        best: _Found | None = None
        for _, _, what in heapq.nsmallest(_FIRST, heap):
            assert isinstance(what, tuple)
            order = next(self._orders(what[0], samples, what[1]))
            cut = order.best(below_s, None if sync is None else sync.most_units(order))
            if cut is not None:
                self._plan(order, cut)
                now = _priced(order, cut)
                if now is not None and now.step_s < below_s:
                    best, below_s = _Found(order, now, samples), now.step_s
        return best

    def _screened(
        self, atoms: tuple[int, ...], samples: int, least_stages: int
    ) -> Iterator[tuple[float, Partition, int]]:
        """Yield every grouping and number of waves, with seconds that none of its plans beats."""
        groupings = [
            one for one in self._groupings(atoms) if least_stages <= len(one) <= self.most_stages
        ]
        if not groupings:
            return
        waves = np.array(wave_counts(samples))
        sizes = -(-samples // waves)
        groups = sorted({group for grouping in groupings for group in grouping})
        place = {group: index for index, group in enumerate(groups)}
        nothing = np.full((1, 2, len(waves)), np.inf)
        wave_s = np.concatenate(
            [[self.least.wave_s(self._blocks(group))[:, sizes - 1] for group in groups], nothing]
        )
        widest = max(map(len, groupings))
        rows = np.array(
            [
                [place[group] for group in grouping] + [len(groups)] * (widest - len(grouping))
                for grouping in groupings
            ]
        )
        stages = np.array([len(grouping) for grouping in groupings])
        best = self._best_crossing(atoms)
        for column, (count, size) in enumerate(zip(waves.tolist(), sizes.tolist(), strict=True)):
            cross_s = size * best.wave_s
            unit_s, tail_s = wave_s[rows, :, column].transpose(2, 0, 1)
            least = least_pipelines_s(unit_s, tail_s, self.problem.units, count)
            least = np.maximum(least, 2 * (count - 1) * cross_s * (stages > 1))
            least += 2 * (stages - 1) * (cross_s + best.latency_s)
            yield from zip(least.tolist(), groupings, itertools.repeat(count))

    def _groupings(self, atoms: tuple[int, ...]) -> list[Partition]:
        if atoms not in self._partitions:
            self._partitions[atoms] = list(partitions(atoms, self.kinds))
        return self._partitions[atoms]

    def _best_crossing(self, atoms: tuple[int, ...]) -> Crossing:
        """Return what one sample takes at least between two stages."""
        found = [
            self.problem.crossing((one,), (other,), 1)
            for a, b in itertools.combinations(atoms, 2)
            for one in self.atoms[a]
            for other in self.atoms[b]
        ]
        return Crossing(
            min((one.wave_s for one in found), default=0.0),
            min((one.latency_s for one in found), default=0.0),
        )

    def _orders(self, grouping: Partition, samples: int, waves: int) -> Iterator[Order]:
        size = math.ceil(samples / waves)
        for order in orders(grouping, self.kinds):
            groups = [self._blocks(group) for group in order]
            tables = tuple(
                self._table(Stage(blocks, 1, Gathering.HOLD, not at, at == len(groups) - 1,
                                  waves, size))
                for at, blocks in enumerate(groups)
            )  # fmt: skip
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
        for table, (way, units) in zip(order.tables, cut.choices, strict=True):
            if (way, units) not in table.planned:
                done = False
                stage = table.stage_of(way, units)
                plan = self._plan_of(stage)
                times = None if plan is None else planned_times(self.problem, stage, plan)
                table.plan(way, units, times)
        return done

    def _plan_of(self, stage: Stage) -> Plan | None:
        left_s = max(self.deadline - time.perf_counter(), _LEAST_S)
        return self.planned.plan(stage_problem(self.problem, stage), time_limit_s=left_s)

    def _pipeline(self, found: _Found) -> Pipeline:
        order = found.order
        planned = []
        times = order.times(found.cut.choices)
        for table, (way, units), seconds in zip(
            order.tables, found.cut.choices, times, strict=True
        ):
            stage = table.stage_of(way, units)
            plan = self._plan_of(stage)
            assert plan is not None
            planned.append(PlannedStage(stage, plan, seconds))
        return Pipeline(tuple(planned), order.crossings, found.samples)

    def _pairs(self, today_s: float) -> None:
        """Search two parallel pipelines where they might be faster than all else."""
        everything = range(len(self.atoms))
        seen = set()
        for size in range(1, len(self.atoms) // 2 + 1):
            for one in itertools.combinations(everything, size):
                other = tuple(atom for atom in everything if atom not in one)
                sides = (tuple(sorted(self.kinds[atom] for atom in side)) for side in (one, other))
                key = tuple(sorted(sides))
                if key not in seen:
                    seen.add(key)
                    self._pair(one, other, today_s)

    def _pair(self, one: tuple[int, ...], other: tuple[int, ...], today_s: float) -> None:
        sides = (one, other)
        sync = Sync(self.problem, self._blocks(one), self._blocks(other))
        part = -(-self.problem.batch // _PARTS)
        splits = []
        for samples in range(part, self.problem.batch, part):
            both = (samples, self.problem.batch - samples)
            work_s = max(map(self._work_s, sides, both))
            splits.append((work_s + sync.least_s(self.most_stages), both))
        for least_s, both in sorted(splits):
            if least_s >= self._cutoff_s(today_s) or time.perf_counter() > self.deadline:
                self.bound_s = min(self.bound_s, least_s)
                return
            bounds_s = [
                min((found[0] for found in self._screened(side, samples, 1)), default=math.inf)
                for side, samples in zip(sides, both, strict=True)
            ]
            least_s = max(least_s, max(bounds_s) + sync.least_s(self.most_stages))
            if least_s >= self._cutoff_s(today_s):
                self.bound_s = min(self.bound_s, least_s)
                continue
            self.bound_s = min(self.bound_s, self._pair_of(sides, both, sync, today_s))

    def _pair_of(
        self,
        sides: tuple[tuple[int, ...], tuple[int, ...]],
        both: tuple[int, int],
        sync: Sync,
        today_s: float,
    ) -> float:
        """Search two pipelines of these samples; return seconds that none of them beats."""
        least_sync_s = sync.least_s(self.most_stages)
        bound_s = math.inf
        while True:
            below_s = self._cutoff_s(today_s) - least_sync_s
            found = []
            for side, samples in zip(sides, both, strict=True):
                fastest, side_s = self.fastest(side, samples, below_s, 1, sync)
                if fastest is None:
                    return min(bound_s, side_s + least_sync_s)
                found.append((fastest, side_s))
            bound_s = min(bound_s, max(side_s for _, side_s in found) + least_sync_s)
            pipelines = tuple(self._pipeline(fastest) for fastest, _ in found)
            sync_s = max(sync.seconds(each.stage) for pipe in pipelines for each in pipe.stages)
            plan = PipelinePlan(pipelines, sync_s)
            if self.best is None or plan.step_s < self.best.step_s:
                self.best = plan
            # To be faster, pipelines that are no faster must exchange less.
            sync = replace(sync, below_s=sync_s)

    def _cutoff_s(self, today_s: float) -> float:
        return min(today_s, self.best.step_s if self.best else math.inf)

    def _work_s(self, atoms: Sequence[int], samples: int) -> float:
        """Return the seconds that these atoms' ranks need for all units of so many samples."""
        kinds = self.least.kinds(self._blocks(atoms))
        return samples * self.problem.units / sum(kind.count * kind.speed for kind in kinds)


@dataclass(frozen=True)
class Sync:
    """What two parallel pipelines exchange: the gradients of all stages, after all backwards."""

    problem: PipelineProblem
    one: tuple[int, ...]
    other: tuple[int, ...]
    below_s: float = math.inf

    def seconds(self, stage: Stage) -> float:
        rate, fixed_s = self._line(stage)
        return fixed_s + stage.units * rate

    def most_units(self, order: Order) -> list[int]:
        """Return the most units of each stage whose exchange is short enough."""
        units = self.problem.units
        if math.isinf(self.below_s):
            return [units] * len(order.tables)
        found = []
        for table in order.tables:
            rate, fixed_s = self._line(table.stage)
            fitting = (n for n in range(units, 0, -1) if fixed_s + n * rate < self.below_s)
            found.append(next(fitting, 0))
        return found

    def least_s(self, most_stages: int) -> float:
        """Return seconds that no exchange beats: some stage has its share of the units."""
        found = 0.0
        for side, peer in ((self.one, self.other), (self.other, self.one)):
            best = min(
                self.problem.unit.reduce / link.bandwidth_bytes_per_s
                for a in self.problem.nodes(side)
                for b in self.problem.nodes(peer)
                for link in [self.problem.network.between_groups((a,), (b,))]
            )
            stages = min(len(side), most_stages)
            found = max(found, math.ceil(self.problem.units / stages) * best)
        return found

    def _line(self, stage: Stage) -> tuple[float, float]:
        """Return the seconds of a unit's exchange and those besides."""
        problem = self.problem
        peer = self.other if set(stage.blocks) <= set(self.one) else self.one
        link = problem.network.between_groups(problem.nodes(stage.blocks), problem.nodes(peer))
        root = problem.root.reduce if stage.has_root else 0.0
        rate = link.bandwidth_bytes_per_s
        return problem.unit.reduce / rate, root / rate + 2 * link.latency_s


def _priced(order: Order, cut: Cut) -> Cut | None:
    """Return a cut with the seconds of its stages' plans; None if a stage has none."""
    for table, (way, units) in zip(order.tables, cut.choices, strict=True):
        if math.isinf(table.sum_s[way, units]):
            return None
    return order.cut(cut.choices)
