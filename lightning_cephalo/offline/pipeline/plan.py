"""What the advisor finds: a pipeline with its stages, and how it compares with today's plan."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from lightning_cephalo.observe.recording import Event
from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.offline.pipeline.simulate import simulate_pipeline
from lightning_cephalo.offline.pipeline.stages import Stage
from lightning_cephalo.offline.pipeline.times import Crossing, StageTimes, pipeline_s
from lightning_cephalo.plan import Plan


@dataclass(frozen=True)
class PlannedStage:
    stage: Stage
    plan: Plan
    times: StageTimes


@dataclass(frozen=True)
class Pipeline:
    """Stages that the batch passes in waves."""

    stages: tuple[PlannedStage, ...]
    crossings: tuple[Crossing, ...]

    @property
    def waves(self) -> int:
        return self.stages[0].stage.waves

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(planned.stage.units for planned in self.stages)

    @property
    def times(self) -> tuple[StageTimes, ...]:
        return tuple(planned.times for planned in self.stages)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return pipeline_s(self.times, self.crossings, self.waves)

    def simulate(self) -> tuple[tuple[Event, ...], ...]:
        """Play a step of each stage."""
        return simulate_pipeline(self.times, self.crossings, self.waves)

    def to_dict(self, problem: PipelineProblem) -> dict[str, Any]:
        """Return plain lists and numbers, for JSON; units are numbered from 1."""
        ends = itertools.accumulate(self.units)
        return {
            "step_s": self.step_s,
            "waves": self.waves,
            "stages": [
                {
                    "blocks": [problem.blocks[block].name for block in planned.stage.blocks],
                    "units": [end - planned.stage.units + 1, end],
                    "gathering": "regather" if planned.stage.regathers else "hold",
                    "wave_forward_s": planned.times.wave_forward_s,
                    "wave_backward_s": planned.times.wave_backward_s,
                    "ranks": [rank.to_dict() for rank in planned.plan.ranks],
                }
                for planned, end in zip(self.stages, ends, strict=True)
            ],
        }


@dataclass(frozen=True)
class Advice:
    """Whether a pipeline would be faster than today's plan, and how sure that is."""

    problem: PipelineProblem
    today_s: float
    best: Pipeline | None
    bound_s: float
    covers: str

    @property
    def pipeline_wins(self) -> bool:
        return self.best is not None and self.best.step_s < self.today_s

    @property
    def gap(self) -> float:
        """How far the bound is below the fastest pipeline found, as a fraction of their step."""
        if self.best is None:
            return 0.0
        return max(0.0, 1 - self.bound_s / self.best.step_s)
