"""One step of a rank by phase: what it holds, and what moves each way.

A :class:`MemoryTimeline` comes from a recorded step; reports and traces show it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from lightning_cephalo.plan.plan import RankPlan
from lightning_cephalo.plan.program import NONE, Instruction, Operation
from lightning_cephalo.plan.timeline import (
    Event,
    Phase,
    Recording,
    Span,
    StepFunction,
    Stream,
    merged,
)


@dataclass(frozen=True)
class MemoryTimeline(Recording):
    """What one rank holds and moves in one recorded step.

    Attributes:
        planned_bytes: The plan's prediction of the peak; None: it has none.
        capacity_bytes: Memory that the plan was allowed to use; None: it does not say.
    """

    planned_bytes: float | None = None
    capacity_bytes: float | None = None

    @classmethod
    def of_recording(cls, recording: Recording, plan: RankPlan | None = None) -> MemoryTimeline:
        """Return the timeline of a recorded step."""
        planned = () if plan is None else (plan.memory_bytes, plan.capacity_bytes)
        own = (getattr(recording, field.name) for field in fields(recording))
        return cls(*own, *planned)

    @property
    def peak_bytes(self) -> float | None:
        """Most bytes on the device at the same time; None if they were not measured."""
        return max((held.device_bytes for held in self.held), default=None)

    @property
    def end_s(self) -> float:
        """When the step ends."""
        return max((span.end_s for span in self.phases), default=0.0)


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


def way_of(event: Event) -> Way | None:
    """Return which way an event's bytes move."""
    return _STREAMS.get(event.stream) or _OPERATIONS.get(event.operation)


def rate(events: Iterable[Event], way: Way) -> StepFunction:
    """Return the bytes per second that move one way over time; empty where none are known.

    An event's bytes are spread evenly over its duration.
    """
    changes: list[tuple[float, float]] = []
    for event in events:
        if event.moved_bytes and way_of(event) is way:
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
