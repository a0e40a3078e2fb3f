"""Lets the waiting processes of all ranks agree on whether training is forked again.

A round lasts from one fork of all ranks (:mod:`.staying`) to the next loss of one. The waiting
processes speak in a store of the agent, which outlives all ranks. Each says that its fork was
killed, if it was, and that it has ended. All fork again when all forks have ended. Whoever cannot
agree ends, and the agent starts all ranks again: torch's agent ends all as soon as one ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist

STORE = "LIGHTNING_CEPHALO_STAY"
"""Environment variable with the address of the agent's store, HOST:PORT."""
STAYED = "LIGHTNING_CEPHALO_STAYED"
"""Environment variable of a fork: how many rounds were before it, since the agent's last start."""

# seconds to hear that a fork was killed, until all have ended, and between two looks
_HEAR_S, _END_S, _LOOK_S = 5.0, 20.0, 0.02
_ANSWER = timedelta(seconds=10)


def serve() -> dist.Store:
    """Open the store of this process, the agent, for the ranks that it starts."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ[STORE] = f"localhost:{store.port}"
    return store


class Rounds:
    """Speaks for one rank.

    Args:
        address: Where the agent's store is, HOST:PORT.
        world_size: Number of ranks.
        start: Counts the agent's starts of the ranks.
        most: Forks that may be lost over all starts, before only the agent starts ranks again.
    """

    def __init__(self, address: str, world_size: int, start: int, most: int) -> None:
        self._address = address
        self._world_size, self._start, self._most = world_size, start, most

    @cached_property
    def _store(self) -> dist.Store:
        # opened in the process that uses it: a connection is of no use behind a fork
        host, _, port = self._address.rpartition(":")
        return dist.TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=_ANSWER
        )

    def tell_over(self) -> None:
        """Say that ``fit()`` has ended well on this rank: nothing is forked any more."""
        with suppress(dist.DistError):  # without the agent nothing is forked
            self._store.set(self._over, "")

    def is_lost(self, number: int) -> bool:
        """Return whether a fork was killed, and ``fit()`` has ended on no rank.

        Args:
            number: Of the round.
        """
        with suppress(dist.DistError):  # without the agent nothing is forked
            return self._has(self._key(number, "lost")) and not self._has(self._over)
        return False

    def agree(self, number: int, was_killed: bool, must_end: Callable[[], bool]) -> bool:
        """Wait until all forks of a round have ended, and return whether there is another round.

        Args:
            number: Of the round.
            was_killed: Whether this rank's fork was.
            must_end: Returns whether this process was asked to end.
        """
        lost, ended = self._key(number, "lost"), self._key(number, "ended")

        def wait(seconds: float, until: Callable[[], bool]) -> bool:
            end_s = time.monotonic() + seconds
            while not until():
                if must_end() or time.monotonic() > end_s or self._has(self._over):
                    return False
                time.sleep(_LOOK_S)
            return not must_end() and not self._has(self._over)

        with suppress(dist.DistError):
            if was_killed:
                if self._store.add("stay/losses", 1) > self._most:
                    return False
                self._store.set(lost, "")
            if not wait(_HEAR_S, lambda: self._has(lost)):
                return False
            self._store.add(ended, 1)
            return wait(_END_S, lambda: self._store.add(ended, 0) >= self._world_size)
        return False

    @property
    def _over(self) -> str:
        return f"stay/{self._start}/over"

    def _key(self, number: int, name: str) -> str:
        return f"stay/{self._start}/{number}/{name}"

    def _has(self, key: str) -> bool:
        found: bool = self._store.check([key])
        return found
