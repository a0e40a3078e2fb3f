"""Tells whether other programs took the processors while ranks that compute on them were measured.

Speeds that are measured beside other programs are wrong by more than a few per cent: a rank that is
three times as fast may look 1.6 times as fast. Repetitions do not show it, as they are disturbed as
well. Two figures of the kernel do. Threads of a rank wait for a processor although they could run,
and processors of its host are busy with what is none of the ranks'. Either alone is harmless. Ranks
that share too few processors wait for each other, in training as well. And other programs may run
on processors that no rank wants.

Source: Linux, Documentation/scheduler/sched-stats.rst and filesystems/proc.rst (``/proc/stat``).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# Of the time in which a rank's threads could run; and processors busy with other programs.
_WAITED, _OTHERS = 0.15, 0.3
# Ticks of the kernel are 0.01 s: shorter windows say nothing.
_SHORTEST_S = 0.1


@dataclass(frozen=True)
class ProcessorUse:
    """The use of processors by a rank and by its whole host while the rank was measured.

    Attributes:
        host: The host's name.
        wall_s: Seconds of measuring.
        ran_s: Seconds for which the rank's threads ran, summed over threads.
        waited_s: Seconds for which they could have run, but waited for a processor.
        busy_s: Seconds for which the host's processors were busy, summed over processors.
    """

    host: str
    wall_s: float
    ran_s: float
    waited_s: float
    busy_s: float

    @property
    def waited(self) -> float:
        """The part of the time in which the rank's threads could run that they waited for."""
        wanted_s = self.ran_s + self.waited_s
        return self.waited_s / wanted_s if wanted_s else 0.0


class ProcessorWatch:
    """Reads the kernel's figures before and after a measurement.

    ::

        watch = ProcessorWatch()
        ...                       # measure
        use = watch.use()         # ProcessorUse(host='na', wall_s=2.1, ran_s=1.9, ...)

    Args:
        proc: Where the kernel's files are.
    """

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._wall_s, self._ran_s = time.monotonic(), time.process_time()
        self._waited_s, self._busy_s = self._waits_s(), self._host_s()

    def use(self) -> ProcessorUse | None:
        """Return the use since this object was made; None where the kernel does not tell it."""
        busy_s, waits_s = self._host_s(), self._waits_s()
        if busy_s is None or self._busy_s is None or not waits_s:
            return None
        return ProcessorUse(
            host=socket.gethostname(),
            wall_s=time.monotonic() - self._wall_s,
            ran_s=time.process_time() - self._ran_s,
            waited_s=sum(end - self._waited_s.get(at, 0.0) for at, end in waits_s.items()),
            busy_s=busy_s - self._busy_s,
        )

    def _waits_s(self) -> dict[str, float]:
        """Return the seconds that each thread of this process has waited for a processor."""
        found = {}
        for thread in (self._proc / "self" / "task").glob("*"):
            try:
                found[thread.name] = int((thread / "schedstat").read_text().split()[1]) * 1e-9
            except (OSError, IndexError):  # a thread that has just ended
                continue
        return found

    def _host_s(self) -> float | None:
        """Return the seconds for which the host's processors have been busy."""
        try:
            first = (self._proc / "stat").read_text().splitlines()[0].split()[1:]
        except (OSError, IndexError):
            return None
        user, nice, system, _, _, interrupt, soft_interrupt, *rest = map(int, first)
        stolen = rest[0] if rest else 0  # by other virtual machines
        ticks = user + nice + system + interrupt + soft_interrupt + stolen
        return ticks / os.sysconf("SC_CLK_TCK")


def disturbance(uses: Sequence[ProcessorUse | None]) -> str:
    """Return what disturbed the measurement of ranks, for the user; empty: nothing did.

    Args:
        uses: Of every rank; None: not known, or the rank does not compute on processors.
    """
    known = [(rank, use) for rank, use in enumerate(uses) if use is not None]
    said = []
    for host in dict.fromkeys(use.host for _, use in known):
        own = [(rank, use) for rank, use in known if use.host == host]
        wall_s = max(use.wall_s for _, use in own)
        if wall_s < _SHORTEST_S:
            continue
        busy_s = max(use.busy_s for _, use in own)
        others = (busy_s - sum(use.ran_s for _, use in own)) / wall_s
        rank, use = max(own, key=lambda each: each[1].waited)
        if others >= _OTHERS and use.waited >= _WAITED:
            said.append(
                f"Other programs used {others:.1f} processors of {host!r} while ranks were"
                f" measured: of the time in which rank {rank} could compute, it waited"
                f" {use.waited:.0%} for a processor."
            )
    if not said:
        return ""
    return " ".join(
        [
            *said,
            "The measured speeds may be far off, and with them the plan. Measure again on a quiet"
            " machine with CephaloStrategy(remeasure=True), or give a plan.",
        ]
    )
