"""Marks points in a device's work and measures the time between them.

On the CPU a *mark* is the time at which the host passes it. On an emulated device it is the time at
which the device will have done all earlier work. On other devices the host queues kernels, runs
ahead and must not wait: a mark is an event on the current stream, read after the device has passed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Mark = Any
"""Seconds of the host's clock, or an event of the device."""


class Marks(Protocol):
    """Makes and reads marks."""

    def now(self) -> Mark:
        """Mark the current point in the device's work."""

    def passed(self, mark: Mark) -> bool:
        """Return whether the device has passed the mark, so that it can be read."""

    def between_s(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks."""

    def tie(self) -> None:
        """Relate marks to the host's clock; block until the device has done its work."""

    def host_s(self, mark: Mark) -> float:
        """Return a mark made before the last :meth:`tie` as seconds of the host's clock."""

    def when_done(self, work: Any, note: Callable[[Mark], None]) -> None:
        """Call ``note``, in any thread, with a mark of the time at which a collective is done."""


def _when_done_on_host(work: Any, note: Callable[[], None]) -> None:
    tell = getattr(work, "when_done", None)  # this package's own handles have this and no future
    if tell is not None:
        tell(note)
        return
    # gloo runs the callback as soon as the work is done, in the thread that has done it
    work.get_future().add_done_callback(lambda _: note())


def _in_the_past() -> float:
    return -math.inf


class HostMarks:
    """Marks of a device whose kernels run on the host, or of an emulated device.

    The host of an emulated device runs ahead until it issues a collective. If the host waits for an
    earlier collective in the meantime, the emulated device keeps working and does not wait.

    Args:
        now_s: Seconds of the host's clock; read by several threads.
        done_s: The time at which the device will have done its work, by the same clock.
    """

    def __init__(
        self,
        now_s: Callable[[], float] = time.perf_counter,
        done_s: Callable[[], float] = _in_the_past,
    ) -> None:
        self._now_s = now_s
        self._done_s = done_s

    def now(self) -> Mark:
        return max(self._now_s(), self._done_s())

    def passed(self, mark: Mark) -> bool:
        return True

    def between_s(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def tie(self) -> None:
        pass

    def host_s(self, mark: Mark) -> float:
        return float(mark)

    def when_done(self, work: Any, note: Callable[[Mark], None]) -> None:
        _when_done_on_host(work, lambda: note(self._now_s()))


class StreamMarks:
    """Marks that are events on the current stream."""

    def __init__(
        self,
        device: torch.device,
        collectives_on_device: bool,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = device
        self._collectives_on_device = collectives_on_device
        self._now_s = now_s
        self._aside: torch.Stream | None = None
        self._tied: tuple[torch.Event, float] | None = None

    def now(self) -> Mark:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Mark) -> bool:
        return bool(mark.query())

    def between_s(self, start: Mark, end: Mark) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def tie(self) -> None:
        event = self.now()
        event.synchronize()
        # again at every call: the time between events is a float32 of milliseconds
        self._tied = event, self._now_s()

    def host_s(self, mark: Mark) -> float:
        if isinstance(mark, float):  # made on the host, by a collective of gloo
            return mark
        assert self._tied is not None
        event, at_s = self._tied
        return at_s - self.between_s(mark, event)

    def when_done(self, work: Any, note: Callable[[Mark], None]) -> None:
        if not self._collectives_on_device:
            _when_done_on_host(work, lambda: note(self._now_s()))
            return
        # work.wait() makes the current stream wait, not the host: a stream without other work
        # passes the event as soon as the collective is done
        self._aside = self._aside or torch.Stream(self._device)
        with self._aside:
            work.wait()
            note(self.now())
