"""Updates units: inside the backward, on the host, or with the optimizer's own step.

[Note: early updates]
A unit's gradient is final when its reduce is done: its rows are updated, and the gradient's memory
is given back. The optimizer's own ``step`` updates the root unit, and parameters of which this rank
cannot know yet whether any rank has used them: it knows it of those that it has used itself, and
of others where the summed gradient is not zero. The exchange behind the backward tells the rest.

An error between two of these updates leaves weights half-updated: a rank that fails learns nothing
of the others, which go on. So the error says it on all ranks, and no such checkpoint is written.

[Note: state in host memory]
Streamed state is copied to a staging buffer on the device, which updates, and is copied back. Where
the host updates, gradients are copied to it, and the new rows to the device.

Updates follow a unit's reduce where early updates are exact. The others come with the optimizer's
own ``step``, when gradients are final and clipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from lightning_cephalo.common.errors import CephaloError
from lightning_cephalo.plan.program import Instruction, Operation, late_updates
from lightning_cephalo.plan.state_homes import StateHome
from lightning_cephalo.sharding.unit import Unit

if TYPE_CHECKING:
    from lightning_cephalo.execution.executor import Executor


class UnitUpdates(Protocol):
    """Updates one unit at a time and moves its state; ``adapters/moved_state.py`` has one.

    Attributes:
        homes: Where the state of each unit lives; empty: all of it is on the device.
        updated: Ids of the parameters that the step has updated so far.
    """

    homes: tuple[StateHome, ...]
    updated: set[int]

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer updates this sharded parameter."""

    def fetch(self, unit: int) -> None:
        """Start to copy a unit's state to the device."""

    def update(self, parameters: Sequence[nn.Parameter], on_host: bool) -> list[bool]:
        """Update parameters of a unit by their gradients, and return for each whether it was."""

    def store(self, unit: int) -> None:
        """Start to copy a unit's state back, or take what the host has updated."""

    def left(self) -> list[int]:
        """Return units whose state is away that hold gradients still, in the backward's order."""

    def on_host(self) -> list[int]:
        """Return the units that the host updates now."""

    def finish(self) -> None:
        """End a step, behind the optimizer's own."""


class Updates:
    """The updates of one model.

    Attributes:
        mover: Updates units one by one, wherever their state is; None: no training has begun.
        are_exact: Whether updates in the next step's backward give what the optimizer's step gives.
        is_on: Whether units are updated inside the backward of the step that runs.
        drops: Whether steps hold no gradients of units, and update nothing.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)
        self.mover: UnitUpdates | None = None
        self.is_on = self.drops = self.are_exact = False
        self._updated: set[int] = set()
        self._may = self._may_again = self._is_late = False

    # -- a step -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Find out how the step that begins may update."""
        self.is_on = self._may = self._may_again or self.are_exact
        # a step that nobody has announced updates nothing: it is one of several that add up
        self._may_again = self.are_exact = False
        self._is_late = False

    def passes(self) -> dict[str, Any]:
        """Return the options of ``compile_step`` that the step has."""
        homes = () if self.drops or self.mover is None else self.mover.homes
        return {"updates_early": self.is_on or self.drops, "homes": homes}

    def agree(self, everyone: bool) -> bool:
        """Learn whether all ranks may update early; return whether that changes this step."""
        before, self.is_on = self.is_on, everyone
        return before is not everyone

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Let steps inside hold no gradients of units, and update nothing."""
        self.drops = True
        try:
            yield
        finally:
            self.drops = False

    @property
    def left_half_updated(self) -> bool:
        """Whether units were updated in a step whose other updates have not come."""
        return bool(self._updated)

    def repeat(self) -> None:
        """Let the step that begins next be the one of before, which has failed."""
        self._may_again = self._may

    def finish(self) -> None:
        """Give all gradients back that the optimizer's step has used."""
        self._updated, self._is_late = set(), False
        if self.mover is None:
            return
        for unit in self._units if self.is_on else ():
            parameters = unit.reduced_parameters()
            updated = [p.grad is not None and self.mover.holds(p) for p in parameters]
            unit.give_back(updated, keeps_unused=False)
        self.mover.finish()

    # -- instructions -------------------------------------------------------------------------

    def update(self, executor: Executor, instruction: Instruction) -> None:
        """Update a unit; also on a rank that has failed: the others make it."""
        index, on_host = instruction.unit, instruction.operation is Operation.HOST_UPDATE
        if self._is_late and self.mover is not None:
            self._updated.add(index)
            self.mover.update([p for _, p in self._units[index].named_sharded()], on_host)
            return
        unit = self._units[index]
        executor.await_reduce_of(unit)
        if not self.drops:
            self._updated.add(index)
            executor.failure.guarded(self._update_early, executor, index, on_host)
        if self.drops or executor.failure.error is not None:
            unit.drop_gradients()  # the next units need the memory

    def _update_early(self, executor: Executor, index: int, on_host: bool) -> None:
        """Update what is known to have a gradient, and give the gradient's memory back."""
        step, unit = executor.step, self._units[index]
        unit.publish(unit.surely_used(step.used[index], bool(step.calls)))
        if self.mover is not None:
            unit.give_back(self.mover.update(unit.reduced_parameters(), on_host))

    def move(self, executor: Executor, instruction: Instruction) -> None:
        """Start to copy a unit's state, there or back."""
        if self._is_late:  # behind the last exchange: an error ends the step at once
            self._move(instruction)
        else:
            executor.failure.guarded(self._move, instruction)

    def _move(self, instruction: Instruction) -> None:
        if self.mover is None:
            return
        if instruction.operation is Operation.FETCH_STATE:
            self.mover.fetch(instruction.unit)
        else:
            self.mover.store(instruction.unit)

    def before_step(self, executor: Executor) -> Container[int]:
        """Update units whose state is in host memory; return the ids of all updated parameters."""
        if self.mover is None:
            return ()
        self._is_late = True
        left = self.mover.left()
        busy = [unit for unit in self.mover.on_host() if unit in left]  # one update at a time
        executor.run([*_stores(busy), *late_updates(left, self.mover.homes)])
        return self.mover.updated

    def after_step(self, executor: Executor) -> None:
        """Wait for what the host updates; the counterpart of :meth:`before_step`."""
        executor.run(_stores([] if self.mover is None else self.mover.on_host()))

    def explain(self, failure: BaseException) -> None:
        """Let an error say that it leaves weights half-updated, if it does."""
        if not self.left_half_updated:
            return
        said = (
            f"Weights are half-updated: this step had updated {len(self._updated)} of"
            f" {len(self._units)} units. Continue from the last checkpoint:"
            " fit(model, ckpt_path=...)."
        )
        if said in str(failure) or said in getattr(failure, "__notes__", ()):
            return
        if isinstance(failure, CephaloError) and len(failure.args) == 1:
            failure.args = (f"{failure}\n{said}",)
        elif isinstance(failure, Exception) and hasattr(failure, "add_note"):
            failure.add_note(said)
        else:  # Lightning shows no text of an interrupt; Python 3.10 has no notes
            warnings.warn(said, stacklevel=2)


def _stores(units: Sequence[int]) -> list[Instruction]:
    return [Instruction(Operation.STORE_STATE, unit) for unit in units]
