"""Times a rank's work and its waiting for others in each step, by its device's own clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_cephalo.accelerator.marks import HostMarks, Mark, Marks
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.plan.program import Instruction, Operation


@dataclass(frozen=True)
class Share:
    """How this rank spent the forward and the backward of one step."""

    busy_s: float
    waiting_s: float


Spans = tuple[tuple[Mark, Mark], ...]


class Timing(Observer):
    """Times this rank's work and waiting, step by step."""

    def __init__(self, marks: Marks | None = None) -> None:
        self._marks = marks or HostMarks()
        self._began: Mark | None = None
        self._waits_since: Mark | None = None
        self._work: list[tuple[Mark, Mark]] = []
        self._waits: list[tuple[Mark, Mark]] = []
        self._unread: deque[tuple[Spans, Spans]] = deque()

    def restart(self) -> None:
        """Begin a step, and discard the times since the last finished step."""
        self._work.clear()
        self._waits.clear()
        self._began = None

    def before(self, instruction: Instruction) -> None:
        # a pass begins with its first instruction; the update is neither forward nor backward
        if self._began is None and instruction.operation is not Operation.UPDATE:
            self._began = self._marks.now()

    def after(self, instruction: Instruction) -> None:
        if instruction.operation is Operation.AGREE and self._began is not None:
            self._work.append((self._began, self._marks.now()))
            self._began = None

    def before_wait(self, instruction: Instruction) -> None:
        self._waits_since = self._marks.now()

    def after_wait(self, instruction: Instruction) -> None:
        self._waits.append((self._waits_since, self._marks.now()))

    def finish(self) -> bool:
        """End the step; return whether one was timed since the last call."""
        if not self._work:
            return False
        self._unread.append((tuple(self._work), tuple(self._waits)))
        self.restart()
        return True

    def read(self) -> list[Share]:
        """Return the finished, unread steps whose marks the device has passed, in order."""
        found = []
        while self._unread and self._marks.passed(self._unread[0][0][-1][1]):
            work, waits = self._unread.popleft()
            waiting_s = self._sum_s(waits)
            found.append(Share(max(self._sum_s(work) - waiting_s, 0.0), waiting_s))
        return found

    def _sum_s(self, spans: Sequence[tuple[Mark, Mark]]) -> float:
        return sum(self._marks.between_s(start, end) for start, end in spans)
