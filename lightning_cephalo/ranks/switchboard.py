"""Lets ranks ask each other where they are, and leave messages, while collectives may be stuck.

Every rank has a small TCP server in a thread. Its answers do not depend on what the rank's own
thread does. A rank that does not answer has ended, or its process is stopped.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import socketserver
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.ranks.whereabouts import Whereabouts, whereabouts

_MOST_BYTES = 1 << 20
_ANSWER_S = 2.0
_MOST_THREADS = 64
# of a run; numbers of meetings go on from run to run
_MOST_MEETINGS = 1 << 32
# How often a server looks whether it is to stop; where systems allow it, it is woken before.
_LOOKS_S = 0.1
_GOODBYE = b"{}\n"


@dataclass(frozen=True)
class Process:
    """The process of a rank, and where it answers."""

    host: str
    address: str
    port: int
    number: int
    place: str

    @classmethod
    def here(cls, place: str, port: int = 0) -> Process:
        """Return this process."""
        return cls(socket.gethostname(), _own_host(), port, os.getpid(), place)

    def __str__(self) -> str:
        # hosts may have equal names, such as containers
        host = self.host if self.address == self.host else f"{self.host}, {self.address}"
        return f"process {self.number} on host {host}"


class Switchboard:
    """Knows the servers of all ranks, and runs this rank's."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._thread = threading.get_ident()
        self._meetings = _Meetings(world_size)
        self._failures = _Failures(world_size)
        self._processes: dict[int, Process] = {}
        self._run = 0
        # the number of the run that each message is of
        self._heard: list[tuple[int, str]] = []
        # closed to tell others, where this rank fails as it has no free file number
        self._spare = socket.socket()
        self._met = 0
        self.begun: Callable[[], list[int] | None] | None = None
        self.on_news: Callable[[], None] | None = None
        self._server = _Server(weakref.WeakMethod(self._answer))
        threading.Thread(target=self._server.serve_forever, args=(_LOOKS_S,), daemon=True).start()
        self.close = weakref.finalize(self, _stop, self._server, self._spare, os.getpid())

    @classmethod
    def create(cls, control: ControlGroup, nodes: Sequence[int]) -> Switchboard | None:
        """Start the servers of all ranks; collective; None if there is one rank."""
        if control.world_size == 1:
            return None
        made = cls(control.rank, control.world_size)
        made.know(control.gather(made.process(str(nodes[control.rank]))))
        return made

    def process(self, place: str) -> Process:
        """Return this process, with the port of this rank's server."""
        return Process.here(place, int(self._server.server_address[1]))

    def know(self, processes: Sequence[Process]) -> None:
        """Note the processes of all ranks, in rank order; they can be reached from now on."""
        for rank, process in enumerate(processes):
            self.has_come(rank, process)

    def has_come(self, rank: int, process: Process) -> None:
        """Note the process of one rank; it can be reached as soon as this rank's own is noted."""
        self._processes[rank] = process

    def begin_run(self) -> None:
        """Count another run over the same ranks, in this thread."""
        self._run += 1
        self._thread = threading.get_ident()

    def name_of(self, rank: int) -> str:
        """Return a rank with its process and host: "Rank 1 (process 4711 on host na)"."""
        process = self._processes.get(rank)
        return f"Rank {rank}" if process is None else f"Rank {rank} ({process})"

    def is_beside(self, rank: int) -> bool:
        """Whether a rank is on this rank's node."""
        return self._processes[rank].place == self._processes[self.rank].place

    def where_is(self, rank: int) -> Whereabouts | None:
        """Return where a rank is; None if it is stopped."""
        try:
            return self._whereabouts_of(rank)
        except TimeoutError:
            return None

    def look(self, ranks: Iterable[int] | None = None) -> dict[int, Whereabouts | OSError]:
        """Ask other ranks at the same time where they are."""

        def ask(rank: int) -> Whereabouts | OSError:
            try:
                return self._whereabouts_of(rank)
            except OSError as failure:
                return failure

        others = self._others(ranks)
        return dict(zip(others, _at_the_same_time([partial(ask, r) for r in others]), strict=True))

    def _whereabouts_of(self, rank: int) -> Whereabouts:
        return Whereabouts(**self._ask(rank, {"ask": "whereabouts"}, _ANSWER_S))

    def _others(self, ranks: Iterable[int] | None) -> list[int]:
        return [r for r in (sorted(self._processes) if ranks is None else ranks) if r != self.rank]

    def tell(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Leave a message with other ranks, those that can be reached, and end all meetings."""
        self._meetings.end()

        def tell(rank: int) -> bool:
            """Return whether there was a file number for it."""
            try:
                self._ask(rank, {"ask": "tell", "of": [self._run, message]}, _ANSWER_S)
            except OSError as failure:  # or that rank has ended or is stopped
                return failure.errno not in (errno.EMFILE, errno.ENFILE)
            return True

        others = self._others(ranks)
        could = _at_the_same_time([partial(tell, rank) for rank in others])
        for rank, has_tried in zip(others, could, strict=True):
            if not has_tried:
                self._spare.close()
                tell(rank)

    def heard(self) -> list[str]:
        """Return the messages that other ranks have left, those of this run first."""
        return [message for _, message in sorted(self._heard, key=lambda of: of[0] < self._run)]

    def forget_this_run(self) -> None:
        """Drop the messages of this run, whose ranks have all failed and go on together."""
        self._heard = [(run, message) for run, message in self._heard if run < self._run]
        self._meetings.begin()

    def knows_of_this_run(self) -> bool:
        """Whether another rank has said why this run has ended."""
        return any(run >= self._run for run, _ in self._heard)

    def knows_of_earlier_runs(self) -> bool:
        """Whether another rank has said why an earlier run has ended, on that rank alone."""
        return any(run < self._run for run, _ in self._heard)

    def stay_with(self, rank: int) -> socket.socket:
        """Return a lasting connection: an end without :meth:`say_goodbye` is a loss to both."""
        connection = socket.create_connection(self._address_of(rank), _ANSWER_S)
        try:
            connection.sendall(json.dumps({"ask": "stay"}).encode() + b"\n")
            received = b""
            while received != b"\n":
                received = connection.recv(1)
                if not received:
                    raise ConnectionResetError(f"rank {rank} has closed the connection")
            connection.settimeout(None)
        except OSError:
            connection.close()
            raise
        return connection

    def say_goodbye(self, own: socket.socket | None) -> None:
        """Say over a connection that lasts, and over those that others have made to this rank."""
        for connection in [*self._server.staying, *([own] if own is not None else [])]:
            with suppress(OSError):
                connection.sendall(_GOODBYE)

    def arrive(
        self, number: int, purpose: tuple[str, ...], wait_s: float
    ) -> dict[int, tuple[str, ...]]:
        """Say that this rank has come to a meeting; return who has come so far, and for what."""
        self._met = number
        of_all_runs = self._run * _MOST_MEETINGS + number
        asked = {"ask": "arrive", "of": [of_all_runs, self.rank, purpose, wait_s]}
        came = self._ask(0, asked, wait_s + _ANSWER_S)["came"]
        if came is None:
            raise ConnectionAbortedError("a rank has failed, so that not all will come")
        return {int(rank): tuple(what) for rank, what in sorted(came.items())}

    def fail(
        self, position: Sequence[int], wait_s: float, *, gives_up: bool
    ) -> tuple[bool | None, list[int]]:
        """Say that this rank has failed; return whether all have at equal positions, and which."""
        asked = {"ask": "fail", "of": [self._run, self.rank, list(position), wait_s, gives_up]}
        answer = self._ask(0, asked, wait_s + _ANSWER_S)
        return answer["verdict"], answer["failed"]

    def position(self) -> list[int] | None:
        """Return how many collectives this rank has begun, and its last meeting; None: unknown."""
        begun = self.begun() if self.begun is not None else None
        return None if begun is None else [*begun, self._met]

    def position_of(self, rank: int) -> list[int] | None:
        """Return the position of another rank."""
        return self._ask(rank, {"ask": "position"}, _ANSWER_S)["position"]

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["ask"] == "arrive":
            return {"came": self._meetings.arrive(*asked["of"])}
        if asked["ask"] == "fail":
            answer = self._failures.fail(*asked["of"])
            if answer["verdict"]:  # before that rank goes on and arrives at a meeting
                self.forget_this_run()
            return answer
        if asked["ask"] == "position":
            return {"position": self.position()}
        if asked["ask"] == "tell":
            run, message = asked["of"]
            self._heard.append((int(run), str(message)))
            self._meetings.end()
            self._tell_listener()
            return {}
        if asked["ask"] == "stay":
            return {}
        if asked["ask"] == "lost":
            self._tell_listener()
            return {}
        return asdict(whereabouts(self._thread))

    def _tell_listener(self) -> None:
        listener = self.on_news
        if listener is not None:
            listener()

    def _address_of(self, rank: int) -> tuple[str, int]:
        process = self._processes[rank]
        return ("localhost" if self.is_beside(rank) else process.address, process.port)

    def _ask(self, rank: int, asked: dict[str, Any], limit_s: float) -> dict[str, Any]:
        with socket.create_connection(self._address_of(rank), _ANSWER_S) as connection:
            connection.sendall(json.dumps(asked).encode() + b"\n")
            connection.settimeout(limit_s)
            with connection.makefile("rb") as answers:
                line = answers.readline(_MOST_BYTES)
        if not line:
            raise ConnectionResetError(f"rank {rank} has closed the connection")
        return json.loads(line)


class _Meetings:
    """Counts, on rank 0, the ranks that have come to each meeting."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._came: dict[int, dict[int, tuple[str, ...]]] = {}
        self._changed = threading.Condition()
        self._has_ended = False

    def begin(self) -> None:
        """Let ranks wait for each other again."""
        with self._changed:
            self._has_ended = False

    def end(self) -> None:
        """Let nobody wait any longer, as a rank has failed."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def arrive(
        self, number: int, rank: int, purpose: tuple[str, ...], wait_s: float
    ) -> dict[int, tuple[str, ...]] | None:
        """Return who has come once all have, or after some seconds; None if a rank has failed."""
        with self._changed:
            came = self._came.setdefault(number, {})
            came[rank] = purpose
            # all have come to the last one, so nobody asks for the one before it
            self._came.pop(number - 2, None)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(came) == self._world_size or self._has_ended, wait_s)
            # where all have come, one that has failed since does so for what all learn here
            is_over = self._has_ended and len(came) < self._world_size
            return None if is_over else dict(came)


class _Failures:
    """Decides, on rank 0, whether all ranks of a run have failed at equal positions."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._run = -1
        self._failed: dict[int, list[int]] = {}
        self._verdict: bool | None = None
        self._changed = threading.Condition()

    def fail(
        self, run: int, rank: int, position: list[int], wait_s: float, gives_up: bool
    ) -> dict[str, Any]:
        """Note that a rank has failed; return the verdict, and which ranks have."""
        with self._changed:
            if run != self._run:
                self._run, self._failed, self._verdict = run, {}, None
            self._failed[rank] = position
            if self._verdict is None and len(self._failed) == self._world_size:
                self._verdict = len({tuple(each) for each in self._failed.values()}) == 1
            elif self._verdict is None and gives_up:
                self._verdict = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._verdict is not None, wait_s)
            return {"verdict": self._verdict, "failed": sorted(self._failed)}


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(
        self, answer: weakref.WeakMethod[Callable[[dict[str, Any]], dict[str, Any]]]
    ) -> None:
        self.answer = answer
        self.staying: set[socket.socket] = set()
        super().__init__(("", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # this process may start no other thread
            self.process_request_thread(request, client_address)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    timeout = _ANSWER_S

    def handle(self) -> None:
        try:
            asked, answer = json.loads(self.rfile.readline(_MOST_BYTES)), self.server.answer()
            if answer is not None:
                self.wfile.write(json.dumps(answer(asked)).encode() + b"\n")
                if asked["ask"] == "stay":
                    del answer  # it would keep the switchboard alive
                    self._stay()
        except (OSError, ValueError):
            return  # a stranger asks, who speaks no JSON, or a rank that has ended

    def _stay(self) -> None:
        """Wait for a goodbye; without one, the rank that asks has ended."""
        self.connection.settimeout(None)
        self.server.staying.add(self.connection)
        try:
            if self.rfile.readline(_MOST_BYTES):
                return
        except OSError:  # a process may also end with what it was sent unread
            pass
        finally:
            self.server.staying.discard(self.connection)
        answer = self.server.answer()
        if answer is not None:
            answer({"ask": "lost"})


def _at_the_same_time(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(min(len(calls), _MOST_THREADS)) as pool:
        try:
            return [started.result() for started in [pool.submit(call) for call in calls]]
        except RuntimeError:  # this process may start no other thread
            return [call() for call in calls]


def _stop(server: _Server, spare: socket.socket, process: int) -> None:
    spare.close()
    if os.getpid() != process:
        return  # a fork has no thread that serves
    with suppress(OSError):  # other systems than Linux refuse it
        server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that serves
    server.shutdown()
    server.server_close()


def _own_host() -> str:
    """Return the address by which other hosts reach this one: that of its way to rank 0.

    Hosts may have equal names (containers), or names that only they know.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing
            address = str(probe.getsockname()[0])
    except (KeyError, OSError):
        return socket.gethostname()
    return socket.gethostname() if address.startswith("127.") else address
