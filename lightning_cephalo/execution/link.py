"""Waits for other ranks, and shows each instruction of a step to those who observe it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.plan.program import Instruction, Operation
from lightning_cephalo.ranks.control import ControlGroup


class Link:
    """This rank's tie to all others.

    Attributes:
        now: The instruction that runs.
    """

    def __init__(self, control: ControlGroup) -> None:
        self.control = control
        self.now = Instruction(Operation.AGREE)
        self._observers: tuple[Observer, ...] = ()

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank; each gives equally many."""
        with self.waiting():
            return self.control.gather(list(numbers))

    def wait(self, work: Any) -> None:
        """Wait for a collective."""
        with self.waiting():
            work.wait()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell observers, in a ``with`` block, that this rank waits for others."""
        for observer in self._observers:
            observer.before_wait(self.now)
        yield
        for observer in self._observers:
            observer.after_wait(self.now)

    # -- observers ----------------------------------------------------------------------------

    def before(self, instruction: Instruction) -> None:
        for observer in self._observers:
            observer.before(instruction)

    def after(self, instruction: Instruction) -> None:
        for observer in self._observers:
            observer.after(instruction)

    def issued(self, works: Sequence[Any]) -> None:
        """Tell observers what the instruction that runs has begun."""
        for observer in self._observers:
            observer.issued(self.now, works)

    def attach(self, observer: Observer) -> None:
        self._observers = (*self._observers, observer)

    def detach(self, observer: Observer) -> None:
        self._observers = tuple(other for other in self._observers if other is not observer)

    def is_observed_by(self, observer: Observer) -> bool:
        return any(other is observer for other in self._observers)

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        self.attach(observer)
        try:
            yield
        finally:
            self.detach(observer)
