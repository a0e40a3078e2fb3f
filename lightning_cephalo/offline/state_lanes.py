"""Simulates the ways of a rank's optimizer state that lives in host memory.

Each direction of a link, and the host's processors, do one thing at a time, beside the device.
Streamed state passes through two buffers: one is filled only when what it held before has left.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_cephalo.common.lanes import Lane
from lightning_cephalo.plan import Problem, RankPlan, RankProfile
from lightning_cephalo.plan.moving import MovedState, moved_by
from lightning_cephalo.plan.program import ROOT, Instruction, Operation
from lightning_cephalo.plan.state_homes import STAGED_UNITS, StateHome
from lightning_cephalo.plan.timeline import Stream

_Record = Callable[[Stream, Instruction, float, float], None]


def homes_of(problem: Problem, rank: RankPlan) -> tuple[StateHome, ...]:
    """Return where the state of each simulated unit lives; empty: all of it is on the device."""
    if not rank.moves_state:
        return ()
    moved = moved_by(problem, rank)
    return tuple(moved.homes[at] for at in _units(problem, moved))


def _units(problem: Problem, moved: MovedState) -> list[int]:
    """Return the model's unit that each simulated unit stands for, the root unit first."""
    units = len(moved.sizes) - 1
    return [ROOT, *(1 + unit * units // problem.units for unit in range(problem.units))]


class StateLanes:
    """The links and the host's processors of one rank."""

    def __init__(
        self, problem: Problem, profile: RankProfile, rank: RankPlan, record: _Record
    ) -> None:
        self._homes = homes_of(problem, rank)
        moved = moved_by(problem, rank)
        parts = (len(moved.sizes) - 1) / problem.units
        self._sizes = [
            rank.state_fraction * moved.sizes[at] * (parts if unit else 1.0)
            for unit, at in enumerate(_units(problem, moved)[: len(self._homes)])
        ]
        self._problem, self._profile, self._record = problem, profile, record
        streams = (Stream.TO_DEVICE, Stream.TO_HOST, Stream.HOST)
        self._lanes = {stream: Lane() for stream in streams}
        self._buffers_s = [0.0] * STAGED_UNITS
        self._next = 0
        self._fetched: dict[int, tuple[float, int]] = {}

    def run(self, instruction: Instruction, now_s: float) -> None:
        """Do an instruction, whose unit is ready at ``now_s``."""
        unit = instruction.unit
        match instruction.operation:
            case Operation.FETCH_STATE:
                start_s = max(now_s, self._buffers_s[self._next])
                end_s = self._copy(instruction, Stream.TO_DEVICE, start_s)
                self._fetched[unit] = end_s, self._next
                self._next = (self._next + 1) % STAGED_UNITS
            case Operation.STORE_STATE if unit in self._fetched:
                _, buffer = self._fetched.pop(unit)
                self._buffers_s[buffer] = self._copy(instruction, Stream.TO_HOST, now_s)
            case Operation.HOST_UPDATE:
                arrived_s = self._copy(instruction, Stream.TO_HOST, now_s)
                back = Instruction(Operation.STORE_STATE, unit)
                self._copy(back, Stream.TO_DEVICE, self._update(instruction, arrived_s))

    def arrival_s(self, unit: int) -> float:
        """Return when a unit's state is on the device; 0 if it has not left."""
        return self._fetched.get(unit, (0.0, 0))[0]

    @property
    def done_s(self) -> float:
        return max(0.0, *(lane.done_s for lane in self._lanes.values()))

    def _update(self, instruction: Instruction, start_s: float) -> float:
        size = self._sizes[instruction.unit]
        took_s = size / self._profile.host_updated_parameters_per_s
        return self._work(instruction, Stream.HOST, start_s, took_s)

    def _copy(self, instruction: Instruction, stream: Stream, start_s: float) -> float:
        unit, problem, profile = instruction.unit, self._problem, self._profile
        is_streamed = self._homes[unit] is StateHome.STREAMED
        each = problem.moment_bytes if is_streamed else problem.element_bytes
        to_device = stream is Stream.TO_DEVICE
        rate = profile.to_device_bytes_per_s if to_device else profile.to_host_bytes_per_s
        return self._work(instruction, stream, start_s, each * self._sizes[unit] / rate)

    def _work(
        self, instruction: Instruction, stream: Stream, start_s: float, took_s: float
    ) -> float:
        end_s = self._lanes[stream].place(start_s, took_s)
        self._record(stream, instruction, end_s - took_s, end_s)
        return end_s
