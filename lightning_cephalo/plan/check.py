"""Proves that the programs of all ranks can run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lightning_cephalo.common.errors import ProgramError
from lightning_cephalo.plan.play import Meeting, Player, play
from lightning_cephalo.plan.program import COLLECTIVES, NONE, ROOT, Instruction, Operation, Program
from lightning_cephalo.plan.state_homes import STAGED_UNITS

# What units, passages (a visit and a microbatch) and microbatches may be, and what is wrong if an
# instruction needs that and they are not, or the reverse.
_UNIT, _PASSAGE, _MICROBATCH = range(3)
_WRONG = {
    "gathered": (_UNIT, "the unit is not gathered", "the unit is gathered already"),
    "armed": (_UNIT, "the unit is not armed", "the unit is armed already"),
    "passed": (_UNIT, "", "a backward has passed the unit already"),
    "reduced": (_UNIT, "the unit is not reduced yet", "the unit is reduced already"),
    "updated": (_UNIT, "the unit is not updated yet", ""),
    "fetched": (_UNIT, "", "its state is on the device"),
    "with the host": (_UNIT, "", ""),
    "without a loss": (_MICROBATCH, "its microbatch did not go forward", ""),
    "with a loss": (_MICROBATCH, "", ""),
    "forward": (_PASSAGE, "nothing went forward there", ""),
    "back": (_PASSAGE, "", ""),
    "offloaded": (_PASSAGE, "nothing was offloaded there", "what entered is on the host"),
}


class _Rule(NamedTuple):
    """What an instruction needs, what must not be, and what begins and ends with it."""

    needs: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


_RULES = {
    Operation.GATHER: _Rule((), ("gathered",), ("gathered",)),
    Operation.FREE: _Rule(("gathered",), ends=("gathered",)),
    Operation.ARM: _Rule(("gathered",), ("reduced", "armed", "passed"), ("armed",)),
    Operation.FORWARD: _Rule(("gathered",), (), ("forward", "without a loss")),
    Operation.LOSS: _Rule(
        ("gathered", "without a loss"), begins=("with a loss",), ends=("without a loss",)
    ),
    Operation.OFFLOAD: _Rule(("forward",), ("offloaded",), ("offloaded",)),
    Operation.FETCH: _Rule(("offloaded",), ends=("offloaded",)),
    Operation.BACKWARD: _Rule(
        ("gathered", "forward"), ("offloaded", "reduced"), ("passed", "back"), ("forward",)
    ),
    Operation.REDUCE: _Rule(("armed",), (), ("reduced",), ("armed",)),
    Operation.MEET: _Rule(("gathered",)),
    Operation.AGREE: _Rule(),
    Operation.FETCH_STATE: _Rule((), ("fetched",), ("fetched",)),
    Operation.UPDATE: _Rule(("reduced",), ("gathered",), ("updated",)),
    Operation.HOST_UPDATE: _Rule(
        ("reduced",), ("fetched", "gathered"), ("updated", "with the host")
    ),
    Operation.STORE_STATE: _Rule(("updated",), ends=("fetched", "with the host")),
}


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
    - Nothing stays gathered, armed or offloaded at the end of the step.
    - All ranks issue the same collectives in the same order. Otherwise they would wait for each
      other forever.

    Raises:
        ProgramError: A check fails. The message names the rank and the first instruction at fault,
            if there is one.
    """
    states = [_State(rank, program) for rank, program in enumerate(programs)]
    everyone = tuple(range(len(programs)))
    play([_collectives(program, everyone) for program in programs])
    # a rank without microbatches does not show which visits have a backward
    busy = [state for state in states if state.are["with a loss"]]
    for state in busy[1:]:
        if state.visits_back != busy[0].visits_back:
            raise ProgramError(
                f"Backwards must pass the same visits on all ranks; on rank {busy[0].rank} they"
                f" pass {busy[0].visits_back}, but on rank {state.rank} {state.visits_back}."
            )


def _collectives(program: Program, ranks: tuple[int, ...]) -> Player:
    for instruction in program.instructions:
        if instruction.operation in COLLECTIVES:
            yield Meeting(ranks, Instruction(instruction.operation, instruction.unit))


