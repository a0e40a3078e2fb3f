"""Copies a piece into its file while the next step computes.

Shards and optimizer state change in an update only. So training waits for the thread behind the
next forward. The file gets its header only then, and only if no tensor has been written to in
between, such as by a hook: each tensor counts its writes. A copy is never torn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.recovery.store import Piece, Slot


class Task:
    """Runs a function in a thread."""

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        self._function = function
        self._error: BaseException | None = None
        # a daemon: one that waits for a host that is lost must not keep the process
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether the function has returned or failed."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the function has returned."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._thread.name} has not ended within {timeout_s:g} s")
        if self._error is not None:
            raise self._error


class Draft:
    """A piece that a thread writes until :meth:`finish`, which comes behind the next forward."""

    def __init__(
        self,
        slot: Slot,
        piece: Piece,
        meta: bytes,
        tensors: Sequence[Tensor],
        accelerator: Accelerator,
    ) -> None:
        self.slot, self.piece = slot, piece
        self._probe = Probe(tensors)
        self.took_s = 0.0
        behind = accelerator.end_of_work()

        def copy() -> None:
            if behind is not None:
                behind.synchronize()
            begin_s = time.thread_time()
            with accelerator.own_queue():
                slot.fill(meta, tensors)
            self.took_s = time.thread_time() - begin_s

        self._task = Task("keeping a step", copy)

    def finish(self) -> bool:
        """Wait for the copy, and return whether it is whole: no tensor has changed meanwhile."""
        self._task.wait()
        is_whole = not self._probe.is_written
        self._probe = Probe(())
        if is_whole:
            self.slot.finish(self.piece)
        return is_whole


class Probe:
    """Tells whether tensors are written to."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._versions = [tensor._version for tensor in tensors]

    @property
    def is_written(self) -> bool:
        """Whether any has been written to since then."""
        return [tensor._version for tensor in self._tensors] != self._versions
