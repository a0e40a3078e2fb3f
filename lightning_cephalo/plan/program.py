"""The order of a step as data: a :class:`Program`, one tuple of instructions per rank and pass.

A program is the only description of a step. ``execution/executor.py`` runs it.
``offline/simulate.py`` plays it with seconds and bytes. ``plan/check.py`` proves that it can run.
``observe/`` records it, and errors name its instructions. It is built from the visits of a model.
The layered order gathers each unit where it is needed. Options and the prefetch change it::

    layered           G0 Z0 F0.0 F0.1 G1 F1.0 F1.1 X1 G2 F2.0 L0.0 F2.1 L0.1 A
                      Z2 B2.1 B2.0 R2 X2 G1 Z1 B1.1 B1.0 R1 X1 R0 X0 A
                      U
    not resharding    drops X1 from the forward and G1 from the backward
    prefetch          moves G1 before Z0 and G2 before F1.0; in the backward, G1 before Z2
    offload           with three units: adds O1.0 after F1.0, and H1.0 after B3.0
    early updates     adds U2 after R1 X1, and U1 after R0 X0; U updates the rest
    moved state       unit 2 streamed: adds I2 after R2, and S2 after U2
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
from dataclasses import dataclass
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


def loss_unit(visits: Sequence[Visit], ends: Ends) -> int:
    """Return the unit that runs with the loss: a head whose visit comes last, or the root unit."""
    last = visits[-1] if visits else Visit(ROOT)
    return last.unit if last.unit in ends.heads and not last.is_meeting else ROOT


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
    """Return the program of a rank's step.

    Args:
        visits: Visits in the order of the forward.
        microbatches: Number of this rank's microbatches; 0 for a rank that only communicates.
        trainable: Per unit, the root unit first, whether it has gradients to reduce.
        homes: Where each unit's optimizer state lives; empty: all of it is on the device.
        ends: The units that are embeddings and heads.
    """
    order = [at for at in backward_order(visits) if visits[at].unit not in ends]
    away = order[UNITS_THAT_STAY:] if offload_boundaries else []
    fetched_behind = dict(zip(order, away, strict=False))
    program = layered(visits, microbatches, trainable, ends, reshard_after_forward, away)
    backward: list[Instruction] = []
    for each in prefetch(program.backward):
        backward.append(each)
        if each.operation is Operation.BACKWARD and each.visit in fetched_behind:
            at = fetched_behind[each.visit]
            backward.append(Instruction(Operation.FETCH, visits[at].unit, at, each.microbatch))
    homes = homes or [StateHome.RESIDENT] * len(trainable)
    backward, update = _updates(backward, updates_early, homes)
    return Program(prefetch(program.forward), tuple(backward), tuple(update), ends)


# -- the layered order ------------------------------------------------------------------------


def layered(
    visits: Sequence[Visit],
    microbatches: int,
    trainable: Sequence[bool],
    ends: Ends = NO_ENDS,
    reshards: bool = True,
    away: Sequence[int] = (),
) -> Program:
    """Return the program of an order that is known, whose gathers come where they are needed."""

    def forward(reshards: bool) -> Instructions:
        last = len(visits) - 1
        case = (visits, microbatches, lambda visit, _: visit == last, ends, trainable)
        is_away = away.__contains__
        return tuple(layered_forward(*case, known=visits, reshards=reshards, is_away=is_away))

    found = forward(True)
    held = [unit for unit in gathered_after(found) if unit != ROOT]
    kept = None
    if not reshards:
        freed = [each.unit for each in found if each.operation is Operation.FREE]
        found, kept = forward(False), dict.fromkeys(freed)
    backward = layered_backward(visits, microbatches, trainable, held, ends, kept)
    return Program(found, backward, ends=ends)


def layered_forward(
    visits: Iterable[Visit],
    microbatches: int,
    has_returned: Callable[[int, int], bool],
    ends: Ends = NO_ENDS,
    trainable: Sequence[bool] = (),
    *,
    start: int | None = None,
    known: Sequence[Visit] = (),
    reshards: bool = True,
    is_away: Callable[[int], bool] = lambda visit: False,
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
        known: All visits, if they are known: a head that comes last runs with the loss.
        reshards: Whether units are freed behind their visit; embeddings are in any case, as their
            backward needs no parameters.
        is_away: Whether what enters a visit is copied to the host.
    """
    head = loss_unit(known, ends)
    head_at = len(known) - 1 if head != ROOT else None
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
    kept: set[int] = set()  # of those that others have followed
    for position, visit in positions:
        unit, with_loss = visit.unit, position == head_at
        is_head = unit in ends.heads and not visit.is_meeting
        if unit not in (*held, ROOT):
            for other in () if with_loss else _left_behind(unit, held, ends):
                held.remove(other)
                if reshards or other in ends.embeddings:
                    yield Instruction(Operation.FREE, other, position - 1)
                else:
                    kept.add(other)
            if unit not in kept:
                yield Instruction(Operation.GATHER, unit, position)
            held.append(unit)
        before = [each.unit for each in known[-3:-1]] if position + 1 == head_at else []
        runs = unit != ROOT and (microbatches > 0 or visit.is_meeting)
        if before and runs and head not in (*held, *before):
            # with the unit before, as a head has memory of its own
            if head not in kept:
                yield Instruction(Operation.GATHER, head, position)
            held.append(head)
        if visit.is_meeting:
            yield Instruction(Operation.MEET, unit, position)
        arms = is_head and visit.differentiable and trainable[unit]
        if with_loss and trainable[unit]:
            yield Instruction(Operation.ARM, unit, position)
        for microbatch in range(microbatches):
            if not with_loss:
                yield Instruction(Operation.FORWARD, unit, position, microbatch)
                if position != NONE and is_away(position):
                    yield Instruction(Operation.OFFLOAD, unit, position, microbatch)
            if with_loss or has_returned(position, microbatch):
                if arms and not with_loss:
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
    held: Iterable[int],
    ends: Ends = NO_ENDS,
    kept: Iterable[int] | None = None,
) -> Instructions:
    """Return the instructions of the backward, in which ``held`` are gathered beside the root unit.

    The backward of a head that comes last has run with the loss, and the head is armed. Without
    resharding, ``kept`` are the units that others have followed; they are gathered, too.
    """
    head, order = loss_unit(visits, ends), backward_order(visits)
    if head != ROOT:
        order = [position for position in order if position != len(visits) - 1]
    reduced_at = {visits[position].unit: position for position in order}
    armed = {ROOT, head}
    since = dict.fromkeys(held, NONE)  # per gathered unit, its last visit
    unused = [u for u in kept or () if u not in (*since, *reduced_at, *ends.embeddings)]
    found = [Instruction(Operation.FREE, unit) for unit in unused]
    if head not in (ROOT, *reduced_at):
        if trainable[head]:
            found.append(Instruction(Operation.REDUCE, head, len(visits) - 1))
        found.append(Instruction(Operation.FREE, head, len(visits) - 1))
        del since[head]
    for position in order:
        unit = visits[position].unit
        needs_parameters = unit != ROOT and unit not in ends.embeddings
        if unit not in (*since, ROOT):
            for other in _left_behind(unit, [*since], ends):
                last = since.pop(other)
                is_last = last == reduced_at.get(other, NONE) or other in ends.embeddings
                if kept is None or is_last:
                    found.append(Instruction(Operation.FREE, other, last))
            if kept is None and needs_parameters:
                found.append(Instruction(Operation.GATHER, unit, position))
        if needs_parameters:
            since[unit] = position
        if trainable[unit] and unit not in armed:
            found.append(Instruction(Operation.ARM, unit, position))
            armed.add(unit)
        found += [
            Instruction(Operation.BACKWARD, unit, position, microbatch)
            for microbatch in reversed(range(microbatches))
        ]
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


