"""Stops all ranks at the same step if any of them receives SIGTERM while it trains or evaluates.

Lightning's handler communicates while other ranks are in another collective (Lightning #20806), and
the host waits for the device before every batch (#21487). Here it sets a flag, which the exchange
of each step carries: all ranks end with ``SIGTERMException`` after the same step. Before training
begins SIGTERM ends the process, as Lightning has not registered its handler yet.

[Note: Lightning's signals] The notifier and ``_broadcast_sigterm_tensor`` are private. Only this
file uses them; tests/lightning/test_termination.py fails when they change.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_cephalo.adapters.view import TrainerView


class Termination:
    """Receives SIGTERM in Lightning's place, and tells Lightning when all ranks know."""

    is_noticed = _is_agreed = False
    _view: TrainerView | None = None

    def begin(self, view: TrainerView) -> None:
        """Receive the signal from now on; comes before Lightning registers its handlers."""
        self.end()
        self._view = view
        # on the instances: the exchange of every step does what these methods are for
        vars(view.epoch_loop)["_broadcast_sigterm_tensor"] = _do_nothing
        vars(view.connector("signal"))["_sigterm_notifier_fn"] = self._receive

    def end(self) -> None:
        """Give Lightning's objects their own methods back."""
        if self._view is not None:
            vars(self._view.epoch_loop).pop("_broadcast_sigterm_tensor", None)
            vars(self._view.connector("signal")).pop("_sigterm_notifier_fn", None)
        self._view, self.is_noticed, self._is_agreed = None, False, False

    def _receive(self, number: int, frame: Any) -> None:
        if self._view is None:  # Lightning has ended without removing its handlers
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self.is_noticed and self._view.strategy.launcher is not None:
            self._view.strategy.launcher.kill(number)  # the processes that this one has started
        self.is_noticed = True

    def note(self) -> tuple[float]:
        return (float(self.is_noticed),)

    def learn(self, notes: Sequence[Sequence[float]]) -> None:
        """Let Lightning stop at the next opportunity if any rank has noticed the signal."""
        if any(is_noticed for (is_noticed,) in notes) and self._view is not None:
            self._is_agreed = self._view.connector("signal").received_sigterm = True

    def ends_with(self, exception: BaseException) -> bool:
        """Return whether all ranks end with this exception, at the same place."""
        return self._is_agreed and isinstance(exception, SIGTERMException)


def _do_nothing() -> None:
    """Stand in for a method; a copy of the loop takes it along by its name."""
