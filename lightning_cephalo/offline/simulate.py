"""Simulates a training step of a plan, instruction by instruction, without the cluster.

The programs of all ranks (plan/program.py) define the order; this file adds only how long each
instruction takes, and how much memory it holds. Every rank has streams for compute, communication
and copies. A collective starts when all ranks have issued it and their links are free, and ends on
all at the same time. It checks the closed form of ``plan/cost.py``, whose ``fill_s`` it replaces.

Of optimizer state in host memory, each direction of a link, and the host's processors, do one thing
at a time, beside the device. Streamed state passes through two buffers: one is filled only when
what it held before has left.

No step is longer than the closed form. It is shorter where the slowest rank of the forward is not
that of the backward, or an early update hides behind a gather: by less than 3 % from 24 units on,
for problems as in ``tests/offline/simulated_cases.py``. The exchange of weights between the passes
(AGREE) synchronises hosts, not devices, and is not simulated.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from lightning_cephalo.common.lanes import Lane
from lightning_cephalo.observe.recording import Event, Held, Recording, Stream, merged
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
from lightning_cephalo.plan.state_homes import STAGED_UNITS, StateHome

KINDS = ("gathered buffers", "peak of a microbatch", "boundaries and kept activations", "state")
"""What the memory of a simulated step tells apart."""

# in the order of the curves of a profile
_COMPUTE = (Operation.FORWARD, Operation.BACKWARD, Operation.LOSS)


@dataclass(frozen=True)
class Timeline(Recording):
    """One simulated step of ranks with equal profiles and equal plans, of which one was played.

    Its peak is the prediction of ``predict``, or is lower by at most one unit's boundaries and
    retained activations of the batch: where a microbatch in the middle has the highest peak, some
    others do not hold those of the last unit. Host memory is less than ``predict`` returns by the
    boundaries of the two units that stay on the device.

    Attributes:
        ranks: Indices of the ranks, ascending; ``rank`` is the first.
    """

    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Simulation:
    """Result of :func:`simulate`.

    Attributes:
        step_s: Time of one step. All steps are equal: each ends with a rendezvous of all ranks.
        timelines: One for each group of equal ranks, ordered by first rank.
    """

    step_s: float
    timelines: tuple[Timeline, ...]

    def timeline(self, rank: int) -> Timeline:
        """Return the timeline of this rank's group."""
        return next(timeline for timeline in self.timelines if rank in timeline.ranks)


class _Kind(NamedTuple):
    """Ranks with equal profiles and equal plans."""

    problem: Problem
    profile: RankProfile
    part: RankPlan
    program: Program
    ranks: tuple[int, ...]


def simulate(problem: Problem, plan: Plan) -> Simulation:
    """Simulate a training step of a plan; equal ranks with equal plans are simulated once."""
    predicted = cost.predict(problem, plan)  # raises PlanError if plan and problem do not match
    problem = cost.as_planned(problem, plan)
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank, (profile, part) in enumerate(zip(problem.ranks, plan.ranks, strict=True)):
        doing: tuple[object, ...] = (part.microbatch_sizes, part.recompute, part.offload)
        doing += part.state_fraction, part.resident_fraction, part.host_update_fraction
        alike.setdefault((profile, *doing), []).append(rank)
    kinds = []
    for ranks in alike.values():
        profile, part = problem.ranks[ranks[0]], plan.ranks[ranks[0]]
        kinds.append(_Kind(problem, profile, part, program_of(problem, part), tuple(ranks)))
    check([kind.program for kind in kinds])
    lanes = [_Lane(kind) for kind in kinds]
    everyone = tuple(range(len(lanes)))
    seconds = _collectives_s(problem, kinds[0].program)
    play([lane.run(everyone) for lane in lanes], lambda meeting: next(seconds))
    end_s = max(max(lane.free_s.values()) for lane in lanes)
    step_s = end_s + problem.step_overhead_s
    timelines = []
    for kind, lane in zip(kinds, lanes, strict=True):
        lane.note(Stream.COMMUNICATION, Instruction(Operation.OVERHEAD), end_s, step_s)
        timed = [event for event in lane.events if event.end_s > event.start_s]
        timeline = Timeline(
            kind.ranks[0],
            f"{len(kind.ranks)} × {kind.profile.name}",
            tuple(sorted(timed, key=lambda event: event.start_s)),
            _held(kind, lane.events),
            end_s=step_s,
            planned_bytes=predicted.ranks[kind.ranks[0]].memory_bytes,
            capacity_bytes=kind.profile.capacity_bytes,
            kinds=KINDS,
            ranks=kind.ranks,
        )
        timelines.append(timeline)
    return Simulation(step_s, tuple(timelines))


