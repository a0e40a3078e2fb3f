"""The virtual clock of an emulated device: the time at which its work so far would be done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

CREDIT_LIMIT_S = 0.25
"""How far a starved rank may fall behind its clock and still catch up, in seconds."""

_PAUSE_S = 1e-3
"""Host time between two operators, in seconds, from which the clock checks for blocked time."""


class ThreadActivity:
    """Measures the seconds for which the calling thread ran or waited for a processor so far.

    The rest of the elapsed time is time that the thread spent blocked: in a collective, in a sleep,
    on a file. Without ``/proc`` (macOS) waiting for a processor looks like being blocked. A starved
    rank then does not catch up.
    """

    def __init__(
        self,
        ran: Callable[[], float] = time.thread_time,
        statistics: str | os.PathLike[str] = "/proc/thread-self/schedstat",
    ) -> None:
        self._ran = ran
        try:
            self._statistics = os.open(statistics, os.O_RDONLY)
        except OSError:
            self._statistics = -1

    def __call__(self) -> float:
        """Returns the seconds, exact to about 10 microseconds; a call costs about two."""
        # The kernel updates the first field, run time, only at a scheduler tick (4 ms); the thread
        # clock is exact. The second field, the wait in the run queue in nanoseconds, is complete
        # whenever the thread runs to read it.
        queued_ns = 0
        if self._statistics >= 0:
            queued_ns = int(os.pread(self._statistics, 64, 0).split()[1])
        return self._ran() + queued_ns * 1e-9

    def close(self) -> None:
        """Closes the file; later calls count run time only."""
        if self._statistics >= 0:
            os.close(self._statistics)
            self._statistics = -1


class VirtualClock:
    """Adds up the cost of work, and makes the host wait until a device would have done it.

    The device starts a piece of work when it has done the previous one, or when the host submits
    it, whichever is later. The host really does the work, and other processes may delay it. That
    delay is not a property of the emulated device. So the clock may lag behind real time by up to
    ``CREDIT_LIMIT_S`` and catch up. Only time in which the host's thread ran or wanted to run earns
    this credit. While the thread is *blocked*, the device finishes its work but earns no credit.
    Otherwise a fast rank that waits for a slow rank in every collective would run its next step at
    the machine's full speed.

    Source: the credit rule and its limits were measured on two cores with two to six ranks.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        active: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now = now
        self._active = ThreadActivity() if active is None else active
        self._sleep = sleep
        self._suspicious = False
        self._blocked_s = 0.0
        self._seen_s = self._device_s = now()
        self._looked_s, self._looked_active_s = self._seen_s, self._active()

    @property
    def now_s(self) -> float:
        """The host's current time."""
        return self._now()

    @property
    def ahead_s(self) -> float:
        """Seconds of work that the device still had to do at the host's last check."""
        return self._device_s - self._seen_s

    @property
    def done_s(self) -> float:
        """The host's time at which the device is done with its work."""
        return self._device_s

    @property
    def blocked_s(self) -> float:
        """Seconds in which the device was idle because its host was blocked."""
        return self._blocked_s

    def suspect(self) -> None:
        """Notes that the thread may be blocked, even briefly, before the next call."""
        self._suspicious = True

    def advance(self, cost_s: float) -> None:
        """Gives the device ``cost_s`` seconds of work."""
        self._settle()
        self._device_s += cost_s

    def wait(self) -> None:
        """Blocks until the device has done all of its work."""
        self._settle()
        remaining_s = self.ahead_s
        if remaining_s <= 0:
            return
        while remaining_s > 0:
            self._sleep(remaining_s)
            remaining_s = self._device_s - self._now()
        # The machine causes oversleeping, so it stays as credit. But the sleep itself must not
        # count as blocked time later.
        self._seen_s = self._now()
        self._looked_s, self._looked_active_s = self._seen_s, self._active()

    def delay_until(self, moment_s: float) -> None:
        """Lets the device start its next work no earlier; the host does not wait."""
        self._settle()
        self._device_s = max(self._device_s, moment_s)

    def sleep_until(self, moment_s: float) -> None:
        """Blocks the host until a moment that has nothing to do with the device's work."""
        while (remaining_s := moment_s - self._now()) > 0:
            self.suspect()
            self._sleep(remaining_s)

    def forfeit(self) -> None:
        """Drops the credit that the host could still catch up."""
        self._device_s = max(self._device_s, self._seen_s)

    def close(self) -> None:
        """Closes the file that the clock reads; time can still be read."""
        if isinstance(self._active, ThreadActivity):
            self._active.close()

    def _settle(self) -> None:
        now_s = self._now()
        gap_s = now_s - self._seen_s
        blocked_s = 0.0
        if gap_s > _PAUSE_S or self._suspicious:
            active_s = self._active()
            blocked_s = (now_s - self._looked_s) - (active_s - self._looked_active_s)
            blocked_s = min(max(blocked_s, 0.0), gap_s)
            self._looked_s, self._looked_active_s = now_s, active_s
            self._suspicious = False
        ahead_s = self._device_s - self._seen_s
        self._blocked_s += max(0.0, blocked_s - max(ahead_s, 0.0))
        ahead_s = max(ahead_s - blocked_s, min(ahead_s, 0.0)) - (gap_s - blocked_s)
        self._device_s = now_s + max(ahead_s, -CREDIT_LIMIT_S)
        self._seen_s = now_s
