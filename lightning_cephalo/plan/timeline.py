"""A step in time, simulated or recorded: a program's instructions on streams, bytes over time."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_cephalo.plan.program import Instruction, Operation

StepFunction = tuple[tuple[float, float], ...]
"""Pairs of (time_s, bytes): from that time on that many bytes, until the next pair."""


class Stream(str, enum.Enum):
    """What runs side by side on one rank.

    In recorded steps reduces have a stream of their own, as they have a process group of their own;
    the simulator plays them one after the other with the gathers.
    """

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"
    REDUCTION = "reduction"


@dataclass(frozen=True)
class Event:
    """An instruction of a program that took time on one stream of one rank.

    Attributes:
        rank: Which.
        stream: Where; events of one stream do not overlap in a simulation.
        instruction: What. ``WAIT`` is recorded only: in a simulation it is what lies between the
            events. ``OVERHEAD`` is simulated only.
        start_s: From the start of the first step.
        end_s: Later than ``start_s``: what takes no time is no event.
    """

    rank: int
    stream: Stream
    instruction: Instruction
    start_s: float
    end_s: float

    @property
    def operation(self) -> Operation:
        """What the instruction does."""
        return self.instruction.operation

    @property
    def unit(self) -> int:
        """Index of the unit; 0 is the root unit, -1 where no unit is meant."""
        return self.instruction.unit

    @property
    def microbatch(self) -> int:
        """Index on the rank; -1 where all are meant."""
        return self.instruction.microbatch


@dataclass(frozen=True)
class Timeline:
    """One step of ranks that do the same: equal profiles and equal plans.

    Attributes:
        ranks: Which, ascending.
        events: Of the first of them, by start.
        memory: Bytes on the device over time. Its maximum is what ``predict`` says, or less by at
            most one unit's boundaries and kept activations of the batch: when a microbatch in the
            middle has the highest peak, some others do not hold theirs of the last unit. Work that
            takes no time leaves no trace in it.
        host_memory: Bytes of offloaded boundaries over time; less than ``predict`` says by the two
            units that stay on the device.
        compute_s: Time that the compute stream was busy.
        communication_s: The same of the communication stream, without waiting for other ranks.
        copy_s: The same of the copy stream.
        waiting_s: Time of the step in which the compute stream had nothing to do.
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
    """What :func:`simulate` found.

    Attributes:
        step_s: Time of one step. All steps are equal: each ends with a rendezvous of all ranks.
        steps: How many.
        timelines: One for every kind of rank, by first rank.
    """

    step_s: float
    steps: int
    timelines: tuple[Timeline, ...]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return sum(len(timeline.ranks) for timeline in self.timelines)

    def timeline(self, rank: int) -> Timeline:
        """The one step of this rank's kind."""
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
        """This rank's events of all steps, in the order of their start."""
        return tuple(
            replace(
                event,
                rank=rank,
                start_s=event.start_s + step * self.step_s,
                end_s=event.end_s + step * self.step_s,
            )
            for step in range(self.steps)
            for event in self.timeline(rank).events
        )

    def memory_of(self, rank: int) -> StepFunction:
        """Bytes on this rank's device over all steps."""
        return self._repeated(self.timeline(rank).memory)

    def host_memory_of(self, rank: int) -> StepFunction:
        """Bytes of this rank's offloaded boundaries over all steps."""
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
        rank: Which.
        name: Of its device.
        events: By start. Times are from the start of the first event of any rank; between hosts
            they are good to what an exchange of a few bytes takes.
    """

    rank: int
    name: str
    events: tuple[Event, ...]


def merged(points: Iterable[tuple[float, float]]) -> StepFunction:
    """Without points that another at the same time replaces, or that change nothing."""
    found: list[tuple[float, float]] = []
    for point in points:
        if found and found[-1][0] == point[0]:
            found.pop()
        if not found or found[-1][1] != point[1]:
            found.append(point)
    return tuple(found)
