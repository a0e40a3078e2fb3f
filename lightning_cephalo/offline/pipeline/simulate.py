"""Plays a pipeline's step unit by unit, to check ``closed_form.py``, which knows waves only.

A stage is one lane: its ranks meet in the collectives of each unit, so its slowest rank counts. A
gather runs at most one unit ahead of the compute (two buffers), and a unit's reduce is issued
behind the next unit's gather, as in the layered step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_cephalo.offline.pipeline.closed_form import check_shape
from lightning_cephalo.offline.pipeline.times import Crossing, StageTimes


class Work(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class Span:
    """One wave in one stage (or its update, with wave -1), in seconds from the step's start."""

    stage: int
    wave: int
    work: Work
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PipelineRun:
    """A simulated step: its seconds, and what each stage did."""

    step_s: float
    spans: tuple[Span, ...]


def simulate_pipeline(
    stages: Sequence[StageTimes], crossings: Sequence[Crossing], waves: int
) -> PipelineRun:
    """Simulate a step: all forwards, then all backwards."""
    check_shape(stages, crossings, waves)
    lanes = [_Lane(index, stage) for index, stage in enumerate(stages)]
    arrived = [0.0] * waves
    for index, lane in enumerate(lanes):
        left = [lane.forward(wave, arrived[wave]) for wave in range(waves)]
        if index < len(crossings):
            arrived = _cross(left, crossings[index])
    arrived = [lanes[-1].free_s] * waves
    for index in reversed(range(len(lanes))):
        left = [lanes[index].backward(wave, arrived[wave], waves) for wave in range(waves)]
        if index:
            arrived = _cross(left, crossings[index - 1])
    reduced_s = max(lane.reduced_s() for lane in lanes)
    for lane in lanes:
        lane.update(reduced_s)
    spans = tuple(span for lane in lanes for span in lane.spans)
    return PipelineRun(max(span.end_s for span in spans), spans)


def _cross(left: Sequence[float], crossing: Crossing) -> list[float]:
    """Return when each wave arrives; the link carries one after another."""
    free_s, arrived = 0.0, []
    for end_s in left:
        free_s = max(free_s, end_s) + crossing.wave_s
        arrived.append(free_s + crossing.latency_s)
    return arrived


class _Lane:
    """The two streams of a stage, and the buffers of its units."""

    def __init__(self, index: int, times: StageTimes) -> None:
        self.index = index
        self.times = times
        self.spans: list[Span] = []
        self.free_s = 0.0
        self._link_s = times.ready_s
        # Ends of the last two units' compute: a gather needs the buffer of the one before the last.
        self._ended = (0.0, 0.0)
        self._gathered_s = 0.0
        self._to_reduce: float | None = None

    def forward(self, wave: int, arrived_s: float) -> float:
        """Run one wave forward; return when it is done."""
        times = self.times
        start_s = None
        for unit in range(times.units):
            if times.regathers:
                self._gather()
            elif wave == 0:
                self._link_s += times.gather_s
                self._gathered_s = self._link_s
            begun_s = max(self.free_s, self._gathered_s, arrived_s if unit == 0 else 0.0)
            start_s = begun_s if start_s is None else start_s
            self._compute(begun_s, times.forward_s)
        self._note(wave, Work.FORWARD, start_s)
        return self.free_s

    def backward(self, wave: int, arrived_s: float, waves: int) -> float:
        """Run one wave backward, the tail first; return when it is done."""
        times = self.times
        self.free_s = max(self.free_s, arrived_s)
        start_s = self.free_s
        self.free_s += times.tail_s
        for _ in range(times.units):
            if times.regathers:
                self._gather()
                self._reduce()
            begun_s = max(self.free_s, self._gathered_s)
            self._compute(begun_s, times.backward_s)
            if times.regathers:
                self._to_reduce = self.free_s
            elif wave == waves - 1:
                self._to_reduce = self.free_s
                self._reduce()
        self._note(wave, Work.BACKWARD, start_s)
        return self.free_s

    def reduced_s(self) -> float:
        self._reduce()
        return max(self._link_s, self.free_s) + self.times.after_s

    def update(self, start_s: float) -> None:
        end_s = start_s + self.times.update_s
        self.spans.append(Span(self.index, -1, Work.UPDATE, start_s, end_s))

    def _compute(self, begun_s: float, seconds: float) -> None:
        self.free_s = begun_s + seconds
        self._ended = (self._ended[1], self.free_s)

    def _gather(self) -> None:
        """Gather the next unit into the buffer of the unit before the last one."""
        self._link_s = max(self._link_s, self._ended[0]) + self.times.gather_s
        self._gathered_s = self._link_s

    def _reduce(self) -> None:
        if self._to_reduce is not None:
            self._link_s = max(self._link_s, self._to_reduce) + self.times.reduce_s
            self._to_reduce = None

    def _note(self, wave: int, work: Work, start_s: float | None) -> None:
        self.spans.append(Span(self.index, wave, work, start_s or 0.0, self.free_s))
