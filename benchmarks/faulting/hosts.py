"""Hosts that go and come: rows of the table of ``faults.py``, which calls this.

Each host is an agent with one rank and memory of its own, all on this machine. A host that is lost
loses its agent, its rank and its memory in one moment. Losses and samples of every step, over all
ranks, are compared with those of two ranks that nobody interrupted. The storage is a server of S3
on this machine, if moto and s3fs are installed, else a folder. Where hosts have networks of their
own, each is a network namespace with a host name of its own, which needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from side_by_side.links import LinkError, ShapedHosts, address

STEPS = 128
# a host takes a while to import all that its rank needs, and the others train on meanwhile
_LONG = 512
_WAIT_S = 300.0
_BUCKET = "s3://kept"


@dataclass(frozen=True)
class Meeting:
    """How the hosts of a training meet.

    Attributes:
        nodes: As for ``--nnodes``.
        networks: A network namespace for each host; none: all are on this machine's.
        host: The number of the host where they meet.
        port: The port there.
    """

    nodes: str
    networks: tuple[str, ...]
    host: int
    port: int

    @property
    def endpoint(self) -> str:
        """As for ``--rdzv-endpoint``."""
        return f"{address(self.host - 1) if self.networks else '127.0.0.1'}:{self.port}"


class Host:
    """An agent with one rank, and the memory that it keeps steps in."""

    def __init__(self, number: int, at: Meeting, folder: Path, rest: list[str]) -> None:
        import faults

        # rank 0 is on the host of the lowest address; the first one started is where agents meet
        self.log = (folder / f"log{number}").open("a")
        own = address(number - 1) if at.networks else f"127.0.0.{number}"
        command = [
            *(sys.executable, "-m", "lightning_cephalo.run", f"--nnodes={at.nodes}"),
            *("--rdzv-id=faults", f"--rdzv-endpoint={at.endpoint}", f"--local-addr={own}"),
            *(faults.__file__, "--train=hosts", f"--folder={folder}", *rest),
        ]
        if at.networks:  # a name that all hosts know: its address
            named = ["unshare", "--uts", "sh", "-c", f'hostname {own}; exec "$@"', "sh"]
            command = ["ip", "netns", "exec", at.networks[number - 1], *named, *command]
        self.agent = subprocess.Popen(
            command,
            env=faults.environment(LIGHTNING_CEPHALO_DOMAIN=str(number)),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def lose(self) -> None:
        """Kill all its processes, and drop its memory."""
        from lightning_cephalo.recovery.store import Agent, folder_of

        memory = folder_of(None, Agent.of(self.agent.pid).name)
        for process in _processes_of(self.agent.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.agent.wait()
        shutil.rmtree(memory, ignore_errors=True)
        self.log.close()


def _processes_of(session: int) -> list[int]:
    """Return the processes of a session: an agent's, and all that it has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError):
            if os.getsid(int(path.name)) == session:
                found.append(int(path.name))
    return found


