"""Runs the instructions of optimizer state that lives in host memory.

[Note: state in host memory]
A unit's state is where its :class:`~lightning_cephalo.plan.state_homes.StateHome` says. Streamed
state is copied to one of two staging buffers on the device, the device updates, and the state is
copied back. Where the host updates, gradients are copied to it, one thread updates rows of
parameters there, and the new rows are copied to the device.

Updates follow a unit's reduce where early updates are exact. The others come with the optimizer's
own ``step``: when gradients are final and clipped, before it updates all that is on the device.
What the host updates is awaited when ``step`` ends.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from lightning_cephalo.plan.state_homes import StateHome


class StateMover(Protocol):
    """Moves and updates the state of units; ``adapters/moved_state.py`` has one."""

    def fetch(self, unit: int) -> None:
        """Start to copy a unit's state to the device."""

    def update(self, unit: int, on_host: bool) -> None:
        """Update a unit's parameters by the gradients that they hold.

        Args:
            unit: Index of the unit.
            on_host: Whether the host updates it, which has only begun when this returns.
        """

    def store(self, unit: int) -> None:
        """Start to copy a unit's state back, or take what the host has updated."""

    def update_left(self) -> Container[int]:
        """Update what the program has left out; return the ids of all updated parameters."""

    def finish(self) -> None:
        """End a step."""


class StateMoves:
    """Where the optimizer state of a model's units lives, and what moves it.

    See [Note: state in host memory].

    Attributes:
        mover: Moves state; None: all of it is on the device.
        planned: Where the state of each unit lives by the plan; empty: on the device.
        is_late: Whether the updates of the optimizer's own step are running.
    """

    def __init__(self) -> None:
        self.mover: StateMover | None = None
        self.planned: tuple[StateHome, ...] = ()
        self.is_late = False

    @property
    def homes(self) -> Sequence[StateHome]:
        """Where the state of each unit lives; empty: all of it is on the device."""
        return self.planned if self.mover is not None else ()
