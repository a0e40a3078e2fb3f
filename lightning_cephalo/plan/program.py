"""The order of a step as data: a :class:`Program`, one tuple of instructions per rank and pass.

A program is the one description of a step. ``execution/executor.py`` runs it,
``offline/simulate.py`` plays it with seconds and bytes, ``plan/check.py`` proves it, ``observe/``
records it, and errors name its instructions. Small pure passes make it from the visits of a
model::

    layered           G0 Z0 F0.0 F0.1 G1 F1.0 F1.1 X1 G2 F2.0 L0.0 F2.1 L0.1 A
                      Z2 B2.0 B2.1 R2 X2 G1 Z1 B1.0 B1.1 R1 X1 R0 X0 A
                      U
    keep_gathered     drops X1 from the forward and G1 from the backward
    prefetch          moves G1 before Z0 and G2 before F1.0; in the backward, G1 before Z2
    offload           with three units: adds O1.0 behind F1.0, and H1.0 behind B3.0

Layered accumulation (Cephalo, ICS 2025, figure 4): all microbatches pass a unit before any passes
the next, so that a unit is gathered once per pass and reduced once per step, however many
microbatches a rank has. A *visit* is one use of a unit by every microbatch; a unit that is used
twice has two visits and is reduced after the one that comes last in the backward. The root unit
holds everything outside of the others: its forward leads to the first unit, its loss is what
follows the last.

To print the program of two ranks, of which one has half the microbatches::

    python -m lightning_cephalo.plan
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

ROOT = 0
NONE = -1
# Boundaries of the last visits are needed again immediately: they stay on the device.
UNITS_THAT_STAY = 2


class Operation(str, enum.Enum):
    """What an instruction does; the value is its name in traces and messages.

    ``WAIT`` and ``OVERHEAD`` stand in timelines only: a program holds what a rank does, and not
    what it waits for.
    """

    GATHER = "gather"  # begin to all-gather the unit's parameters
    ARM = "arm"  # have zeroed gradients to accumulate into
    FORWARD = "forward"  # pass a microbatch through the unit
    LOSS = "loss"  # what follows the last unit: head, loss, and the backward of both
    OFFLOAD = "offload"  # copy what entered the unit to the host
    FETCH = "fetch"  # begin to copy it back
    BACKWARD = "backward"  # carry a microbatch's gradients through the unit
    REDUCE = "reduce"  # begin to reduce-scatter the unit's gradients
    FREE = "free"  # give the gathered parameters back
    AGREE = "agree"  # exchange weights, failures and uses between all ranks
    UPDATE = "update"  # the optimizer's step
    WAIT = "wait"
    OVERHEAD = "overhead"


_LETTERS = {
    Operation.GATHER: "G",
    Operation.ARM: "Z",
    Operation.FORWARD: "F",
    Operation.LOSS: "L",
    Operation.OFFLOAD: "O",
    Operation.FETCH: "H",
    Operation.BACKWARD: "B",
    Operation.REDUCE: "R",
    Operation.FREE: "X",
    Operation.AGREE: "A",
    Operation.UPDATE: "U",
    Operation.WAIT: "W",
    Operation.OVERHEAD: "V",
}

COLLECTIVES = frozenset({Operation.GATHER, Operation.REDUCE, Operation.AGREE})
COMPUTE = frozenset({Operation.FORWARD, Operation.LOSS, Operation.BACKWARD})


@dataclass(frozen=True)
class Instruction:
    """One thing that a rank does.

    >>> str(Instruction(Operation.FORWARD, unit=2, visit=1, microbatch=0))
    'F2.0'

    Attributes:
        operation: What.
        unit: Index of the unit; 0 is the root unit, -1 where no unit is meant.
        visit: Position in the order of visits; -1 for the root unit and where none is meant.
        microbatch: Index on this rank; -1 where all are meant.
    """

    operation: Operation
    unit: int = NONE
    visit: int = NONE
    microbatch: int = NONE

    def __str__(self) -> str:
        unit = "" if self.unit == NONE else str(self.unit)
        microbatch = "" if self.microbatch == NONE else f".{self.microbatch}"
        return f"{_LETTERS[self.operation]}{unit}{microbatch}"


@dataclass(frozen=True)
class Visit:
    """One use of a unit.

    Attributes:
        unit: Index of the unit.
        differentiable: Whether a backward passes through it (not so for a frozen unit whose
            inputs need no gradient, or a use under ``torch.no_grad``).
    """

    unit: int
    differentiable: bool = True


Instructions = tuple[Instruction, ...]


@dataclass(frozen=True)
class Program:
    """What one rank does in one step, in order.

    The three parts are what Lightning's hooks call: ``training_step``, ``backward``, and the
    optimizer's step.

    Attributes:
        forward: Up to the exchange of all microbatches' weights.
        backward: Up to the gradients on the sharded parameters.
        update: The optimizer's step.
    """

    forward: Instructions
    backward: Instructions
    update: Instructions = (Instruction(Operation.UPDATE),)

    @property
    def instructions(self) -> Instructions:
        """All of them."""
        return (*self.forward, *self.backward, *self.update)

    def __str__(self) -> str:
        return "\n".join(text(part) for part in (self.forward, self.backward, self.update))


def text(instructions: Iterable[Instruction]) -> str:
    """Instructions in letters, such as ``"G1 F1.0 F1.1 X1"``; see the module's text."""
    return " ".join(map(str, instructions))


