"""The interface of objects that observe the instructions of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_cephalo.plan.program import Instruction


class Observer:
    """Receives a call for every instruction that an :class:`~.executor.Executor` runs.

    Every method does nothing unless it is overridden.
    """

    def before(self, instruction: Instruction) -> None:
        """The instruction is about to run; the unit that it computes with is gathered."""

    def after(self, instruction: Instruction) -> None:
        """The instruction has run; a collective has only begun."""

    def issued(self, instruction: Instruction, works: Sequence[Any]) -> None:
        """A collective is under way."""

    def before_wait(self, instruction: Instruction) -> None:
        """The rank is about to wait for other ranks on behalf of this instruction."""

    def after_wait(self, instruction: Instruction) -> None:
        """The wait is over."""
