"""Tells whether ranks go on that one process has started, and whether that process does.

Lightning's launcher starts the ranks of a node from the process of its first one, in fit(). It
waits for one that ends well before it trains. Nobody ends the others where that first process
itself ends before they are connected. An agent waits for the others where one ends well, so that
one tells the ranks of its host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen

from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.common.files import lives

STARTER = "LIGHTNING_CEPHALO_STARTER"
"""Environment variable of a started rank: the number of the process that has started it."""

TOLD = "LIGHTNING_CEPHALO_TOLD"
"""Environment variable with a folder, in which ranks tell the agent and the ranks of their host."""

_ENDED = "ended"
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
    """Look whether the process that has started this rank goes on, if a rank's process has."""
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


def look_for_started(started: Sequence[Popen[bytes]], first: int, host: str) -> None:
    """Look whether the processes go on that this rank has started, while it waits for them."""
    for rank, process in enumerate(started, first + 1):
        status = process.poll()
        if status is not None:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise RemoteRankError(
                f"Rank {rank} (process {process.pid} on host {host}), which rank {first} has"
                f" started, is gone: the process {how} before it came to the others. Its own output"
                " says more."
            )


def tell_ended() -> None:
    """Tell the other ranks of this host that this one's script has ended well."""
    folder, rank = os.environ.get(TOLD), os.environ.get("RANK")
    if folder is not None and rank is not None:
        with suppress(OSError):  # then the others wait for as long as ranks may take to come
            Path(folder, f"{_ENDED}{rank}").write_text(str(os.getpid()))


def look_for_ended(host: str) -> None:
    """Look whether a rank of this host has ended well, while this one waits for all to come."""
    for path in sorted(Path(os.environ[TOLD]).glob(f"{_ENDED}*")):
        rank, process = path.name.removeprefix(_ENDED), ""
        with suppress(OSError):  # the agent removes them when the ranks end
            process = path.read_text()
        if process:
            raise RemoteRankError(
                f"Rank {rank} (process {process} on host {host}) is gone: its script ended with"
                " status 0 before it came to the others. Let the script reach fit() on every rank."
            )
