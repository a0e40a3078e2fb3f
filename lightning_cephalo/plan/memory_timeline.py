"""One step of a rank by phase: what it holds, what moves each way, and what is busy.

A :class:`MemoryTimeline` comes from a recorded step; reports and traces show it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_cephalo.plan.plan import RankPlan
from lightning_cephalo.plan.program import NONE, Instruction, Operation
from lightning_cephalo.plan.timeline import (
    Event,
    Held,
    Phase,
    Recording,
    Span,
    StepFunction,
    Stream,
    merged,
)

_LINKS = frozenset({Stream.COMMUNICATION, Stream.REDUCTION})
_COPIES = frozenset({Stream.COPY, Stream.TO_HOST, Stream.TO_DEVICE})


@dataclass(frozen=True)
class PhaseSummary:
    """One phase of a step on one rank."""

    phase: Phase
    seconds: float
    device_bytes: float
    sizes: tuple[float, ...]
    host_bytes: float
    gathered_bytes: float
    reduced_bytes: float
    to_host_bytes: float
    to_device_bytes: float
    compute_busy: float
    link_busy: float
    copy_busy: float
    host_busy: float


@dataclass(frozen=True)
class MemoryTimeline:
    """What one rank holds and moves in one recorded step.

    Attributes:
        name: Name of its device.
        held: Bytes by kind over the step; empty: they were not measured.
        planned_bytes: The plan's prediction of the peak; None: it has none.
        capacity_bytes: Memory that the plan was allowed to use; None: it does not say.
    """

    rank: int
    name: str
    held: tuple[Held, ...]
    phases: tuple[Span, ...]
    events: tuple[Event, ...]
    planned_bytes: float | None = None
    capacity_bytes: float | None = None

    @classmethod
    def of_recording(cls, recording: Recording, plan: RankPlan | None = None) -> MemoryTimeline:
        """Return the timeline of a recorded step."""
        return cls(
            rank=recording.rank,
            name=recording.name,
            held=recording.held,
            phases=recording.phases,
            events=recording.events,
            planned_bytes=None if plan is None else plan.memory_bytes,
            capacity_bytes=None if plan is None else plan.capacity_bytes,
        )

    @property
    def peak_bytes(self) -> float | None:
        """Most bytes on the device at the same time; None if they were not measured."""
        return max((held.device_bytes for held in self.held), default=None)

    @property
    def end_s(self) -> float:
        """When the step ends."""
        return max((span.end_s for span in self.phases), default=0.0)

    def lanes(self) -> tuple[list[Event], ...]:
        """Return the events that make device, link, copies and host busy."""
        device, link, copies, host = [], [], [], []
        for event in self.events:
            if event.stream is Stream.HOST:
                host.append(event)
            elif event.stream in _COPIES:
                copies.append(event)
            elif event.stream in _LINKS:
                link.append(event)
            elif event.operation is not Operation.WAIT:
                device.append(event)
        return device, link, copies, host

    def summary(self) -> tuple[PhaseSummary, ...]:
        """Return every phase that takes time, in their order."""
        return tuple(self._of(span) for span in self.phases if span.end_s > span.start_s)

    def _of(self, span: Span) -> PhaseSummary:
        fullest = max(
            held_in(self.held, span), key=lambda held: held.device_bytes, default=Held(0.0, ())
        )
        begun = [e for e in self.events if span.start_s <= e.start_s < span.end_s]
        device, link, copies, host = self.lanes()
        return PhaseSummary(
            phase=span.phase,
            seconds=span.end_s - span.start_s,
            device_bytes=fullest.device_bytes,
            sizes=fullest.sizes,
            host_bytes=max((held.host_bytes for held in held_in(self.held, span)), default=0.0),
            gathered_bytes=_moved(begun, Way.GATHERED),
            reduced_bytes=_moved(begun, Way.REDUCED),
            to_host_bytes=_moved(begun, Way.TO_HOST),
            to_device_bytes=_moved(begun, Way.TO_DEVICE),
            compute_busy=busy(device, span),
            link_busy=busy(link, span),
            copy_busy=busy(copies, span),
            host_busy=busy(host, span),
        )


def held_in(held: Sequence[Held], span: Span) -> list[Held]:
    """Return what is held at any moment of a phase."""
    ends = [*(one.time_s for one in held[1:]), float("inf")]
    return [
        one
        for one, end_s in zip(held, ends, strict=True)
        if one.time_s < span.end_s and end_s > span.start_s
    ]


def busy(events: Iterable[Event], span: Span) -> float:
    """Return the share of a phase in which any of some events runs, 0 to 1."""
    covered_s, until_s = 0.0, span.start_s
    for event in sorted(events, key=lambda event: event.start_s):
        start_s, end_s = max(event.start_s, until_s), min(event.end_s, span.end_s)
        if end_s > start_s:
            covered_s += end_s - start_s
            until_s = end_s
    seconds = span.end_s - span.start_s
    return covered_s / seconds if seconds > 0 else 0.0


class Way(str, enum.Enum):
    """Ways of bytes to and from a rank's device."""

    GATHERED = "gathered from ranks"
    REDUCED = "reduced to ranks"
    TO_HOST = "to the host"
    TO_DEVICE = "to the device"


