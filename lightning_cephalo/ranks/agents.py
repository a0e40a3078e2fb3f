"""Lets the agents of several hosts meet, whatever their clocks say.

torch's agents write the time of their clock into a common state, and compare those of others with
their own. A clock some seconds behind then counts as a lost host. Here each agent notes by its own
clock when it has seen a time change. It counts at most a moment between two looks, as it may not
have run in between. What others have written stays in the common state as it is.

[Note: torch's state] The state is private to torch; of it only ``last_heartbeats`` and ``deadline``
are used. Only this file uses them; tests/distributed/test_agents.py fails when they change.
"""

from __future__ import annotations

import os
import pickle
import socket
import stat
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from lightning_cephalo.ranks.connecting import within
from lightning_cephalo.ranks.refusals import UnlessRefused
from lightning_cephalo.ranks.starter import TOLD

BACKEND = "cephalo"
"""The name under which torch's launcher finds :func:`meeting`."""

MET = "met"
"""Key among the launcher's settings: a function that gets one which ends the endpoint's watch."""

_PORT = 29400  # as torch's
_DEADLINE = "deadline"
# an agent looks every second; one that looks later did not run, and counts this much
_MOST_S, _LATE_S = 2.0, 0.5
_SILENT_S = 15.0
_ANSWER_S = 2.0
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# a key that nobody sets
_NOTHING = "cephalo/nothing"


def register() -> None:
    """Let torch's launcher find :func:`meeting`."""
    rendezvous_handler_registry.register(BACKEND, meeting)


def meeting(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return where the agents meet: torch's own place, with times of this host's clock."""
    backend, store = create_backend(parameters)
    host, port = _place(parameters.endpoint)
    limit_silence(port, _SILENT_S)
    watch = Watch(host, port, _SILENT_S)
    if port:  # else all agents are this one
        watch.begin()
    met = parameters.get(MET)
    if met is not None:
        met(watch.end)
    last_call_s = float(parameters.get("last_call_timeout"))
    handler = create_handler(store, OwnClock(backend, last_call_s), parameters)
    told = os.environ.get(TOLD)
    if told is None:
        return handler
    return cast(RendezvousHandler, UnlessRefused(handler, Path(told), parameters.max_nodes))


def limit_silence(port: int, silent_s: float) -> int:
    """Let the kernel end this process's connections to a port whose host acknowledges nothing.

    A host that loses its power or its network closes no connection, and torch's store then waits
    for the kernel's limit, a quarter of an hour. torch does not show the connection.
    """
    count = 0
    for connection in _connections_to(port):
        limit_ms = round(1000 * silent_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
        count += 1
    return count


def _connections_to(port: int) -> Iterator[socket.socket]:
    """Yield this process's connections to a port, on Linux."""
    numbers = os.listdir("/proc/self/fd") if hasattr(socket, "TCP_USER_TIMEOUT") else []
    for number in map(int, numbers):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                is_tcp = connection.family in _FAMILIES and connection.type == socket.SOCK_STREAM
                if is_tcp and connection.getpeername()[1] == port:
                    yield connection


def answers(endpoint: str) -> bool:
    """Return whether a store answers at HOST:PORT, where agents meet."""
    host, port = _place(endpoint)
    try:
        # not enough: the kernel takes connections for a process that is stopped, too
        with socket.create_connection((host, port), timeout=_ANSWER_S):
            pass
        within(_ANSWER_S, partial(_store_at, host, port))
    except (OSError, dist.DistError):
        _cut(port)
        return False
    return True


def _store_at(host: str, port: int) -> dist.TCPStore:
    wait = timedelta(seconds=_ANSWER_S)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)


