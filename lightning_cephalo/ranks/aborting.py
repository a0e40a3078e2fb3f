"""Aborts this process's groups on the device, where a destroyed one would wait for a lost rank."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_cephalo.accelerator.backends import backend_of

_ABORT_S = 10.0


def abort_groups() -> None:
    """Abort all process groups without waiting for pending collectives, which may never end.

    A rank that fails alone leaves other ranks in a collective, whose kernels wait for that rank.
    Lightning afterwards empties the device's cache and destroys the groups. If the groups run on
    the device, both wait for these kernels (pytorch/torchtitan#1342).

    Private API: no public function aborts all groups. It runs in a thread, because it may itself
    wait forever.
    """
    if _is_connected():
        abort_collectives()
        thread = threading.Thread(target=distributed_c10d._abort_process_group, daemon=True)
        thread.start()
        thread.join(_ABORT_S)


def abort_collectives() -> None:
    """End the collectives that run on this device; later ones raise torch's error.

    Other than behind :func:`abort_groups`, the groups are still known: the thread that uses them
    gets an error that says so. All are aborted at the same time. NCCL frees a communicator's memory
    in its abort, which waits for all kernels of the device, also for those of communicators that
    are not aborted yet: seen on a GPU, with three groups (pytorch#119797).

    Private API: no public function does this for the groups of others.
    """
    if not _is_connected():
        return
    threads = [
        threading.Thread(target=group.abort, daemon=True)
        for group in list(distributed_c10d._world.pg_map)
        if backend_of(group).must_be_aborted
    ]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + _ABORT_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


def _is_connected() -> bool:
    return dist.is_available() and dist.is_initialized()
