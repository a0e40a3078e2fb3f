"""Names a rank that is lost or fails while all meet and connect.

In the roll call, a rank watches those that have come, and those of an earlier run. Behind it, torch
may wait without a limit: for a store whose process is stopped, and in gloo and NCCL for a rank that
is lost at that moment. So a thread connects, and the rank's own thread looks meanwhile whether
another rank is gone or has failed. Nothing ends a call that hangs in torch: the thread stays in it.

Each rank looks for the next one only, and tells all others what it finds: a thousand ranks that
each look for all would make a million connections a second. A store of our own with limits would
end the waits for keys, but not gloo's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_cephalo.accelerator.backends import backend_named
from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.ranks.crash_report import first_lines, seen, tell_why
from lightning_cephalo.ranks.switchboard import Process, Switchboard

_LOOK_S = 1.0
# torch's own limit comes first, with better words
_LATER_S = 3.0
_Answer = TypeVar("_Answer")


class Lookout:
    """Raises DistNetworkError when it is called, if another rank is gone or has failed."""

    def __init__(self, switchboard: Switchboard) -> None:
        self._switchboard = switchboard
        # a network may refuse all connections between hosts but those of collectives
        self._reachable: set[int] = set()

    def __call__(self, ranks: Sequence[int] | None = None) -> None:
        board = self._switchboard
        if board.knows_of_this_run():
            raise dist.DistNetworkError("another rank has failed while all connected")
        watched = [(board.rank + 1) % board.world_size] if ranks is None else ranks
        for rank, answer in board.look(watched).items():
            if not isinstance(answer, OSError):
                self._reachable.add(rank)
            elif isinstance(answer, ConnectionError) and (
                rank in self._reachable or board.is_beside(rank)
            ):
                raise dist.DistNetworkError(
                    f"rank {rank} has ended while all connected"
                ) from answer


@dataclass(frozen=True)
class Watch:
    """Watches ranks that this one has heard from, while it waits for all to come.

    ``where`` and ``name_of`` tell of ranks of an earlier run.
    """

    own: Switchboard
    # raises RemoteRankError where a rank is gone that is known otherwise, as from an earlier run
    others: Callable[[], None] | None = None
    where: Callable[[Sequence[int]], str] = field(default=lambda ranks: "")
    name_of: Callable[[int], str] | None = None
    _lookout: Lookout = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lookout", Lookout(self.own))

    def look(self, come: Mapping[int, Process]) -> None:
        """Raise RemoteRankError if a rank is gone that has come, or that is known otherwise."""
        if self.others is not None:
            self.others()
        self._note(come)
        try:
            self._lookout(list(come))
        except dist.DistNetworkError:
            heard = self.own.heard()  # of a rank that knows more: it may have met all others
            raise RemoteRankError(heard[0] if heard else seen(self.own, self.own.look())) from None

    def that_answer(self, come: Mapping[int, Process]) -> list[int]:
        """Return which of the ranks that have come answer now."""
        self._note(come)
        answers = self.own.look(list(come))
        return [rank for rank, answer in answers.items() if not isinstance(answer, OSError)]

    def _note(self, come: Mapping[int, Process]) -> None:
        for rank, process in come.items():
            self.own.has_come(rank, process)


def within(
    limit_s: float, ask: Callable[[], _Answer], watch: Callable[[], None] | None = None
) -> _Answer:
    """Return what a function returns that may never return."""
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
    """Connect to the other ranks; if that fails, let all ranks know which one is the cause."""
    try:
        if backend_named(backend).runs_on_device:
            connect = _on_this_device(connect)
        return within(wait.total_seconds() + _LATER_S, connect, Lookout(switchboard))
    except BaseException as failure:
        cause = tell_why(switchboard, failure)
        if cause is None:
            raise
        # torch's own error has its C++ stack
        raise RemoteRankError(
            f"{cause}\nThis rank was connecting to the others: {words_of(failure)}. {remedy}"
        ) from None


def _on_this_device(connect: Callable[[], _Answer]) -> Callable[[], _Answer]:
    """Return a function that connects with this thread's device, in any thread."""
    if not torch.accelerator.is_available():  # a backend alone is no device
        return connect
    index = torch.accelerator.current_device_index()

    def on_this_device() -> _Answer:
        torch.accelerator.set_device_index(index)
        return connect()

    return on_this_device


def words_of(failure: BaseException) -> str:
    """Return torch's words in an error, for a sentence of one's own."""
    return first_lines(failure).rstrip(".")
