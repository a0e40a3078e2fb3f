"""What may watch a step: one small interface around the instructions of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_cephalo.plan.program import Instruction


class Observer:
    """Is told of every instruction that an :class:`~.executor.Executor` runs.

    The executor, the units and the collectives know no observer by name; without any, none of this
    is called. Every method does nothing unless it is overridden::

        class Counter(Observer):
            def after(self, instruction):
                self.count += instruction.operation is Operation.GATHER

        executor.attach(counter)
    """

    def before(self, instruction: Instruction) -> None:
        """The instruction is about to run; the unit that it computes with is there."""

    def after(self, instruction: Instruction) -> None:
        """The instruction has run; of a collective: it has begun."""

    def issued(self, instruction: Instruction, works: Sequence[Any]) -> None:
        """A collective is under way.

        Args:
            instruction: GATHER or REDUCE; between its ``before`` and its ``after``.
            works: Handles of torch.distributed; none where a rank is alone.
        """

    def before_wait(self, instruction: Instruction) -> None:
        """The rank is about to wait for others, for the sake of this instruction."""

    def after_wait(self, instruction: Instruction) -> None:
        """The rank goes on."""
