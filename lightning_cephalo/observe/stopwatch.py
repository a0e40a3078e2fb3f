"""How long a rank works in a step and how long it waits for others, by its device's own clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_cephalo.accelerator.marks import HostMarks, Mark, Marks


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
        marks: Of the device; None: of the host.

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
