"""Lets ranks meet in a store, and ends their wait for those that do not come.

Rank 0 calls, and each rank answers with its backend. Rank 0 waits for all, and writes that all is
well, or why this run cannot begin. All others read that. So every rank raises the same error.

[Note: what an earlier start has left]
torch's elastic agent keeps one store over all restarts. Each call has a name of its own, and so has
each answer. Ranks answer every call that they see, and believe a verdict that names their own
answer. All keys of the run lie under the call's name.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError
from lightning_cephalo.common.texts import printable

RESTARTING = timedelta(seconds=120)
"""How long ranks wait for each other where an agent starts them again afterwards."""

_HEARING = timedelta(seconds=10)
_LOOK = timedelta(seconds=1)
_CALL = "cephalo/call"
_WELL, _ABSENT, _DIFFERENT = "w", "a", "d"


def restarts_left() -> int:
    """Return how many times torch's elastic agent may still start the ranks again."""
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return max(0, most - int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def shares_agents_store() -> bool:
    """Return whether ranks meet in the store of torch's elastic agent."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def patience(timeout: timedelta) -> timedelta:
    """Return how long ranks wait for each other before they are connected.

    Only the ranks notice a host that is lost meanwhile. The agents of the other hosts start the
    ranks again once these have ended. An agent notices the ranks of its own host: on a single host,
    a rank may work for long before it connects.

    Args:
        timeout: The longest wait.
    """
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    return min(timeout, RESTARTING) if restarts_left() and hosts > 1 else timeout


def store_of_all(
    rank: int, world_size: int, address: str, port: int, backend: str, wait: timedelta
) -> dist.Store:
    """Return a store that all ranks have come to; collective.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        address: The host of rank 0.
        port: The port of the store.
        backend: This rank's backend of collectives.
        wait: How long to wait for the others.

    Raises:
        RemoteRankError: If ranks have not come; it names them, on each that has come.
        UnsupportedError: On every rank, if ranks would use different backends.
    """
    holds = rank == 0 and not shares_agents_store()
    try:
        # not torch's rendezvous: there rank 0 waits for the others without a word of who is missing
        store = dist.TCPStore(
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
    except dist.DistNetworkError as error:
        if holds:
            raise  # such as a port that another process has
        raise RemoteRankError(
            f"Rank {rank} could not reach rank 0 at {address}:{port} within {_seconds(wait)}."
            f" {_what_follows()}"
        ) from error
    call = answer_the_call(store, rank, world_size, backend, wait)
    return dist.PrefixStore(f"cephalo/{call}/default_pg", store)


def answer_the_call(
    store: dist.Store, rank: int, world_size: int, backend: str, wait: timedelta
) -> str:
    """Say that this rank is there, and wait for all others; collective.

    Args:
        store: A store that all ranks can reach.
        rank: This rank.
        world_size: The number of ranks.
        backend: This rank's backend of collectives.
        wait: How long to wait for the others.

    Raises:
        RemoteRankError: As :func:`store_of_all`.
        UnsupportedError: As :func:`store_of_all`.

    Returns:
        The name of this start, equal on all ranks; no other start has it.
    """
    answer = secrets.token_hex(4)
    said = f"{answer} {backend} {socket.gethostname()}"
    if rank == 0:
        call = secrets.token_hex(4)
        store.set(_said_by(call, rank), said)
        store.set(_CALL, call)
        verdict, there = _verdict(store, call, world_size, wait)
        store.set(_verdict_of(call), verdict)
    else:
        call, verdict = _heard(store, rank, answer, said, wait)
        store.set(_heard_by(call, rank), "")
    kind, _, words = verdict.partition(" ")[2].partition(" ")
    if kind == _WELL:
        return call
    if rank == 0:
        # the store may live in this process, which ends with the error
        with suppress(dist.DistError):  # a rank that has ended meanwhile has nothing to hear
            store.wait([_heard_by(call, r) for r in there if r], _HEARING)
    if kind == _DIFFERENT:
        raise UnsupportedError(words)
    raise RemoteRankError(f"{words} {_what_follows()}")


def _said_by(call: str, rank: int) -> str:
    return f"cephalo/{call}/said/{rank}"


def _heard_by(call: str, rank: int) -> str:
    return f"cephalo/{call}/heard/{rank}"


def _verdict_of(call: str) -> str:
    return f"cephalo/{call}/verdict"


def _verdict(
    store: dist.Store, call: str, world_size: int, wait: timedelta
) -> tuple[str, list[int]]:
    """Wait for all ranks; return the answers that came, why this run cannot begin, and who came."""
    keys = [_said_by(call, rank) for rank in range(world_size)]
    with suppress(dist.DistStoreError):
        store.wait(keys, wait)
    said = {
        rank: store.get(key).decode().split(" ", 2)
        for rank, key in enumerate(keys)
        if store.check([key])
    }
    found = _found(world_size, {r: (backend, host) for r, (_, backend, host) in said.items()}, wait)
    return f"{','.join(answer for answer, _, _ in said.values())} {found}", list(said)


def _found(world_size: int, said: dict[int, tuple[str, str]], wait: timedelta) -> str:
    absent = [rank for rank in range(world_size) if rank not in said]
    if absent:
        hosts = sorted({host for _, host in said.values()})
        has, its = ("has", "Its host") if len(absent) == 1 else ("have", "Their hosts")
        return (
            f"{_ABSENT} {_ranks(absent)} of {world_size} {has} not connected within"
            f" {_seconds(wait)}; all others have, from {printable(', '.join(hosts))}. {its} may be"
            " lost, the process may have ended, or the script works for long before fit()."
        )
    used: dict[str, list[int]] = {}
    for rank, (backend, _) in said.items():
        used.setdefault(backend, []).append(rank)
    if len(used) == 1:
        return _WELL
    named = " and ".join(f"{name!r} (ranks {ranks})" for name, ranks in sorted(used.items()))
    return (
        f"{_DIFFERENT} The ranks use different backends: {named}. Ranks of different kinds of"
        " devices have only 'gloo' in common: pass process_group_backend='gloo' to CephaloStrategy"
        " on every rank."
    )


def _heard(
    store: dist.Store, rank: int, answer: str, said: str, wait: timedelta
) -> tuple[str, str]:
    """Answer rank 0's calls; return the call whose verdict names this answer, and the verdict."""
    patience_s = (wait + _HEARING).total_seconds()
    answered = ""
    end_s = time.monotonic() + patience_s
    try:
        while time.monotonic() < end_s:
            awaited = _verdict_of(answered) if answered else _CALL
            with suppress(dist.DistStoreError):
                store.wait([awaited], min(_LOOK, wait))
            if not store.check([_CALL]):
                continue
            call = store.get(_CALL).decode()
            if call != answered:
                store.set(_said_by(call, rank), said)
                answered, end_s = call, time.monotonic() + patience_s
            elif store.check([_verdict_of(call)]):
                verdict = store.get(_verdict_of(call)).decode()
                if answer in verdict.partition(" ")[0].split(","):
                    return call, verdict
                time.sleep(_LOOK.total_seconds() / 10)  # of an earlier start
    except dist.DistError as error:
        raise RemoteRankError(_without_first(rank, "is gone")) from error
    raise RemoteRankError(_without_first(rank, "is silent"))


def _without_first(rank: int, how: str) -> str:
    return (
        f"Rank {rank} waited for all ranks to connect, but rank 0, which notes who has come, {how}."
        f" {_what_follows()}"
    )


def _what_follows() -> str:
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
