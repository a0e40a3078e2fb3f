"""Steps that were recorded or simulated: instructions on streams, and bytes over time."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from lightning_cephalo.plan.program import Instruction, Operation

_V = TypeVar("_V")


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


class Kind(str, enum.Enum):
    """Kinds of bytes on a device; the value is what tables and figures call it."""

    OTHER = "other"
    PARAMETER_ROWS = "parameters, own rows"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENT_ROWS = "gradients, own rows"
    GATHERED = "gathered parameters"
    FULL_GRADIENTS = "full gradients"
    ACTIVATIONS = "activations"
    INSIDE = "inside of an instruction"


MEASURED_KINDS = tuple(kind.value for kind in Kind)


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
class Event:
    """An instruction of a program that took time on one stream of one rank.

    ``WAIT`` is recorded only: a simulation shows it as the gap between events of a stream, which do
    not overlap there. ``OVERHEAD`` is simulated only.

    Attributes:
        start_s: Seconds from the start of the first event of any rank.
        end_s: Later than ``start_s``: an instruction that takes no time has no event.
        moved_bytes: Bytes to or from this rank's device; 0: none, or not recorded.
    """

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


@dataclass(frozen=True)
class Recording:
    """One step of one rank.

    ::

        strategy.report.timeline[0].peak_bytes

    Attributes:
        name: Name of its device.
        events: Events by start. Between hosts, the error of their times is at most the duration of
            an exchange of a few bytes.
        held: What the rank holds over the step; empty: not measured.
        start_s: When the step begins, on the clock of the events.
        end_s: When it ends; None: no step has come to its end.
        planned_bytes: The plan's prediction of the peak; None: it has none.
        capacity_bytes: Memory that the plan was allowed to use; None: it does not say.
        kinds: What ``Held.sizes`` tell apart.
    """

    rank: int
    name: str
    events: tuple[Event, ...]
    held: tuple[Held, ...] = ()
    start_s: float = 0.0
    end_s: float | None = None
    planned_bytes: float | None = None
    capacity_bytes: float | None = None
    kinds: tuple[str, ...] = MEASURED_KINDS

    @property
    def peak_bytes(self) -> float | None:
        """Most bytes on the device at the same time; None if they were not measured."""
        return max((held.device_bytes for held in self.held), default=None)

    def busy_s(self, stream: Stream) -> float:
        """Return how long a stream was busy, without waiting."""
        own = (event for event in self.events if event.stream is stream)
        worked = (event for event in own if event.operation is not Operation.WAIT)
        return sum((event.end_s - event.start_s for event in worked), 0.0)

    def later(self, by_s: float) -> Recording:
        """Return the recording on a clock that shows ``by_s`` more."""
        return replace(
            self,
            events=tuple(
                replace(event, start_s=event.start_s + by_s, end_s=event.end_s + by_s)
                for event in self.events
            ),
            held=tuple(replace(held, time_s=held.time_s + by_s) for held in self.held),
            start_s=self.start_s + by_s,
            end_s=None if self.end_s is None else self.end_s + by_s,
        )


def merged(points: Iterable[tuple[float, _V]]) -> tuple[tuple[float, _V], ...]:
    """Drop points that a later one at the same time replaces, or that change nothing."""
    found: list[tuple[float, _V]] = []
    for point in points:
        if found and found[-1][0] == point[0]:
            found.pop()
        if not found or found[-1][1] != point[1]:
            found.append(point)
    return tuple(found)
