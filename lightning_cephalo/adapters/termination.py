"""Stops all ranks at the same step if any of them receives SIGTERM.

Lightning's own way hangs with unequal ranks: the signal's handler communicates while other ranks
are in another collective (Lightning #20806), and only rank 0's flag is passed on. It also makes the
host wait for the device before every batch (Lightning #21487). Here the handler sets a flag, and
the exchange that ends the forward of each step carries it. All ranks then end as Lightning ends a
single process: with ``SIGTERMException``, after the same step.

[Note: Lightning's signals] The signal connector, its handlers and ``_broadcast_sigterm_tensor`` are
private. Only this file uses them; tests/lightning/test_termination.py fails when they change.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Termination:
    """Receives SIGTERM in Lightning's place, and tells Lightning when all ranks know."""

    def __init__(self) -> None:
        self._is_noticed = self._is_agreed = False
        self._trainer: Trainer | None = None

    def begin(self, trainer: Trainer) -> None:
        """Receive the signal from now on; a second call for a running Trainer does nothing.

        Call this after Lightning has registered its handlers, which it removes at the end.
        """
        loop = trainer.fit_loop.epoch_loop
        # on the instance: the exchange of every step does what this method is for
        loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]
        self._trainer = trainer
        composed = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            return  # signals cannot be received here, by Lightning neither
        handlers = getattr(composed, "signal_handlers", ())
        notify = trainer._signal_connector._sigterm_notifier_fn
        if notify not in handlers:
            return
        others = [handler for handler in handlers if handler != notify]

        def receive(number: int, frame: Any) -> None:
            self._receive(number)
            for handler in others:
                if callable(handler):
                    handler(number, frame)

        signal.signal(signal.SIGTERM, receive)

    def end(self) -> None:
        """Give Lightning's loop its own method back."""
        if self._trainer is not None:
            vars(self._trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        self._trainer = None
        self._is_noticed = self._is_agreed = False

    def _receive(self, number: int) -> None:
        if self._trainer is not None and not self._is_noticed:
            launcher = self._trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(number)  # the processes that this one has started
        self._is_noticed = True

    def note(self) -> float:
        """Return what the exchange of a step carries to all ranks."""
        return float(self._is_noticed)

    def learn(self, notes: Sequence[float]) -> None:
        """Read the notes of all ranks; from then on Lightning stops at the next opportunity."""
        if any(notes) and self._trainer is not None:
            self._is_agreed = True
            self._trainer._signal_connector.received_sigterm = True

    def ends_with(self, exception: BaseException) -> bool:
        """Return whether all ranks end with this exception, at the same place."""
        return self._is_agreed and isinstance(exception, SIGTERMException)


def _nothing() -> None:
    pass
