"""Keeps a host from running too far ahead of its GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

# The device always has one step's work in its queue while the host prepares the next.
_STEPS_AHEAD = 1


class Throttle:
    """Lets the host be at most one whole step ahead of the device.

    Nothing else in a step makes the host wait for the device. A host that queues many steps holds
    memory for all of them (NCCL keeps what its operations use until they have run), and hears of an
    error long after its cause. On the CPU there is no queue, and nothing to do.

    Args:
        device: This rank's device.
        mark: Returns an event at the end of what the device has been given; by default a CUDA
            event on the current stream.
    """

    def __init__(self, device: torch.device, mark: Callable[[], Any] | None = None) -> None:
        self._mark = mark or (_cuda_event if device.type == "cuda" else None)
        self._ends: deque[Any] = deque()

    def begin_step(self) -> None:
        """Wait for the end of the step before the last."""
        while len(self._ends) > _STEPS_AHEAD:
            self._ends.popleft().synchronize()

    def end_step(self) -> None:
        """The device has been given all of a step's work."""
        if self._mark is not None:
            self._ends.append(self._mark())


def _cuda_event() -> Any:
    event = torch.cuda.Event(blocking=True)  # waiting for it sleeps instead of spinning
    event.record()
    return event
