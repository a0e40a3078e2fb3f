"""Proves that the programs of all ranks can run together."""

from __future__ import annotations

from collections.abc import Container, Sequence

from lightning_cephalo.common.errors import ProgramError
from lightning_cephalo.plan.program import (
    COLLECTIVES,
    COMPUTE,
    NONE,
    ROOT,
    Instruction,
    Operation,
    Program,
)
from lightning_cephalo.plan.state_homes import STAGED_UNITS

# Exchanges of a step: one ends the forward, one the backward. Early updates come before the second.
_AGREEMENTS = 2


def check(programs: Sequence[Program]) -> None:
    """Prove that the programs of all ranks can run together.

    - Each compute instruction finds its unit gathered, but for the backward of an embedding.
    - Each microbatch that goes forward has a loss. The root unit is armed before the loss.
    - Each microbatch comes back through the same visits, on all ranks.
    - Each armed unit is reduced once, after all its backwards.
    - A unit that is updated early has been reduced before, and is not used after. Each unit is
      updated once, and none is left out.
    - Optimizer state that is fetched is used for one update and stored, and no more of it is on the
      device than two buffers hold. What the host updates comes back.
    - A gradient that has left for the host was reduced before, and the host updates its unit.
    - Nothing stays gathered, armed or offloaded at the end of the step.
    - All ranks issue the same collectives in the same order. Otherwise they would wait for each
      other forever.

    Raises:
        ProgramError: A check fails. The message names the rank and the first instruction at fault,
            if there is one.
    """
    states = [_check_rank(rank, program) for rank, program in enumerate(programs)]
    first = _collectives(programs[0]) if programs else []
    for rank, program in enumerate(programs[1:], start=1):
        own = _collectives(program)
        if own != first:
            at = next(
                (i for i, (a, b) in enumerate(zip(own, first, strict=False)) if a != b),
                min(len(own), len(first)),
            )
            raise ProgramError(
                f"Collectives must come in one order on all ranks; as number {at + 1} rank 0 has"
                f" {_named(first, at)}, but rank {rank} has {_named(own, at)}."
            )
    # a rank without microbatches does not show which visits have a backward
    busy = [(rank, sorted(state.returned)) for rank, state in enumerate(states) if state.losses]
    for rank, own_visits in busy[1:]:
        if own_visits != busy[0][1]:
            raise ProgramError(
                f"Backwards must pass the same visits on all ranks; on rank {busy[0][0]} they pass"
                f" {busy[0][1]}, but on rank {rank} {own_visits}."
            )


def _collectives(program: Program) -> list[tuple[Operation, int]]:
    return [(i.operation, i.unit) for i in program.instructions if i.operation in COLLECTIVES]


def _named(collectives: Sequence[tuple[Operation, int]], at: int) -> str:
    if at >= len(collectives):
        return "none"
    return str(Instruction(*collectives[at]))


