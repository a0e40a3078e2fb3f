"""Lets ranks meet in a store, and ends their wait for those that do not come.

Rank 0 calls, and each rank answers with its backend and its process. Rank 0 waits for all, and
writes its verdict: all is well, or why this run cannot begin. So every rank raises the same error.

torch's elastic agent keeps one store over all restarts. So each call and each answer has a name of
its own. Ranks answer every call that they see, and believe a verdict that names their own answer.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError
from lightning_cephalo.common.texts import printable
from lightning_cephalo.ranks.connecting import Watch, within, words_of
from lightning_cephalo.ranks.switchboard import Process

RESTARTING = timedelta(seconds=120)
"""How long ranks wait for each other where an agent starts them again afterwards."""

# rank 0 may look for 2 s for one that is stopped, twice, before it tells what it has found
_HEARING = timedelta(seconds=8)
_PAUSE_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02, 0.1
_LOOK_S = 1.0
_CALL = "cephalo/call"
_WELL, _ABSENT, _DIFFERENT = "w", "a", "d"


@dataclass(frozen=True)
class RollCall:
    """What ranks know of each other when all have come."""

    name: str
    processes: tuple[Process, ...]

    @property
    def prefix(self) -> str:
        """The beginning of all keys of this start."""
        return f"cephalo/{self.name}/default_pg"


def restarts_left() -> int:
    """Return how many times torch's elastic agent may still start the ranks again."""
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return max(0, most - int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def shares_agents_store() -> bool:
    """Return whether ranks meet in the store of torch's elastic agent."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def patience(timeout: timedelta) -> timedelta:
    """Return how long ranks wait for each other before they are connected."""
    # only ranks notice a lost host; ranks of its own host are noticed by the agent
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    return min(timeout, RESTARTING) if restarts_left() and hosts > 1 else timeout


def store_of_all(
    rank: int,
    process: Process,
    world_size: int,
    address: str,
    port: int,
    backend: str,
    wait: timedelta,
    watch: Watch | None = None,
) -> tuple[dist.Store, RollCall]:
    """Return a store that all ranks have come to, and who has come; collective."""
    holds = rank == 0 and not shares_agents_store()

    def connect() -> dist.Store:
        # not torch's rendezvous: there rank 0 waits for the others without a word of who is missing
        return dist.TCPStore(
            address,
            port,
            world_size,
            holds,
            timeout=wait,
            wait_for_workers=False,
            multi_tenant=True,
            # as torch's rendezvous: not every build of torch has it
            use_libuv=os.environ.get("USE_LIBUV", str(int(sys.platform != "win32"))) == "1",
        )

    try:
        # torch waits without a limit for the answer of a process that is stopped
        limit_s = (wait + _HEARING).total_seconds()
        store = within(limit_s, connect, None if watch is None else partial(watch.look, {}))
    except RemoteRankError as loss:
        raise RemoteRankError(f"{loss} {what_follows()}") from None
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if holds and "EADDRINUSE" in str(error):
            raise UnsupportedError(
                f"Rank 0 cannot listen on port {port}, where the ranks meet: another process has"
                " it, such as another job on this host. Give this job another MASTER_PORT (torchrun"
                " --master-port)."
            ) from None
        if holds:
            raise
        # torch's own error has its C++ stack
        raise RemoteRankError(
            f"Rank {rank} could not reach rank 0 at {address}:{port} within {_seconds(wait)}:"
            f" {words_of(error)}. {what_follows()}"
        ) from None
    call = partial(answer_the_call, store, rank, process, world_size, backend, wait, watch)
    try:
        longest = wait + _HEARING + (_HEARING if rank == 0 else _HEARING / 3)
        return store, within(longest.total_seconds(), call)
    except dist.DistStoreError:
        raise RemoteRankError(_without_first(rank, "is silent", _first(watch))) from None


def answer_the_call(
    store: dist.Store,
    rank: int,
    process: Process,
    world_size: int,
    backend: str,
    wait: timedelta,
    watch: Watch | None = None,
) -> RollCall:
    """Say that this rank is there, and wait for all others; collective."""
    answer = secrets.token_hex(4)
    said = json.dumps(asdict(_Answer(answer, backend, process)))
    if rank == 0:
        call = secrets.token_hex(4)
        store.set(_said_by(call, rank), said)
        store.set(_CALL, call)
        verdict, there = _verdict(store, call, world_size, wait, watch)
        store.set(_verdict_of(call), json.dumps(asdict(verdict)))
    else:
        call, verdict = _heard(store, rank, answer, said, wait, watch)
        store.set(_heard_by(call, rank), "")
    if verdict.kind == _WELL:
        return RollCall(call, verdict.processes)
    if rank == 0:
        # the store may live in this process, which ends with the error
        with suppress(dist.DistError):  # a rank that has ended meanwhile has nothing to hear
            store.wait([_heard_by(call, r) for r in there if r], _HEARING)
    if verdict.kind == _DIFFERENT:
        raise UnsupportedError(verdict.words)
    raise RemoteRankError(f"{verdict.words} {what_follows()}")


@dataclass(frozen=True)
class _Answer:
    """What a rank says."""

    name: str
    backend: str
    process: Process

    @classmethod
    def read(cls, text: bytes) -> _Answer:
        told = json.loads(text)
        return cls(told["name"], told["backend"], Process(**told["process"]))


@dataclass(frozen=True)
class _Verdict:
    """What rank 0 finds: the answers that came, and whether this run can begin."""

    answers: tuple[str, ...]
    processes: tuple[Process, ...]
    kind: str
    words: str

    @classmethod
    def read(cls, text: bytes) -> _Verdict:
        told = json.loads(text)
        processes = tuple(Process(**each) for each in told["processes"])
        return cls(tuple(told["answers"]), processes, told["kind"], told["words"])


def _said_by(call: str, rank: int) -> str:
    return f"cephalo/{call}/said/{rank}"


def _heard_by(call: str, rank: int) -> str:
    return f"cephalo/{call}/heard/{rank}"


def _verdict_of(call: str) -> str:
    return f"cephalo/{call}/verdict"


def _verdict(
    store: dist.Store, call: str, world_size: int, wait: timedelta, watch: Watch | None
) -> tuple[_Verdict, list[int]]:
    """Wait for all ranks; return whether this run can begin, and who waits to hear that."""
    keys = [_said_by(call, rank) for rank in range(world_size)]
    began_s = looked_s = time.monotonic()
    pause_s, lost = _PAUSE_S, ""
    # not the store's own wait: it ends for no rank that is lost
    while not (lost or store.check(keys) or time.monotonic() > began_s + wait.total_seconds()):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _FIRST_PAUSE_S)
        if watch is not None and time.monotonic() > looked_s + _LOOK_S:
            lost = _lost(watch, _said(store, keys))
            looked_s = time.monotonic()
    said = _said(store, keys)
    there = list(said)
    if watch is not None and lost:
        kind, words, there = _ABSENT, lost, watch.that_answer(_processes(said))
    else:
        kind, words = _found(world_size, said, wait)
        absent = [rank for rank in range(world_size) if rank not in said]
        if absent and watch is not None:
            words = f"{words} {watch.where(absent)}".rstrip()
    answers = tuple(each.name for each in said.values())
    processes = tuple(each.process for each in said.values())
    return _Verdict(answers, processes, kind, words), there


def _said(store: dist.Store, keys: Sequence[str]) -> dict[int, _Answer]:
    return {
        rank: _Answer.read(store.get(key)) for rank, key in enumerate(keys) if store.check([key])
    }


def _processes(said: Mapping[int, _Answer]) -> dict[int, Process]:
    return {rank: each.process for rank, each in said.items()}


def _lost(watch: Watch, said: Mapping[int, _Answer]) -> str:
    """Return which rank is gone that has come, or that was there in an earlier run."""
    try:
        watch.look(_processes(said))
    except RemoteRankError as loss:
        return str(loss)
    return ""


def _found(world_size: int, said: Mapping[int, _Answer], wait: timedelta) -> tuple[str, str]:
    absent = [rank for rank in range(world_size) if rank not in said]
    if absent:
        hosts = sorted({each.process.host for each in said.values()})
        has, its = ("has", "Its host") if len(absent) == 1 else ("have", "Their hosts")
        return _ABSENT, (
            f"{_ranks(absent)} of {world_size} {has} not connected within"
            f" {_seconds(wait)}; all others have, from {printable(', '.join(hosts))}. {its} may be"
            " lost, the process may have ended, or the script works for long before fit()."
        )
    used: dict[str, list[int]] = {}
    for rank, each in said.items():
        used.setdefault(each.backend, []).append(rank)
    if len(used) == 1:
        return _WELL, ""
    named = " and ".join(f"{name!r} (ranks {ranks})" for name, ranks in sorted(used.items()))
    return _DIFFERENT, (
        f"The ranks use different backends: {named}. Ranks of different kinds of"
        " devices have only 'gloo' in common: pass process_group_backend='gloo' to CephaloStrategy"
        " on every rank."
    )


def _heard(
    store: dist.Store, rank: int, answer: str, said: str, wait: timedelta, watch: Watch | None
) -> tuple[str, _Verdict]:
    """Answer rank 0's calls; return the call whose verdict names this answer, and the verdict."""
    patience_s = (wait + _HEARING).total_seconds()
    answered, pause_s, lost = "", _PAUSE_S, ""
    first = _first(watch)
    looked_s = time.monotonic()
    end_s = looked_s + patience_s
    try:
        while time.monotonic() < end_s:
            if watch is not None and not lost and time.monotonic() > looked_s + _LOOK_S:
                lost = _lost(watch, {})
                looked_s = time.monotonic()
                if lost:  # a rank that ends here has perhaps read a verdict that says more
                    end_s = min(end_s, looked_s + _LOOK_S)
            if not store.check([_verdict_of(answered) if answered else _CALL]):
                # torch prints two lines for each wait in vain
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if not store.check([_CALL]):
                continue
            call = store.get(_CALL).decode()
            if call != answered:
                store.set(_said_by(call, rank), said)
                answered = call
                if store.check([_said_by(call, 0)]):
                    process = _Answer.read(store.get(_said_by(call, 0))).process
                    first = f"rank 0 ({process})"
                if not lost:
                    end_s = time.monotonic() + patience_s
            elif store.check([_verdict_of(call)]):
                verdict = _Verdict.read(store.get(_verdict_of(call)))
                if answer in verdict.answers:
                    return call, verdict
                time.sleep(_LONGEST_PAUSE_S)  # of an earlier start
    except dist.DistError:
        lost = lost or _lost_soon(watch)
        if not lost:
            raise RemoteRankError(_without_first(rank, "is gone", first)) from None
    if lost:
        raise RemoteRankError(f"{lost} {what_follows()}")
    raise RemoteRankError(_without_first(rank, "is silent", first))


def _lost_soon(watch: Watch | None) -> str:
    """Return which rank of an earlier run is gone, now that a connection is closed."""
    end_s = time.monotonic() + _LOOK_S
    while watch is not None and time.monotonic() < end_s:
        lost = _lost(watch, {})
        if lost:
            return lost
        time.sleep(_LONGEST_PAUSE_S)
    return ""


def _first(watch: Watch | None) -> str:
    """Return the name of rank 0, with its process where it is known from an earlier run."""
    named = "Rank 0" if watch is None or watch.name_of is None else watch.name_of(0)
    return f"r{named[1:]}"


def _without_first(rank: int, how: str, first: str) -> str:
    return (
        f"Rank {rank} waited for all ranks to connect, but {first}, which notes who has come,"
        f" {how}. {what_follows()}"
    )


def what_follows() -> str:
    """Return a sentence about what happens when ranks that wait for others end."""
    if restarts_left():
        return (
            "The ranks that are there end, so that the agent starts all again, on the hosts that"
            " are left. What one rank does alone for longer belongs into prepare_data()."
        )
    return (
        "See the output of the ranks that are missing. CephaloStrategy(timeout=...) says how long"
        " ranks wait."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _seconds(wait: timedelta) -> str:
    return f"{wait.total_seconds():g} s"
