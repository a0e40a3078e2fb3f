"""Runs the instructions of optimizer state that lives in host memory.

[Note: state in host memory]
Streamed state is copied to a staging buffer on the device, which updates, and is copied back. Where
the host updates, gradients are copied to it, and the new rows to the device.

Updates follow a unit's reduce where early updates are exact. The others come with the optimizer's
own ``step``, when gradients are final and clipped. Gradients that the host will use leave the
device behind their unit's reduce all the same: their part of the norm is computed before, and the
host multiplies them by the factor.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from torch import nn

from lightning_cephalo.plan.state_homes import StateHome
from lightning_cephalo.sharding.spent_gradients import SentGradient, mark_sent
from lightning_cephalo.sharding.unit import Unit


class StateMover(Protocol):
    """Moves and updates the state of units; ``adapters/moved_state.py`` has one."""

    def fetch(self, unit: int) -> None:
        """Start to copy a unit's state to the device."""

    def update(self, unit: int, on_host: bool) -> None:
        """Update a unit's parameters by the gradients that they hold."""

    def send_gradients(self, parameters: Sequence[nn.Parameter]) -> list[SentGradient | None]:
        """Start to copy gradients to the host, which will use them; None: there is none."""

    def forget_sent(self) -> None:
        """Forget gradients that have left, in a step that is repeated."""

    def store(self, unit: int) -> None:
        """Start to copy a unit's state back, or take what the host has updated."""

    def update_left(self) -> Container[int]:
        """Update what the program has left out; return the ids of all updated parameters."""

    def finish(self) -> None:
        """End a step."""


class StateMoves:
    def __init__(self) -> None:
        self.mover: StateMover | None = None
        self.planned: tuple[StateHome, ...] = ()
        self.is_late = self.sends_gradients = self._sent_last = False

    def begin_step(self) -> bool:
        """Return whether gradients of the step that begins may leave for the host."""
        self._sent_last, self.sends_gradients = self.sends_gradients, False
        return self._sent_last

    def repeat(self, units: Sequence[Unit]) -> None:
        """Prepare to repeat a step: forget all that it has reduced, on the device and the host."""
        self.sends_gradients = self._sent_last
        if not self._sent_last or self.mover is None:
            return
        self.mover.forget_sent()
        for unit in units:
            for flat in unit.flats:
                flat.gradient.forget()

    @property
    def homes(self) -> Sequence[StateHome]:
        """Where the state of each unit lives; empty: all of it is on the device."""
        return self.planned if self.mover is not None else ()

    def send_gradient(self, unit: Unit, used: Sequence[bool], has_samples: bool) -> None:
        """Let the gradients of a unit leave for the host, where they are known to exist."""
        assert self.mover is not None
        unit.publish(unit.surely_used(used, has_samples))
        parameters = unit.reduced_parameters()
        sent = self.mover.send_gradients(parameters)
        unit.give_back([each is not None for each in sent])
        for parameter, each in zip(parameters, sent, strict=True):
            if each is not None:
                mark_sent(parameter, each)