class Hosts:
    """A training on several hosts.

    Args:
        folder: For what ranks and agents tell.
        fault: What will be done to it.
        storage: Where steps are sent; None: nowhere.
        links: Of the hosts' networks; None: all are on this machine's.
    """

    def __init__(
        self, folder: Path, fault: Fault, storage: str | None, links: ShapedHosts | None
    ) -> None:
        folder.mkdir()
        self.folder, self.hosts = folder, dict[int, Host]()
        self._rest = [f"--steps={fault.steps}", f"--copies={fault.copies}"]
        self._rest += [f"--storage={storage}"] if storage else []
        self._nodes, self._links = fault.nodes, links
        self._meeting: Meeting | None = None
        self._store: subprocess.Popen[bytes] | None = None
        self.faults: list[tuple[float, set[int], int]] = []

    def serve(self, number: int) -> None:
        """Let agents meet on a host that has no rank, and stays."""
        at = self._meeting = self._meeting_at(number)
        script = (
            "import time; from torch.distributed import TCPStore; store = TCPStore('0.0.0.0',"
            f" {at.port}, is_master=True, wait_for_workers=False); time.sleep(1e6)"
        )
        inside = ["ip", "netns", "exec", at.networks[number - 1]]
        self._store = subprocess.Popen([*inside, sys.executable, "-c", script])
        self.wait(lambda: self._listens(self._store.pid))

    def _meeting_at(self, number: int) -> Meeting:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        networks = () if self._links is None else self._links.names
        return Meeting(self._nodes, networks, number, port)

    def start(self, *numbers: int) -> None:
        """Start hosts."""
        if not self.hosts and self._store is None:
            self._meeting = self._meeting_at(numbers[0])
        assert self._meeting is not None
        if len(self.hosts) < 2:
            self._want(len(self.hosts) + len(numbers))
        for number in numbers:
            self.hosts[number] = Host(number, self._meeting, self.folder, self._rest)
            if number == self._meeting.host:  # where the others meet
                agent = self.hosts[number].agent.pid
                self.wait(lambda agent=agent: self._listens(agent))

    def slow_down(self, pause_s: float) -> None:
        """Let ranks pause in each step: a host takes a while to import what its rank needs."""
        (self.folder / "pause_s").write_text(str(pause_s))

    def _want(self, hosts: int) -> None:
        """Say how many hosts ranks wait for before they train."""
        (self.folder / "wanted").write_text(str(hosts))

    def _listens(self, process: int) -> bool:
        assert self._meeting is not None
        listening = f":{self._meeting.port:04X} "
        for kind in ("tcp", "tcp6"):  # as that process sees it, in its network
            with suppress(OSError):
                for line in Path(f"/proc/{process}/net/{kind}").read_text().splitlines():
                    if listening in line.split(" 0A ")[0] and " 0A " in line:
                        return True
        return False

    def lose(self, *numbers: int) -> None:
        """Lose hosts at the same moment."""
        self._want(len(self.hosts) - len(numbers))
        for number in numbers:
            self.hosts.pop(number).lose()

    def cut_off(self, number: int, until: Callable[[], bool]) -> None:
        """Cut a host's link until something has happened."""
        assert self._links is not None
        self._links.cut(number - 1)
        self.wait(until)
        self._links.mend(number - 1)

    def said(self, number: int, text: str) -> bool:
        """Return whether a host's agent or rank has said something."""
        return text in (self.folder / f"log{number}").read_text()

    def told(self, name: str = "steps0") -> list[Any]:
        """Return what a rank has told."""
        import faults

        return faults.told_in(self.folder / name)

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for something."""
        deadline = time.monotonic() + _WAIT_S
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happens; see {self.folder}/log*")
            if any(host.agent.poll() not in (None, 0) for host in self.hosts.values()):
                raise RuntimeError(f"an agent has ended; see {self.folder}/log*")
            time.sleep(0.01)

    def train(self, steps: int, ranks: int) -> None:
        """Wait until a world of some ranks has trained some more steps."""
        told = len(self.told())
        self.wait(
            lambda: (
                len(lines := self.told()[told:]) > steps
                and all(line[5] == ranks for line in lines[-steps:])
            )
        )

    def note(self) -> None:
        """Note that a fault is about to be made."""
        lines = self.told()
        self.faults.append((time.time(), {line[4] for line in lines}, lines[-1][0]))

    def end(self) -> None:
        """Wait until all agents have ended well."""
        self.wait(lambda: all(host.agent.poll() is not None for host in self.hosts.values()))
        for host in self.hosts.values():
            assert host.agent.returncode == 0, f"see {self.folder}/log*"
            host.log.close()

    def stop(self) -> None:
        """End what still runs."""
        self.lose(*list(self.hosts))
        if self._store is not None:
            self._store.kill()
            self._store.wait()

    def outcome(self) -> tuple[int, list[float]]:
        """Return the steps that were repeated at most, and the seconds to the next new step."""
        lines, repeated, seconds = self.told(), 0, []
        for moment, before, _ in self.faults:
            last = max(line[0] for line in lines if line[4] in before)
            after = [line for line in lines if line[4] not in before]
            repeated = max(repeated, last + 1 - after[0][0])
            seconds.append(next(line[3] for line in after if line[0] > last) - moment)
        return repeated, seconds


def steps_in(folder: Path) -> dict[int, tuple[float, list[float]]]:
    """Return loss and samples of each step, as it was trained last."""
    import faults

    told = [faults.told_in(folder / f"steps{rank}") for rank in range(4)]
    ranks = [{line[0]: line for line in lines} for lines in told]
    return {
        step: (line[1], sorted(x for rank in range(line[5]) for x in ranks[rank][step][2]))
        for step, line in ranks[0].items()
    }


# -- the faults -----------------------------------------------------------------------------------


def _one_goes(run: Hosts) -> None:
    """A host that has not rank 0."""
    run.start(1, 2)
    run.train(15, 2)
    run.note()
    run.lose(2)


def _rank_zero_goes(run: Hosts) -> None:
    run.start(2, 1)  # agents meet at the first
    run.train(15, 2)
    run.note()
    run.lose(1)


def _one_comes(run: Hosts) -> None:
    run.start(1, 2)
    run.train(15, 2)
    run.note()
    run.start(3)
    run.train(5, 3)


def _two_ranks_at_once(run: Hosts) -> None:
    """Their hosts stay, with their memory."""
    run.start(1, 2, 3)
    run.train(15, 3)
    run.note()
    processes = [run.told(f"steps{rank}")[-1][4] for rank in (1, 2)]
    for process in processes:
        os.kill(process, signal.SIGKILL)


def _dies(run: Hosts, where: str, rank: int) -> None:
    """Let a rank die in something, and lose its host then."""
    mark = run.folder / f"dies_in_{where}{rank}"
    process = run.told(f"steps{rank}")[-1][4]
    run.note()
    mark.touch()
    run.wait(lambda: not Path(f"/proc/{process}").exists() or _is_dead(process))


def _is_dead(process: int) -> bool:
    with suppress(OSError):
        return ") Z" in Path(f"/proc/{process}/stat").read_text()
    return True


def _goes_in_copy(run: Hosts) -> None:
    run.start(1, 2)
    run.train(15, 2)
    _dies(run, "copy", 1)
    run.lose(2)


def _goes_while_recovering(run: Hosts) -> None:
    run.start(1, 2, 3)
    run.train(15, 3)
    run.note()
    started = len(run.told("started"))
    run.lose(3)
    run.wait(lambda: len(run.told("started")) > started)
    run.lose(2)


def _one_goes_without_copies(run: Hosts) -> None:
    run.start(1, 2)
    run.train(40, 2)
    run.note()
    run.lose(2)


def _all_go(run: Hosts) -> None:
    run.start(1, 2)
    run.train(40, 2)
    run.note()
    run.lose(1, 2)
    run.start(1, 2)


def _all_go_in_upload(run: Hosts) -> None:
    run.start(1, 2)
    run.train(40, 2)
    _dies(run, "upload", 1)
    run.lose(1, 2)
    run.start(1, 2)


def _hosts_in_turns(run: Hosts) -> None:
    """From four hosts to two and back, one after the other; one of them is rank 0's."""
    run.start(4, 1, 2, 3)  # agents meet at the fourth, which stays
    run.train(15, 4)
    for number, left in ((2, 3), (1, 2)):
        run.note()
        run.lose(number)
        run.train(10, left)
    for number, then in ((2, 3), (1, 4)):
        run.note()
        run.slow_down(0.3)
        run.start(number)
        run.train(2, then)
        run.slow_down(0.01)
        run.train(10, then)
    run.note()
    run.lose(3)