def compile_step(
    visits: Sequence[Visit],
    microbatches: int,
    trainable: Sequence[bool],
    *,
    reshard_after_forward: bool = True,
    offload_boundaries: bool = False,
) -> Program:
    """Return the program of a rank's step.

    Args:
        visits: In the order of the forward.
        microbatches: Of this rank; 0 for a rank that only communicates.
        trainable: Per unit, the root unit first, whether it has gradients to reduce.
        reshard_after_forward: Free a unit when the microbatches have passed it, and gather it
            again in the backward.
        offload_boundaries: Keep what enters units in host memory until their backward.
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
    return program


# -- the layered order ------------------------------------------------------------------------


def layered_forward(
    visits: Iterable[Visit], microbatches: int, has_returned: Callable[[int, int], bool]
) -> Iterator[Instruction]:
    """Yield the forward: no unit is gathered before all microbatches have passed the one before.

    Args:
        visits: In order. None is asked for before all instructions of the one before have been
            taken, so that an order that is still being discovered can be given lazily.
        microbatches: Of this rank.
        has_returned: Called with a visit (-1: the root unit's forward) and a microbatch whose
            FORWARD there has just been taken: whether only the loss is left of it.
    """
    yield Instruction(Operation.GATHER, ROOT)
    yield Instruction(Operation.ARM, ROOT)
    yield from _forward_of(ROOT, NONE, microbatches, has_returned)
    yield from _visits_forward(visits, 0, microbatches, has_returned)


def resumed_forward(
    visits: Iterable[Visit],
    start: int,
    microbatches: int,
    has_returned: Callable[[int, int], bool],
) -> Iterator[Instruction]:
    """Yield the rest of a forward whose microbatches stand in front of a visit.

    Args:
        visits: From that visit on; otherwise as for :func:`layered_forward`.
        start: Its position.
        microbatches: Of this rank.
        has_returned: As for :func:`layered_forward`.
    """
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
        if visit.unit != held:
            if held != NONE:
                yield Instruction(Operation.FREE, held, position - 1)
            yield Instruction(Operation.GATHER, visit.unit, position)
        held = visit.unit
        yield from _forward_of(held, position, microbatches, has_returned)
    yield Instruction(Operation.AGREE)


def _forward_of(
    unit: int, position: int, microbatches: int, has_returned: Callable[[int, int], bool]
) -> Iterator[Instruction]:
    for microbatch in range(microbatches):
        yield Instruction(Operation.FORWARD, unit, position, microbatch)
        if has_returned(position, microbatch):
            yield Instruction(Operation.LOSS, ROOT, position, microbatch)


def layered_backward(
    visits: Sequence[Visit], microbatches: int, trainable: Sequence[bool]
) -> Instructions:
    """Return the backward; the root unit and the unit of the last visit are gathered already.

    Args:
        visits: In the order of the forward.
        microbatches: Of this rank.
        trainable: Per unit, the root unit first, whether it has gradients to reduce.
    """
    order = backward_order(visits)
    reduced_at = {visits[position].unit: position for position in order}
    armed: set[int] = set()
    found: list[Instruction] = []
    # a unit of which no backward passes the last visit is given back before everything else
    held, held_since = (visits[-1].unit if visits else NONE), NONE
    for position in order:
        unit = visits[position].unit
        if unit != held:
            if held != NONE:
                found.append(Instruction(Operation.FREE, held, held_since))
            found.append(Instruction(Operation.GATHER, unit, position))
        held, held_since = unit, position
        if trainable[unit] and unit not in armed:
            found.append(Instruction(Operation.ARM, unit, position))
            armed.add(unit)
        found.extend(
            Instruction(Operation.BACKWARD, unit, position, microbatch)
            for microbatch in range(microbatches)
        )
        if trainable[unit] and reduced_at[unit] == position:
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
    """Positions of the visits that a backward passes through, in its order."""
    return [p for p in reversed(range(len(visits))) if visits[p].differentiable]


def evaluation_of(unit: int, takes_part: bool) -> Instructions:
    """One visit of a step without gradients, whose units are gathered as ranks ask for them.

    Args:
        unit: The unit that some rank has asked for.
        takes_part: Whether this rank has, too.
    """
    passing = (Instruction(Operation.FORWARD, unit, microbatch=0),) if takes_part else ()
    return (
        Instruction(Operation.GATHER, unit),
        *passing,
        Instruction(Operation.FREE, unit),
    )


# -- passes -----------------------------------------------------------------------------------


def keep_gathered(program: Program) -> Program:
    """Free no unit before its last use: each is gathered once (``reshard_after_forward=False``)."""
    last_free = {i.unit: i for i in program.backward if i.operation is Operation.FREE}
    # units that no backward passes are of no more use behind the forward
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
    """Leave out every FREE of a forward, and every further GATHER of a unit; one at a time."""
    gathered: set[int] = set()
    for instruction in instructions:
        if instruction.operation is Operation.FREE:
            continue
        if instruction.operation is Operation.GATHER:
            if instruction.unit in gathered:
                continue
            gathered.add(instruction.unit)
        yield instruction


def prefetch(program: Program) -> Program:
    """Gather each unit while the visit before is under way, and never one further.

    A unit that is being gathered and the one in use need two buffers: no more are there.
    """
    return replace(
        program,
        forward=_prefetched(program.forward),
        backward=_prefetched(program.backward),
    )


def _prefetched(instructions: Instructions) -> Instructions:
    visits = [list(group) for _, group in groupby(instructions, key=lambda each: each.visit)]
    gathers = [[each for each in visit if each.operation is Operation.GATHER] for visit in visits]
    found: list[Instruction] = []
    for index, visit in enumerate(visits):
        found += gathers[index] if index == 0 else []
        following = gathers[index + 1] if index + 1 < len(visits) else []
        rest = [each for each in visit if each.operation is not Operation.GATHER]
        # what the forward has left over goes first: its buffer is the one to gather into
        left_over = [each for each in rest if following and _is_left_over(each)]
        found += [*left_over, *following, *(each for each in rest if each not in left_over)]
    return tuple(found)


def _is_left_over(instruction: Instruction) -> bool:
    return instruction.operation is Operation.FREE and instruction.visit == NONE


def offload(program: Program, visits: Sequence[Visit]) -> Program:
    """Copy boundaries to the host behind their forward and fetch them two visits ahead of use.

    Args:
        program: Without offload.
        visits: In the order of the forward.
    """
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


def offloading(
    instructions: Iterable[Instruction], is_away: Callable[[int], bool]
) -> Iterator[Instruction]:
    """Add OFFLOAD behind the FORWARD of visits; one at a time, as an order may be discovered.

    Args:
        instructions: Of the forward.
        is_away: Whether what enters a visit goes to the host.
    """
    for instruction in instructions:
        yield instruction
        is_visit = instruction.operation is Operation.FORWARD and instruction.visit != NONE
        if is_visit and is_away(instruction.visit):
            yield replace(instruction, operation=Operation.OFFLOAD)


def gathered_after(instructions: Iterable[Instruction]) -> tuple[int, ...]:
    """Units that are gathered when these instructions end, in the order of their gathers."""
    gathered: dict[int, None] = {}
    for instruction in instructions:
        if instruction.operation is Operation.GATHER:
            gathered[instruction.unit] = None
        elif instruction.operation is Operation.FREE:
            gathered.pop(instruction.unit, None)
    return tuple(gathered)
