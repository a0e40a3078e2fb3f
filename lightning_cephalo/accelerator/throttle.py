"""Keeps a host from running too far ahead of its device."""

from __future__ import annotations

from collections import deque

from lightning_cephalo.accelerator.base import Accelerator, EndOfWork

# The device always has one step's work in its queue while the host prepares the next.
_STEPS_AHEAD = 1


class Throttle:
    """Lets the host be at most one whole step ahead of the device.

    Nothing else in a step makes the host wait for the device. A host that queues many steps holds
    memory for all of them (a backend keeps what its collectives use until they have run), and hears
    of an error long after its cause. On the CPU there is no queue, and nothing to do.

    Args:
        accelerator: This rank's device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._ends: deque[EndOfWork] = deque()

    def begin_step(self) -> None:
        """Wait for the end of the step before the last."""
        while len(self._ends) > _STEPS_AHEAD:
            self._ends.popleft().synchronize()

    def end_step(self) -> None:
        """The device has been given all of a step's work."""
        end = self._accelerator.end_of_work()
        if end is not None:
            self._ends.append(end)
