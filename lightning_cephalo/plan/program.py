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

A unit of embeddings alone (e) needs no parameters in its backward: it has no G there. A head (h)
that comes last runs with the loss, one microbatch after the other, so that the logits of only one
exist. It has memory of its own: the unit before it stays gathered::

    forward           G0 Z0 F0.0 F0.1 Ge Fe.0 Fe.1 Xe G1 Gh F1.0 F1.1 Zh Lh.0 Lh.1 A
    backward          Rh Xh Z1 B1.1 B1.0 R1 X1 Ze Be.1 Be.0 Re R0 X0 A

Where unit 1 normalises by the statistics of the global batch, its microbatches stop and meet::

    forward           G1 F1.0 F1.1 M1 F1.0 F1.1 X1
    backward          G1 Z1 B1.1 B1.0 M1 B1.1 B1.0 R1 X1

In layered accumulation (Cephalo, ICS 2025, figure 4), all microbatches pass a unit before any of
them passes the next. So a unit is gathered once per pass and reduced once per step.

A *visit* is one use of a unit by every microbatch. A unit that is used twice is reduced after the
visit that comes last in the backward. The root unit holds everything outside the other units.
``python -m lightning_cephalo.plan`` prints an example.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, groupby

from lightning_cephalo.plan.state_homes import STAGED_UNITS, StateHome

ROOT = 0
NONE = -1
# Boundaries of the last visits are needed again immediately: they stay on the device.
UNITS_THAT_STAY = 2


class Operation(str, enum.Enum):
    """Kind of an instruction: its name in traces and messages, its letter, colour and phrase.

    ``WAIT`` and ``OVERHEAD`` occur only in timelines.
    """

    letter: str
    colour: str
    phrase: str  # what fails where it fails; empty: its name

    def __new__(cls, name: str, letter: str = "", colour: str = "", phrase: str = "") -> Operation:
        self = str.__new__(cls, name)
        self._value_, self.letter, self.colour, self.phrase = name, letter, colour, phrase
        return self

    GATHER = "gather", "G", "#E69F00"  # start to all-gather the unit's parameters
    ARM = "arm", "Z", "#999999", "gradient"  # provide zeroed gradients to accumulate into
    FORWARD = "forward", "F", "#56B4E9"  # pass a microbatch through the unit
    # run what follows the last unit: loss and its backward; of a head, too
    LOSS = "loss", "L", "#CC79A7"
    OFFLOAD = "offload", "O", "#F0E442"  # copy the unit's input to the host
    FETCH = "fetch", "H", "#8A7A00"  # start to copy it back
    BACKWARD = "backward", "B", "#0072B2"  # carry a microbatch's gradients through the unit
    REDUCE = "reduce", "R", "#D55E00"  # start to reduce-scatter the unit's gradients
    FREE = "free", "X", "#999999", "release"  # free the gathered parameters
    # sum statistics over all microbatches of all ranks, in the middle of a unit
    MEET = "meet", "M", "#8B4513", "meeting"
    AGREE = "agree", "A", "#999999"  # exchange weights, failures and uses between all ranks
    # run the optimizer's step, for one unit or for all that is left
    UPDATE = "update", "U", "#009E73", "optimizer's step"
    # start to copy the unit's optimizer state to the device
    FETCH_STATE = "fetch state", "I", "#8A7A00"
    # start to copy its gradients to the host, which updates it
    HOST_UPDATE = "host update", "C", "#009E73", "optimizer's step on the host"
    # start to copy state back, or take what the host has updated
    STORE_STATE = "store state", "S", "#F0E442"
    WAIT = "wait", "W", "#999999"
    OVERHEAD = "overhead", "V", "#999999"

    # enum's own is Python code, which every instruction would run several times
    __hash__ = str.__hash__


COLLECTIVES = frozenset({Operation.GATHER, Operation.REDUCE, Operation.MEET, Operation.AGREE})
COMPUTE = frozenset({Operation.FORWARD, Operation.LOSS, Operation.BACKWARD})


