"""When jobs run on something that does one at a time, such as a link between device and host."""

from __future__ import annotations

import math


class Lane:
    """Does one job at a time; a job runs as early as there is a gap that holds all of it.

    ::

        lane = Lane()
        lane.place(2.0, 1.0)   # 3.0
        lane.place(0.0, 1.5)   # 1.5: it is done before
        lane.place(0.0, 1.0)   # 4.0

    Jobs are placed in the order in which they are given, each with the time at which it may begin.
    One that has to wait for other work lets later ones go before it, if they are done by then.
    """

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []
        self.busy_s = 0.0

    def place(self, ready_s: float, took_s: float) -> float:
        """Return when a job is done."""
        self.busy_s += took_s
        if not took_s:
            return ready_s
        start_s, index = ready_s, len(self._busy)
        while index and self._busy[index - 1][1] > ready_s:
            index -= 1
        for begun_s, done_s in self._busy[index:]:
            if start_s + took_s <= begun_s:
                break
            start_s = max(start_s, done_s)
            index += 1
        self._busy.insert(index, (start_s, start_s + took_s))
        return start_s + took_s

    @property
    def done_s(self) -> float:
        """When the last job is done; minus infinity before the first."""
        return self._busy[-1][1] if self._busy else -math.inf

    def forget(self, before_s: float) -> None:
        """Forget jobs that were done by then, for which no later one waits."""
        while self._busy and self._busy[0][1] <= before_s:
            self._busy.pop(0)
