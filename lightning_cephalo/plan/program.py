"""The order of a step as data: a :class:`Program`, one tuple of instructions per rank and pass.

A program is the only description of a step. ``execution/executor.py`` runs it.
``offline/simulate.py`` plays it with seconds and bytes. ``plan/check.py`` proves that it can run.
``observe/`` records it, and errors name its instructions. Small pure functions, called passes,
build it from the visits of a model::

    layered           G0 Z0 F0.0 F0.1 G1 F1.0 F1.1 X1 G2 F2.0 L0.0 F2.1 L0.1 A
                      Z2 B2.1 B2.0 R2 X2 G1 Z1 B1.1 B1.0 R1 X1 R0 X0 A
                      U
    keep_gathered     drops X1 from the forward and G1 from the backward
    prefetch          moves G1 before Z0 and G2 before F1.0; in the backward, G1 before Z2
    offload           with three units: adds O1.0 after F1.0, and H1.0 after B3.0
    update_early      adds U2 after R1 X1, and U1 after R0 X0; U updates the rest
    move_state        unit 2 streamed: adds I2 after R2, and S2 after U2
                      unit 1 updated by the host: C1 for U1, and S1 after U
    release_ends      adds Xf after F0.1, Gl before F1.0 and Zl before F2.0; in the backward, Rl Xl
                      at its beginning, and Zf before B1.1

Where unit 1 normalises by the statistics of the global batch, its microbatches stop and meet::

    forward           G1 F1.0 F1.1 M1 F1.0 F1.1 X1
    backward          G1 Z1 B1.1 B1.0 M1 B1.1 B1.0 R1 X1

In layered accumulation (Cephalo, ICS 2025, figure 4), all microbatches pass a unit before any of
them passes the next. So a unit is gathered once per pass and reduced once per step.

A *visit* is one use of a unit by every microbatch. A unit that is used twice is reduced after the
visit that comes last in the backward. The root unit holds everything outside the other units. Its
*ends* are layers that only its forward (``f``, the first ones) or its loss (``l``) uses.
``python -m lightning_cephalo.plan`` prints an example.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby

from lightning_cephalo.plan.state_homes import STAGED_UNITS, StateHome

ROOT = 0
NONE = -1
FIRST_LAYERS = -2
LAST_LAYERS = -3
_END_NAMES = {FIRST_LAYERS: "f", LAST_LAYERS: "l"}
# Boundaries of the last visits are needed again immediately: they stay on the device.
UNITS_THAT_STAY = 2


class Operation(str, enum.Enum):
    """Kind of an instruction; the value is its name in traces and messages.

    ``WAIT`` and ``OVERHEAD`` occur only in timelines.
    """

    GATHER = "gather"  # start to all-gather the unit's parameters
    ARM = "arm"  # provide zeroed gradients to accumulate into
    FORWARD = "forward"  # pass a microbatch through the unit
    LOSS = "loss"  # run what follows the last unit: head, loss, and the backward of both
    OFFLOAD = "offload"  # copy the unit's input to the host
    FETCH = "fetch"  # start to copy it back
    BACKWARD = "backward"  # carry a microbatch's gradients through the unit
    REDUCE = "reduce"  # start to reduce-scatter the unit's gradients
    FREE = "free"  # free the gathered parameters
    MEET = "meet"  # sum statistics over all microbatches of all ranks, in the middle of a unit
    AGREE = "agree"  # exchange weights, failures and uses between all ranks
    UPDATE = "update"  # run the optimizer's step, for one unit or for all that is left
    FETCH_STATE = "fetch state"  # start to copy the unit's optimizer state to the device
    SEND_GRADIENT = "send gradient"  # start to copy its gradient to the host, and give it back
    HOST_UPDATE = "host update"  # start to copy its gradients to the host, which updates it
    STORE_STATE = "store state"  # start to copy state back, or take what the host has updated
    WAIT = "wait"
    OVERHEAD = "overhead"

    # enum's own is Python code, which every instruction would run several times
    __hash__ = str.__hash__


@dataclass(frozen=True)
class OperationInfo:
    """How an operation is written."""

    letter: str
    colour: str
    phrase: str = ""


# programs, figures and messages take it from here; a test finds an operation without a row
OPERATIONS = {
    Operation.GATHER: OperationInfo("G", "#E69F00"),
    Operation.ARM: OperationInfo("Z", "#999999", "gradient"),
    Operation.FORWARD: OperationInfo("F", "#56B4E9"),
    Operation.LOSS: OperationInfo("L", "#CC79A7"),
    Operation.OFFLOAD: OperationInfo("O", "#F0E442"),
    Operation.FETCH: OperationInfo("H", "#8A7A00"),
    Operation.BACKWARD: OperationInfo("B", "#0072B2"),
    Operation.REDUCE: OperationInfo("R", "#D55E00"),
    Operation.FREE: OperationInfo("X", "#999999", "release"),
    Operation.MEET: OperationInfo("M", "#8B4513", "meeting"),
    Operation.AGREE: OperationInfo("A", "#999999"),
    Operation.UPDATE: OperationInfo("U", "#009E73", "optimizer's step"),
    Operation.FETCH_STATE: OperationInfo("I", "#8A7A00"),
    Operation.SEND_GRADIENT: OperationInfo("N", "#F0E442", "gradient on its way to the host"),
    Operation.HOST_UPDATE: OperationInfo("C", "#009E73", "optimizer's step on the host"),
    Operation.STORE_STATE: OperationInfo("S", "#F0E442"),
    Operation.WAIT: OperationInfo("W", "#999999"),
    Operation.OVERHEAD: OperationInfo("V", "#999999"),
}

COLLECTIVES = frozenset({Operation.GATHER, Operation.REDUCE, Operation.MEET, Operation.AGREE})
COMPUTE = frozenset({Operation.FORWARD, Operation.LOSS, Operation.BACKWARD})
_PASSING = COMPUTE | {Operation.MEET}


@dataclass(frozen=True)
class Instruction:
    """One action of a rank.

    >>> str(Instruction(Operation.FORWARD, unit=2, visit=1, microbatch=0))
    'F2.0'

    Attributes:
        unit: Index of the unit; 0 is the root unit, -1 if no unit applies. -2 and -3 are the root
            unit's first and last layers, where they have instructions of their own.
        visit: Position in the order of visits; for LOSS, that of the last visit before it. -1 for
            all else of the root unit and if no visit applies.
        microbatch: Index on this rank; -1 if the instruction is for all microbatches.
    """

    operation: Operation
    unit: int = NONE
    visit: int = NONE
    microbatch: int = NONE

    def __str__(self) -> str:
        unit = "" if self.unit == NONE else _END_NAMES.get(self.unit, str(self.unit))
        microbatch = "" if self.microbatch == NONE else f".{self.microbatch}"
        return f"{OPERATIONS[self.operation].letter}{unit}{microbatch}"


@dataclass(frozen=True)
class Visit:
    """One use of a unit, or a place in it where all microbatches of all ranks meet.

    Attributes:
        unit: The root unit for a place between units.
        differentiable: Whether a backward passes through the visit. It does not for a frozen unit
            whose inputs need no gradient, or for a use under ``torch.no_grad``.
        meeting: Index of the layer that needs statistics of the global batch; -1: a use of a unit.
    """

    unit: int
    differentiable: bool = True
    meeting: int = NONE

    @property
    def is_meeting(self) -> bool:
        """Whether microbatches meet there; no unit is entered."""
        return self.meeting != NONE


@cache
def visit_of(unit: int, differentiable: bool, meeting: int) -> Visit:
    """Return the visit, as the same object each time: most comparisons then end immediately."""
    return Visit(unit, differentiable, meeting)


Instructions = tuple[Instruction, ...]


@dataclass(frozen=True)
class Ends:
    """Layers of the root unit that a step gathers, arms and frees apart from it.

    ``first_trains`` and ``last_trains`` tell whether they have gradients to reduce. The backward of
    the first layers does not need their parameters, as that of an embedding.
    """

    first: bool = False
    last: bool = False
    first_trains: bool = True
    last_trains: bool = True


WHOLE_ROOT = Ends()
"""The root unit is gathered and freed as one."""


@dataclass(frozen=True)
class Program:
    """Instructions of one rank in one step, in order.

    Its three parts run in Lightning's hooks ``training_step`` and ``backward``, and in the
    optimizer's step. Units whose state is in host memory come before that, one by one.
    """

    forward: Instructions
    backward: Instructions
    update: Instructions = (Instruction(Operation.UPDATE),)

    @property
    def instructions(self) -> Instructions:
        """Instructions of all three parts."""
        return (*self.forward, *self.backward, *self.update)

    @cached_property
    def updated_in_backward(self) -> frozenset[int]:
        """The units that the device updates inside the backward."""
        return frozenset(i.unit for i in self.backward if i.operation is Operation.UPDATE)

    def __str__(self) -> str:
        return "\n".join(text(part) for part in (self.forward, self.backward, self.update))


def text(instructions: Iterable[Instruction]) -> str:
    """Return instructions in letters, such as ``"G1 F1.0 F1.1 X1"``."""
    return " ".join(map(str, instructions))


def compile_step(
    visits: Sequence[Visit],
    microbatches: int,
    trainable: Sequence[bool],
    *,
    reshard_after_forward: bool = True,
    offload_boundaries: bool = False,
    updates_early: bool = False,
    homes: Sequence[StateHome] = (),
    sends_gradients: bool = False,
    ends: Ends = WHOLE_ROOT,
) -> Program:
    """Return the program of a rank's step; each option is a pass of this file.

    Args:
        visits: Visits in the order of the forward.
        microbatches: Number of this rank's microbatches; 0 for a rank that only communicates.
        trainable: Per unit, the root unit first, whether it has gradients to reduce.
        homes: Where each unit's optimizer state lives; empty: all of it is on the device.
    """
    forward = tuple(
        layered_forward(visits, microbatches, lambda visit, _: visit == len(visits) - 1)
    )
    program = Program(forward, layered_backward(visits, microbatches, trainable))
    if not reshard_after_forward:
        program = keep_gathered(program)
    program = prefetch(program)
    if offload_boundaries:
        program = offload(program, visits)
    if updates_early:
        program = update_early(program)
    if homes:
        program = move_state(program, homes)
        if sends_gradients:
            program = send_gradients(program, homes)
    return release_ends(program, visits, ends)


# -- the layered order ------------------------------------------------------------------------


def layered_forward(
    visits: Iterable[Visit],
    microbatches: int,
    has_returned: Callable[[int, int], bool],
    ends: Ends = WHOLE_ROOT,
) -> Iterator[Instruction]:
    """Yield the instructions of the forward.

    A unit is gathered only after all microbatches have passed the previous one.

    Args:
        visits: Visits in order, taken one by one behind the instructions of the previous one: an
            order that is still being discovered can be a lazy iterable.
        microbatches: Number of this rank's microbatches.
        has_returned: Called with a visit (-1: the root unit's forward) and a microbatch, after the
            microbatch's FORWARD there was consumed. Returns whether only its loss is left.
        ends: As no visit is known to be the last one, the last layers are gathered behind all
            visits. A microbatch that has needed them waits for that; its loss is left.
    """
    yield Instruction(Operation.GATHER, ROOT)
    yield Instruction(Operation.ARM, ROOT)
    yield from _forward_of(ROOT, NONE, microbatches, has_returned)
    if ends.first:
        yield Instruction(Operation.FREE, FIRST_LAYERS)
    last = NONE
    for instruction in _visits_forward(visits, 0, microbatches, has_returned):
        if instruction.operation is Operation.AGREE and ends.last:
            yield Instruction(Operation.GATHER, LAST_LAYERS)
            yield Instruction(Operation.ARM, LAST_LAYERS)
            for microbatch in range(microbatches):
                yield Instruction(Operation.LOSS, ROOT, last, microbatch)
        last = max(last, instruction.visit)
        yield instruction


def resumed_forward(
    visits: Iterable[Visit],
    start: int,
    microbatches: int,
    has_returned: Callable[[int, int], bool],
) -> Iterator[Instruction]:
    """Yield the rest of a :func:`layered_forward` that has stopped before visit ``start``."""
    for microbatch in range(microbatches):
        if has_returned(start - 1, microbatch):
            yield Instruction(Operation.LOSS, ROOT, start - 1, microbatch)
    yield from _visits_forward(visits, start, microbatches, has_returned)


def _visits_forward(
    visits: Iterable[Visit],
    start: int,
    microbatches: int,
    has_returned: Callable[[int, int], bool],
) -> Iterator[Instruction]:
    held = NONE
    for position, visit in enumerate(visits, start):
        if visit.unit not in (held, ROOT):
            if held != NONE:
                yield Instruction(Operation.FREE, held, position - 1)
            yield Instruction(Operation.GATHER, visit.unit, position)
            held = visit.unit
        if visit.is_meeting:
            yield Instruction(Operation.MEET, visit.unit, position)
        yield from _forward_of(visit.unit, position, microbatches, has_returned)
    yield Instruction(Operation.AGREE)


def _forward_of(
    unit: int, position: int, microbatches: int, has_returned: Callable[[int, int], bool]
) -> Iterator[Instruction]:
    for microbatch in range(microbatches):
        yield Instruction(Operation.FORWARD, unit, position, microbatch)
        if has_returned(position, microbatch):
            yield Instruction(Operation.LOSS, ROOT, position, microbatch)


def layered_backward(
    visits: Sequence[Visit],
    microbatches: int,
    trainable: Sequence[bool],
    held: int | None = None,
) -> Instructions:
    """Return the instructions of the backward.

    The root unit is already gathered, and one other.

    Args:
        visits: Visits in the order of the forward.
        microbatches: Number of this rank's microbatches.
        trainable: Per unit, the root unit first, whether it has gradients to reduce.
        held: The other unit that is gathered; -1 for none. None: that of the last visit.
    """
    order = backward_order(visits)
    reduced_at = {visits[position].unit: position for position in order}
    armed: set[int] = set()
    found: list[Instruction] = []
    # The last visit's unit is still gathered. If the backward starts with another unit, it is
    # freed before everything else.
    if held is None:
        units = [visit.unit for visit in visits if visit.unit != ROOT]
        held = units[-1] if units else NONE
    held_since = NONE
    for position in order:
        unit = visits[position].unit
        if unit not in (held, ROOT):
            if held != NONE:
                found.append(Instruction(Operation.FREE, held, held_since))
            found.append(Instruction(Operation.GATHER, unit, position))
            held = unit
        held_since = NONE if held_since == NONE and unit == ROOT else position
        if trainable[unit] and unit not in armed and unit != ROOT:
            found.append(Instruction(Operation.ARM, unit, position))
            armed.add(unit)
        found.extend(
            Instruction(Operation.BACKWARD, unit, position, microbatch)
            for microbatch in reversed(range(microbatches))
        )
        if visits[position].is_meeting:
            found.append(Instruction(Operation.MEET, unit, position))
        if trainable[unit] and reduced_at[unit] == position and unit != ROOT:
            found.append(Instruction(Operation.REDUCE, unit, position))
    if held != NONE:
        found.append(Instruction(Operation.FREE, held, held_since))
    found += [
        Instruction(Operation.REDUCE, ROOT),
        Instruction(Operation.FREE, ROOT),
        Instruction(Operation.AGREE),
    ]
    return tuple(found)


def backward_order(visits: Sequence[Visit]) -> list[int]:
    """Return the positions of the visits that a backward passes, in its order."""
    return [p for p in reversed(range(len(visits))) if visits[p].differentiable]


def evaluation_of(unit: int, takes_part: bool) -> Instructions:
    """Return one visit of a step without gradients, to a unit that some rank has requested."""
    passing = (Instruction(Operation.FORWARD, unit, microbatch=0),) if takes_part else ()
    return Instruction(Operation.GATHER, unit), *passing, Instruction(Operation.FREE, unit)


# -- passes -----------------------------------------------------------------------------------


def keep_gathered(program: Program) -> Program:
    """Free each unit only after its last use, as with ``reshard_after_forward=False``."""
    last_free = {i.unit: i for i in program.backward if i.operation is Operation.FREE}
    # units that no backward passes are not needed after the forward
    freed = [i.unit for i in program.forward if i.operation is Operation.FREE]
    unused = [unit for unit in dict.fromkeys(freed) if unit not in last_free]
    backward = [
        instruction
        for instruction in program.backward
        if instruction.operation is not Operation.GATHER
        and (
            instruction.operation is not Operation.FREE
            or last_free[instruction.unit] is instruction
        )
    ]
    return replace(
        program,
        forward=tuple(without_frees(program.forward)),
        backward=(*(Instruction(Operation.FREE, unit) for unit in unused), *backward),
    )


def without_frees(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """Yield the instructions of a forward, lazily, without FREEs and repeated GATHERs of units."""
    gathered: set[int] = set()
    for instruction in instructions:
        if instruction.operation is Operation.FREE and instruction.unit != FIRST_LAYERS:
            continue
        if instruction.operation is Operation.GATHER:
            if instruction.unit in gathered:
                continue
            gathered.add(instruction.unit)
        yield instruction


def prefetch(program: Program) -> Program:
    """Gather each unit during the previous visit, and no further ahead: there are two buffers."""
    return replace(
        program,
        forward=_prefetched(program.forward),
        backward=_prefetched(program.backward),
    )


def _prefetched(instructions: Instructions) -> Instructions:
    visits = _joined(list(group) for _, group in groupby(instructions, key=lambda i: i.visit))
    gathers = [[each for each in visit if each.operation is Operation.GATHER] for visit in visits]
    found: list[Instruction] = []
    for index, visit in enumerate(visits):
        found += gathers[index] if index == 0 else []
        following = gathers[index + 1] if index + 1 < len(visits) else []
        rest = [each for each in visit if each.operation is not Operation.GATHER]
        # units left over from the forward are freed first: the gather needs their buffer
        left_over = [each for each in rest if following and _is_left_over(each)]
        found += [*left_over, *following, *(each for each in rest if each not in left_over)]
    return tuple(found)


def _joined(visits: Iterable[list[Instruction]]) -> list[list[Instruction]]:
    """Join the parts of a unit that meetings divide, so that a gather overlaps with all of them."""
    found: list[list[Instruction]] = []
    for visit in visits:
        parts = (*found[-1:], visit)
        meets = any(each.operation is Operation.MEET for part in parts for each in part)
        gathers = any(each.operation is Operation.GATHER for each in visit)
        if found and meets and not gathers:
            found[-1] = found[-1] + visit
        else:
            found.append(visit)
    return found


def _is_left_over(instruction: Instruction) -> bool:
    return instruction.operation is Operation.FREE and instruction.visit == NONE


def offload(program: Program, visits: Sequence[Visit]) -> Program:
    """Copy boundaries to the host after their forward and fetch them two visits before use."""
    order = backward_order(visits)
    away = frozenset(order[UNITS_THAT_STAY:])
    fetched_behind = dict(zip(order, order[UNITS_THAT_STAY:], strict=False))
    backward: list[Instruction] = []
    for instruction in program.backward:
        backward.append(instruction)
        if instruction.operation is Operation.BACKWARD and instruction.visit in fetched_behind:
            position = fetched_behind[instruction.visit]
            backward.append(
                Instruction(
                    Operation.FETCH, visits[position].unit, position, instruction.microbatch
                )
            )
    return replace(
        program,
        forward=tuple(offloading(program.forward, away.__contains__)),
        backward=tuple(backward),
    )


def update_early(program: Program) -> Program:
    """Update each unit as soon as its reduce is done, which the next reduce has waited for.

    Collectives that follow begin before: both travel while the unit is updated.
    """
    backward: list[Instruction] = []
    reduced = due = NONE
    for instruction in program.backward:
        if due != NONE and instruction.operation not in (Operation.FREE, Operation.GATHER):
            backward.append(Instruction(Operation.UPDATE, due))
            due = NONE
        backward.append(instruction)
        if instruction.operation is Operation.REDUCE:
            reduced, due = instruction.unit, reduced
    return replace(program, backward=tuple(backward))


def move_state(program: Program, homes: Sequence[StateHome]) -> Program:
    """Update units whose optimizer state is in host memory, by its way to the device or there.

    Streamed state starts on its way when its unit's reduce does, or, in late updates, while the
    state of the unit before is used: there are two staging buffers. The host begins where the
    device would update a unit. What it has updated comes back at last.
    """
    early = {i.unit for i in program.backward if i.operation is Operation.UPDATE}
    backward: list[Instruction] = []
    reduced: list[int] = []
    for instruction in program.backward:
        unit, home = instruction.unit, homes[max(instruction.unit, ROOT)]
        if instruction.operation is Operation.REDUCE:
            reduced.append(unit)
            backward.append(instruction)
            if unit in early and home is StateHome.STREAMED:
                backward.append(Instruction(Operation.FETCH_STATE, unit))
        elif instruction.operation is Operation.UPDATE and home is StateHome.HOST:
            backward.append(replace(instruction, operation=Operation.HOST_UPDATE))
        else:
            backward.append(instruction)
            if instruction.operation is Operation.UPDATE and home is StateHome.STREAMED:
                backward.append(replace(instruction, operation=Operation.STORE_STATE))
    late = [unit for unit in reduced if unit not in early]
    on_host = [unit for unit in late if homes[unit] is StateHome.HOST]
    streamed = [unit for unit in late if homes[unit] is StateHome.STREAMED]
    update = [Instruction(Operation.HOST_UPDATE, unit) for unit in on_host]
    for index in range(len(streamed) + STAGED_UNITS - 1):
        if index < len(streamed):
            update.append(Instruction(Operation.FETCH_STATE, streamed[index]))
        if index >= STAGED_UNITS - 1:
            unit = streamed[index - STAGED_UNITS + 1]
            update.append(Instruction(Operation.UPDATE, unit))
            update.append(Instruction(Operation.STORE_STATE, unit))
    back = [unit for unit in reduced if homes[unit] is StateHome.HOST]
    update += program.update
    update += [Instruction(Operation.STORE_STATE, unit) for unit in back]
    return replace(program, backward=tuple(backward), update=tuple(update))


def send_gradients(program: Program, homes: Sequence[StateHome]) -> Program:
    """Let gradients of units that the host updates late leave behind the reduce of the next one.

    The root unit's reduce is the last one: its gradient stays.
    """
    late = {i.unit for i in program.update if i.operation is Operation.HOST_UPDATE}
    backward: list[Instruction] = []
    reduced = NONE
    for instruction in program.backward:
        backward.append(instruction)
        if instruction.operation is Operation.REDUCE:
            if reduced in late and homes[reduced] is StateHome.HOST:
                backward.append(Instruction(Operation.SEND_GRADIENT, reduced))
            reduced = instruction.unit
    return replace(program, backward=tuple(backward))


def release_ends(program: Program, visits: Sequence[Visit], ends: Ends) -> Program:
    """Gather, arm and free the first and the last layers of the root unit when they are needed.

    The gather of the last layers hides behind the last but one visit. The first layers are reduced
    with the root unit.
    """
    forward, backward = list(program.forward), list(program.backward)
    if ends.last:
        last = len(visits) - 1
        gather = Instruction(Operation.GATHER, LAST_LAYERS)
        forward.insert(_first_from(forward, max(last - 1, min(last, 0))), gather)
        if ends.last_trains:
            forward.insert(_first_from(forward, last), Instruction(Operation.ARM, LAST_LAYERS))
        backward.insert(0, Instruction(Operation.FREE, LAST_LAYERS))
        if ends.last_trains:
            backward.insert(0, Instruction(Operation.REDUCE, LAST_LAYERS))
    if ends.first:
        of_root = [n for n, each in enumerate(forward) if _begins(each)]
        forward.insert(of_root[-1] + 1, Instruction(Operation.FREE, FIRST_LAYERS))
    if ends.first and ends.first_trains:
        passed = backward_order(visits)
        at = _first_until(backward, passed[-1] if passed else NONE)
        backward.insert(at, Instruction(Operation.ARM, FIRST_LAYERS))
    return replace(program, forward=tuple(forward), backward=tuple(backward))


def _begins(instruction: Instruction) -> bool:
    """Whether an instruction is one of those that use the root unit's first layers, or before."""
    of_root = instruction.unit == ROOT and instruction.visit == NONE
    return of_root and instruction.operation in (Operation.ARM, Operation.FORWARD)


def _first_from(instructions: Sequence[Instruction], position: int) -> int:
    """Return where a forward comes to a visit, behind its gather; else its exchange."""
    return next(
        index
        for index, each in enumerate(instructions)
        if (each.visit >= position and each.operation in _PASSING)
        or each.operation is Operation.AGREE
    )


def _first_until(instructions: Sequence[Instruction], position: int) -> int:
    """Return where a backward comes to a visit; else where it reduces the root unit."""
    return next(
        index
        for index, each in enumerate(instructions)
        if (NONE < each.visit <= position and each.operation in _PASSING)
        or (each.operation is Operation.REDUCE and each.unit == ROOT)
    )


def offloading(
    instructions: Iterable[Instruction], is_away: Callable[[int], bool]
) -> Iterator[Instruction]:
    """Yield a forward's instructions, lazily, with OFFLOAD behind FORWARD of visits away."""
    for instruction in instructions:
        yield instruction
        is_visit = instruction.operation is Operation.FORWARD and instruction.visit != NONE
        if is_visit and is_away(instruction.visit):
            yield replace(instruction, operation=Operation.OFFLOAD)


def gathered_after(instructions: Iterable[Instruction]) -> tuple[int, ...]:
    """Return the units that these instructions leave gathered, in the order of their gathers."""
    gathered: dict[int, None] = {}
    for instruction in instructions:
        if instruction.operation is Operation.GATHER:
            gathered[instruction.unit] = None
        elif instruction.operation is Operation.FREE:
            gathered.pop(instruction.unit, None)
    return tuple(gathered)