@dataclass(frozen=True)
class Instruction:
    """One action of a rank.

    >>> str(Instruction(Operation.FORWARD, unit=2, visit=1, microbatch=0))
    'F2.0'

    Attributes:
        unit: Index of the unit; 0 is the root unit, -1 if no unit applies. For LOSS, the head that
            runs with it, or the root unit.
        visit: Position in the order of visits; for LOSS, that of the last visit before it. -1 for
            all else of the root unit and if no visit applies.
        microbatch: Index on this rank; -1 if the instruction is for all microbatches.
    """

    operation: Operation
    unit: int = NONE
    visit: int = NONE
    microbatch: int = NONE

    def __str__(self) -> str:
        unit = "" if self.unit == NONE else str(self.unit)
        microbatch = "" if self.microbatch == NONE else f".{self.microbatch}"
        return f"{self.operation.letter}{unit}{microbatch}"


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
    """Units that are no blocks, by their indices.

    Attributes:
        embeddings: Units whose backward needs no parameters.
        heads: Units behind all blocks, with memory of their own.
    """

    embeddings: frozenset[int] = frozenset()
    heads: frozenset[int] = frozenset()

    def __contains__(self, unit: int) -> bool:
        return unit in self.embeddings or unit in self.heads


NO_ENDS = Ends()


def with_loss(visits: Sequence[Visit], ends: Ends) -> int:
    """Return the position of the head's visit that runs with the loss; -1 if there is none."""
    last = len(visits) - 1
    is_head = last >= 0 and visits[last].unit in ends.heads and not visits[last].is_meeting
    return last if is_head else NONE


@dataclass(frozen=True)
class Program:
    """Instructions of one rank in one step, in order.

    Its three parts run in Lightning's hooks ``training_step`` and ``backward``, and in the
    optimizer's step. Units whose state is in host memory come before that, one by one.
    """

    forward: Instructions
    backward: Instructions
    update: Instructions = (Instruction(Operation.UPDATE),)
    ends: Ends = NO_ENDS

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
    ends: Ends = NO_ENDS,
) -> Program:
    """Return the program of a rank's step; each option is a pass of this file.

    Args:
        visits: Visits in the order of the forward.
        microbatches: Number of this rank's microbatches; 0 for a rank that only communicates.
        trainable: Per unit, the root unit first, whether it has gradients to reduce.
        homes: Where each unit's optimizer state lives; empty: all of it is on the device.
        ends: The units that are embeddings and heads.
    """
    program = layered(visits, microbatches, trainable, ends)
    if not reshard_after_forward:
        program = keep_gathered(program)
    program = prefetch(program)
    if offload_boundaries:
        program = offload(program, visits)
    if updates_early:
        program = update_early(program)
    if homes:
        program = move_state(program, homes)
    return program


# -- the layered order ------------------------------------------------------------------------


def layered(
    visits: Sequence[Visit], microbatches: int, trainable: Sequence[bool], ends: Ends = NO_ENDS
) -> Program:
    """Return the program of an order that is known, without a pass."""
    last, head = len(visits) - 1, with_loss(visits, ends)
    known = visits if head == NONE else visits[:head]
    *forward, agree = layered_forward(
        known, microbatches, lambda visit, _: visit == last, ends, trainable
    )
    if head != NONE:
        unit = visits[head].unit
        if unit not in gathered_after(forward):
            # with that of the unit before, as it has memory of its own
            was_there = any(visit.unit == unit for visit in visits[max(0, head - 2) : head])
            begins = (Operation.FORWARD, Operation.MEET)
            before = [
                at
                for at, each in enumerate(forward)
                if each.operation in begins and each.visit == head - 1 and each.unit != ROOT
            ]
            at, visit = (len(forward), head)
            if before and not was_there:
                at, visit = before[0], head - 1
            forward.insert(at, Instruction(Operation.GATHER, unit, visit))
        if trainable[unit]:
            forward.append(Instruction(Operation.ARM, unit, head))
        forward += [Instruction(Operation.LOSS, unit, head, each) for each in range(microbatches)]
    forward.append(agree)
    held = [unit for unit in gathered_after(forward) if unit != ROOT]
    backward = layered_backward(visits, microbatches, trainable, held, ends, head)
    return Program(tuple(forward), backward, ends=ends)


