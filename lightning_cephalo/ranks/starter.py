"""Tells a rank that another rank's process has started whether that process goes on.

Lightning's launcher starts the ranks of a node from the process of its first one, in fit(). That
process ends all ranks of the node where one of them ends. Nobody ends them where it ends itself
before they are connected: they would wait for its store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.common.files import lives

STARTER = "LIGHTNING_CEPHALO_STARTER"
"""Environment variable of a started rank: the number of the process that has started it."""

_PARENT = os.getppid()


@contextmanager
def named_to_ranks() -> Iterator[None]:
    """Let ranks that this process starts meanwhile know its number."""
    os.environ[STARTER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[STARTER]


def look_for_starter(first: int, host: str) -> None:
    """Look whether the process that has started this rank goes on, if a rank's process has.

    Args:
        first: The rank of that process.
        host: The name of this host.

    Raises:
        RemoteRankError: If it has ended.
    """
    started_by = os.environ.get(STARTER)
    if started_by is None:
        return
    number = int(started_by)
    # until somebody has waited for it, a process that has ended has a number yet
    is_gone = os.getppid() != number if number == _PARENT else not lives(number)
    if is_gone:
        raise RemoteRankError(
            f"Rank {first} (process {number} on host {host}), which has started this rank, is gone:"
            " the process ended without a message, or was killed (the system does so where host"
            " memory is short)."
        )