def _cut(port: int) -> None:
    """End waits of this process for answers from a port: torch's store has no limit there."""
    for connection in _connections_to(port):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class Watch:
    """Closes all connections to the store in which agents meet, if it is silent for too long.

    The kernel acknowledges what a stopped process is sent, and torch's store waits for its answers
    without a limit. So a connection of its own asks every ``look_s`` seconds.
    """

    def __init__(self, host: str, port: int, silent_s: float, look_s: float = 1.0) -> None:
        self._host, self._port = host, port
        self._silent_s, self._look_s = silent_s, look_s
        self._answers, self._is_over = 0, threading.Event()

    def begin(self) -> None:
        """Watch in two threads, until the store is gone or silent."""
        for work in (self._ask, self._look):
            threading.Thread(target=work, daemon=True, name="cephalo-endpoint").start()

    def end(self) -> None:
        """Watch no longer."""
        self._is_over.set()

    def _ask(self) -> None:
        try:
            store = _store_at(self._host, self._port)
            while not self._is_over.wait(self._look_s):
                store.check([_NOTHING])
                self._answers += 1
        except dist.DistError:  # it is gone, which those that wait there see, too
            pass
        finally:
            self._is_over.set()

    def _look(self) -> None:
        answers, silent_s, looked_s = 0, 0.0, time.monotonic()
        while not self._is_over.wait(self._look_s):
            now_s = time.monotonic()
            silent_s += _counted(now_s - looked_s)
            looked_s = now_s
            if self._answers != answers:
                answers, silent_s = self._answers, 0.0
            elif silent_s > self._silent_s:
                self._is_over.set()
                _cut(self._port)


def may_meet_at(endpoint: str, until_s: float, look_s: float = 0.2) -> bool:
    """Wait until a store answers at HOST:PORT or this host may open one; return if it came so far.

    ``until_s`` is a time of ``time.monotonic``.
    """
    while True:
        if answers(endpoint):
            return True
        # an address of this host: torch's agent opens the store where nobody has
        with suppress(OSError), socket.create_server(_place(endpoint)):
            return True
        if time.monotonic() >= until_s:
            return False
        time.sleep(look_s)


def _place(endpoint: str) -> tuple[str, int]:
    return parse_rendezvous_endpoint(endpoint, _PORT)


class OwnClock(RendezvousBackend):
    """Gives each time of the common state as this host's clock has seen it change."""

    def __init__(
        self,
        backend: RendezvousBackend,
        last_call_s: float,
        clock_s: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._backend, self._last_call_s = backend, last_call_s
        self._clock_s, self._now = clock_s, now
        self._looked_s, self._watched_s = clock_s(), 0.0
        # the time that was written, and when it was seen first
        self._seen: dict[Hashable, tuple[datetime, float]] = {}
        self._given: dict[Hashable, datetime] = {}

    @property
    def name(self) -> str:
        """Name of the rendezvous backend."""
        return BACKEND

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the common state with times of this host, and its token."""
        found = self._backend.get_state()
        return None if found is None else (self._read(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write the common state unless another agent has; return it as :meth:`get_state` does."""
        found = self._backend.set_state(self._written(state), token)
        return None if found is None else (self._read(found[0]), *found[1:])

    def _read(self, written: bytes) -> bytes:
        self._look()
        state, now = pickle.loads(written), self._now()
        times = _times_of(state)
        self._seen = {
            name: old
            if (old := self._seen.get(name)) is not None and old[0] == moment
            else (moment, self._watched_s)
            for name, moment in times.items()
        }
        ages_s = {name: self._watched_s - seen_s for name, (_, seen_s) in self._seen.items()}
        self._given = {name: now - timedelta(seconds=age_s) for name, age_s in ages_s.items()}
        if _DEADLINE in self._given:
            self._given[_DEADLINE] += timedelta(seconds=self._last_call_s)
        return _with_times(state, self._given)

    def _written(self, given: bytes) -> bytes:
        state = pickle.loads(given)
        times = {
            name: self._seen[name][0] if self._given.get(name) == moment else moment
            for name, moment in _times_of(state).items()
        }
        return _with_times(state, times)

    def _look(self) -> None:
        now_s = self._clock_s()
        self._watched_s += _counted(now_s - self._looked_s)
        self._looked_s = now_s


def _counted(passed_s: float) -> float:
    """Return how many of the seconds between two looks count: few, if this process did not run."""
    return passed_s if passed_s <= _MOST_S else _LATE_S


def _times_of(state: Any) -> dict[Hashable, datetime]:
    deadline = {} if state.deadline is None else {_DEADLINE: state.deadline}
    return {**state.last_heartbeats, **deadline}


def _with_times(state: Any, times: dict[Hashable, datetime]) -> bytes:
    state.last_heartbeats = {name: times[name] for name in state.last_heartbeats}
    state.deadline = times.get(_DEADLINE)
    return pickle.dumps(state)
