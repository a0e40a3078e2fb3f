"""Plays a pipeline's step unit by unit, to check ``times.py``, which has waves only.

A stage is one lane: its ranks meet in the collectives of each unit, so its slowest rank counts. A
gather runs at most one unit ahead of the compute (two buffers), and a unit's reduce is issued
behind the next unit's gather, as in the layered step.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from lightning_cephalo.observe.recording import Event, Stream
from lightning_cephalo.offline.pipeline.times import Crossing, StageTimes
from lightning_cephalo.plan.play import Meeting, Player, play
from lightning_cephalo.plan.program import NONE, Instruction, Operation


def simulate_pipeline(
    stages: Sequence[StageTimes], crossings: Sequence[Crossing], waves: int
) -> tuple[tuple[Event, ...], ...]:
    """Return the waves and updates of each stage: all forwards come first."""
    lanes = [_Lane(at, stage, crossings, waves) for at, stage in enumerate(stages)]
    play([lane.run() for lane in lanes], lambda meeting: meeting.what)
    return tuple(tuple(lane.events) for lane in lanes)


_Ends = Generator[Meeting, tuple[float, float], float]
"""Meets, and returns when what it began for has ended."""


class _Lane:
    """The two streams of a stage, and the buffers of its units. It meets for so many seconds."""

    def __init__(
        self, at: int, times: StageTimes, crossings: Sequence[Crossing], waves: int
    ) -> None:
        self.events: list[Event] = []
        self._at, self._times, self._waves = at, times, waves
        self._crossings = crossings
        self._free_s = self._gathered_s = self._link_s = 0.0
        # Ends of the last two units' compute: a gather needs the buffer of the one before the last.
        self._ended = (0.0, 0.0)
        self._to_reduce: float | None = None

    def run(self) -> Player:
        times = self._times
        yield from self._communicate(times.ready_s, 0.0)
        for wave in range(self._waves):
            yield from self._forward(wave)
        for wave in range(self._waves):
            yield from self._backward(wave)
        yield from self._reduce()
        reduced_s = max(self._link_s, self._free_s) + times.after_s
        everyone = tuple(range(len(self._crossings) + 1))
        start_s, _ = yield Meeting(everyone, 0.0, reduced_s)
        self._note(Operation.UPDATE, NONE, start_s, start_s + times.update_s)

    def _forward(self, wave: int) -> Player:
        arrived_s = yield from self._cross(self._at - 1, 0.0)
        starts_s = []
        for _ in range(self._times.units):
            if self._times.regathers or wave == 0:
                yield from self._gather()
            starts_s.append(self._compute(self._times.forward_s, arrived_s))
        self._note(Operation.FORWARD, wave, starts_s[0], self._free_s)
        yield from self._cross(self._at, self._free_s)

    def _backward(self, wave: int) -> Player:
        times = self._times
        arrived_s = yield from self._cross(self._at, 0.0)
        start_s = max(self._free_s, arrived_s)
        self._free_s = start_s + times.tail_s
        for _ in range(times.units):
            if times.regathers:
                yield from self._gather()
                yield from self._reduce()
            self._compute(times.backward_s)
            if times.regathers or wave == self._waves - 1:
                self._to_reduce = self._free_s
            if not times.regathers:
                yield from self._reduce()
        self._note(Operation.BACKWARD, wave, start_s, self._free_s)
        yield from self._cross(self._at - 1, self._free_s)

    def _note(self, operation: Operation, wave: int, start_s: float, end_s: float) -> None:
        instruction = Instruction(operation, microbatch=wave)
        self.events.append(Event(Stream.COMPUTE, instruction, start_s, end_s))

    def _compute(self, seconds: float, ready_s: float = 0.0) -> float:
        """Compute a unit and return when that has begun."""
        begun_s = max(self._free_s, self._gathered_s, ready_s)
        self._free_s = begun_s + seconds
        self._ended = (self._ended[1], self._free_s)
        return begun_s

    def _cross(self, before: int, ready_s: float) -> _Ends:
        """Send a wave over the link behind a stage, or receive one; return when it arrives."""
        if not 0 <= before < len(self._crossings):
            return 0.0
        crossing = self._crossings[before]
        _, end_s = yield Meeting((before, before + 1), crossing.wave_s, ready_s)
        return end_s + crossing.latency_s

    def _gather(self) -> Player:
        buffer_s = self._ended[0] if self._times.regathers else 0.0
        self._gathered_s = yield from self._communicate(self._times.gather_s, buffer_s)

    def _reduce(self) -> Player:
        if self._to_reduce is not None:
            yield from self._communicate(self._times.reduce_s, self._to_reduce)
            self._to_reduce = None

    def _communicate(self, seconds: float, ready_s: float) -> _Ends:
        _, self._link_s = yield Meeting((self._at,), seconds, ready_s)
        return self._link_s
