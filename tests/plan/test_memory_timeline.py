"""Phases, busy shares and traffic of a step, by hand."""

from __future__ import annotations

import pytest

from lightning_cephalo.plan.memory_timeline import (
    MemoryTimeline,
    Way,
    busy,
    held_in,
    phases_of,
    rate,
)
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


def held(time_s: float, activations: float, host: float = 0.0) -> Held:
    sizes = [0.0] * len(MEASURED_KINDS)
    sizes[-2] = activations
    return Held(time_s, tuple(sizes), host)


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


def test_a_moment_is_busy_once_however_many_events_run():
    span = Span(Phase.FORWARD, 1.0, 5.0)
    events = [
        event(Operation.GATHER, 0.0, 2.0),
        event(Operation.GATHER, 1.5, 2.5),
        event(Operation.GATHER, 1.6, 1.7),
        event(Operation.GATHER, 4.0, 9.0),
    ]
    assert busy(events, span) == pytest.approx((1.5 + 1.0) / 4)
    assert busy([], span) == 0.0
    assert busy(events, Span(Phase.UPDATE, 3.0, 3.0)) == 0.0


def test_bytes_are_spread_over_the_time_that_they_take():
    events = [event(Operation.GATHER, 0.0, 2.0, 6.0), event(Operation.GATHER, 1.0, 2.0, 1.0)]
    assert rate(events, Way.GATHERED) == ((0.0, 3.0), (1.0, 4.0), (2.0, 0.0))
    assert rate(events, Way.REDUCED) == ()
    back_to_back = [event(Operation.FETCH, 0.0, 1.0, 2.0), event(Operation.FETCH, 1.0, 2.0, 3.0)]
    assert rate(back_to_back, Way.TO_DEVICE) == ((0.0, 2.0), (1.0, 3.0), (2.0, 0.0))


def test_what_is_held_when_a_phase_begins_belongs_to_it():
    points = [held(0.0, 1.0), held(2.0, 5.0), held(4.0, 2.0)]
    assert held_in(points, Span(Phase.BACKWARD, 3.0, 4.0)) == points[1:2]
    assert held_in(points, Span(Phase.UPDATE, 4.0, 9.0)) == points[2:]


def test_a_phase_has_its_peak_its_traffic_and_its_busy_shares():
    recording = Recording(
        3,
        "T4",
        (
            event(Operation.GATHER, 0.0, 1.0, 100.0),
            event(Operation.FORWARD, 1.0, 3.0),
            event(Operation.OFFLOAD, 3.0, 5.0, 40.0),
            event(Operation.WAIT, 4.0, 6.0),
            event(Operation.REDUCE, 6.0, 8.0, 30.0),
            event(Operation.FETCH, 6.0, 7.0, 40.0),
        ),
        (held(0.0, 10.0), held(1.0, 70.0, 4.0), held(5.0, 20.0, 9.0)),
        (Span(Phase.FORWARD, 0.0, 4.0), Span(Phase.BACKWARD, 4.0, 8.0)),
    )
    timeline = MemoryTimeline.of_recording(recording)
    forward, backward = timeline.summary()
    assert (timeline.peak_bytes, timeline.end_s) == (70.0, 8.0)
    assert (forward.device_bytes, backward.device_bytes) == (70.0, 70.0)
    assert (forward.host_bytes, backward.host_bytes) == (4.0, 9.0)
    assert forward.sizes[-2] == 70.0
    moved = (forward.gathered_bytes, forward.reduced_bytes, forward.to_host_bytes)
    assert moved == (100.0, 0.0, 40.0)
    assert (backward.reduced_bytes, backward.to_device_bytes) == (30.0, 40.0)
    assert (forward.compute_busy, forward.link_busy, forward.copy_busy) == (0.5, 0.25, 0.25)
    # waiting is no computing
    assert (backward.compute_busy, backward.link_busy, backward.copy_busy) == (0.0, 0.5, 0.5)
    later = recording.later(2.0)
    assert (later.events[0].start_s, later.held[0].time_s, later.phases[1].end_s) == (2, 2, 10)
