"""Lets ranks meet in a store, and ends their wait for those that do not come.

Each rank writes its backend into the store. Rank 0 waits for all, and writes that all is well, or
why this run cannot begin. All others read that. So every rank raises the same error.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError
from lightning_cephalo.common.texts import printable

RESTARTING = timedelta(seconds=120)
"""How long ranks wait for each other where an agent starts them again afterwards."""

_HEARING = timedelta(seconds=10)
_VERDICT, _WELL = "cephalo/verdict", "w"
_ABSENT, _DIFFERENT = "a", "d"


def restarts_left() -> int:
    """Return how many times torch's elastic agent may still start the ranks again."""
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return max(0, most - int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def shares_agents_store() -> bool:
    """Return whether ranks meet in the store of torch's elastic agent."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def patience(timeout: timedelta) -> timedelta:
    """Return how long ranks wait for each other before they are connected.

    A host that is lost meanwhile is noticed by nobody else. The agents of the others start the
    ranks again once these have ended. A rank that is lost on a host that stays, its agent notices:
    on a single host, a rank may work for long before it connects.

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
        )
    except dist.DistNetworkError as error:
        if holds:
            raise  # such as a port that another process has
        raise RemoteRankError(
            f"Rank {rank} could not reach rank 0 at {address}:{port} within {_seconds(wait)}."
            f" {_what_follows()}"
        ) from error
    answer_the_call(store, rank, world_size, backend, wait)
    return store


def answer_the_call(
    store: dist.Store, rank: int, world_size: int, backend: str, wait: timedelta
) -> None:
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
    """
    store.set(_said_by(rank), f"{backend} {socket.gethostname()}")
    if rank == 0:
        verdict = _verdict(store, world_size, wait)
        store.set(_VERDICT, verdict)
    else:
        verdict = _heard(store, rank, wait)
    if verdict == _WELL:
        return
    store.set(_heard_by(rank), "")
    if rank == 0:
        there = [r for r in range(world_size) if store.check([_said_by(r)])]
        # the store may live in this process, which ends with the error
        with suppress(dist.DistError):  # a rank that has ended meanwhile has nothing to hear
            store.wait([_heard_by(r) for r in there], _HEARING)
        store.delete_key(_VERDICT)  # the agent's store outlives this start
    if verdict.startswith(_DIFFERENT):
        raise UnsupportedError(verdict.removeprefix(_DIFFERENT))
    raise RemoteRankError(f"{verdict.removeprefix(_ABSENT)} {_what_follows()}")


def _said_by(rank: int) -> str:
    return f"cephalo/backend/{rank}"


def _heard_by(rank: int) -> str:
    return f"cephalo/heard/{rank}"


def _verdict(store: dist.Store, world_size: int, wait: timedelta) -> str:
    """Wait for all ranks, and return why this run cannot begin."""
    keys = [_said_by(rank) for rank in range(world_size)]
    with suppress(dist.DistStoreError):
        store.wait(keys, wait)
    said = [store.get(key).decode().split(" ", 1) if store.check([key]) else None for key in keys]
    absent = [rank for rank, words in enumerate(said) if words is None]
    if absent:
        hosts = sorted({words[1] for words in said if words is not None})
        has, its = ("has", "Its host") if len(absent) == 1 else ("have", "Their hosts")
        return _ABSENT + (
            f"{_ranks(absent)} of {world_size} {has} not connected within {_seconds(wait)}; all"
            f" others have, from {printable(', '.join(hosts))}. {its} may be lost, the process may"
            " have ended, or the script works for long before fit()."
        )
    used: dict[str, list[int]] = {}
    for rank, words in enumerate(said):
        if words is not None:
            used.setdefault(words[0], []).append(rank)
    if len(used) == 1:
        return _WELL
    named = " and ".join(f"{name!r} (ranks {ranks})" for name, ranks in sorted(used.items()))
    return _DIFFERENT + (
        f"The ranks use different backends: {named}. Ranks of different kinds of devices have only"
        " 'gloo' in common: pass process_group_backend='gloo' to CephaloStrategy on every rank."
    )


def _heard(store: dist.Store, rank: int, wait: timedelta) -> str:
    """Return the verdict of rank 0."""
    try:
        store.wait([_VERDICT], wait + _HEARING)
        return store.get(_VERDICT).decode()
    except dist.DistError as error:
        how = "is silent" if isinstance(error, dist.DistStoreError) else "is gone"
        raise RemoteRankError(
            f"Rank {rank} waited for all ranks to connect, but rank 0, which notes who has come,"
            f" {how}. {_what_follows()}"
        ) from error


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
