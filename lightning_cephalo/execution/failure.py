"""What a rank does when its part of a step fails, so that no other rank waits forever.

[Note: failures]
Nothing that a user's code does on one rank may leave the others waiting. A rank whose microbatch
raises drops its microbatches and goes on communicating in the agreed order, as a rank without data
does; at the next exchange (end of forward, end of backward) all ranks learn of it and raise.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.execution.memory_errors import (
    OutOfMemoryInStepError,
    explained,
    is_out_of_memory,
)
from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.plan.program import NONE, ROOT, Instruction, Operation

_DOING = {
    Operation.ARM: "gradient",
    Operation.FREE: "release",
    Operation.UPDATE: "optimizer's step",
}


class Failure:
    """Holds what this rank has failed with in a step, and where it is.

    Args:
        rank: This rank.
        names: Of all units, by index.

    Attributes:
        error: What it has failed with.
        place: Where in the step it is, for messages.
        planned_memory: What the plan counts on, as a sentence; may be empty.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self._rank = rank
        self._names = names
        self._microbatches: list[Microbatch] = []
        self._count = 0
        self.error: BaseException | None = None
        self.place: str | Instruction = ""
        self.planned_memory = ""

    def begin(self, microbatches: list[Microbatch], place: str) -> None:
        """Begin a step with these microbatches; the list is emptied if it fails."""
        self._microbatches, self._count = microbatches, len(microbatches)
        self.error, self.place = None, place

    def guarded(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function that does not communicate, unless this rank has failed already."""
        if self.error is not None:
            return
        try:
            function(*args)
        except Exception as failure:
            self.note(failure)

    def note(self, failure: BaseException) -> None:
        """Take a failure: from now on this rank only communicates."""
        self.error = failure
        self.abandon()
        if is_out_of_memory(failure):
            self.error = self.out_of_memory(failure)

    def with_memory(self, function: Callable[[], None]) -> None:
        """Do this rank's part of a collective, which allocates before it communicates.

        The others wait for it: a rank without memory for it gives up its microbatches instead.
        """
        try:
            function()
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
            error = self.out_of_memory(failure)
            if not self._microbatches:
                raise error from failure
            self.error = self.error or error
            self.abandon()
            function()

    def abandon(self) -> None:
        """Stop this rank's microbatches and drop what they keep."""
        for microbatch in self._microbatches:
            try:
                microbatch.abandon()
            except Exception as second:  # the first failure is the one to report
                self.error = self.error or second
        self._microbatches.clear()

    def take(self) -> BaseException | None:
        """Return the error, to be raised on all ranks, and forget it."""
        error, self.error = self.error, None
        return error

    def out_of_memory(self, failure: BaseException) -> OutOfMemoryInStepError:
        """Return an error that says where in the step the memory ran out."""
        # its frames hold the activations, whose memory the gathers to come may need
        traceback.clear_frames(failure.__traceback__)
        place = self.place if isinstance(self.place, str) else self._named(self.place)
        return explained(failure, self._rank, place, self.planned_memory)

    def explain(self, failure: Exception) -> Exception:
        """Return the error to raise for what failed outside of a step's passes."""
        is_said = isinstance(failure, (OutOfMemoryInStepError, RemoteRankError))
        return failure if is_said or not is_out_of_memory(failure) else self.out_of_memory(failure)

    def _named(self, instruction: Instruction) -> str:
        doing = _DOING.get(instruction.operation, instruction.operation.value)
        if instruction.unit == NONE:
            return doing
        name = self._names[instruction.unit]
        unit = "the root unit" if instruction.unit == ROOT else f"unit {name!r}"
        which = ""
        if instruction.microbatch != NONE:
            which = f", microbatch {instruction.microbatch + 1} of {self._count}"
        return f"{doing} of {unit}{which}"
