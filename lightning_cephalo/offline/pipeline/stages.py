"""A stage of a pipeline: its wave as an ordinary planning problem, and its seconds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.offline.pipeline.times import Gathering, StageTimes
from lightning_cephalo.plan import Links, Plan, Problem, RankProfile, StateBytes


@dataclass(frozen=True)
class Stage:
    blocks: tuple[int, ...]
    units: int
    gathering: Gathering
    is_first: bool
    is_last: bool
    waves: int
    wave_samples: int

    @property
    def regathers(self) -> bool:
        return self.gathering is Gathering.REGATHER

    @property
    def has_root(self) -> bool:
        """Whether it runs the embedding, or the head and the loss."""
        return self.is_first or self.is_last


def stage_problem(problem: PipelineProblem, stage: Stage) -> Problem:
    """Return one wave of a stage, with the step's memory, without once-a-step collectives."""
    whole, held = problem.whole, stage_bytes(problem, stage)
    return Problem(
        ranks=tuple(
            _profile(rank, stage) for block in stage.blocks for rank in problem.blocks[block].ranks
        ),
        units=stage.units,
        links=Links(*_collectives_s(problem, stage)) if stage.regathers else Links(),
        state=StateBytes(held.state),
        global_batch_size=stage.wave_samples,
        boundary_bytes=held.sample / stage.units,
        kept_bytes=stage.waves * whole.kept_bytes,
        microbatch_bytes=stage.waves * whole.microbatch_bytes,
        gathered_bytes=held.buffers,
        minimum_microbatch_size=whole.minimum_microbatch_size,
    )


class StageBytes(NamedTuple):
    """What a stage holds: state over all ranks, buffers on each, and boundaries for a sample."""

    state: float
    buffers: float
    sample: float


def stage_bytes(problem: PipelineProblem, stage: Stage) -> StageBytes:
    """Return what a stage holds through the step, whatever its plan."""
    units, root = stage.units, problem.root
    held = min(2, units) if stage.regathers else units
    neighbours = 2 - stage.is_first - stage.is_last
    receive = max(problem.unit.reduce, root.reduce if stage.has_root else 0.0)
    return StageBytes(
        state=units * problem.unit.state + (root.state if stage.has_root else 0.0) + receive,
        buffers=held * problem.unit.buffers + (root.buffers if stage.has_root else 0.0),
        # A rank retains boundaries of all waves; one more wave is on its way from or to each
        # neighbour.
        sample=(stage.waves * units + neighbours) * problem.whole.boundary_bytes,
    )


def planned_times(problem: PipelineProblem, stage: Stage, plan: Plan) -> StageTimes:
    return stage_times(
        problem,
        stage,
        max(rank.forward_s or 0.0 for rank in plan.ranks),
        max(rank.backward_s or 0.0 for rank in plan.ranks),
        max(rank.tail_s or 0.0 for rank in plan.ranks),
    )


def stage_times(
    problem: PipelineProblem, stage: Stage, forward_s: float, backward_s: float, tail_s: float
) -> StageTimes:
    """Return the seconds of a stage whose slowest rank has these times for one wave."""
    gather_s, reduce_s = _collectives_s(problem, stage)
    ready_s = after_s = 0.0
    updated = stage.units * problem.unit.update
    if stage.has_root:
        ready_s = problem.collective_s(stage.blocks, problem.root.gather)
        after_s = problem.collective_s(stage.blocks, problem.root.reduce)
        updated += problem.root.update
    return StageTimes(
        stage.units,
        forward_s,
        backward_s,
        tail_s if stage.is_last else 0.0,
        gather_s,
        reduce_s,
        stage.gathering,
        ready_s,
        after_s,
        problem.update_s(stage.blocks, updated),
    )


def with_shared_root(
    problem: PipelineProblem, first: Stage, last: Stage, times: StageTimes
) -> StageTimes:
    """Return the last stage's seconds where the first one owns the weights that both use."""
    if first is last:
        return times
    link = problem.network.between_groups(problem.nodes(first.blocks), problem.nodes(last.blocks))
    rate, latency_s = link.bandwidth_bytes_per_s, link.latency_s
    return dataclasses.replace(
        times,
        ready_s=times.ready_s + problem.root.gather / rate + latency_s,
        after_s=times.after_s + problem.root.reduce / rate + latency_s,
    )


def _collectives_s(problem: PipelineProblem, stage: Stage) -> tuple[float, float]:
    return (
        problem.collective_s(stage.blocks, problem.unit.gather),
        problem.collective_s(stage.blocks, problem.unit.reduce),
    )


def _profile(rank: RankProfile, stage: Stage) -> RankProfile:
    """Return a rank's profile in a stage: up to a wave, the tail in the last stage only."""
    size = min(rank.largest_microbatch_size, stage.wave_samples)
    own = rank.up_to(size)
    tail_s = own.tail_s if stage.is_last else (0.0,) * size
    return dataclasses.replace(own, tail_s=tail_s, host_capacity_bytes=0.0)
