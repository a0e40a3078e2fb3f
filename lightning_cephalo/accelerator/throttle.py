"""Limits how far a host runs ahead of its device."""

from __future__ import annotations

from collections import deque

from lightning_cephalo.accelerator.base import Accelerator, EndOfWork

# The device always has one step's work in its queue while the host prepares the next step.
_STEPS_AHEAD = 1


class Throttle:
    """Keeps the host at most one whole step ahead of the device.

    Nothing else in a step makes the host wait for the device. A host that queues many steps holds
    memory for all of them, because a backend keeps the buffers of its collectives until they have
    run. It also sees an error long after its cause. The CPU has no queue and is never throttled.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._ends: deque[EndOfWork] = deque()

    def begin_step(self) -> None:
        """Wait for the end of the step before the last."""
        while len(self._ends) > _STEPS_AHEAD:
            self._ends.popleft().synchronize()

    def end_step(self) -> None:
        """Note that all work of a step has been submitted to the device."""
        end = self._accelerator.end_of_work()
        if end is not None:
            self._ends.append(end)