def layered_forward(
    visits: Iterable[Visit],
    microbatches: int,
    has_returned: Callable[[int, int], bool],
    ends: Ends = NO_ENDS,
    trainable: Sequence[bool] = (),
    start: int | None = None,
) -> Iterator[Instruction]:
    """Yield the instructions of the forward.

    A unit is gathered only after all microbatches have passed the previous one.

    Args:
        visits: Visits in order, taken one by one behind the instructions of the previous one: an
            order that is still being discovered can be a lazy iterable.
        has_returned: Called with a visit (-1: the root unit's forward) and a microbatch, after the
            microbatch's FORWARD there was consumed. Returns whether only its loss is left.
        ends: A microbatch that has returned behind a head runs the head's backward with its loss.
        trainable: Per unit, whether it has gradients; only heads count.
        start: Position of the first of these visits, where a forward that has stopped goes on.
    """
    positions: Iterable[tuple[int, Visit]] = enumerate(visits, start or 0)
    if start is None:
        yield Instruction(Operation.GATHER, ROOT)
        yield Instruction(Operation.ARM, ROOT)
        positions = chain([(NONE, Visit(ROOT))], positions)
    else:
        for microbatch in range(microbatches):
            if has_returned(start - 1, microbatch):
                yield Instruction(Operation.LOSS, ROOT, start - 1, microbatch)
    held: list[int] = []
    for position, visit in positions:
        unit = visit.unit
        if unit not in (*held, ROOT):
            for other in _left_behind(unit, held, ends):
                held.remove(other)
                yield Instruction(Operation.FREE, other, position - 1)
            yield Instruction(Operation.GATHER, unit, position)
            held.append(unit)
        if visit.is_meeting:
            yield Instruction(Operation.MEET, unit, position)
        is_head = unit in ends.heads and not visit.is_meeting
        arms = is_head and visit.differentiable and trainable[unit]
        for microbatch in range(microbatches):
            yield Instruction(Operation.FORWARD, unit, position, microbatch)
            if has_returned(position, microbatch):
                if arms:
                    yield Instruction(Operation.ARM, unit, position)
                    arms = False
                yield Instruction(Operation.LOSS, unit if is_head else ROOT, position, microbatch)
    yield Instruction(Operation.AGREE)


def _left_behind(unit: int, held: Iterable[int], ends: Ends) -> list[int]:
    """Return the units that are freed for another one; heads have memory of their own."""
    return [other for other in held if unit not in ends.heads or other in ends]


def layered_backward(
    visits: Sequence[Visit],
    microbatches: int,
    trainable: Sequence[bool],
    held: Sequence[int],
    ends: Ends = NO_ENDS,
    head: int = NONE,
) -> Instructions:
    """Return the instructions of the backward, in which ``held`` are gathered beside the root unit.

    ``head`` is the position of the visit whose backward has run with the loss; its unit is armed.
    """
    order = [position for position in backward_order(visits) if position != head]
    reduced_at = {visits[position].unit: position for position in order}
    armed: set[int] = set()
    since = dict.fromkeys(held, NONE)  # per gathered unit, its last visit
    found: list[Instruction] = []
    if head != NONE:
        unit = visits[head].unit
        armed.add(unit)
        if unit not in reduced_at:
            if trainable[unit]:
                found.append(Instruction(Operation.REDUCE, unit, head))
            found.append(Instruction(Operation.FREE, unit, head))
            del since[unit]
    for position in order:
        unit = visits[position].unit
        if unit not in (*since, ROOT):
            for other in _left_behind(unit, [*since], ends):
                found.append(Instruction(Operation.FREE, other, since.pop(other)))
            if unit not in ends.embeddings:
                found.append(Instruction(Operation.GATHER, unit, position))
        if unit != ROOT and unit not in ends.embeddings:
            since[unit] = position
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
    found += [Instruction(Operation.FREE, unit, last) for unit, last in since.items()]
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
    backward = [
        each
        for each in program.backward
        if each.operation is not Operation.GATHER
        and (each.operation is not Operation.FREE or last_free[each.unit] is each)
    ]
    # units that no backward passes are not needed after the forward
    freed = {i.unit: None for i in program.forward if i.operation is Operation.FREE}
    unused = [u for u in freed if u not in last_free and u not in program.ends.embeddings]
    return replace(
        program,
        forward=tuple(without_frees(program.forward, program.ends)),
        backward=(*(Instruction(Operation.FREE, unit) for unit in unused), *backward),
    )


def without_frees(
    instructions: Iterable[Instruction], ends: Ends = NO_ENDS
) -> Iterator[Instruction]:
    """Yield the instructions of a forward, lazily, without FREEs and repeated GATHERs of units.

    Embeddings are freed all the same: their backward needs no parameters.
    """
    gathered: set[int] = set()
    for instruction in instructions:
        unit = instruction.unit
        if instruction.operation is Operation.FREE:
            if unit not in ends.embeddings:
                continue
            gathered.discard(unit)
        elif instruction.operation is Operation.GATHER:
            if unit in gathered:
                continue
            gathered.add(unit)
        yield instruction


def prefetch(program: Program) -> Program:
    """Gather each unit during the previous visit, and no further ahead: there are two buffers."""
    forward, backward = _prefetched(program.forward), _prefetched(program.backward)
    return replace(program, forward=forward, backward=backward)


