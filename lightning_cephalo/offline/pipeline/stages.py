"""A stage of a pipeline: its wave as an ordinary planning problem, and its seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_cephalo.offline.pipeline.problem import PartBytes, PipelineProblem
from lightning_cephalo.offline.pipeline.times import StageTimes
from lightning_cephalo.plan import Links, Plan, Problem, RankProfile, StateBytes

_NO_ROOT = PartBytes()


@dataclass(frozen=True)
class Stage:
    """Units on blocks of ranks; see :class:`StageTimes` for ``regathers``."""

    blocks: tuple[int, ...]
    units: int
    regathers: bool
    is_first: bool
    is_last: bool
    waves: int
    wave_samples: int

    @property
    def has_root(self) -> bool:
        """Whether it runs the embedding, or the head and the loss."""
        return self.is_first or self.is_last


def stage_problem(problem: PipelineProblem, stage: Stage) -> Problem:
    """Return one wave of a stage, with the step's memory, without once-a-step collectives.

    It also leaves out early updates and state in host memory, which the whole problem may have. So
    a pipeline that wins would win with them, too.
    """
    whole, held = problem.whole, stage_bytes(problem, stage)
    return Problem(
        ranks=tuple(
            _profile(rank, stage) for block in stage.blocks for rank in problem.blocks[block].ranks
        ),
        units=stage.units,
        links=problem.links(stage.blocks, problem.unit) if stage.regathers else Links(),
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
    units, unit = stage.units, problem.unit
    root = problem.root if stage.has_root else _NO_ROOT
    held = min(2, units) if stage.regathers else units
    neighbours = 2 - stage.is_first - stage.is_last
    return StageBytes(
        state=units * unit.state + root.state + max(unit.reduce, root.reduce),
        buffers=held * unit.buffers + root.buffers,
        # A rank retains boundaries of all waves; one more wave is on its way from or to each
        # neighbour.
        sample=(stage.waves * units + neighbours) * problem.whole.boundary_bytes,
    )


def planned_times(problem: PipelineProblem, stage: Stage, plan: Plan) -> StageTimes:
    """Return the seconds of a stage whose wave has this plan."""
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
    links, root_links = problem.links(stage.blocks, problem.unit), Links()
    updated = stage.units * problem.unit.update
    if stage.has_root:
        root_links = problem.links(stage.blocks, problem.root)
        updated += problem.root.update
    return StageTimes(
        stage.units,
        forward_s,
        backward_s,
        tail_s if stage.is_last else 0.0,
        links.gather_s,
        links.reduce_s,
        stage.regathers,
        root_links.gather_s,
        root_links.reduce_s,
        problem.update_s(stage.blocks, updated),
    )


def with_shared_root(
    problem: PipelineProblem, first: Sequence[int], last: Sequence[int], times: StageTimes
) -> StageTimes:
    """Return the last stage's seconds where the first one's blocks own the root that both use."""
    gather, reduce = (
        problem.crossing(first, last, nbytes)
        for nbytes in (problem.root.gather, problem.root.reduce)
    )
    ready_s, after_s = times.ready_s + gather.arrival_s, times.after_s + reduce.arrival_s
    return dataclasses.replace(times, ready_s=ready_s, after_s=after_s)


def _profile(rank: RankProfile, stage: Stage) -> RankProfile:
    """Return a rank's profile in a stage: up to a wave, the tail in the last stage only."""
    size = min(rank.largest_microbatch_size, stage.wave_samples)
    own = rank.up_to(size)
    tail_s = own.tail_s if stage.is_last else (0.0,) * size
    return dataclasses.replace(own, tail_s=tail_s, host_capacity_bytes=0.0)
