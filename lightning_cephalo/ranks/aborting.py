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

    Lightning afterwards empties the device's cache and destroys the groups. On the device, both
    would wait for kernels that wait for this rank (pytorch/torchtitan#1342). Private API: no public
    function aborts all groups.
    """
    if _is_connected():
        abort_collectives()
        # it may itself wait forever
        thread = threading.Thread(target=distributed_c10d._abort_process_group, daemon=True)
        thread.start()
        thread.join(_ABORT_S)


def abort_collectives() -> None:
    """End the collectives that run on this device; later ones raise torch's error.

    The groups stay known, so the thread that uses them gets an error. All are aborted at the same
    time, because one abort waits for the kernels of other groups (docs/design/recovery.md). Private
    API: no public function does this for the groups of others.
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
