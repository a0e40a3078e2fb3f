"""What a rank does when its part of a step fails, so that no other rank waits for ever.

[Note: failures]
Nothing that a user's code does on one rank may leave the others waiting. A rank whose microbatch
raises drops its microbatches and goes on communicating in the agreed order, as a rank without data
does; at the next exchange (end of forward, end of backward) all ranks learn of it and raise.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_cephalo.execution.entrance import Entrance
from lightning_cephalo.execution.memory_errors import (
    OutOfMemoryInStepError,
    Place,
    explained,
    is_out_of_memory,
)
from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.ranks.control import ControlGroup, RemoteRankError
from lightning_cephalo.sharding.unit import Unit

BEGINNING = Place("beginning")


class Guard(Entrance):
    """Steps that may fail on one rank.

    Args:
        units: All units; the root unit first.
        control: Exchanges between the ranks' processes.

    Attributes:
        planned_memory: What the plan counts on, for messages.
    """

    def __init__(self, units: Sequence[Unit], control: ControlGroup) -> None:
        super().__init__(units)
        self.control = control
        self._microbatches: list[Microbatch] = []
        self._failure: BaseException | None = None
        self._place = BEGINNING
        self.planned_memory = ""

    def _guarded(self, function: Callable[..., Any], *args: Any) -> None:
        if self._failure is not None:
            return
        try:
            function(*args)
        except Exception as failure:
            self._failure = failure
            self._abandon()
            self._failure = self._explained(failure)

    def _with_memory(self, function: Callable[[], None]) -> None:
        """Do this rank's part of a collective, which allocates before it communicates.

        The others wait for it: a rank without memory for it gives up its microbatches instead.
        """
        try:
            function()
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
            error = self._out_of_memory(failure)
            if not self._microbatches:
                raise error from failure
            self._failure = self._failure or error
            self._abandon()
            function()

    @contextmanager
    def naming_place(self, doing: str) -> Iterator[None]:
        """Say more where memory runs out in what follows a step's backward."""
        try:
            yield
        except Exception as failure:
            said = isinstance(failure, (OutOfMemoryInStepError, RemoteRankError))
            if said or not is_out_of_memory(failure):
                raise
            self._place = Place(doing, None)
            raise self._out_of_memory(failure) from failure

    def _explained(self, failure: BaseException) -> BaseException:
        return self._out_of_memory(failure) if is_out_of_memory(failure) else failure

    def _out_of_memory(self, failure: BaseException) -> OutOfMemoryInStepError:
        # its frames hold the activations, whose memory the gathers to come may need
        traceback.clear_frames(failure.__traceback__)
        return explained(failure, self.control.rank, self._place, self.planned_memory)

    def _abandon(self) -> None:
        for microbatch in self._microbatches:
            try:
                microbatch.abandon()
            except Exception as second:  # the first failure is the one to report
                self._failure = self._failure or second
        self._microbatches = []

    def _give_up(self, doing: str) -> None:
        """Leave nothing gathered or armed behind, then raise on all ranks."""
        failure, self._failure = self._failure, None
        self._abandon()
        for unit in self.units:
            unit.wait_reduce()
            unit.free()
        self._in_backward = False
        self.control.raise_if_any_failed(failure, doing)