def _endpoint_goes_and_comes(run: Hosts) -> None:
    """The host where agents meet, which is rank 0's: another one is started there."""
    run.start(1, 2, 3)
    run.train(15, 3)
    run.note()
    run.lose(1)
    run.start(1)
    run.train(5, 3)


def _endpoint_is_cut_off(run: Hosts) -> None:
    """Neither its agent nor its rank ends, and no connection is closed."""
    run.start(1, 2, 3)
    run.train(15, 3)
    run.note()
    run.cut_off(1, lambda: all(run.said(number, "keeps its steps") for number in (2, 3)))
    run.train(5, 3)


def _rank_zero_goes_and_comes(run: Hosts) -> None:
    """Agents meet on a host without ranks."""
    run.serve(4)
    run.start(1, 2, 3)
    run.train(15, 3)
    run.note()
    run.lose(1)
    run.train(10, 2)
    run.note()
    run.slow_down(0.3)
    run.start(1)
    run.train(2, 3)
    run.slow_down(0.01)


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        make: What is done.
        copies: How many copies are kept.
        has_storage: Whether there is a storage.
        nodes: As for ``--nnodes``.
        has_networks: Whether each host has a network of its own.
        steps: Of the training.
    """

    make: Callable[[Hosts], None]
    copies: int = 0
    has_storage: bool = False
    nodes: str = "1:3"
    has_networks: bool = False
    steps: int = STEPS


FAULTS = {
    "a host is lost, copies=1": Fault(_one_goes, 1),
    "the host of rank 0 is lost, copies=1": Fault(_rank_zero_goes, 1),
    "a host is lost in mid-copy, copies=1": Fault(_goes_in_copy, 1),
    # the second one goes before new copies are whole: with copies=1 rows are lost with it
    "a host is lost, and another one while recovering, copies=2": Fault(_goes_while_recovering, 2),
    "a host joins": Fault(_one_comes, steps=_LONG),
    "two of three ranks are killed, each on a host": Fault(_two_ranks_at_once),
    "a host is lost, no copies, a storage": Fault(_one_goes_without_copies, has_storage=True),
    "all hosts are lost, a storage": Fault(_all_go, has_storage=True),
    "a rank is killed in mid-upload, and all hosts are lost": Fault(
        _all_go_in_upload, has_storage=True
    ),
    "2:4 hosts: two are lost, two join, one is lost, copies=1": Fault(
        _hosts_in_turns, 1, nodes="2:4", has_networks=True, steps=_LONG
    ),
    "the host of the endpoint is lost, and one starts there, copies=1": Fault(
        _endpoint_goes_and_comes, 1, nodes="2:3", has_networks=True
    ),
    "the host of the endpoint is cut off until others say so, copies=1": Fault(
        _endpoint_is_cut_off, 1, nodes="2:3", has_networks=True, steps=_LONG
    ),
    "the endpoint is elsewhere: the host of rank 0 is lost, and joins, copies=1": Fault(
        _rank_zero_goes_and_comes, 1, nodes="2:3", has_networks=True, steps=_LONG
    ),
}


# -- the table ------------------------------------------------------------------------------------


@contextmanager
def _s3() -> Iterator[Callable[[], int] | None]:
    """Run a server of S3, and yield what returns the bytes it has given; None: there is none."""
    try:
        import s3fs
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server
    except ImportError:
        yield None
        return
    given = [0]
    app = DomainDispatcherApplication(create_backend_app)

    def answer(environ: Any, start: Any) -> Iterable[bytes]:
        for part in app(environ, start):
            given[0] += len(part)
            yield part

    class Quiet(WSGIRequestHandler):
        def log_request(self, *_: Any) -> None:
            pass

    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
    )
    s3fs.S3FileSystem().mkdir(_BUCKET)
    yield lambda: given[0]
    server.shutdown()


def report(folder: Path, only: str) -> None:
    """Print a row for each fault.

    Args:
        folder: For logs.
        only: The faults that contain this text.
    """
    import faults

    wanted = {name: row for name, row in FAULTS.items() if only in name}
    if not wanted:
        return
    names = ["fault of hosts", "steps repeated", "samples as without", "losses differ by"]
    print(f"| {' | '.join([*names, 'seconds', 'read from storage'])} |")
    print("|---|---|---|---|---|---|", flush=True)
    uninterrupted = faults.Run(folder / "hosts", _LONG, "hosts")
    assert uninterrupted.end() == 0, f"see {uninterrupted.folder}/log"
    expected = steps_in(uninterrupted.folder)
    with _s3() as given:
        for index, (name, fault) in enumerate(wanted.items()):
            own, steps = folder / f"hosts{index}", fault.steps
            place = f"{_BUCKET}/{index}" if given else str(folder / f"sent{index}")
            before = given() if given else 0
            links = ShapedHosts(4, 10_000) if fault.has_networks else None
            try:
                with links or nullcontext():
                    run = Hosts(own, fault, place if fault.has_storage else None, links)
                    try:
                        fault.make(run)
                        run.end()
                    finally:
                        run.stop()
            except LinkError as error:
                print(f"| {name} | not here: {error} | | | | |", flush=True)
                continue
            except (TimeoutError, RuntimeError) as error:
                print(f"| {name} | does not go on: {error} | | | | |", flush=True)
                continue
            told = steps_in(run.folder)
            whole = {step: line for step, line in expected.items() if step <= steps}
            same = sum(step in told and told[step][1] == seen for step, (_, seen) in whole.items())
            differences = (abs(told[s][0] / loss - 1) for s, (loss, _) in whole.items())
            repeated, seconds = run.outcome()
            read = f"{(given() - before) / 1e6:.2f} MB" if given and fault.has_storage else ""
            took = ", ".join(f"{each:.1f}" for each in seconds)
            row = [name, repeated, f"{same} of {len(whole)}", f"{max(differences):.1e}", took, read]
            print(f"| {' | '.join(map(str, row))} |")
            sys.stdout.flush()