class _State:
    """State of one rank while its program is read."""

    def __init__(self, rank: int, embeddings: Container[int]) -> None:
        self._rank = rank
        self.embeddings = embeddings  # their backward needs no parameters
        self.gathered: set[int] = set()
        self.armed: set[int] = set()
        self.reduced: set[int] = set()
        self.forward: set[tuple[int, int]] = set()
        self.without_loss: set[int] = set()
        self.losses: set[int] = set()
        self.reached: dict[int, int] = {}  # per microbatch, its latest visit
        self.returned: dict[int, set[int]] = {}  # per visit, the microbatches that passed it
        self.returned_units: set[int] = set()
        self.updated: set[int] = set()
        self.has_early_updates = self.is_updated = False
        self.agreements = 0
        self.sent: set[int] = set()  # units whose gradients are on the host
        self.fetched: set[int] = set()  # units whose optimizer state is on the device
        self.on_host: set[int] = set()  # units that the host updates
        self.away: set[tuple[int, int]] = set()

    def read(self, instruction: Instruction) -> None:
        """Check one instruction and apply it."""
        operation, unit = instruction.operation, instruction.unit
        passage = (instruction.visit, instruction.microbatch)
        if operation is Operation.STORE_STATE:
            self._store_state(instruction)
            return
        self._expect(instruction, not self.is_updated, "the optimizer has made its step")
        self._expect(instruction, unit not in self.updated, "the unit is updated already")
        is_there = unit in self.gathered or unit in self.embeddings
        if operation is Operation.GATHER:
            self._expect(instruction, unit not in self.gathered, "the unit is gathered already")
            self.gathered.add(unit)
        elif operation is Operation.FREE:
            self._expect(instruction, unit in self.gathered, "the unit is not gathered")
            self.gathered.discard(unit)
        elif operation is Operation.ARM:
            self._expect(instruction, is_there, "the unit is not gathered")
            self._expect(instruction, unit not in self.reduced, "the unit is reduced already")
            self._expect(instruction, unit not in self.armed, "the unit is armed already")
            came = unit in self.returned_units
            self._expect(instruction, not came, "a backward has passed the unit already")
            self.armed.add(unit)
        elif operation in COMPUTE:
            is_there = is_there if operation is Operation.BACKWARD else unit in self.gathered
            self._expect(instruction, is_there, "the unit is not gathered")
            self._compute(instruction)
        elif operation is Operation.OFFLOAD:
            self._expect(instruction, passage in self.forward, "nothing went forward there")
            self._expect(instruction, passage not in self.away, "it is on the host already")
            self.away.add(passage)
        elif operation is Operation.FETCH:
            self._expect(instruction, passage in self.away, "nothing was offloaded there")
            self.away.discard(passage)
        elif operation is Operation.REDUCE:
            self._expect(instruction, unit in self.armed, "the unit is not armed")
            self.armed.discard(unit)
            self.reduced.add(unit)
        elif operation is Operation.MEET:
            self._expect(instruction, unit in self.gathered, "the unit is not gathered")
        elif operation is Operation.AGREE:
            self._expect(instruction, not self.without_loss, "a microbatch has no loss yet")
            self.agreements += 1
        elif operation is Operation.FETCH_STATE:
            self._expect(instruction, unit not in self.fetched, "its state is fetched already")
            room = len(self.fetched) < STAGED_UNITS
            self._expect(instruction, room, f"the state of units {sorted(self.fetched)} is there")
            self.fetched.add(unit)
        elif operation is Operation.SEND_GRADIENT:
            self._expect(instruction, unit in self.reduced, "the unit is not reduced yet")
            self._expect(instruction, unit not in self.sent, "its gradient has left already")
            self.sent.add(unit)
        elif operation in (Operation.UPDATE, Operation.HOST_UPDATE) and unit != NONE:
            on_host = operation is Operation.HOST_UPDATE or unit not in self.sent
            self._expect(instruction, on_host, "its gradient is on the host")
            self._expect(instruction, unit in self.reduced, "the unit is not reduced yet")
            self._expect(instruction, unit not in self.gathered, "the unit is gathered still")
            self.has_early_updates |= self.agreements < _AGREEMENTS
            self.updated.add(unit)
            if operation is Operation.HOST_UPDATE:
                self._expect(instruction, unit not in self.fetched, "its state is on the device")
                self.on_host.add(unit)
        elif operation is Operation.UPDATE:
            self._expect_nothing_held()
            self._expect(instruction, not self.fetched, f"units {sorted(self.fetched)} hold state")
            away = sorted(self.sent - self.updated)
            self._expect(instruction, not away, f"the host has not updated units {away}")
            left = sorted(self.reduced - self.updated - {ROOT}) if self.has_early_updates else []
            self._expect(instruction, not left, f"units {left} have missed their early update")
            self.is_updated = True

    def _store_state(self, instruction: Instruction) -> None:
        unit = instruction.unit
        came = unit in self.fetched or unit in self.on_host
        self._expect(instruction, came, "its state is neither fetched nor with the host")
        self._expect(instruction, unit in self.updated, "the unit is not updated yet")
        self.fetched.discard(unit)
        self.on_host.discard(unit)

    def _compute(self, instruction: Instruction) -> None:
        passage = (instruction.visit, instruction.microbatch)
        if instruction.operation is Operation.FORWARD:
            before = self.reached.get(instruction.microbatch, NONE - 1)
            follows = instruction.visit == before + 1
            self._expect(instruction, follows, "its microbatch was not at the visit before")
            self.reached[instruction.microbatch] = instruction.visit
            self.forward.add(passage)
            self.without_loss.add(instruction.microbatch)
        elif instruction.operation is Operation.LOSS:
            self._expect(instruction, ROOT in self.armed, "the root unit is not armed")
            waits = instruction.microbatch in self.without_loss
            self._expect(instruction, waits, "its microbatch did not go forward")
            self.without_loss.discard(instruction.microbatch)
            self.losses.add(instruction.microbatch)
        else:
            self._expect(instruction, passage in self.forward, "nothing went forward there")
            self._expect(instruction, not self.without_loss, "a microbatch has no loss yet")
            self._expect(instruction, passage not in self.away, "what entered is on the host")
            reduced = instruction.unit in self.reduced
            self._expect(instruction, not reduced, "the unit is reduced already")
            later = instruction.visit <= self.reached[instruction.microbatch]
            self._expect(instruction, later, "its microbatch came back from an earlier visit")
            self.reached[instruction.microbatch] = instruction.visit
            self.returned.setdefault(instruction.visit, set()).add(instruction.microbatch)
            self.returned_units.add(instruction.unit)
            self.forward.discard(passage)

    def _expect(self, instruction: Instruction, holds: bool, otherwise: str) -> None:
        if not holds:
            unit = "" if instruction.unit == NONE else f" of unit {instruction.unit}"
            raise ProgramError(
                f"Rank {self._rank} cannot run {instruction} ({instruction.operation.value}{unit}):"
                f" {otherwise}."
            )

    def expect_nothing_left(self) -> None:
        """Raise ProgramError if a step would leave something behind."""
        self._expect_nothing_held()
        if self.on_host or self.fetched:
            found = sorted(self.on_host | self.fetched)
            raise ProgramError(f"Rank {self._rank} ends its step with {found} still without S.")

    def _expect_nothing_held(self) -> None:
        left = {
            "gathered": sorted(self.gathered),
            "armed": sorted(self.armed),
            "offloaded": sorted(self.away),
            "without a loss": sorted(self.without_loss),
            "on their way back": sorted(
                (visit, each)
                for visit, came in self.returned.items()
                for each in self.losses - came
            ),
        }
        for what, found in left.items():
            if found:
                raise ProgramError(f"Rank {self._rank} ends its step with {found} still {what}.")


def _check_rank(rank: int, program: Program) -> _State:
    state = _State(rank, program.ends.embeddings)
    for instruction in program.instructions:
        state.read(instruction)
    state.expect_nothing_left()
    if not state.is_updated:
        raise ProgramError(f"Rank {rank} ends its step without U (update).")
    return state
