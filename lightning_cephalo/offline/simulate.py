"""Simulates a training step of a plan, instruction by instruction, without the cluster.

The programs of all ranks (plan/program.py) define the order; this file adds only how long each
instruction takes, and how much memory it holds. Every rank has streams for compute, communication
and copies. A collective starts when all ranks have issued it and their links are free, and ends on
all at the same time. It checks the closed form of ``plan/cost.py``, whose ``fill_s`` it replaces.

No step is longer than the closed form. It is shorter where the slowest rank of the forward is not
that of the backward, or an early update hides behind a gather: by less than 3 % from 24 units on,
for problems as in ``tests/offline/simulated_cases.py``. The exchange of weights between the passes
(AGREE) synchronises hosts, not devices, and is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_cephalo.common import records
from lightning_cephalo.offline.state_lanes import StateLanes, homes_of
from lightning_cephalo.plan import Plan, Problem, RankPlan, RankProfile, cost
from lightning_cephalo.plan.check import check
from lightning_cephalo.plan.moving import moved_by
from lightning_cephalo.plan.play import Meeting, Player, play
from lightning_cephalo.plan.program import (
    NONE,
    ROOT,
    UNITS_THAT_STAY,
    Ends,
    Instruction,
    Operation,
    Program,
    Visit,
    compile_step,
)
from lightning_cephalo.plan.state_homes import StateHome
from lightning_cephalo.plan.timeline import (
    Event,
    Simulation,
    StepFunction,
    Stream,
    Timeline,
    merged,
)

# indices of StateBytes.totals_bytes
_FORWARD, _REDUCING, _UPDATING = range(3)
_LINKED = frozenset({Operation.GATHER, Operation.REDUCE})
# in the order of the curves of a profile
_COMPUTE = (Operation.FORWARD, Operation.BACKWARD, Operation.LOSS)


def simulate(problem: Problem, plan: Plan, *, steps: int = 1) -> Simulation:
    """Simulate training steps of a plan; equal ranks with equal plans are simulated once."""
    steps = records.whole("steps", steps, minimum=1)
    cost.predict(problem, plan)  # raises the PlanError for plans that do not match the problem
    problem = cost.as_planned(problem, plan)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, (profile, part) in enumerate(zip(problem.ranks, plan.ranks, strict=True)):
        doing: tuple[object, ...] = (part.microbatch_sizes, part.recompute, part.offload)
        doing += part.state_fraction, part.resident_fraction, part.host_update_fraction
        kinds.setdefault((profile, *doing), []).append(rank)
    programs = programs_of(problem, plan)
    check([programs[ranks[0]] for ranks in kinds.values()])
    lanes = [
        _Lane(problem, problem.ranks[own[0]], plan.ranks[own[0]], programs[own[0]], own)
        for own in kinds.values()
    ]
    everyone = tuple(range(len(lanes)))
    play([lane.run(everyone) for lane in lanes], _seconds_of(problem))
    end_s = max(lane.end_s for lane in lanes)
    step_s = end_s + problem.step_overhead_s
    for lane in lanes:
        lane.record(Stream.COMMUNICATION, Instruction(Operation.OVERHEAD), end_s, step_s)
    return Simulation(step_s, steps, tuple(lane.timeline(step_s) for lane in lanes))


def programs_of(problem: Problem, plan: Plan) -> list[Program]:
    """Return the program of every rank, for a model that visits each unit once."""
    problem = cost.as_planned(problem, plan)
    heads = [problem.units + 1] * problem.has_last_layers
    visits = [Visit(unit) for unit in (*range(1, problem.units + 1), *heads)]
    programs = []
    for part in plan.ranks:
        homes = homes_of(problem, part)
        program = compile_step(
            visits,
            len(part.microbatch_sizes),
            [True] * (len(visits) + 1),
            reshard_after_forward=bool(problem.reshard_after_forward),
            offload_boundaries=part.offload,
            updates_early=problem.early_update,
            homes=(*homes, *homes[: len(heads)]),  # the root unit's state has that of heads
            ends=Ends(heads=frozenset(heads)),
        )
        programs.append(program)
    return programs


def _seconds_of(problem: Problem) -> Callable[[Meeting], float]:
    """Return a function of the collectives of a step, one after another."""
    head, before, links = problem.units + 1, Instruction(Operation.OVERHEAD), problem.links
    others = {
        (Operation.GATHER, ROOT): problem.root_links.gather_s,
        (Operation.GATHER, head): problem.last_links.gather_s,
        (Operation.REDUCE, ROOT): problem.root_links.reduce_s,
        (Operation.REDUCE, head): problem.last_links.reduce_s,
    }
    of_units = {Operation.GATHER: links.gather_s, Operation.REDUCE: links.reduce_s}

    def seconds_of(meeting: Meeting) -> float:
        nonlocal before
        behind, before = before, meeting.what
        operation, unit = before.operation, before.unit
        is_behind_reduce = behind.operation is Operation.REDUCE and ROOT < behind.unit < head
        if operation is Operation.GATHER and is_behind_reduce:  # it runs beside the reduce
            return max(0.0, links.both_s - links.reduce_s)
        return others.get((operation, unit), of_units[operation])

    return seconds_of


class _Microbatch(NamedTuple):
    size: int
    seconds: dict[Operation, float]
    copy_s: float
    peak_bytes: float
    reducing_peak_bytes: float


class _Change(NamedTuple):
    """A change of a rank's memory.

    Boundaries and activations are counted in unit-samples: integers cancel exactly.
    ``moment`` is the index of ``StateBytes.totals_bytes`` from then on; None: as before.
    """

    time_s: float
    boundaries: int = 0
    kept: int = 0
    host: int = 0
    peak_bytes: float = 0.0
    moment: int | None = None


class _Lane:
    """Equal ranks, of which one is played."""

    def __init__(
        self,
        problem: Problem,
        profile: RankProfile,
        part: RankPlan,
        program: Program,
        ranks: Sequence[int],
    ) -> None:
        self._problem, self._program, self._ranks = problem, program, tuple(ranks)
        mode = cost.Mode.of(part)
        needs = (cost.device_need, cost.reducing_need)
        peaks = [need(problem, profile, mode).peaks for need in needs]
        curves = dict(zip(_COMPUTE, cost.time_curves(profile, mode), strict=True))
        self._microbatches = [
            _Microbatch(
                size,
                {operation: curve[size - 1] for operation, curve in curves.items()},
                cost.copy_time(problem, profile, size, mode),
                *(curve[size - 1] for curve in peaks),
            )
            for size in part.microbatch_sizes
        ]
        self._keeps, self._heads = not mode.recompute, program.ends.heads
        resting = problem.fixed_bytes + problem.microbatch_bytes * len(part.microbatch_sizes)
        if part.offload and problem.units > UNITS_THAT_STAY:
            resting += problem.boundary_bytes * part.batch_size  # gradients between units
        self._resting_bytes = resting
        moved = moved_by(problem, part)
        share = part.state_fraction
        more_bytes = moved.device_bytes(problem)
        self._states_bytes = [share * (size + more_bytes) for size in problem.state.totals_bytes]
        self._state_host_bytes = share * moved.host_bytes(problem)
        self._state = StateLanes(problem, profile, part, self.record)
        seconds_of = share / profile.updated_parameters_per_s
        self._rows_s = seconds_of * (problem.parameters - sum(moved.sizes_of(StateHome.HOST)))
        self._unit_rows_s = seconds_of * problem.parameters * problem.unit_part
        self._updates = 0
        self._events: list[Event] = []
        self._changes: list[_Change] = []
        # per unit, when it was gathered and reduced last; per passage, when it was copied
        self._gathered_s: dict[int, float] = {}
        self._reduced_s: dict[int, float] = {}
        self._copied_s: dict[tuple[int, int], float] = {}
        self._is_reducing = False
        self._free_s = self._copy_free_s = self.end_s = 0.0

    # -- execution ----------------------------------------------------------------------------

    def run(self, everyone: tuple[int, ...]) -> Player:
        """Play the step, collective by collective."""
        end_s = 0.0
        for instruction in (*self._program.forward, *self._program.backward):
            operation, unit = instruction.operation, instruction.unit
            if operation in _LINKED:
                if operation is Operation.REDUCE and unit not in self._heads:
                    self._begin_to_reduce()
                start_s, end_s = yield Meeting(everyone, Instruction(operation, unit), self._free_s)
                self.record(Stream.COMMUNICATION, instruction, start_s, end_s)
                done_s = self._gathered_s if operation is Operation.GATHER else self._reduced_s
                done_s[unit] = end_s
            elif instruction.microbatch != NONE:
                self._pass(instruction)
            elif operation is Operation.UPDATE and unit not in self._heads:
                seconds = self._problem.unit_update_s + self._unit_rows_s
                self._update(instruction, self._reduced_s[unit], seconds)
            else:
                self._move(instruction)
        rest_s = self._problem.update_overhead_s - self._updates * self._problem.unit_update_s
        rest_s = max(0.0, rest_s) + max(0.0, self._rows_s - self._updates * self._unit_rows_s)
        self._free_s = max(self._free_s, end_s)
        for instruction in self._program.update:
            is_last = instruction.unit == NONE  # it takes all of the time
            if instruction.operation is not Operation.UPDATE:
                self._move(instruction)
            elif instruction.unit not in self._heads:
                self._update(instruction, end_s, rest_s * is_last)
        self._changes.append(_Change(self._free_s, moment=_FORWARD))
        self.end_s = max(self._free_s, self._state.done_s)

    def _begin_to_reduce(self) -> None:
        if not self._is_reducing:
            self._is_reducing = True
            # no later than the next unit's backward, which waits for its gather
            begun_s = max(self._free_s, *self._gathered_s.values())
            self._changes.append(_Change(begun_s, moment=_REDUCING))

    def _pass(self, instruction: Instruction) -> None:
        """Compute or copy a microbatch."""
        operation, at = instruction.operation, (instruction.visit, instruction.microbatch)
        if instruction.visit == NONE:
            return  # the root unit's forward counts in the tail
        microbatch = self._microbatches[instruction.microbatch]
        size = microbatch.size
        if operation not in _COMPUTE:
            # as soon as the preceding compute is done
            start_s = max(self._free_s, self._copy_free_s)
            self._copied_s[at] = self._copy_free_s = end_s = start_s + microbatch.copy_s
            self.record(Stream.COPY, instruction, start_s, end_s)
            away = size * (operation is Operation.OFFLOAD)
            self._changes += [
                _Change(start_s, size - away, host=away),
                _Change(end_s, -away, host=away - size),
            ]
            return
        if operation is Operation.FORWARD:
            # the boundary reuses the memory of the boundary from two visits before
            at = (instruction.visit - UNITS_THAT_STAY, instruction.microbatch)
        ready_s = max(self._gathered_s[instruction.unit], self._copied_s.pop(at, 0.0))
        start_s = max(self._free_s, ready_s)
        self._free_s = start_s + microbatch.seconds[operation]
        self.record(Stream.COMPUTE, instruction, start_s, self._free_s)
        peak_bytes = microbatch.reducing_peak_bytes if self._is_reducing else microbatch.peak_bytes
        # it holds boundaries from its start, or frees them at its end
        held = size * (operation is Operation.FORWARD)
        freed = size * (operation is Operation.BACKWARD)
        self._changes += [
            _Change(start_s, held, held * self._keeps, peak_bytes=peak_bytes),
            _Change(self._free_s, -freed, -freed * self._keeps, peak_bytes=-peak_bytes),
        ]

    def _move(self, instruction: Instruction) -> None:
        if instruction.unit in self._heads:
            return  # the time of its update is the root unit's
        needs_gradient = instruction.operation is Operation.HOST_UPDATE
        ready_s = self._reduced_s[instruction.unit] if needs_gradient else 0.0
        self._state.run(instruction, max(self._free_s, ready_s))

    def _update(self, instruction: Instruction, ready_s: float, seconds: float) -> None:
        start_s = max(self._free_s, ready_s, self._state.arrival_s(instruction.unit))
        self._free_s = start_s + seconds
        if instruction.unit != NONE:
            self._updates += seconds > 0
            self._changes.append(_Change(start_s, moment=_UPDATING))
            self._changes.append(_Change(self._free_s, moment=_REDUCING))
        self.record(Stream.COMPUTE, instruction, start_s, self._free_s)

    def record(
        self, stream: Stream, instruction: Instruction, start_s: float, end_s: float
    ) -> None:
        if end_s > start_s:
            self._events.append(Event(self._ranks[0], stream, instruction, start_s, end_s))

    # -- results ------------------------------------------------------------------------------

    def timeline(self, step_s: float) -> Timeline:
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

    def _memory(self) -> tuple[StepFunction, StepFunction]:
        problem = self._problem
        state_bytes, gathered_bytes = self._states_bytes[_FORWARD], self._resting_bytes
        device = [(0.0, state_bytes + gathered_bytes)]
        host = [(0.0, self._state_host_bytes)]
        boundaries = kept = on_host = 0
        peak_bytes = 0.0
        # The sort is stable: of changes at the same time, a cause stays before its effect.
        for change in sorted(self._changes, key=lambda change: change.time_s):
            boundaries += change.boundaries
            kept += change.kept
            on_host += change.host
            peak_bytes += change.peak_bytes
            if change.moment is not None:
                state_bytes = self._states_bytes[change.moment]
            held_bytes = boundaries * problem.boundary_bytes + kept * problem.kept_bytes
            used_bytes = state_bytes + (gathered_bytes + peak_bytes + held_bytes)
            device.append((change.time_s, used_bytes))
            host_bytes = on_host * problem.boundary_bytes + self._state_host_bytes
            host.append((change.time_s, host_bytes))
        return merged(device), merged(host)
