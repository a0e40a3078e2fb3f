"""Tells a listener of copies between device and host, and of updates by the host.

Without a listener a copy costs one comparison more. Copies of a device that runs behind the host
are not told: their ends are events of the device, which have no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from lightning_cephalo.accelerator.base import Accelerator, HostWorker


class Told:
    """Copies that a listener is told of."""

    def __init__(self, accelerator: Accelerator, to_host: bool | None = None) -> None:
        self._accelerator, self._to_host = accelerator, to_host
        self._copies = accelerator.copies()
        self._free_s = 0.0

    def start(self, target: Tensor, source: Tensor, after: Sequence[Any] | None = None) -> Any:
        """Start a copy; see :meth:`~.base.Copies.start`."""
        listener = self._accelerator.listener
        if listener is None or not target.numel():
            return self._copies.start(target, source, after)
        begun_s = _begun_s(listener.device_s(), self._accelerator.now_s(), after)
        arrival = self._copies.start(target, source, after)
        end_s = listener.device_s() if arrival is None else arrival
        if isinstance(end_s, float):
            # an emulated link does one copy after the other
            start_s = begun_s if arrival is None else min(max(begun_s, self._free_s), end_s)
            self._free_s = end_s
            listener.copied(target.numel() * target.element_size(), self._to_host, start_s, end_s)
        return arrival

    def start_all(
        self, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Any] | None = None
    ) -> Any:
        """Start copies to targets from sources, one behind the other; return the last one's end."""
        arrival = None
        for target, source in pairs:
            arrival = self.start(target, source, after)
            after = (arrival,)
        return arrival

    def wait(self, arrival: Any) -> None:
        """Make later work run after a copy."""
        self._copies.wait(arrival)

    def finish(self, arrival: Any) -> None:
        """Block until a copy is done."""
        self._copies.finish(arrival)


class Leaving:
    """Copies to the host; the memory that they read on the device is kept until they are done."""

    def __init__(self, copies: Told) -> None:
        self._copies = copies
        self._held: deque[tuple[Any, Any]] = deque()
        self.last: Any = None
        """The end of the last one, which is that of all."""

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Start copies to targets from sources, one behind the other."""
        after = None
        for pair in pairs:
            self.last = self._copies.start(*pair, after)
            after = (self.last,)
            self._held.append((pair, self.last))

    def let_go(self, but: int = 0) -> None:
        """Give memory back, but that of the last copies; later work runs after its copies."""
        while len(self._held) > but:
            _, arrival = self._held.popleft()
            self._copies.wait(arrival)

    def finish(self) -> None:
        """Block until all copies are done."""
        self._copies.finish(self.last)
        self._held.clear()


class ToldWorker:
    """A thread of the host whose updates a listener is told of."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._worker: HostWorker = accelerator.host_worker()
        self._free_s = 0.0

    def submit(
        self,
        work: Callable[[], Any],
        elements: int,
        after: Sequence[Any],
        then: Callable[[Sequence[Any]], list[Any]],
    ) -> Future[list[Any]]:
        """Do some work behind all that was submitted before; see :class:`~.base.HostWorker`."""
        listener = self._accelerator.listener
        if listener is None:
            return self._worker.submit(work, elements, after, then)
        begun_s = _begun_s(listener.device_s(), self._accelerator.now_s(), after)
        running, clock, worked_s = listener.running(), self._accelerator.now_s, []

        def told_work() -> None:
            worked_s.append(clock())
            work()
            worked_s.append(clock())

        def told_then(done: Sequence[Any]) -> list[Any]:
            start_s, end_s = worked_s
            ends_s = [end for end in done if isinstance(end, float)]
            if ends_s:  # of an emulated host, whose threads have a clock of their own
                end_s = max(ends_s)
                start_s = min(max(begun_s, self._free_s), end_s)
                self._free_s = end_s
            listener.updated(running, start_s, end_s)
            return then(done)

        return self._worker.submit(told_work, elements, after, told_then)

    def close(self) -> None:
        """End the thread, when its work is done."""
        self._worker.close()


def _begun_s(device_s: float, now_s: float, after: Sequence[Any] | None) -> float:
    """Return when work may begin: behind the device's own, or behind what it waits for."""
    if after is None:
        return device_s
    return max([now_s, *(each for each in after if isinstance(each, float))])
