"""Ranks that stay, and run one function after the other: half of a short fit is else their start.

``in_ranks`` and ``by_plan`` do what those of ``common`` do. But functions and arguments are sent to
ranks that run already, so they and their types stand at the top of their files. A function whose
ranks end, freeze or change what others find needs ranks of its own: those of ``common``.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from launch import (
    AFTER_FAILURE_S,
    RankFailure,
    let_no_message_interrupt,
    port_to_meet,
    torchrun_environments,
)
from plans import PLANS

_LOOK_S = 5.0
"""How often idle ranks look whether the test process is still there."""


@dataclass(frozen=True)
class Job:
    """A function, and what of the test process a rank that had been forked now would have."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = field(default_factory=os.getcwd)
    warning_filters: list[Any] = field(default_factory=lambda: list(warnings.filters))
    port: int = field(default_factory=port_to_meet)


class Ranks:
    """Forks of the test process that wait for functions."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank, environment in enumerate(torchrun_environments(world_size)):
            end, theirs = context.Pipe()
            # as a daemon it ends with the test process, which else would wait for it
            process = context.Process(
                target=_serve, args=(rank, environment, theirs, os.getpid()), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(end)
            self._processes.append(process)

    def run(self, job: Job, timeout_s: float) -> list[Any]:
        """Return every rank's result; a hang or a failure is a RankFailure."""
        payload = pickle.dumps(job)
        for end in self._ends:
            end.send_bytes(payload)
        outcomes: dict[int, tuple[bool, Any]] = {}
        end_s = time.monotonic() + timeout_s
        while len(outcomes) < len(self._ends) and time.monotonic() < end_s:
            for rank, outcome in self._come(outcomes):
                outcomes[rank] = outcome
                if not outcome[0]:  # ranks seldom end by themselves after another one has raised
                    end_s = min(end_s, time.monotonic() + AFTER_FAILURE_S)
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in outcomes.items() if not ok]
        hung = sorted(set(range(len(self._ends))) - outcomes.keys())
        if hung:
            failures.append(f"ranks {hung} were still running")
        if failures:
            raise RankFailure("\n".join(failures))
        return [outcomes[rank][1] for rank in range(len(self._ends))]

    def _come(self, known: dict[int, Any]) -> list[tuple[int, tuple[bool, Any]]]:
        """Wait a little; returns what has come from which ranks."""
        missing = {end: rank for rank, end in enumerate(self._ends) if rank not in known}
        found = []
        for end in wait(list(missing), 1.0):
            try:
                found.append((missing[end], pickle.loads(end.recv_bytes())))
            except EOFError:
                found.append((missing[end], (False, "died without a result")))
        return found

    @property
    def processes(self) -> set[BaseProcess]:
        """The ranks."""
        return set(self._processes)

    def close(self) -> None:
        """Let the ranks end; one that cannot is killed."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.send_bytes(b"")
            end.close()
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()

    def kill(self) -> None:
        """End the ranks, whatever they do."""
        for process in self._processes:
            process.kill()
        self.close()


def _serve(rank: int, environment: dict[str, str], jobs: Connection, parent: int) -> None:
    # A collection would write to, and so copy, every page of what the test process has made.
    gc.freeze()
    multiprocessing.current_process().daemon = False  # loaders have workers
    torch.set_num_threads(1)
    let_no_message_interrupt()
    # Lightning would give a lone rank all cores
    environment = {**environment, "OMP_NUM_THREADS": "1"}
    while True:
        while not jobs.poll(_LOOK_S):
            if os.getppid() != parent:
                return
        payload = jobs.recv_bytes()
        if not payload:
            break
        jobs.send_bytes(_outcome(rank, environment, payload))


def _outcome(rank: int, environment: dict[str, str], payload: bytes) -> bytes:
    try:
        job: Job = pickle.loads(payload)
        os.environ.clear()
        os.environ.update({**job.environment, **environment, "MASTER_PORT": str(job.port)})
        os.chdir(job.folder)
        random.seed(rank)
        torch.manual_seed(rank)
        warnings.filters[:] = job.warning_filters
        with warnings.catch_warnings():
            value = job.function(*job.args)
        return pickle.dumps((True, value))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        if torch.distributed.is_initialized():
            # each fit makes groups, whose threads and connections would slow down those that follow
            torch.distributed.destroy_process_group()
        gc.collect()


class _Started:
    """The ranks of this process, by how many they are."""

    def __init__(self) -> None:
        self.by_world_size: dict[int, Ranks] = {}

    def run(self, world_size: int, job: Job, timeout_s: float) -> list[Any]:
        ranks = self.by_world_size.pop(world_size, None) or Ranks(world_size)
        try:
            results = ranks.run(job, timeout_s)
        except BaseException:
            ranks.kill()
            raise
        self.by_world_size[world_size] = ranks
        return results

    def close(self) -> None:
        while self.by_world_size:
            self.by_world_size.popitem()[1].close()


_started = _Started()


def close() -> None:
    """Let all ranks end."""
    _started.close()


def processes() -> set[BaseProcess]:
    """All ranks that stay."""
    return set().union(*(ranks.processes for ranks in _started.by_world_size.values()))


def in_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 450.0
) -> list[Any]:
    """Return ``function(*args)`` of every rank, each run as torchrun would run a script."""
    return _started.run(world_size, Job(function, args), timeout_s)


def by_plan(plan: str | None, function: Callable[..., Any], *args: Any) -> Any:
    """Return what ``function(plan, *args)`` gives on rank 0 of the plan, or on one device."""
    if plan is None:
        return function(None, *args)
    return in_ranks(len(PLANS[plan].ranks), function, plan, *args)[0]
