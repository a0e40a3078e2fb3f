"""Ends this rank's wait for its device where the device waits for a rank that is gone.

A collective's kernel waits for the other rank's, and this rank's thread waits for the kernel where
no Python runs, such as in ``loss.item()``. Nothing of the backend ends that before its timeout. So
each rank keeps a connection to the next one, which the system closes when a process ends. A thread
of each neighbour sees that, and tells all. Where a rank's own thread does not learn of the loss in
time, the thread here aborts the device's collectives: what waits goes on to an error.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from lightning_cephalo.ranks.crash_report import CrashReport
from lightning_cephalo.ranks.switchboard import Switchboard

# the thread that trains mostly learns of a loss by itself, and says more
_PATIENCE_S = 0.25


class LossWatch:
    """Watches the other ranks of a run for one that ends."""

    def __init__(
        self,
        crash_report: CrashReport,
        switchboard: Switchboard,
        abort: Callable[[], None],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._crash_report, self._switchboard = crash_report, switchboard
        self._abort, self._patience_s = abort, patience_s
        self._noticed, self._stands_down = threading.Event(), threading.Event()
        self._is_over = False
        self._link: socket.socket | None = None

    @classmethod
    def begin(
        cls,
        crash_report: CrashReport,
        abort: Callable[[], None],
        patience_s: float = _PATIENCE_S,
    ) -> LossWatch | None:
        """Start to watch; None if there is one rank."""
        switchboard = crash_report.switchboard
        if switchboard is None:
            return None
        watch = cls(crash_report, switchboard, abort, patience_s)
        switchboard.on_news = watch._noticed.set
        next_rank = (switchboard.rank + 1) % switchboard.world_size
        # a rank that cannot be reached ends the run elsewhere, with a message
        with suppress(OSError):
            watch._link = switchboard.stay_with(next_rank)
            threading.Thread(target=watch._listen, args=(watch._link,), daemon=True).start()
        threading.Thread(target=watch._watch, daemon=True).start()
        return watch

    def stand_down(self) -> None:
        """Abort nothing from now on: this rank's own thread ends the run."""
        self._stands_down.set()

    def end(self) -> None:
        """Stop watching, and let neighbours know that this rank ends well."""
        self._is_over = True
        self._stands_down.set()
        self._switchboard.on_news = None
        self._noticed.set()
        link, self._link = self._link, None
        self._switchboard.say_goodbye(link)
        if link is not None:
            link.close()

    def _listen(self, link: socket.socket) -> None:
        """Wait for the end of the next rank."""
        with suppress(OSError):  # closed here, or by a process that has ended
            if link.recv(1):
                return
        self._noticed.set()

    def _watch(self) -> None:
        while True:
            self._noticed.wait()
            self._noticed.clear()
            if self._is_over:
                return
            # a connection may also be cut between ranks that live
            if self._crash_report.tells_of_loss():
                break
        if not self._stands_down.wait(self._patience_s):
            self._abort()
