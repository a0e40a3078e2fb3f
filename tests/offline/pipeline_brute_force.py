"""The fastest pipeline by trying all of them: groupings, orders, cuts, ways and waves.

Waves are divided by a planner that is quick and not the best: the search is to find the fastest
pipeline whatever plans its stages have.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from pipeline_cases import problem_of, rank

from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.offline.pipeline.search import wave_counts
from lightning_cephalo.offline.pipeline.stages import (
    Stage,
    planned_times,
    stage_problem,
    with_shared_root,
)
from lightning_cephalo.offline.pipeline.times import StageTimes, pipeline_s
from lightning_cephalo.plan import Plan, Problem, RankPlan
from lightning_cephalo.plan.cost import device_need
from lightning_cephalo.plan.solver.solve import priced
from lightning_cephalo.plan.solver.state import share_state


def random_problem(dice: random.Random) -> PipelineProblem:
    """Two to four nodes of one or two ranks, with links and memory that bind or not."""
    nodes = []
    count = dice.choice([2, 2, 3, 3, 3, 4])
    for _ in range(count):
        kind = rank(dice.choice([0.5, 1, 2]), dice.choice([400, 700, 1200, 5000]), sizes=3)
        nodes.append([kind] * dice.randint(1, 2))
    return problem_of(
        *nodes,
        units=dice.randint(2, 8 if count < 4 else 5),
        batch=dice.randint(2, 6),
        between=dice.choice([3.0, 20.0, 200.0, 2000.0]),
        inside=dice.choice([50.0, 2000.0]),
        latency_s=dice.choice([0.0, 0.1]),
    )


def quick_plan(problem: Problem, time_limit_s: float = 0.0) -> Plan | None:
    """Give each sample to the rank that has it done first and can hold it, one by one."""
    batches = [0] * len(problem.ranks)
    needs = [device_need(problem, profile) for profile in problem.ranks]
    if any(need.fixed > profile.capacity_bytes
           for need, profile in zip(needs, problem.ranks, strict=True)):  # fmt: skip
        return None
    for _ in range(problem.global_batch_size):
        able = [
            (own.backward_s[0] * (batch + 1), at)
            for at, (own, need, batch) in enumerate(zip(problem.ranks, needs, batches, strict=True))
            if own.forward_s and need.of((1,) * (batch + 1)) <= own.capacity_bytes
        ]
        if not able:
            return None
        batches[min(able)[1]] += 1
    used = [need.of((1,) * batch) for need, batch in zip(needs, batches, strict=True)]
    capacities = [own.capacity_bytes for own in problem.ranks]
    if sum(capacities) - sum(used) < problem.state.held_bytes:
        return None
    fractions = share_state([own - taken for own, taken in zip(capacities, used, strict=True)])
    parts = [RankPlan((1,) * batch, share) for batch, share in zip(batches, fractions, strict=True)]
    return priced(problem, parts, backend="quick")


def fastest_s(problem: PipelineProblem) -> float:
    """Return the shortest step of all pipelines; infinite if none fits."""
    planned: dict[Stage, StageTimes | None] = {}
    found = math.inf
    for groups in _ordered_partitions(list(range(len(problem.blocks)))):
        if not 2 <= len(groups) <= problem.units:
            continue
        for waves, units in itertools.product(
            wave_counts(problem.batch), _compositions(problem.units, len(groups))
        ):
            size = math.ceil(problem.batch / waves)
            for way in itertools.product(*(_gatherings(count) for count in units)):
                stages = [
                    Stage(group, count, own, at == 0, at == len(groups) - 1, waves, size)
                    for at, (group, count, own) in enumerate(zip(groups, units, way, strict=True))
                ]
                found = min(found, _seconds(problem, stages, planned))
    return found


def _gatherings(units: int) -> tuple[bool, ...]:
    # two units are always held whole: up to two there is nothing to gain from gathering again
    return (False,) if units <= 2 else (False, True)


def _seconds(
    problem: PipelineProblem, stages: list[Stage], planned: dict[Stage, StageTimes | None]
) -> float:
    times: list[StageTimes] = []
    for stage in stages:
        if stage not in planned:
            plan = quick_plan(stage_problem(problem, stage))
            planned[stage] = None if plan is None else planned_times(problem, stage, plan)
        own = planned[stage]
        if own is None:
            return math.inf
        times.append(own)
    times[-1] = with_shared_root(problem, stages[0].blocks, stages[-1].blocks, times[-1])
    crossings = [
        problem.crossing(one.blocks, other.blocks, one.wave_samples * problem.crossing_bytes)
        for one, other in itertools.pairwise(stages)
    ]
    return pipeline_s(times, crossings, stages[0].waves)


def _ordered_partitions(blocks: list[int]) -> Iterator[list[tuple[int, ...]]]:
    if not blocks:
        yield []
    for size in range(1, len(blocks) + 1):
        for group in itertools.combinations(blocks, size):
            rest = [block for block in blocks if block not in group]
            for others in _ordered_partitions(rest):
                yield [group, *others]


def _compositions(units: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, units), parts - 1):
        ends = (0, *cuts, units)
        yield tuple(b - a for a, b in itertools.pairwise(ends))
