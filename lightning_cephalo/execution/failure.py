"""Handles a failure of this rank in a step, so that no other rank waits forever.

[Note: failures]
A rank whose microbatch raises drops its microbatches, and goes on communicating in the agreed
order, like a rank without data. The next exchange informs all ranks, and all raise.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_cephalo.accelerator.torch_versions import leave_checkpoints
from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.execution.memory_errors import (
    OutOfMemoryInStepError,
    explained,
    is_out_of_memory,
)
from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.plan.program import NONE, ROOT, Instruction

_Result = TypeVar("_Result")


class Failure:
    """Holds this rank's error in a step, and its place in the step."""

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self._rank = rank
        self._names = names
        self._microbatches: list[Microbatch] = []
        self._count = 0
        self.error: BaseException | None = None
        self.place: str | Instruction = ""
        self.planned_memory = ""
        self.gave_up = False  # an error that all ranks have

    def begin(self, microbatches: list[Microbatch], place: str) -> None:
        self._microbatches, self._count = microbatches, len(microbatches)
        self.error, self.place, self.gave_up = None, place, False

    def guarded(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function that does not communicate and note its failure; not after a failure."""
        if self.error is not None:
            return
        try:
            function(*args)
        except Exception as failure:
            self.note(failure)

    def note(self, failure: BaseException) -> None:
        """Store a failure: from now on this rank only communicates."""
        self.error = failure
        leave_checkpoints(failure)
        self.abandon()
        if is_out_of_memory(failure):
            self.error = self.out_of_memory(failure)

    def with_memory(self, function: Callable[[], _Result]) -> _Result:
        """Start this rank's part of a collective, which allocates before it communicates.

        A rank that lacks the memory drops its microbatches and tries again: others wait for it.
        """
        try:
            return function()
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
            error = self.out_of_memory(failure)
            if not self._microbatches:
                raise error from failure
            self.error = self.error or error
            self.abandon()
            try:
                return function()
            except Exception as again:
                raise (error if is_out_of_memory(again) else again) from failure

    def abandon(self) -> None:
        for microbatch in self._microbatches:
            try:
                microbatch.abandon()
            except Exception as second:  # the first failure is the one to report
                self.error = self.error or second
        self._microbatches.clear()

    def take(self) -> BaseException | None:
        """Return the error for raising it on all ranks, and clear it."""
        error, self.error = self.error, None
        return error

    def out_of_memory(self, failure: BaseException) -> OutOfMemoryInStepError:
        """Return an error that names the point of the step where the memory ran out."""
        # its frames hold activations, whose memory later gathers may need
        traceback.clear_frames(failure.__traceback__)
        place = self.place if isinstance(self.place, str) else self._named(self.place)
        return explained(failure, self._rank, place, self.planned_memory)

    def explain(self, failure: Exception) -> Exception:
        """Return the error to raise for a failure outside of a step's forward and backward."""
        is_said = isinstance(failure, (OutOfMemoryInStepError, RemoteRankError))
        return failure if is_said or not is_out_of_memory(failure) else self.out_of_memory(failure)

    def _named(self, instruction: Instruction) -> str:
        doing = instruction.operation.phrase or instruction.operation.value
        if instruction.unit == NONE:
            return doing
        unit = f"unit {self._names[instruction.unit]!r}"
        if instruction.unit == ROOT:
            unit = "the root unit"
        which = ""
        if instruction.microbatch != NONE:
            which = f", microbatch {instruction.microbatch + 1} of {self._count}"
        return f"{doing} of {unit}{which}"
