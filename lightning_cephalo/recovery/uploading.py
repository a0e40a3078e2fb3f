"""Sends kept steps to the storage, beside training.

All ranks send their pieces of the same step, each in a thread. When all have, rank 0 commits it. A
storage that is away ends no training.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery.drafts import Task
from lightning_cephalo.recovery.storage import Storage
from lightning_cephalo.recovery.store import Piece, Slot

# what a rank says with the exchange of a step
_IDLE, _DUE, _BUSY, _DONE, _FAILED = (float(number) for number in range(5))
# seconds from one failure to the next try, at least
_AGAIN_S = 10.0
# seconds after which an upload counts as hanging, at least; or so many times its distance
_HANGS_S, _HANGS = 600.0, 3.0


class _Phase(Enum):
    IDLE = "nothing is under way"
    SENDING = "each rank sends its piece"
    COMMITTING = "rank 0 commits the step"


class Uploading:
    """Sends a kept step now and then."""

    def __init__(
        self,
        storage: Storage,
        every_s: float,
        control: ControlGroup,
        pinned: Piece | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage, self._every_s, self._control = storage, every_s, control
        self.pinned = pinned
        self.uploads = 0
        self._phase = _Phase.IDLE
        self._task: Task | None = None
        self._failure: Exception | None = None
        self._said = ""
        self._is_due = self._is_cancelled = False
        self._now_s = now_s
        self._next_s = self._phase_began_s = now_s()
        self._has_told_hanging = False

    def note(self) -> float:
        """Return what the exchange of a step carries to all ranks."""
        if self._phase is _Phase.IDLE:
            return _DUE if self._now_s() >= self._next_s else _IDLE
        task = self._task
        if task is not None and not task.is_done:
            return _BUSY
        self._task = None
        if task is not None:
            try:
                task.wait()
            except Exception as error:
                self._failure = error
        return _DONE if self._failure is None else _FAILED

    def learn(self, notes: Sequence[float]) -> None:
        """Read the notes of all ranks."""
        self._is_due = self._phase is _Phase.IDLE and notes[0] == _DUE
        if self._phase is _Phase.IDLE:
            return
        if _BUSY in notes:
            if self._control.rank == 0:
                self._tell_hanging([r for r, note in enumerate(notes) if note == _BUSY])
            return
        if _FAILED in notes:
            self._fail(notes.index(_FAILED) == self._control.rank)
        elif self._phase is _Phase.SENDING:
            self._enter(_Phase.COMMITTING)
            if self._control.rank == 0:
                self._start("committing a step", self._storage.commit, self.pinned, self._must_stop)
        else:
            self._enter(_Phase.IDLE)
            self.uploads += 1
            self._said = ""

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._phase_began_s, self._has_told_hanging = phase, self._now_s(), False

    def _tell_hanging(self, busy: Sequence[int]) -> None:
        """Warn once where a storage neither answers nor fails, as a network's disk may."""
        lasted_s = self._now_s() - self._phase_began_s
        if self._has_told_hanging or lasted_s <= max(_HANGS * self._every_s, _HANGS_S):
            return
        self._has_told_hanging = True
        doing = "send a step to" if self._phase is _Phase.SENDING else "commit a step in"
        warnings.warn(
            f"Rank {', '.join(map(str, busy))} has begun to {doing} storage={self._storage.url!r}"
            f" {lasted_s:.0f} s ago, and has not ended. Training goes on, but no later step is sent"
            " until it has. See whether the storage answers there.",
            stacklevel=4,
        )

    def _fail(self, tells: bool) -> None:
        self._enter(_Phase.IDLE)
        failure, self._failure = self._failure, None
        self._next_s = max(self._next_s, self._now_s() + _AGAIN_S)
        if tells and str(failure) != self._said:
            self._said = str(failure)
            warnings.warn(
                f"Rank {self._control.rank} could not send a step: {failure} Training goes on, and"
                " tries again. If memory of hosts is lost until then, a restart goes back to the"
                " step that was sent before, if any.",
                stacklevel=4,
            )

    def offer(self, piece: Piece | None, slot_of: Callable[[Piece], Slot | None]) -> None:
        """Begin to send a step if it is time to; every rank does, with the same step."""
        if not self._is_due or piece is None:
            return
        self._is_due = False
        self._next_s = self._now_s() + self._every_s
        self._enter(_Phase.SENDING)
        self.pinned = piece
        try:
            slot = slot_of(piece)
            if slot is None:
                raise RecoveryError("the files of kept steps were removed while training runs.")
            sizes, content = slot.content()
            send = self._storage.send
            self._start("sending a step", send, piece, sizes, content, self._must_stop)
        except Exception as error:  # other ranks send, and wait for this one's next note
            self._failure = error

    def _must_stop(self) -> bool:
        return self._is_cancelled

    def _start(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        self._task = Task(name, lambda: function(*args))

    def cancel(self, timeout_s: float) -> bool:
        """Send no more; wait until what is under way has stopped, and return whether it has."""
        self._is_cancelled = True
        if self._task is None:
            return True
        with suppress(Exception):  # nobody needs it any more
            self._task.wait(timeout_s)
        return self._task.is_done