class _State:
    """What a rank's program leaves behind; reads all of it."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank = rank
        self.are: dict[str, set[Any]] = {name: set() for name in _WRONG}
        self._embeddings = program.ends.embeddings
        self._reached: dict[int, int] = {}  # per microbatch, its latest visit
        updates = (Operation.UPDATE, Operation.HOST_UPDATE)
        self._updates_early = any(each.operation in updates for each in program.backward)
        for instruction in program.instructions:
            self._read(instruction)
        self._expect_nothing_held()
        left = sorted(self.are["fetched"] | self.are["with the host"])
        if left:
            raise ProgramError(f"Rank {rank} ends its step with {left} still without S.")
        if NONE not in self.are["updated"]:
            raise ProgramError(f"Rank {rank} ends its step without U (update).")

    @property
    def visits_back(self) -> list[int]:
        """The visits that a backward has passed."""
        return sorted({visit for visit, _ in self.are["back"]})

    def _read(self, instruction: Instruction) -> None:
        """Check one instruction and apply it."""
        operation, unit = instruction.operation, instruction.unit
        keys = (unit, (instruction.visit, instruction.microbatch), instruction.microbatch)
        for otherwise in self._faults(instruction, keys):
            of = "" if unit == NONE else f" of unit {unit}"
            raise ProgramError(
                f"Rank {self.rank} cannot run {instruction} ({operation.value}{of}): {otherwise}."
            )
        for name in _RULES[operation].begins:
            self.are[name].add(keys[_WRONG[name][0]])
        for name in _RULES[operation].ends:
            self.are[name].discard(keys[_WRONG[name][0]])
        if operation in (Operation.FORWARD, Operation.BACKWARD):
            self._reached[instruction.microbatch] = instruction.visit

    def _faults(self, instruction: Instruction, keys: tuple[Any, ...]) -> Iterator[str]:
        """Yield what is wrong with an instruction; the first one counts."""
        operation, unit, are = instruction.operation, instruction.unit, self.are
        if operation is not Operation.STORE_STATE:
            if NONE in are["updated"]:
                yield "the optimizer has made its step"
            if unit in are["updated"]:
                yield "the unit is updated already"
        if operation is Operation.UPDATE and unit == NONE:
            self._expect_nothing_held()
            if are["fetched"]:
                yield f"units {sorted(are['fetched'])} hold state"
            left = sorted(are["reduced"] - are["updated"] - {ROOT})
            if self._updates_early and left:
                yield f"units {left} have missed their early update"
            return
        # the backward of an embedding needs no parameters
        is_free = unit in self._embeddings and operation in (Operation.ARM, Operation.BACKWARD)
        rule = _RULES[operation]
        for name in (*rule.needs, *rule.never):
            place, missing, present = _WRONG[name]
            is_so = keys[place] in are[name] or (name == "gathered" and is_free)
            if is_so != (name in rule.needs):
                yield present if is_so else missing
        reached = self._reached.get(instruction.microbatch, NONE - 1)
        match operation:
            case Operation.FORWARD if instruction.visit != reached + 1:
                yield "its microbatch was not at the visit before"
            case Operation.LOSS if ROOT not in are["armed"]:
                yield "the root unit is not armed"
            case Operation.AGREE | Operation.BACKWARD if are["without a loss"]:
                yield "a microbatch has no loss yet"
            case Operation.BACKWARD if instruction.visit > reached:
                yield "its microbatch came back from an earlier visit"
            case Operation.FETCH_STATE if len(are["fetched"]) >= STAGED_UNITS:
                yield f"the state of units {sorted(are['fetched'])} is there"
            case Operation.STORE_STATE if unit not in are["fetched"] | are["with the host"]:
                yield "its state is neither fetched nor with the host"

    def _expect_nothing_held(self) -> None:
        are = self.are
        names = ("gathered", "armed", "offloaded", "without a loss")
        held = {name: are[name] for name in names}
        passages = {(visit, each) for visit in self.visits_back for each in are["with a loss"]}
        held["on their way back"] = passages - are["back"]
        for what, found in held.items():
            if found:
                raise ProgramError(
                    f"Rank {self.rank} ends its step with {sorted(found)} still {what}."
                )
