"""Names a rank that is lost or fails while all connect.

Behind the roll call, ranks wait in a store for each other's addresses, and for connections. torch
waits there for the whole timeout, and says which key is missing. It waits without a limit where the
process of the store is stopped, and where gloo connects to a rank that is killed at that moment. So
a thread connects, and the rank's own thread looks meanwhile whether another rank is gone or has
failed.

[Note: what is left behind] Nothing ends a call that hangs in torch. Where a rank is lost, the
thread stays in it, perhaps until the process ends.

[Note: who watches whom] Each rank looks for the next one only, and tells all others what it finds:
a thousand ranks that each look for all would make a million connections a second.

Alternatives considered: a store of our own with limits, which torch asks in place of its own. It
ends the waits for keys, but not gloo's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from lightning_cephalo.accelerator.backends import backend_named
from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.ranks.crash_report import first_lines, tell_why
from lightning_cephalo.ranks.switchboard import Switchboard

_LOOK_S = 1.0
# torch's own limit comes first, with better words
_LATER_S = 3.0
_Answer = TypeVar("_Answer")


class Lookout:
    """Looks, each time it is called, whether another rank is gone or has failed.

    Args:
        switchboard: Knows where the other ranks answer.
    """

    def __init__(self, switchboard: Switchboard) -> None:
        self._switchboard = switchboard
        self._next = (switchboard.rank + 1) % switchboard.world_size
        # a network may refuse all connections between hosts but those of collectives
        self._is_reachable = switchboard.is_beside(self._next)

    def __call__(self) -> None:
        """Look.

        Raises:
            DistNetworkError: If a rank is gone or has failed.
        """
        if self._switchboard.knows_of_this_run():
            raise dist.DistNetworkError("another rank has failed while all connected")
        self._look()

    def _look(self) -> None:
        try:
            self._switchboard.where_is(self._next)
            self._is_reachable = True
        except ConnectionError as error:
            if self._is_reachable:
                message = f"rank {self._next} has ended while all connected"
                raise dist.DistNetworkError(message) from error
        except OSError:
            return


def within(
    limit_s: float, ask: Callable[[], _Answer], watch: Callable[[], None] | None = None
) -> _Answer:
    """Return what a function returns that may never return.

    Args:
        limit_s: How long it may take, in seconds.
        ask: The function. It runs in a thread, which stays where it does not return.
        watch: Called every second meanwhile; ends the wait if it raises.

    Raises:
        DistStoreError: If it takes longer.
        BaseException: What the function raises.
    """
    answers: list[_Answer] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # this process may start no other thread
        return ask()
    end_s = time.monotonic() + limit_s
    while thread.is_alive():
        thread.join(_LOOK_S)
        if thread.is_alive() and watch is not None:
            watch()
        if thread.is_alive() and time.monotonic() > end_s:
            raise dist.DistStoreError(f"nothing has come for {limit_s:g} s")
    if failures:
        raise failures[0]
    return answers[0]


def connect_watched(
    switchboard: Switchboard,
    backend: str,
    connect: Callable[[], _Answer],
    wait: timedelta,
    remedy: str,
) -> _Answer:
    """Connect to the other ranks; if that fails, let all ranks know which one is the cause.

    Args:
        switchboard: Reaches the other ranks.
        backend: Of the group that is made. Over the device, the rank's own thread connects, whose
            device is set; then nobody watches.
        connect: Makes a process group.
        wait: How long torch waits in it, where it has a limit.
        remedy: A sentence with the way out.

    Raises:
        RemoteRankError: If another rank is lost or has failed; it names the rank.
        BaseException: This rank's own failure.
    """
    try:
        if backend_named(backend).runs_on_device:
            return connect()
        return within(wait.total_seconds() + _LATER_S, connect, Lookout(switchboard))
    except BaseException as failure:
        cause = tell_why(switchboard, failure)
        if cause is None:
            raise
        # torch's own error has its C++ stack
        raise RemoteRankError(
            f"{cause}\nThis rank was connecting to the others: {words_of(failure)}. {remedy}"
        ) from None


def words_of(failure: BaseException) -> str:
    """Return torch's words in an error, for a sentence of one's own."""
    return first_lines(failure).rstrip(".")
