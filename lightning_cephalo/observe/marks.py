"""Marks: points in a device's work, by its own clock.

A *mark* is a point in the device's work. On the CPU that is the time at which the host passes it;
on an emulated device, the time at which that will have done what it was given before. On CUDA the
host runs ahead and must not stop to look: a mark is an event on the current stream, and is read
when the device has passed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lightning_cephalo.accelerator.emulated import active_device

Mark = Any
"""Seconds of ``time.perf_counter``, or a CUDA event."""


class Marks(Protocol):
    """Makes and reads marks."""

    def now(self) -> Mark:
        """Mark where the device's work is."""

    def passed(self, mark: Mark) -> bool:
        """Whether the device has come to the mark, so that it can be read."""

    def between_s(self, start: Mark, end: Mark) -> float:
        """Seconds from one mark to another."""

    def tie(self) -> None:
        """Tie marks to the host's clock; stops until the device has done its work."""

    def host_s(self, mark: Mark) -> float:
        """A mark before the last :meth:`tie` as seconds of the host's ``time.perf_counter``."""

    def when_done(self, work: Any, note: Callable[[Mark], None]) -> None:
        """Call ``note`` with a mark of the moment at which a collective is done, in any thread."""


class HostMarks:
    """For a device that has done its work when the host goes on, or for an emulated one.

    The host of an emulated device runs ahead of it until it issues a collective: if it waits for
    another meanwhile, its device works, and does not wait.
    """

    def now(self) -> Mark:
        emulated = active_device()  # ranks are connected before they become emulated devices
        now_s = time.perf_counter()
        return now_s if emulated is None else max(now_s, emulated.done_s)

    def passed(self, mark: Mark) -> bool:
        return True

    def between_s(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def tie(self) -> None:
        pass

    def host_s(self, mark: Mark) -> float:
        return float(mark)

    def when_done(self, work: Any, note: Callable[[Mark], None]) -> None:
        tell = getattr(work, "when_done", None)  # a Transfer's, which has no future
        if tell is not None:
            tell(lambda: note(time.perf_counter()))
            return
        # gloo runs the callback in the thread that has done the work, as soon as it is done
        work.get_future().add_done_callback(lambda _: note(time.perf_counter()))


class CudaMarks:
    """Events on the current stream.

    Args:
        nccl: Whether collectives run on a stream of the device (NCCL), not on the host (gloo).
    """

    def __init__(self, nccl: bool) -> None:
        self._nccl = nccl
        self._aside: Any = None
        self._tied: tuple[Any, float] | None = None

    def now(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Mark) -> bool:
        return bool(mark.query())

    def between_s(self, start: Mark, end: Mark) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def tie(self) -> None:
        event = self.now()
        event.synchronize()
        # not once for all: the time between events is a float32 of milliseconds
        self._tied = event, time.perf_counter()

    def host_s(self, mark: Mark) -> float:
        if isinstance(mark, float):  # made on the host, by a collective of gloo
            return mark
        assert self._tied is not None
        event, at_s = self._tied
        return at_s - self.between_s(mark, event)

    def when_done(self, work: Any, note: Callable[[Mark], None]) -> None:
        if not self._nccl:
            work.get_future().add_done_callback(lambda _: note(time.perf_counter()))
            return
        # waiting makes the current stream wait, not the host: a stream that does nothing else
        # passes the event as soon as the collective is done
        self._aside = self._aside or torch.cuda.Stream()
        with torch.cuda.stream(self._aside):
            work.wait()
            note(self.now())


def marks_of(device: torch.device, backend: str | None) -> Marks:
    """Marks of a device whose collectives run on ``backend``."""
    return CudaMarks(backend == "nccl") if device.type == "cuda" else HostMarks()
