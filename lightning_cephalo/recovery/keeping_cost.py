"""Measures how often keeping a step is worth its time."""

from __future__ import annotations

import math
import time

from lightning_cephalo.recovery.options import fitting_every

_LINK_SHARE = 0.05


class Cost:
    """Compares the time that keeping takes with that of the updates in between."""

    def __init__(self, now_s: float) -> None:
        self._ended_s = self._began_s = now_s
        self._keeping_s = self._update_s = 0.0

    def begin(self, updates: int) -> None:
        """Note that a step is kept after some updates."""
        self._began_s = time.monotonic()
        self._keeping_s = 0.0
        self._update_s = (self._began_s - self._ended_s) / updates if updates else 0.0

    def pause(self) -> None:
        """Note that training goes on meanwhile."""
        self._keeping_s += time.monotonic() - self._began_s

    def go_on(self) -> None:
        """Note that training waits."""
        self._began_s = time.monotonic()

    def end(self) -> None:
        """Note that the step is kept."""
        self._ended_s = time.monotonic()
        self._keeping_s += self._ended_s - self._began_s

    def add(self, seconds: float) -> None:
        """Count time that a thread has taken from training."""
        self._keeping_s += seconds

    def fitting_every(self, every: float, copies_s: float) -> float:
        """Return how many updates should lie between two kept steps."""
        if not self._update_s:
            return every
        own = fitting_every(self._keeping_s, self._update_s)
        return float(max(own, math.ceil(copies_s / (_LINK_SHARE * self._update_s))))
