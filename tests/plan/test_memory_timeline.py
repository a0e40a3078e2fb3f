"""Phases and traffic of a step, by hand."""

from __future__ import annotations

from lightning_cephalo.plan import RankPlan
from lightning_cephalo.plan.memory_timeline import MemoryTimeline, Way, phases_of, rate
from lightning_cephalo.plan.program import Instruction, Operation
from lightning_cephalo.plan.timeline import (
    MEASURED_KINDS,
    Event,
    Held,
    Phase,
    Recording,
    Span,
    Stream,
)


def event(operation: Operation, start_s: float, end_s: float, moved: float = 0.0) -> Event:
    streams = {
        Operation.GATHER: Stream.COMMUNICATION,
        Operation.REDUCE: Stream.REDUCTION,
        Operation.OFFLOAD: Stream.COPY,
        Operation.FETCH: Stream.COPY,
    }
    stream = streams.get(operation, Stream.COMPUTE)
    return Event(0, stream, Instruction(operation, 1), start_s, end_s, moved)


def held(time_s: float, activations: float) -> Held:
    sizes = [0.0] * len(MEASURED_KINDS)
    sizes[-2] = activations
    return Held(time_s, tuple(sizes))


def test_phases_begin_behind_the_first_exchange_and_with_the_optimizers_step():
    order = [
        Instruction(Operation.GATHER, 0),
        Instruction(Operation.FORWARD, 1, 0, 0),
        Instruction(Operation.AGREE),
        Instruction(Operation.BACKWARD, 1, 0, 0),
        Instruction(Operation.UPDATE, 1),  # early: inside of the backward
        Instruction(Operation.AGREE),
        Instruction(Operation.UPDATE),
        Instruction(Operation.STORE_STATE, 1),
    ]
    marks = [(float(index), instruction) for index, instruction in enumerate(order)]
    assert phases_of(marks, 9.0) == (
        Span(Phase.FORWARD, 0.0, 3.0),
        Span(Phase.BACKWARD, 3.0, 6.0),
        Span(Phase.UPDATE, 6.0, 9.0),
    )
    again = [(time_s + 9, instruction) for time_s, instruction in marks]
    kinds = [span.phase for span in phases_of(marks + again, 18.0)]
    assert kinds == [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE] * 2
    assert phases_of([], 1.0) == ()


def test_bytes_are_spread_over_the_time_that_they_take():
    events = [event(Operation.GATHER, 0.0, 2.0, 6.0), event(Operation.GATHER, 1.0, 2.0, 1.0)]
    assert rate(events, Way.GATHERED) == ((0.0, 3.0), (1.0, 4.0), (2.0, 0.0))
    assert rate(events, Way.REDUCED) == ()
    back_to_back = [event(Operation.FETCH, 0.0, 1.0, 2.0), event(Operation.FETCH, 1.0, 2.0, 3.0)]
    assert rate(back_to_back, Way.TO_DEVICE) == ((0.0, 2.0), (1.0, 3.0), (2.0, 0.0))


def test_a_recording_has_a_peak_an_end_and_what_was_planned():
    recording = Recording(
        3,
        "T4",
        (event(Operation.GATHER, 0.0, 1.0, 100.0),),
        (held(0.0, 10.0), held(1.0, 70.0), held(5.0, 20.0)),
        (Span(Phase.FORWARD, 0.0, 4.0), Span(Phase.BACKWARD, 4.0, 8.0)),
    )
    planned = RankPlan((1,), 1.0, memory_bytes=60, capacity_bytes=90)
    timeline = MemoryTimeline.of_recording(recording, planned)
    assert (timeline.peak_bytes, timeline.end_s, timeline.name) == (70.0, 8.0, "T4")
    assert (timeline.planned_bytes, timeline.capacity_bytes) == (60, 90)
    assert MemoryTimeline.of_recording(recording).planned_bytes is None
    later = recording.later(2.0)
    assert (later.events[0].start_s, later.held[0].time_s, later.phases[1].end_s) == (2, 2, 10)
