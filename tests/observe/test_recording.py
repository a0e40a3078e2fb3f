"""A step of a rank, by hand."""

from __future__ import annotations

from lightning_cephalo.observe.recording import (
    MEASURED_KINDS,
    Event,
    Held,
    Recording,
    Stream,
    merged,
)
from lightning_cephalo.plan.program import Instruction, Operation


def held(time_s: float, activations: float) -> Held:
    sizes = [0.0] * len(MEASURED_KINDS)
    sizes[-2] = activations
    return Held(time_s, tuple(sizes))


def test_a_recording_has_a_peak_and_can_be_read_on_another_clock():
    gather = Event(Stream.COMMUNICATION, Instruction(Operation.GATHER, 1), 0.0, 1.0, 100.0)
    looks = (held(0.0, 10.0), held(1.0, 70.0), held(5.0, 20.0))
    recording = Recording(3, "T4", (gather,), looks, 0.0, 8.0)
    assert recording.peak_bytes == 70.0
    later = recording.later(2.0)
    assert (later.events[0].start_s, later.held[0].time_s) == (2.0, 2.0)
    assert (later.start_s, later.end_s) == (2.0, 10.0)
    assert Recording(3, "T4", ()).later(2.0).end_s is None


def test_a_stream_is_busy_for_its_work_and_not_while_it_waits():
    work = Event(Stream.COMPUTE, Instruction(Operation.FORWARD, 1, 0, 0), 0.0, 1.0)
    wait = Event(Stream.COMPUTE, Instruction(Operation.WAIT, 2), 1.0, 4.0)
    copy = Event(Stream.COPY, Instruction(Operation.OFFLOAD, 1, 0, 0), 1.0, 3.0)
    recording = Recording(0, "T4", (work, wait, copy))
    assert recording.busy_s(Stream.COMPUTE) == 1.0
    assert recording.busy_s(Stream.COPY) == 2.0


def test_of_points_at_one_time_the_last_counts_and_what_changes_nothing_is_dropped():
    assert merged([(0, 1.0), (1, 2.0), (1, 3.0), (2, 3.0)]) == ((0, 1.0), (1, 3.0))
    assert merged([(0, 1.0), (1, 2.0), (1, 1.0)]) == ((0, 1.0),)