def program_of(problem: Problem, part: RankPlan) -> Program:
    """Return the program of a rank, for a model that visits each unit once."""
    heads = [problem.units + 1] * problem.has_last_layers
    visits = [Visit(unit) for unit in (*range(1, problem.units + 1), *heads)]
    homes = [home for home, _ in _state_of(problem, part)]
    return compile_step(
        visits,
        len(part.microbatch_sizes),
        [True] * (len(visits) + 1),
        reshard_after_forward=bool(problem.reshard_after_forward),
        offload_boundaries=part.offload,
        updates_early=problem.early_update,
        homes=(*homes, *homes[: len(heads)]),  # the root unit's state has that of heads
        ends=Ends(heads=frozenset(heads)),
    )


def _state_of(problem: Problem, part: RankPlan) -> list[tuple[StateHome, float]]:
    """Return where each unit's state lives, and the parameters of this rank; empty: on the device.

    A simulated unit stands for one of the model's, or for several. The root unit comes first.
    """
    if not part.moves_state:
        return []
    moved, share = moved_by(problem, part), part.state_fraction
    own = len(moved.sizes) - 1
    found = [(moved.homes[ROOT], share * moved.sizes[ROOT])]
    for at in (1 + unit * own // problem.units for unit in range(problem.units)):
        found.append((moved.homes[at], share * moved.sizes[at] * (own / problem.units)))
    return found


def _collectives_s(problem: Problem, program: Program) -> Iterator[float]:
    """Yield the seconds of the collectives of a step, one after another."""
    links, head, is_behind_reduce = problem.links, problem.units + 1, False
    apart = {ROOT: problem.root_links, head: problem.last_links}
    for instruction in (*program.forward, *program.backward):
        own = apart.get(instruction.unit, links)
        if instruction.operation is Operation.GATHER:
            beside_s = max(0.0, links.both_s - links.reduce_s)  # it runs beside the reduce
            yield beside_s if is_behind_reduce else own.gather_s
            is_behind_reduce = False
        elif instruction.operation is Operation.REDUCE:
            yield own.reduce_s
            is_behind_reduce = ROOT < instruction.unit < head


# -- time -------------------------------------------------------------------------------------


def _updates_of(kind: _Kind) -> dict[int, float]:
    """Return what updates take: of units inside the backward, and of the rest at the end."""
    problem, profile, part, program, _ = kind
    seconds_of = part.state_fraction / profile.updated_parameters_per_s
    on_host = sum(moved_by(problem, part).sizes_of(StateHome.HOST))
    rows_s = seconds_of * (problem.parameters - on_host)
    unit_rows_s = seconds_of * problem.parameters * problem.unit_part
    early = program.updated_in_backward - program.ends.heads
    rest_s = max(0.0, problem.update_overhead_s - len(early) * problem.unit_update_s)
    rest_s += max(0.0, rows_s - len(early) * unit_rows_s)
    return {**dict.fromkeys(early, problem.unit_update_s + unit_rows_s), NONE: rest_s}


class _Lane:
    """When the instructions of a rank begin and end."""

    def __init__(self, kind: _Kind) -> None:
        problem, profile, part, _, _ = self._kind = kind
        mode, sizes = cost.Mode.of(part), part.microbatch_sizes
        copies_s = [cost.copy_time(problem, profile, size, mode) for size in sizes]
        self._seconds = {Operation.OFFLOAD: copies_s, Operation.FETCH: copies_s}
        for operation, curve in zip(_COMPUTE, cost.time_curves(profile, mode), strict=True):
            self._seconds[operation] = [curve[size - 1] for size in sizes]
        self._update_s = _updates_of(kind)
        self._state = _state_of(problem, part)
        # in the order of the program, with those that take no time
        self.events: list[Event] = []
        self.free_s: dict[Stream, float] = defaultdict(float)
        self._links = {each: Lane() for each in (Stream.TO_DEVICE, Stream.TO_HOST, Stream.HOST)}
        # by operation, unit and microbatch
        self._done_s: dict[tuple[Operation, int, int], float] = defaultdict(float)
        self._staged = [NONE] * STAGED_UNITS  # units that have been fetched

    def run(self, everyone: tuple[int, ...]) -> Player:
        """Play the step, collective by collective."""
        program, free_s = self._kind.program, self.free_s
        for instruction in (*program.forward, *program.backward):
            if instruction.operation in (Operation.GATHER, Operation.REDUCE):
                what = Instruction(instruction.operation, instruction.unit)
                times_s = yield Meeting(everyone, what, free_s[Stream.COMPUTE])
                self.note(Stream.COMMUNICATION, instruction, *times_s)
            else:
                self._do(instruction)
        free_s[Stream.COMPUTE] = max(free_s[Stream.COMPUTE], free_s[Stream.COMMUNICATION])
        for instruction in program.update:
            self._do(instruction)

    def note(self, stream: Stream, instruction: Instruction, start_s: float, end_s: float) -> None:
        self.events.append(Event(stream, instruction, start_s, end_s))
        self.free_s[stream] = max(self.free_s[stream], end_s)
        key = instruction.operation, instruction.unit, instruction.microbatch
        self._done_s[key] = end_s

    def _do(self, instruction: Instruction) -> None:
        """Compute, copy, update, or move optimizer state; all else takes no time."""
        operation, unit, at = instruction.operation, instruction.unit, instruction.microbatch
        now_s, done_s = self.free_s[Stream.COMPUTE], self._done_s
        is_root = instruction.visit == NONE  # its forward counts in the tail
        match operation:
            case Operation.FORWARD | Operation.LOSS | Operation.BACKWARD if not is_root:
                copied_s = done_s[Operation.FETCH, unit, at]
                if operation is Operation.FORWARD:
                    # the boundary reuses the memory of the boundary from two visits before
                    copied_s = done_s[Operation.OFFLOAD, unit - UNITS_THAT_STAY, at]
                ready_s = max(done_s[Operation.GATHER, unit, NONE], copied_s)
                self._work(Stream.COMPUTE, instruction, ready_s, self._seconds[operation][at])
            case Operation.OFFLOAD | Operation.FETCH:
                # as soon as the preceding compute is done
                self._work(Stream.COPY, instruction, now_s, self._seconds[operation][at])
            case _ if unit in self._kind.program.ends.heads:
                pass  # the time of its update is the root unit's
            case Operation.UPDATE:
                needs = (Operation.REDUCE, Operation.FETCH_STATE)
                ready_s = max(done_s[need, unit, NONE] for need in needs)
                self._work(Stream.COMPUTE, instruction, ready_s, self._update_s.get(unit, 0.0))
            case Operation.FETCH_STATE:
                left_s = done_s[Operation.STORE_STATE, self._staged[-STAGED_UNITS], NONE]
                self._staged.append(unit)
                self._copy(Stream.TO_DEVICE, instruction, max(now_s, left_s))
            case Operation.STORE_STATE if self._state[unit][0] is StateHome.STREAMED:
                self._copy(Stream.TO_HOST, instruction, now_s)
            case Operation.HOST_UPDATE:
                ready_s = max(now_s, done_s[Operation.REDUCE, unit, NONE])
                arrived_s = self._copy(Stream.TO_HOST, instruction, ready_s)
                rate = self._kind.profile.host_updated_parameters_per_s
                seconds = self._state[unit][1] / rate
                updated_s = self._work(Stream.HOST, instruction, arrived_s, seconds)
                back = Instruction(Operation.STORE_STATE, unit)
                self._copy(Stream.TO_DEVICE, back, updated_s)

    def _copy(self, stream: Stream, instruction: Instruction, ready_s: float) -> float:
        """Copy the optimizer state of a unit, or what the host updates of it."""
        (home, parameters), profile = self._state[instruction.unit], self._kind.profile
        is_streamed, to_device = home is StateHome.STREAMED, stream is Stream.TO_DEVICE
        problem = self._kind.problem
        each = problem.moment_bytes if is_streamed else problem.element_bytes
        rate = profile.to_device_bytes_per_s if to_device else profile.to_host_bytes_per_s
        return self._work(stream, instruction, ready_s, each * parameters / rate)

    def _work(
        self, stream: Stream, instruction: Instruction, ready_s: float, seconds: float
    ) -> float:
        """Return when it is done; what moves or updates on the host fills gaps that others left."""
        if stream in self._links:
            end_s = self._links[stream].place(ready_s, seconds)
            start_s = end_s - seconds
        else:
            start_s = max(self.free_s[stream], ready_s)
            end_s = start_s + seconds
        self.note(stream, instruction, start_s, end_s)
        return end_s


# -- memory -----------------------------------------------------------------------------------


class _Change(NamedTuple):
    """A change of a rank's memory.

    Boundaries and activations are counted in unit-samples: integers cancel exactly. ``moment`` is
    a change of the index of ``StateBytes.totals_bytes``: before reduces, from then on, in updates.
    """

    time_s: float
    boundaries: int = 0
    kept: int = 0
    host: int = 0
    peak_bytes: float = 0.0
    moment: int = 0


def _changes(kind: _Kind, events: Iterable[Event]) -> Iterator[_Change]:
    """Yield what the instructions of a step change, in the order of the program."""
    problem, profile, part, program, _ = kind
    mode, sizes, heads = cost.Mode.of(part), part.microbatch_sizes, program.ends.heads
    needs = (cost.device_need, cost.reducing_need)
    peaks = [need(problem, profile, mode).peaks for need in needs]
    has_reduced, free_s, gathered_s = False, 0.0, 0.0
    for event in events:
        start_s, end_s, unit = event.start_s, event.end_s, event.unit
        size = 0 if event.microbatch == NONE else sizes[event.microbatch]
        match event.operation:
            case Operation.GATHER:
                gathered_s = end_s
            case Operation.REDUCE if not has_reduced and unit not in heads:
                has_reduced = True
                # no later than the next unit's backward, which waits for its gather
                yield _Change(max(free_s, gathered_s), moment=1)
            case Operation.FORWARD | Operation.LOSS | Operation.BACKWARD:
                # it holds boundaries from its start, or frees them at its end
                held = size * (event.operation is Operation.FORWARD)
                freed = size * (event.operation is Operation.BACKWARD)
                peak_bytes = peaks[has_reduced][size - 1]
                keeps = not mode.recompute
                yield _Change(start_s, held, held * keeps, peak_bytes=peak_bytes)
                yield _Change(end_s, -freed, -freed * keeps, peak_bytes=-peak_bytes)
            case Operation.OFFLOAD:
                yield _Change(start_s, host=size)
                yield _Change(end_s, boundaries=-size)
            case Operation.FETCH:
                yield _Change(start_s, boundaries=size)
                yield _Change(end_s, host=-size)
            case Operation.UPDATE if unit != NONE:
                yield _Change(start_s, moment=1)
                yield _Change(end_s, moment=-1)
        if event.stream is Stream.COMPUTE:
            free_s = end_s
    yield _Change(free_s, moment=-1)


def _held(kind: _Kind, events: Iterable[Event]) -> tuple[Held, ...]:
    """Return what a rank holds over a step, by :data:`KINDS`."""
    problem, part = kind.problem, kind.part
    moved, share = moved_by(problem, part), part.state_fraction
    more_bytes, host_bytes = moved.device_bytes(problem), share * moved.host_bytes(problem)
    states_bytes = [share * (size + more_bytes) for size in problem.state.totals_bytes]
    fixed_bytes = problem.fixed_bytes + problem.microbatch_bytes * len(part.microbatch_sizes)
    if part.offload and problem.units > UNITS_THAT_STAY:
        fixed_bytes += problem.boundary_bytes * part.batch_size  # gradients between units
    # The sort is stable: of changes at the same time, a cause stays before its effect.
    ordered = sorted(_changes(kind, events), key=lambda change: change.time_s)
    points = []
    for at in accumulate(ordered, _then, initial=_Change(0.0)):
        held_bytes = at.boundaries * problem.boundary_bytes + at.kept * problem.kept_bytes
        sizes = fixed_bytes, at.peak_bytes, held_bytes, states_bytes[at.moment]
        on_host = at.host * problem.boundary_bytes + host_bytes
        points.append((at.time_s, (sizes, on_host)))
    return tuple(Held(time_s, *held) for time_s, held in merged(points))


def _then(before: _Change, change: _Change) -> _Change:
    """Return all changes up to this one, of which the last gives the time."""
    return _Change(change.time_s, *map(operator.add, before[1:], change[1:]))