def prefetch(instructions: Instructions) -> Instructions:
    """Gather each unit during the previous visit, and no further ahead: there are two buffers."""
    blocks = _blocks(instructions)
    found: list[Instruction] = []
    due: list[Instruction] = []
    for block, following in zip(blocks, [*blocks[1:], []], strict=True):
        ahead = _gathers(following)
        rest = [each for each in block if each.operation is not Operation.GATHER]
        frees = [each for each in rest if each.operation is Operation.FREE]
        # units left over from the forward are freed first: the gather needs their buffer
        left_over = [each for each in frees if ahead and each.visit == NONE]
        freed = {each.unit for each in frees if each not in left_over}
        found += [*due, *left_over, *(each for each in ahead if each.unit not in freed)]
        found += [each for each in rest if each not in left_over]
        due = [each for each in ahead if each.unit in freed]
    return tuple(found)


def _gathers(block: Sequence[Instruction]) -> list[Instruction]:
    return [each for each in block if each.operation is Operation.GATHER]


def _blocks(instructions: Instructions) -> list[list[Instruction]]:
    """Return the instructions of each visit, with those of others that no gather may divide.

    Meetings divide a unit into parts. Of a frozen unit there may be nothing but BACKWARD, between
    parts of another visit. A rank without samples has not even that: its next gather would come
    earlier.
    """
    found: list[list[Instruction]] = [[]]
    for at, group in groupby(instructions, key=lambda each: each.visit):
        block, before = list(group), found[-1]
        operations = {each.operation for each in block}
        meets = any(each.operation is Operation.MEET for each in (*before, *block))
        goes_on = at != NONE and any(each.visit == at for each in before)
        goes_on = goes_on or operations == {Operation.BACKWARD}
        if before and (goes_on or (meets and Operation.GATHER not in operations)):
            before += block
        else:
            found.append(block)
    return found


