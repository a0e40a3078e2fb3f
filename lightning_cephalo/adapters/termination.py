"""Stops all ranks at the same step if any of them receives SIGTERM.

Lightning's handler communicates while other ranks are in another collective (Lightning #20806), and
the host waits for the device before every batch (#21487). Here it sets a flag, which the exchange
of each step carries: all ranks end with ``SIGTERMException`` after the same step. While the job is
set up, ranks ask each other between two measurements.

[Note: Lightning's signals] The signal connector, its handlers and ``_broadcast_sigterm_tensor`` are
private. Only this file uses them; tests/lightning/test_termination.py fails when they change.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_cephalo.ranks.control import ControlGroup

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Termination:
    """Receives SIGTERM in Lightning's place, and tells Lightning when all ranks know."""

    def __init__(self) -> None:
        self.is_noticed = self._is_agreed = False
        self._trainer: Trainer | None = None
        self._before: Any = None
        self._handler: Any = None

    def begin(self, trainer: Trainer) -> None:
        """Receive the signal from now on; comes before Lightning registers its handlers."""
        self.end()
        self._trainer = trainer
        # on the instances: the exchange of every step does what these methods are for
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing  # type: ignore[method-assign]
        vars(trainer._signal_connector)["_sigterm_notifier_fn"] = self._receive
        if threading.current_thread() is not threading.main_thread():
            return  # signals cannot be received here, by Lightning neither
        self._before, self._handler = signal.getsignal(signal.SIGTERM), self._receive_first
        signal.signal(signal.SIGTERM, self._handler)

    def end(self) -> None:
        """Give Lightning's objects their own methods back, and the process its handler."""
        trainer, self._trainer = self._trainer, None
        self.is_noticed = self._is_agreed = False
        if trainer is None:
            return
        vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        connector = trainer._signal_connector
        vars(connector).pop("_sigterm_notifier_fn", None)
        handler, self._handler = self._handler, None
        if handler is None:
            return
        # if Lightning has registered its handlers, it will restore the one that it has found
        if connector._original_handlers.get(signal.SIGTERM) is handler:
            connector._original_handlers[signal.SIGTERM] = self._before
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        self._before = None

    def _receive_first(self, number: int, frame: Any) -> None:
        """Handle the signal as Lightning's handlers do, which come later."""
        self._receive(number, frame)
        if callable(self._before):
            self._before(number, frame)

    def _receive(self, number: int, frame: Any) -> None:
        if self._trainer is None:  # Lightning has ended without removing its handlers
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self.is_noticed:
            launcher = self._trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(number)  # the processes that this one has started
        self.is_noticed = True

    def note(self) -> tuple[float]:
        """Return what the exchange of a step carries to all ranks."""
        return (float(self.is_noticed),)

    def learn(self, notes: Sequence[Sequence[float]]) -> None:
        """Read the notes of all ranks; from then on Lightning stops at the next opportunity."""
        if any(is_noticed for (is_noticed,) in notes) and self._trainer is not None:
            self._is_agreed = True
            self._trainer._signal_connector.received_sigterm = True

    def check(self, control: ControlGroup) -> None:
        """Raise SIGTERMException on all ranks if any has received the signal; collective."""
        if control.any(self.is_noticed):
            self._is_agreed = True
            raise SIGTERMException

    def ends_with(self, exception: BaseException) -> bool:
        """Return whether all ranks end with this exception, at the same place."""
        return self._is_agreed and isinstance(exception, SIGTERMException)


def _do_nothing() -> None:
    """Stand in for a method; a trainer that is copied takes it along by its name."""
