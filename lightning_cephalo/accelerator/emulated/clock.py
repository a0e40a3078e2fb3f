"""The virtual clock of an emulated device: when it would have done the work given to it so far."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["CREDIT_LIMIT_S", "ThreadActivity", "VirtualClock"]

CREDIT_LIMIT_S = 0.25
"""How far a starved rank may fall behind its clock and still catch up, in seconds."""

_PAUSE_S = 1e-3
"""Host time between two operators from which on it is worth asking why it passed, in seconds."""


class ThreadActivity:
    """Seconds for which the calling thread ran or waited for a processor, since it started.

    What is missing from the elapsed time is time that the thread spent blocked: in a collective, in
    a sleep, on a file. Without ``/proc`` (macOS) the wait for a processor cannot be told from being
    blocked, and a starved rank then does not catch up.

    Args:
        ran: Seconds for which this thread ran.
        statistics: The kernel's scheduler statistics of this thread: three numbers, of which the
            second is the wait for a processor in nanoseconds.
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
        """Seconds; good to about 10 microseconds, costs about two."""
        # The kernel brings the first field, run time, up to date only at a scheduler tick (4 ms);
        # the thread clock is exact. The second is the wait in the run queue in nanoseconds, which
        # is complete whenever the thread is running to read it.
        queued_ns = 0
        if self._statistics >= 0:
            queued_ns = int(os.pread(self._statistics, 64, 0).split()[1])
        return self._ran() + queued_ns * 1e-9

    def close(self) -> None:
        """Gives the file back; further calls count run time only."""
        if self._statistics >= 0:
            os.close(self._statistics)
            self._statistics = -1


class VirtualClock:
    """Adds up the cost of work, and makes the host wait until a device would have done it.

    The device starts a piece of work when it has done the previous one, or when the host hands it
    over, whichever is later. The host is a stand-in that really does the work, and may be kept from
    it by other processes; that delay is no property of the emulated device. So the clock may lag
    behind real time by up to ``CREDIT_LIMIT_S`` and catch up, but only for time in which the host's
    thread ran or wanted to run. Time in which the thread was *blocked* lets the device finish what
    it was given, and earns nothing: else a fast rank that waits for a slow one in every collective
    would run its next step at the machine's full speed.

    Args:
        now: Time of the host in seconds, monotonic.
        active: Seconds for which this thread ran or waited for a processor; by default a
            :class:`ThreadActivity` of the calling thread.
        sleep: Blocks for so many seconds.

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
        """The host's time, now."""
        return self._now()

    @property
    def ahead_s(self) -> float:
        """Seconds of work that the device still had to do when the host last looked."""
        return self._device_s - self._seen_s

    @property
    def done_s(self) -> float:
        """When the device is done with the work that it has, by the host's time."""
        return self._device_s

    @property
    def blocked_s(self) -> float:
        """Seconds in which the device had nothing left to do because its host was blocked."""
        return self._blocked_s

    def suspect(self) -> None:
        """Says that the thread may have been blocked, however briefly, before the next call."""
        self._suspicious = True

    def advance(self, cost_s: float) -> None:
        """Gives the device work that takes it ``cost_s`` seconds."""
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
        # Oversleeping is the machine's doing, so it stays as credit; only the sleep itself must not
        # be taken for a block later.
        self._seen_s = self._now()
        self._looked_s, self._looked_active_s = self._seen_s, self._active()

    def forfeit(self) -> None:
        """Gives up what the host could still catch up."""
        self._device_s = max(self._device_s, self._seen_s)

    def close(self) -> None:
        """Gives back what the clock reads from; time can still be read."""
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
