"""Runs the user's step in a greenlet, which waits at places until the scheduler resumes it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import greenlet
import torch
from torch.utils.hooks import RemovableHandle

from lightning_cephalo.execution.replay import ThreadState
from lightning_cephalo.plan.program import Visit

if TYPE_CHECKING:
    from lightning_cephalo.execution.microbatch import Microbatch

_MAX_PARKS_WHILE_STOPPING = 100


class StepGreenlet(greenlet.greenlet):
    """A greenlet whose code finds the microbatch that it computes, until it returns."""

    microbatch: Microbatch | None = None


def running_microbatch() -> Microbatch | None:
    """Return the microbatch whose code calls this; None outside of a step."""
    current = greenlet.getcurrent()
    return current.microbatch if isinstance(current, StepGreenlet) else None


class UserCode:
    """One run of the step, over some samples.

    Attributes:
        parked: The place where it waits; None: it has not begun, or has returned.
        finished: Whether it has returned.
        result: What it has returned.
        handles: How many hooks it has registered.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        device_types: tuple[str, ...],
        own_handles: Callable[[], int],
    ) -> None:
        self._device_types, self._own_handles = device_types, own_handles
        self._greenlet = StepGreenlet(step)
        # a greenlet starts with no context variables of its own
        self._greenlet.gr_context = contextvars.copy_context()
        # the scheduler's are equal during a step
        self._others: ThreadState | None = None
        self.parked: Visit | None = None
        self.finished = False
        self.result: Any = None
        self.handles = 0

    def advance(self, microbatch: Microbatch) -> None:
        """Run the step until it waits or returns."""
        if self._others is None:
            self._others = ThreadState.capture(self._device_types)
        step = self._greenlet
        step.microbatch = microbatch
        first_handle = RemovableHandle.next_id - self._own_handles()
        try:
            switched = step.switch()
        finally:
            step.microbatch = None  # no cycle stays
            torch.clear_autocast_cache()  # casts of one microbatch are no part of another's graph
            self.handles += RemovableHandle.next_id - first_handle - self._own_handles()
            if step.dead:  # else it has restored them when it parked
                self._others.restore()
        if step.dead:
            self.finished, self.result, self.parked = True, switched, None
        else:
            self.parked = switched

    def park(self, place: Visit) -> ThreadState:
        """Switch to the scheduler until it resumes this greenlet; return this greenlet's modes."""
        others = self._others
        assert others is not None
        modes = others.now()
        if modes is not others:
            others.restore()
        if torch.is_inference_mode_enabled():
            # it belongs to the thread too; left on, other microbatches would run in it
            with torch.inference_mode(False):
                self._greenlet.parent.switch(place)
        else:
            self._greenlet.parent.switch(place)
        if modes is not others:
            modes.restore()
        return modes

    def abandon(self) -> None:
        """Stop the step where it is."""
        before = ThreadState.capture(self._device_types)
        try:
            # the user's cleanup code may call units again and park there
            for _ in range(_MAX_PARKS_WHILE_STOPPING):
                if self._greenlet.dead:
                    break
                self._greenlet.throw(greenlet.GreenletExit)
        finally:
            before.restore()