def _prefetched(instructions: Instructions) -> Instructions:
    visits = _joined(list(group) for _, group in groupby(instructions, key=lambda i: i.visit))
    gathers = [[each for each in visit if each.operation is Operation.GATHER] for visit in visits]
    gathers.append([])
    found: list[Instruction] = []
    for index, visit in enumerate(visits):
        found += gathers[index]  # those that have not come before
        following = gathers[index + 1]
        rest = [each for each in visit if each.operation is not Operation.GATHER]
        # units left over from the forward are freed first: the gather needs their buffer
        left_over = [
            each
            for each in rest
            if following and each.operation is Operation.FREE and each.visit == NONE
        ]
        rest = [each for each in rest if each not in left_over]
        freed = {each.unit for each in rest if each.operation is Operation.FREE}
        gathers[index + 1] = [each for each in following if each.unit in freed]
        found += [*left_over, *(each for each in following if each.unit not in freed), *rest]
    return tuple(found)


def _joined(visits: Iterable[list[Instruction]]) -> list[list[Instruction]]:
    """Join parts with those before, so that a gather overlaps with all of them on every rank.

    Meetings divide a unit into parts. Of a frozen unit there may be nothing but BACKWARD, between
    parts of another visit. A rank without samples has not even that: its next gather would come
    earlier.
    """
    found: list[list[Instruction]] = []
    for visit in visits:
        parts = (*found[-1:], visit)
        meets = any(each.operation is Operation.MEET for part in parts for each in part)
        gathers = any(each.operation is Operation.GATHER for each in visit)
        computes = all(each.operation is Operation.BACKWARD for each in visit)
        at = visit[0].visit
        goes_on = at != NONE and any(each.visit == at for each in (found or [[]])[-1])
        if found and (computes or goes_on or (meets and not gathers)):
            found[-1] = found[-1] + visit
        else:
            found.append(visit)
    return found


def offload(program: Program, visits: Sequence[Visit]) -> Program:
    """Copy boundaries to the host after their forward and fetch them two visits before use."""
    order = [at for at in backward_order(visits) if visits[at].unit not in program.ends]
    away = frozenset(order[UNITS_THAT_STAY:])
    fetched_behind = dict(zip(order, order[UNITS_THAT_STAY:], strict=False))
    backward: list[Instruction] = []
    for each in program.backward:
        backward.append(each)
        if each.operation is Operation.BACKWARD and each.visit in fetched_behind:
            at = fetched_behind[each.visit]
            backward.append(Instruction(Operation.FETCH, visits[at].unit, at, each.microbatch))
    forward = tuple(offloading(program.forward, away.__contains__))
    return replace(program, forward=forward, backward=tuple(backward))


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
    early = program.updated_in_backward
    backward: list[Instruction] = []
    for each in program.backward:
        home, is_update = homes[max(each.unit, ROOT)], each.operation is Operation.UPDATE
        by_host = is_update and home is StateHome.HOST
        backward.append(replace(each, operation=Operation.HOST_UPDATE) if by_host else each)
        if home is StateHome.STREAMED and is_update:
            backward.append(Instruction(Operation.STORE_STATE, each.unit))
        is_reduced_early = each.operation is Operation.REDUCE and each.unit in early
        if home is StateHome.STREAMED and is_reduced_early:
            backward.append(Instruction(Operation.FETCH_STATE, each.unit))
    reduced = [each.unit for each in backward if each.operation is Operation.REDUCE]
    update = late_updates([unit for unit in reduced if unit not in early], homes)
    update += program.update
    back = [unit for unit in reduced if homes[unit] is StateHome.HOST]
    update += [Instruction(Operation.STORE_STATE, unit) for unit in back]
    return replace(program, backward=tuple(backward), update=tuple(update))


def late_updates(units: Sequence[int], homes: Sequence[StateHome]) -> list[Instruction]:
    """Return updates behind the backward, of units whose state is in host memory."""
    on_host = [unit for unit in units if homes[unit] is StateHome.HOST]
    streamed = [unit for unit in units if homes[unit] is StateHome.STREAMED]
    update = [Instruction(Operation.HOST_UPDATE, unit) for unit in on_host]
    for index in range(len(streamed) + STAGED_UNITS - 1):
        if index < len(streamed):
            update.append(Instruction(Operation.FETCH_STATE, streamed[index]))
        if index >= STAGED_UNITS - 1:
            unit = streamed[index - STAGED_UNITS + 1]
            update.append(Instruction(Operation.UPDATE, unit))
            update.append(Instruction(Operation.STORE_STATE, unit))
    return update


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