_OPERATIONS = {
    Operation.GATHER: Way.GATHERED,
    Operation.REDUCE: Way.REDUCED,
    Operation.OFFLOAD: Way.TO_HOST,
    Operation.FETCH: Way.TO_DEVICE,
}
_STREAMS = {Stream.TO_HOST: Way.TO_HOST, Stream.TO_DEVICE: Way.TO_DEVICE}


def _way(event: Event) -> Way | None:
    """Return which way an event's bytes move."""
    return _STREAMS.get(event.stream) or _OPERATIONS.get(event.operation)


def rate(events: Iterable[Event], way: Way) -> StepFunction:
    """Return the bytes per second that move one way over time; empty where none are known.

    An event's bytes are spread evenly over its duration.
    """
    changes: list[tuple[float, float]] = []
    for event in events:
        if event.moved_bytes and _way(event) is way:
            per_s = event.moved_bytes / (event.end_s - event.start_s)
            changes += [(event.start_s, per_s), (event.end_s, -per_s)]
    points, now = [], 0.0
    under_way = 0
    for time_s, change in sorted(changes):
        under_way += 1 if change > 0 else -1
        now = now + change if under_way else 0.0  # without the rest of rounding
        points.append((time_s, max(now, 0.0)))
    return merged(points)


def phases_of(marks: Sequence[tuple[float, Instruction]], end_s: float) -> tuple[Span, ...]:
    """Return the phases of a step, by the moments before its instructions.

    The exchange of all ranks behind the forward ends it. The backward lasts up to the optimizer's
    own step. Steps that call several backwards have several of each.
    """
    found: list[Span] = []
    now, has_agreed = Phase.FORWARD, False
    for time_s, instruction in marks:
        before = now
        is_last = instruction.operation is Operation.UPDATE and instruction.unit == NONE
        if is_last:
            now = Phase.UPDATE
        elif now is Phase.FORWARD and has_agreed:
            now = Phase.BACKWARD
        elif now is Phase.UPDATE and instruction.operation in (Operation.GATHER, Operation.FORWARD):
            now, has_agreed = Phase.FORWARD, False
        has_agreed = has_agreed or instruction.operation is Operation.AGREE
        if not found or now is not before:
            if found:
                found[-1] = replace(found[-1], end_s=time_s)
            found.append(Span(now, time_s, end_s))
    return tuple(found)


def _moved(events: Iterable[Event], way: Way) -> float:
    return sum((event.moved_bytes for event in events if _way(event) is way), 0.0)
