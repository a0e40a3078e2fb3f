"""Timelines of a simulated or recorded step: instructions on streams, and bytes over time."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_cephalo.plan.program import Instruction, Operation

StepFunction = tuple[tuple[float, float], ...]
"""Pairs of (time_s, bytes): the number of bytes from that time until the next pair."""


class Stream(str, enum.Enum):
    """Streams of one rank, which run at the same time.

    Recorded steps have a separate stream for reduces, because reduces have their own process group.
    The simulator plays reduces on the stream of the gathers, one after the other. Optimizer state
    that lives in host memory has a stream in each direction, and one of the host's processors.
    """

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"
    REDUCTION = "reduction"
    TO_DEVICE = "state to device"
    TO_HOST = "state to host"
    HOST = "host updates"


class Phase(str, enum.Enum):
    """Parts of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Kind(str, enum.Enum):
    """Kinds of bytes on a device; the value is what tables and figures call it."""

    PARAMETER_ROWS = "parameters, own rows"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENT_ROWS = "gradients, own rows"
    GATHERED = "gathered parameters"
    FULL_GRADIENTS = "full gradients"
    ACTIVATIONS = "activations"
    INSIDE = "inside of an instruction"
    OTHER = "other"


MEASURED_KINDS = (
    Kind.OTHER,
    Kind.PARAMETER_ROWS,
    Kind.OPTIMIZER_STATE,
    Kind.GRADIENT_ROWS,
    Kind.GATHERED,
    Kind.FULL_GRADIENTS,
    Kind.ACTIVATIONS,
    Kind.INSIDE,
)
"""What a recorded step tells apart, in the order of :attr:`Held.sizes`."""


@dataclass(frozen=True)
class Held:
    """What a rank holds from a moment of a step until the next one.

    Attributes:
        time_s: Seconds, on the clock of the events beside it.
        sizes: Bytes on the device by kind; they sum to the most that is held until the next one.
        host_bytes: Bytes of host memory for boundaries and optimizer state.
    """

    time_s: float
    sizes: tuple[float, ...]
    host_bytes: float = 0.0

    @property
    def device_bytes(self) -> float:
        """Bytes on the device, of all kinds."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Span:
    """A phase of a step on one rank."""

    phase: Phase
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Event:
    """An instruction of a program that took time on one stream of one rank.

    ``WAIT`` is recorded only: a simulation shows it as the gap between events of a stream, which do
    not overlap there. ``OVERHEAD`` is simulated only.

    Attributes:
        start_s: Seconds from the start of the first step.
        end_s: Later than ``start_s``: an instruction that takes no time has no event.
        moved_bytes: Bytes to or from this rank's device; 0: none, or not recorded.
    """

    rank: int
    stream: Stream
    instruction: Instruction
    start_s: float
    end_s: float
    moved_bytes: float = 0.0

    @property
    def operation(self) -> Operation:
        return self.instruction.operation

    @property
    def unit(self) -> int:
        return self.instruction.unit

    @property
    def microbatch(self) -> int:
        return self.instruction.microbatch

    def later(self, by_s: float) -> Event:
        """Return the event on a clock that shows ``by_s`` more."""
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)


@dataclass(frozen=True)
class Timeline:
    """One simulated step of ranks with equal profiles and equal plans.

    Attributes:
        ranks: Indices of the ranks, ascending.
        events: Events of the first of these ranks, by start.
        memory: Bytes on the device over time. Its maximum is the prediction of ``predict``, or is
            lower by at most one unit's boundaries and retained activations of the batch: where a
            microbatch in the middle has the highest peak, some others do not hold those of the last
            unit. Work that takes no time does not appear in it.
        host_memory: Bytes of offloaded boundaries and optimizer state over time; less than
            ``predict`` returns by the boundaries of the two units that stay on the device.
        communication_s: Time that the communication stream was busy, without waiting for other
            ranks.
        waiting_s: Time of the step in which the compute stream was idle.
    """

    ranks: tuple[int, ...]
    events: tuple[Event, ...]
    memory: StepFunction
    host_memory: StepFunction
    compute_s: float
    communication_s: float
    copy_s: float
    waiting_s: float


@dataclass(frozen=True)
class Simulation:
    """Result of :func:`simulate`.

    Attributes:
        step_s: Time of one step. All steps are equal: each ends with a rendezvous of all ranks.
        timelines: One for each group of equal ranks, ordered by first rank.
    """

    step_s: float
    steps: int
    timelines: tuple[Timeline, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(timeline.ranks) for timeline in self.timelines)

    def timeline(self, rank: int) -> Timeline:
        """Return the timeline of this rank's group, which covers one step."""
        return self._by_rank[rank]

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events of all ranks and steps, rank by rank in the order of their start."""
        return tuple(event for rank in range(self.world_size) for event in self.events_of(rank))

    @cached_property
    def memory(self) -> tuple[StepFunction, ...]:
        """Bytes on every rank's device over all steps, in rank order."""
        return tuple(self.memory_of(rank) for rank in range(self.world_size))

    def events_of(self, rank: int) -> tuple[Event, ...]:
        """Return this rank's events of all steps, in the order of their start."""
        return tuple(
            replace(event.later(step * self.step_s), rank=rank)
            for step in range(self.steps)
            for event in self.timeline(rank).events
        )

    def memory_of(self, rank: int) -> StepFunction:
        """Return the bytes on this rank's device over all steps."""
        return self._repeated(self.timeline(rank).memory)

    def host_memory_of(self, rank: int) -> StepFunction:
        """Return the bytes of this rank's offloaded boundaries over all steps."""
        return self._repeated(self.timeline(rank).host_memory)

    @cached_property
    def _by_rank(self) -> tuple[Timeline, ...]:
        found = {rank: timeline for timeline in self.timelines for rank in timeline.ranks}
        return tuple(found[rank] for rank in range(len(found)))

    def _repeated(self, function: StepFunction) -> StepFunction:
        return merged(
            (time_s + step * self.step_s, size)
            for step in range(self.steps)
            for time_s, size in function
        )


@dataclass(frozen=True)
class Recording:
    """One real step of one rank.

    Attributes:
        name: Name of its device.
        events: Events by start. Times count from the start of the first event of any rank. Between
            hosts, their error is at most the duration of an exchange of a few bytes.
        held: What the rank holds over the step, by :data:`MEASURED_KINDS`; empty: not measured.
    """

    rank: int
    name: str
    events: tuple[Event, ...]
    held: tuple[Held, ...] = ()
    phases: tuple[Span, ...] = ()

    def later(self, by_s: float) -> Recording:
        """Return the recording on a clock that shows ``by_s`` more."""
        return replace(
            self,
            events=tuple(event.later(by_s) for event in self.events),
            held=tuple(replace(held, time_s=held.time_s + by_s) for held in self.held),
            phases=tuple(
                replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s)
                for span in self.phases
            ),
        )


def merged(points: Iterable[tuple[float, float]]) -> StepFunction:
    """Drop points that a later one at the same time replaces, or that change nothing."""
    found: list[tuple[float, float]] = []
    for point in points:
        if found and found[-1][0] == point[0]:
            found.pop()
        if not found or found[-1][1] != point[1]:
            found.append(point)
    return tuple(found)