def _updates(
    instructions: Iterable[Instruction], early: bool, homes: Sequence[StateHome]
) -> tuple[list[Instruction], list[Instruction]]:
    """Return a backward with early updates, and the instructions behind it.

    An early update follows the next reduce, which has waited for its own. Collectives that come
    then begin before: both travel while the unit is updated. Streamed state starts on its way when
    its unit's reduce does.
    """
    backward: list[Instruction] = []
    reduced: list[int] = []
    due: list[int] = []
    for each in instructions:
        if each.operation not in (Operation.FREE, Operation.GATHER):
            while due:
                backward += _update(due.pop(), homes)
        backward.append(each)
        if each.operation is Operation.REDUCE:
            due += reduced[-1:] if early else []
            reduced.append(each.unit)
            if early and each.unit != ROOT and homes[each.unit] is StateHome.STREAMED:
                backward.append(Instruction(Operation.FETCH_STATE, each.unit))
    update = late_updates(reduced[-1:] if early else reduced, homes)
    on_host = [unit for unit in reduced if homes[unit] is StateHome.HOST]
    stores = [Instruction(Operation.STORE_STATE, unit) for unit in on_host]
    return backward, [*update, Instruction(Operation.UPDATE), *stores]


def _update(unit: int, homes: Sequence[StateHome]) -> list[Instruction]:
    if homes[unit] is StateHome.HOST:
        return [Instruction(Operation.HOST_UPDATE, unit)]
    store = [Instruction(Operation.STORE_STATE, unit)] * (homes[unit] is StateHome.STREAMED)
    return [Instruction(Operation.UPDATE, unit), *store]


def late_updates(units: Sequence[int], homes: Sequence[StateHome]) -> list[Instruction]:
    """Return updates behind the backward, of units whose state is in host memory.

    Streamed state arrives while that of the unit before is used: there are two staging buffers.
    """
    on_host = [unit for unit in units if homes[unit] is StateHome.HOST]
    streamed = [unit for unit in units if homes[unit] is StateHome.STREAMED]
    update = [Instruction(Operation.HOST_UPDATE, unit) for unit in on_host]
    for index in range(len(streamed) + STAGED_UNITS - 1):
        if index < len(streamed):
            update.append(Instruction(Operation.FETCH_STATE, streamed[index]))
        if index >= STAGED_UNITS - 1:
            update += _update(streamed[index - STAGED_UNITS + 1], homes)
    return update


def gathered_after(instructions: Iterable[Instruction]) -> tuple[int, ...]:
    """Return the units that these instructions leave gathered, in the order of their gathers."""
    gathered: dict[int, None] = {}
    for instruction in instructions:
        if instruction.operation is Operation.GATHER:
            gathered[instruction.unit] = None
        elif instruction.operation is Operation.FREE:
            gathered.pop(instruction.unit, None)
    return tuple(gathered)
