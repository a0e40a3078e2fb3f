"""Run a function on several gloo ranks, forked from the test process: 0.1 s for two of them."""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import pickle
import random
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

SOON_S = 300.0
"""When ranks must have ended that wait for none that has failed: before :func:`run_ranks` ends
them, long before the half hour after which collectives give up, and late enough for a machine that
does much else."""

AFTER_FAILURE_S = 60.0
"""How long ranks may go on after one has raised what nobody expects."""


class RankFailure(AssertionError):
    """Some rank raised; the message holds every failing rank's traceback."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 450.0,
    process_group: bool = True,
) -> list[Any]:
    """Return ``function(rank, *args)`` of every rank; a hang or a failure is an AssertionError."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, folder, timeout_s, process_group, function, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        waited = _wait_for(processes, folder, timeout_s)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in hung:
            processes[rank].kill()
            processes[rank].join()
        outcomes = [_outcome(folder, rank) for rank in range(world_size)]
    failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(outcomes) if not ok]
    if hung:
        failures.append(f"ranks {hung} were still running {waited}")
    if failures:
        raise RankFailure("\n".join(failures))
    return [value for _, value in outcomes]


def _wait_for(processes: Sequence[BaseProcess], folder: str, timeout_s: float) -> str:
    """Wait until all have ended, or have had their time; returns a description of that time.

    Ranks seldom end by themselves after another one has raised. One that dies, they find out about.
    """
    end_s, told = time.monotonic() + timeout_s, f"after {timeout_s} s"
    running = dict(enumerate(processes))
    while running and (left_s := end_s - time.monotonic()) > 0:
        # what a rank has started keeps the sentinel of a rank that is gone
        ended = wait([process.sentinel for process in running.values()], min(left_s, 1.0))
        for rank, process in list(running.items()):
            if process.sentinel in ended:
                process.join()
            if process.is_alive():
                continue
            del running[rank]
            raised = os.path.exists(_path(folder, rank)) and not _outcome(folder, rank)[0]
            if raised and time.monotonic() + AFTER_FAILURE_S < end_s:
                end_s = time.monotonic() + AFTER_FAILURE_S
                told = f"{AFTER_FAILURE_S} s after rank {rank} had failed"
    return told


def run_script(
    script: str | os.PathLike[str], arguments: Sequence[object], environments: Sequence[dict]
) -> None:
    """Run a script once for each environment, all at the same time, in forks of this process.

    A script so run has nothing to import, which takes an interpreter of its own seconds.
    """

    def main(rank: int) -> None:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name)
        os.environ.update(environments[rank], OMP_NUM_THREADS="1")
        sys.argv = [str(script), *map(str, arguments)]
        runpy.run_path(str(script), run_name="__main__")

    run_ranks(len(environments), main, process_group=False)


def port_to_meet() -> int:
    """Return a free port that no connection of another test takes before the ranks listen on it.

    Systems give connections ports from 16000 or more; Lightning chooses among those too. Each
    worker of pytest has ports of its own: two of them would both find one free.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    for port in random.SystemRandom().sample(range(10000 + worker, 16000, 8), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no free port")


def torchrun_environments(world_size: int) -> list[dict[str, str]]:
    """What torchrun gives to each rank of one node."""
    port = port_to_meet()
    return [
        {
            "TORCHELASTIC_RUN_ID": "test",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
        }
        for rank in range(world_size)
    ]


def let_no_message_interrupt() -> None:
    """Let a thread run on that sends or receives, though it wakes another one.

    A message wakes gloo's thread, which spins on the connection while the sender holds its lock. If
    it also takes the sender's core it spins for milliseconds: a quarter of the time of ranks.
    """
    with contextlib.suppress(AttributeError, OSError):  # only Linux has it, and some forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _outcome(folder: str, rank: int) -> tuple[bool, Any]:
    path = _path(folder, rank)
    if not os.path.exists(path):
        return False, "died without a result"
    with open(path, "rb") as file:
        return pickle.load(file)


def _path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"result{rank}")


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    process_group: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # A collection would write to, and so copy, every page of what the test process has made.
    gc.freeze()
    torch.set_num_threads(1)
    let_no_message_interrupt()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        if process_group:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
            # Else a rank with nothing to do may be gone before another has connected to it.
            dist.barrier()
        outcome = (True, function(rank, *args))
        payload = pickle.dumps(outcome)
        if process_group:
            dist.destroy_process_group()
    except BaseException:
        payload = pickle.dumps((False, traceback.format_exc()))
    partial = _path(folder, rank) + ".partial"
    with open(partial, "wb") as file:
        file.write(payload)
    os.replace(partial, _path(folder, rank))
