"""Keeps Python's garbage collector away from objects that live as long as training.

A full collection walks all objects of the process: 450,000 with torch and Lightning, which takes
0.2 s on a slow core. Visits of units keep objects from the forward to the backward, so that a full
collection comes every 10,000 visits or so. All ranks then wait for the one that collects.
"""

from __future__ import annotations

import gc
from typing import Any


class LastingObjects:
    """Freezes all objects behind the first full collection in training, until training ends.

    Nothing is collected for this: whatever that collection has left is in use. Objects that come
    later are collected as always. If the user's code has switched the collector off, or has frozen
    objects itself, nothing happens.

    ::

        lasting = LastingObjects()
        lasting.begin()
        for batch in batches:
            lasting.between_steps()
            step(batch)
        lasting.end()
    """

    def __init__(self) -> None:
        self._is_watching = self._has_collected = self._has_frozen = False

    def begin(self) -> None:
        """Watch for a full collection from now on; a second call does nothing."""
        if not self._is_watching and gc.isenabled() and not gc.get_freeze_count():
            gc.callbacks.append(self._note)
            self._is_watching = True

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self._has_collected = True

    def between_steps(self) -> None:
        """Freeze objects, if a full collection has come; call it where no step holds any."""
        if self._has_collected and self._is_watching:
            self._stop_watching()
            gc.freeze()
            self._has_frozen = True

    def _stop_watching(self) -> None:
        gc.callbacks.remove(self._note)
        self._is_watching = self._has_collected = False

    def end(self) -> None:
        """Leave all objects to the collector again."""
        if self._is_watching:
            self._stop_watching()
        if self._has_frozen:
            gc.unfreeze()
            self._has_frozen = False
