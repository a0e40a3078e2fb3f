"""One training step of a plan, played event by event on a cluster that is not here.

Every rank has three streams: compute, communication, and copies of offloaded boundaries.
Collectives are rendezvous: one starts when all ranks have issued it and their communication streams
are free, and ends on all of them together. The order is the runner's (accumulation/schedule.py),
here with three units and microbatches a and b::

    communication  root g0  g1 ...  g2 ...                  g1 ...  r2 g0    r1 ...  r0 root
    compute                 0a 0b   1a 1b   2a tail 2b tail 2a 2b   1a 1b    0a 0b        optimizer

All microbatches pass a unit before the next; the next unit is gathered meanwhile, never one
further, as there are two buffers; a unit is reduced under the backward of the next. The last unit
stays gathered between the passes. A unit's boundaries are copied out after its forward and fetched
two units ahead of its backward; those of the last two units stay, as the backward starts there.

Times and bytes of a microbatch are those of ``plan/cost.py``, whose closed form this checks. With G
and R the gather and the reduce of a unit, F and B the forward and the backward of one and U units,
the simulated step of equal ranks differs from the closed form by::

    min(G, F) + max(G, B) + max(R, B) + R - 2 max(G + R, B)          (two units or more)

which is the fill and the drain of the pipeline: G + R where compute hides all communication (the
first gather and the last reduce have nothing to hide behind), no less than -G where communication
sets the pace. Ranks whose slowest pass is not the same gain a little more, as one is up to two
units ahead of another where the passes meet. So a part of the step that falls as 1 / U: within 3 %
from 24 units on as ``benchmarks/simulator.py`` draws them, a quarter for two units. No step is
longer than the closed form and G + R.

The runner's exchange of weights between the passes is not played: hosts meet there, not devices.
``step_overhead_s`` is added as it is given, ``fill_s`` is not: it is what is played here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_cephalo.common import records
from lightning_cephalo.plan import Plan, Problem, RankPlan, RankProfile, cost
from lightning_cephalo.plan.timeline import (
    NONE,
    Activity,
    Event,
    Simulation,
    StepFunction,
    Stream,
    Timeline,
    merged,
)


def simulate(problem: Problem, plan: Plan, *, steps: int = 1) -> Simulation:
    """Play ``steps`` training steps of a plan.

    Ranks with equal profiles and equal plans are played once.

    Args:
        problem: what there is.
        plan: who does what; its predictions are not read.
        steps: how many steps the events cover.

    Raises:
        PlanError: ``steps`` is not a positive whole number, the plan is for another number of
            ranks, or it says what was not profiled (a microbatch size, a mode).
    """
    steps = records.whole("steps", steps, minimum=1)
    cost.predict(problem, plan)  # its complaints are ours
    problem = cost.as_planned(problem, plan)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, (profile, part) in enumerate(zip(problem.ranks, plan.ranks, strict=True)):
        doing = (part.microbatch_sizes, part.recompute, part.offload, part.state_fraction)
        kinds.setdefault((profile, *doing), []).append(rank)
    lanes = [
        _Lane(problem, problem.ranks[ranks[0]], plan.ranks[ranks[0]], ranks)
        for ranks in kinds.values()
    ]
    even = cost.shares_are_even([part.state_fraction for part in plan.ranks])
    step_s = _Cluster(problem, lanes, even).step()
    return Simulation(step_s, steps, tuple(lane.timeline(step_s) for lane in lanes))


class _Cluster:
    """The order of a step over all ranks; collectives are issued here so that all see the same."""

    def __init__(self, problem: Problem, lanes: Sequence[_Lane], even: bool) -> None:
        self._problem = problem
        self._lanes = lanes
        self._gather_s, self._reduce_s = cost.collective_times(problem, even=even)
        self._free_s = 0.0

    def step(self) -> float:
        """Play one step and return when it ends."""
        problem, units = self._problem, self._problem.units
        self._collective(Activity.GATHER, NONE, problem.root_gather_s)
        ready_s = self._gather(0)
        for unit in range(units):
            following_s = self._gather(unit + 1) if unit + 1 < units else ready_s
            for lane in self._lanes:
                lane.forward(unit, ready_s)
            ready_s = following_s
        for unit in reversed(range(units)):
            following_s = ready_s
            if unit and problem.reshard_after_forward:
                following_s = self._gather(unit - 1)
            for lane in self._lanes:
                lane.backward(unit, ready_s)
            self._collective(Activity.REDUCE, unit, self._reduce_s)
            ready_s = following_s
        end_s = self._collective(Activity.REDUCE, NONE, problem.root_reduce_s)
        end_s = self._everywhere(Activity.OPTIMIZER, Stream.COMPUTE, end_s, problem.optimizer_s)
        return self._everywhere(
            Activity.OVERHEAD, Stream.COMMUNICATION, end_s, problem.step_overhead_s
        )

    def _gather(self, unit: int) -> float:
        return self._collective(Activity.GATHER, unit, self._gather_s)

    def _collective(self, name: Activity, unit: int, seconds: float) -> float:
        """Issue it on every rank as soon as its compute before is done; return when it ends."""
        start_s = max(self._free_s, max(lane.free_s for lane in self._lanes))
        self._free_s = self._everywhere(name, Stream.COMMUNICATION, start_s, seconds, unit)
        return self._free_s

    def _everywhere(
        self, name: Activity, stream: Stream, start_s: float, seconds: float, unit: int = NONE
    ) -> float:
        for lane in self._lanes:
            lane.record(stream, name, start_s, start_s + seconds, unit)
        return start_s + seconds


@dataclass(frozen=True)
class _Microbatch:
    index: int
    size: int
    forward_s: float
    backward_s: float
    tail_s: float
    copy_s: float
    peak_bytes: float


class _Change(NamedTuple):
    """Of a rank's memory: boundaries, kept activations and host boundaries count unit-samples, so
    that what is released is exactly what was kept.
    """

    time_s: float
    boundaries: int = 0
    kept: int = 0
    host: int = 0
    peak_bytes: float = 0.0


class _Lane:
    """The streams and the memory of one kind of rank."""

    def __init__(
        self, problem: Problem, profile: RankProfile, part: RankPlan, ranks: Sequence[int]
    ) -> None:
        mode = cost.Mode.of(part)
        curves = (*cost.time_curves(profile, mode), cost.peak_curve(profile, mode))
        self._microbatches = []
        for index, size in enumerate(part.microbatch_sizes):
            forward_s, backward_s, tail_s, peak_bytes = (curve[size - 1] for curve in curves)
            copy_s = cost.copy_time(problem, profile, size, mode)
            self._microbatches.append(
                _Microbatch(index, size, forward_s, backward_s, tail_s, copy_s, peak_bytes)
            )
        self._problem = problem
        self._ranks = tuple(ranks)
        self._offloaded_units = problem.units - cost.UNITS_ON_DEVICE if part.offload else 0
        self._keeps = not mode.recompute
        resting = problem.fixed_bytes + problem.microbatch_bytes * len(part.microbatch_sizes)
        if part.offload and problem.units > cost.UNITS_ON_DEVICE:
            resting += problem.boundary_bytes * part.batch_size  # gradients between units
        self._base_bytes = part.state_fraction * problem.state_bytes, resting
        self._events: list[Event] = []
        self._changes: list[_Change] = []
        self._copied_s: dict[tuple[int, int], float] = {}
        self._copy_free_s = 0.0
        self.free_s = 0.0

    def forward(self, unit: int, ready_s: float) -> None:
        """Pass all microbatches through a unit that is gathered at ``ready_s``."""
        for microbatch in self._microbatches:
            # the boundary takes the room of the one two units before
            room_s = self._copied_s.pop((unit - cost.UNITS_ON_DEVICE, microbatch.index), 0.0)
            start_s = max(self.free_s, ready_s, room_s)
            size, seconds = microbatch.size, microbatch.forward_s
            self._compute(Activity.FORWARD, start_s, seconds, unit, microbatch, keep=size)
            if unit < self._offloaded_units:
                start_s, end_s = self._copy(Activity.OFFLOAD, unit, microbatch)
                self._changes.append(_Change(start_s, host=size))
                self._changes.append(_Change(end_s, boundaries=-size))
            if unit == self._problem.units - 1:
                self._compute(Activity.TAIL, self.free_s, microbatch.tail_s, NONE, microbatch)

    def backward(self, unit: int, ready_s: float) -> None:
        """Carry all gradients back through a unit that is gathered at ``ready_s``."""
        for microbatch in self._microbatches:
            fetched_s = self._copied_s.pop((unit, microbatch.index), 0.0)
            start_s = max(self.free_s, ready_s, fetched_s)
            size, seconds = microbatch.size, microbatch.backward_s
            self._compute(Activity.BACKWARD, start_s, seconds, unit, microbatch, release=size)
            following = unit - cost.UNITS_ON_DEVICE
            if 0 <= following < self._offloaded_units:
                start_s, end_s = self._copy(Activity.FETCH, following, microbatch)
                self._changes.append(_Change(start_s, boundaries=size))
                self._changes.append(_Change(end_s, host=-size))

    def record(
        self,
        stream: Stream,
        name: Activity,
        start_s: float,
        end_s: float,
        unit: int,
        microbatch: int = NONE,
    ) -> None:
        """Note an event, if it took time."""
        if end_s > start_s:
            rank = self._ranks[0]
            self._events.append(Event(rank, stream, name, start_s, end_s, unit, microbatch))

    def timeline(self, step_s: float) -> Timeline:
        """What was recorded, of a step that took ``step_s``."""
        busy_s = dict.fromkeys(Stream, 0.0)
        for event in self._events:
            busy_s[event.stream] += event.end_s - event.start_s
        memory, host_memory = self._memory()
        return Timeline(
            ranks=self._ranks,
            events=tuple(sorted(self._events, key=lambda event: event.start_s)),
            memory=memory,
            host_memory=host_memory,
            compute_s=busy_s[Stream.COMPUTE],
            communication_s=busy_s[Stream.COMMUNICATION],
            copy_s=busy_s[Stream.COPY],
            waiting_s=max(step_s - busy_s[Stream.COMPUTE], 0.0),
        )

    def _compute(
        self,
        name: Activity,
        start_s: float,
        seconds: float,
        unit: int,
        microbatch: _Microbatch,
        *,
        keep: int = 0,
        release: int = 0,
    ) -> None:
        """Run it; ``keep`` samples' boundaries from its start on, ``release`` them at its end."""
        self.free_s = start_s + seconds
        self.record(Stream.COMPUTE, name, start_s, self.free_s, unit, microbatch.index)
        peak_bytes, kept, released = (
            microbatch.peak_bytes,
            keep * self._keeps,
            release * self._keeps,
        )
        self._changes.append(_Change(start_s, keep, kept, peak_bytes=peak_bytes))
        self._changes.append(_Change(self.free_s, -release, -released, peak_bytes=-peak_bytes))

    def _copy(self, name: Activity, unit: int, microbatch: _Microbatch) -> tuple[float, float]:
        """Start as soon as the compute before is done; return start and end."""
        start_s = max(self.free_s, self._copy_free_s)
        self._copy_free_s = start_s + microbatch.copy_s
        self.record(Stream.COPY, name, start_s, self._copy_free_s, unit, microbatch.index)
        self._copied_s[unit, microbatch.index] = self._copy_free_s
        return start_s, self._copy_free_s

    def _memory(self) -> tuple[StepFunction, StepFunction]:
        """Device and host memory over time."""
        problem = self._problem
        state_bytes, gathered_bytes = self._base_bytes
        device, host = [(0.0, state_bytes + gathered_bytes)], [(0.0, 0.0)]
        boundaries = kept = on_host = 0
        peak_bytes = 0.0
        # Stable: of changes at one time, the cause was noted before its effect.
        for change in sorted(self._changes, key=lambda change: change.time_s):
            boundaries += change.boundaries
            kept += change.kept
            on_host += change.host
            peak_bytes += change.peak_bytes
            held_bytes = boundaries * problem.boundary_bytes + kept * problem.kept_bytes
            used_bytes = state_bytes + (gathered_bytes + peak_bytes + held_bytes)
            device.append((change.time_s, used_bytes))
            host.append((change.time_s, on_host * problem.boundary_bytes))
        return merged(device), merged(host)
