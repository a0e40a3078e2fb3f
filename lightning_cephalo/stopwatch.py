"""How long a rank works in a step and how long it waits for others, by its device's own clock.

A *mark* is a point in the device's work. On the CPU that is the time at which the host passes it;
on an emulated device, the time at which that will have done what it was given before. On CUDA the
host runs ahead and must not stop to look: a mark is an event on the current stream, and is read
when the device has passed it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_cephalo.emulation import active_device, host_now_s

Mark = Any
"""Seconds of ``host_now_s``, or a CUDA event."""


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
        """A mark before the last :meth:`tie` as seconds of the host's clock."""

    def when_done(self, work: Any, note: Callable[[Mark], None]) -> None:
        """Call ``note`` with a mark of the moment at which a collective is done, in any thread."""


class HostMarks:
    """For a device that has done its work when the host goes on, or for an emulated one.

    The host of an emulated device runs ahead of it until it issues a collective: if it waits for
    another meanwhile, its device works, and does not wait.

    Args:
        now: Seconds of the host's clock; read by several threads.
    """

    def __init__(self, now: Callable[[], float] = host_now_s) -> None:
        self._now = now

    def now(self) -> Mark:
        emulated = active_device()  # ranks are connected before they become emulated devices
        now_s = self._now()
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
            tell(lambda: note(self._now()))
            return
        # gloo runs the callback in the thread that has done the work, as soon as it is done
        work.get_future().add_done_callback(lambda _: note(self._now()))


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


@dataclass(frozen=True)
class Share:
    """What one step's forward and backward were spent on, on this rank.

    Attributes:
        busy_s: With work of its own: computing, copying its slices, summing gradients.
        waiting_s: With waiting for gathers, reduces, and what ranks tell each other.
    """

    busy_s: float
    waiting_s: float


Spans = tuple[tuple[Mark, Mark], ...]


class Stopwatch:
    """Times this rank's work and waiting, step by step.

    Always on: it costs two marks for each collective that is waited for.

    Args:
        marks: Of the device.

    Attributes:
        marks: The same.
        last_waits: Marks of where the last step's waiting began and ended.
        last_work_ended: Mark of where its backward ended.
    """

    def __init__(self, marks: Marks | None = None) -> None:
        self.marks = marks or HostMarks()
        self.last_waits: Spans = ()
        self.last_work_ended: Mark | None = None
        self._work: list[tuple[Mark, Mark]] = []
        self._waits: list[tuple[Mark, Mark]] = []
        self._began: Mark | None = None
        self._unread: deque[tuple[Spans, Spans]] = deque()

    def restart(self) -> None:
        """Begin a step: what was timed since the last one was finished is forgotten."""
        self._work.clear()
        self._waits.clear()
        self._began = None

    def begin(self) -> None:
        """A pass (forward or backward) begins; only waiting inside of one counts."""
        self._began = self.marks.now()

    def end(self) -> None:
        """The pass ends."""
        self._work.append((self._began, self.marks.now()))
        self._began = None

    def wait(self, work: Any) -> None:
        """Wait for a collective."""
        if self._began is None:
            work.wait()
            return
        start = self.marks.now()
        work.wait()
        self._waits.append((start, self.marks.now()))

    def finish(self) -> bool:
        """End the step; returns whether one was timed since the last call."""
        if not self._work:
            return False
        work, self.last_waits = tuple(self._work), tuple(self._waits)
        self.last_work_ended = work[-1][1]
        self._unread.append((work, self.last_waits))
        self.restart()
        return True

    def read(self) -> list[Share]:
        """The steps finished and not read before whose marks the device has passed, in order."""
        found = []
        while self._unread and self.marks.passed(self._unread[0][0][-1][1]):
            work, waits = self._unread.popleft()
            waiting_s = self._sum_s(waits)
            found.append(Share(max(self._sum_s(work) - waiting_s, 0.0), waiting_s))
        return found

    def _sum_s(self, spans: Sequence[tuple[Mark, Mark]]) -> float:
        return sum(self.marks.between_s(start, end) for start, end in spans)
