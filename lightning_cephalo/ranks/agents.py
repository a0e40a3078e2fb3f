"""Lets the agents of several hosts meet, whatever their clocks say.

torch's agents write the time of their clock into a common state, again and again. Each compares the
times of the others with its own clock. So a host whose clock is some seconds behind counts as lost,
and one that has not run for some seconds takes all others for lost. Here each agent notes by its
own clock when it has seen a time change. It counts at most a moment between two looks, as it may
not have run in between. What others have written stays in the common state as it is.

[Note: torch's state] The state is private to torch; of it only ``last_heartbeats`` and ``deadline``
are used. Only this file uses them; tests/distributed/test_agents.py fails when they change.
"""

from __future__ import annotations

import os
import pickle
import socket
import stat
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

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

BACKEND = "cephalo"
"""The name under which torch's launcher finds :func:`meeting`."""

MET = "met"
"""The key of a function among the launcher's settings, which is called where agents can meet."""

_PORT = 29400  # as torch's
_DEADLINE = "deadline"
# an agent looks every second
_MOST_S = 2.0
_SILENT_S = 15.0


def register() -> None:
    """Let torch's launcher find :func:`meeting`."""
    rendezvous_handler_registry.register(BACKEND, meeting)


def meeting(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return where the agents meet: torch's own place, with times of this host's clock.

    Args:
        parameters: As for torch's backend "c10d".
    """
    backend, store = create_backend(parameters)
    limit_silence(parse_rendezvous_endpoint(parameters.endpoint, _PORT)[1], _SILENT_S)
    met = parameters.get(MET)
    if met is not None:
        met()
    last_call_s = float(parameters.get("last_call_timeout"))
    return create_handler(store, OwnClock(backend, last_call_s), parameters)


def limit_silence(port: int, silent_s: float) -> int:
    """Let the kernel end this process's connections to a port whose host acknowledges nothing.

    A host that loses its power or its network closes no connection. torch's store gives up a wait
    after its timeout, and then waits for an answer to that, without a limit but the kernel's, a
    quarter of an hour. Nobody else has the connection, so it is found among all.

    Args:
        port: Where the connections lead to.
        silent_s: Seconds that what was sent may stay unacknowledged.

    Returns:
        The number of connections. It is 0 on systems other than Linux.
    """
    count = 0
    numbers = os.listdir("/proc/self/fd") if hasattr(socket, "TCP_USER_TIMEOUT") else []
    for number in map(int, numbers):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.type != socket.SOCK_STREAM or connection.getpeername()[1] != port:
                    continue
                limit_ms = round(1000 * silent_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
                count += 1
    return count


def answers(endpoint: str) -> bool:
    """Return whether somebody answers where agents meet.

    Args:
        endpoint: The place, as HOST:PORT.
    """
    with suppress(OSError), socket.create_connection(_place(endpoint), timeout=2.0):
        return True
    return False


def may_meet_at(endpoint: str, until_s: float, look_s: float = 0.2) -> bool:
    """Wait until somebody answers where agents meet, or until this host may be that place.

    Args:
        endpoint: The place, as HOST:PORT.
        until_s: Until when to wait, by the clock ``time.monotonic``.
        look_s: Seconds from one look to the next.

    Returns:
        Whether agents may meet there now.
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
    """Gives each time of the common state as this host's clock has seen it change.

    Args:
        backend: Holds the common state.
        last_call_s: Seconds from the moment when enough agents are there to the deadline.
        clock_s: Seconds that pass on this host, from any moment.
        now: This host's time of day, which torch compares with.
    """

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
        """The name that torch's launcher knows it by."""
        return BACKEND

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the common state, with times of this host, and its token."""
        found = self._backend.get_state()
        return None if found is None else (self._read(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write the common state, unless another agent has; return it as :meth:`get_state` does.

        Args:
            state: The state, with times of this host.
            token: Of the state that was changed.
        """
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
        self._watched_s += min(now_s - self._looked_s, _MOST_S)
        self._looked_s = now_s


def _times_of(state: Any) -> dict[Hashable, datetime]:
    deadline = {} if state.deadline is None else {_DEADLINE: state.deadline}
    return {**state.last_heartbeats, **deadline}


def _with_times(state: Any, times: dict[Hashable, datetime]) -> bytes:
    state.last_heartbeats = {name: times[name] for name in state.last_heartbeats}
    state.deadline = times.get(_DEADLINE)
    return pickle.dumps(state)
