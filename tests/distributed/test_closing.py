"""A rank closes its connections over gloo, and no other one waits for it, though it goes on."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launch import SOON_S, run_ranks

from lightning_cephalo.ranks.closing import close_connections
from lightning_cephalo.ranks.crash_report import is_lost_connection


def _closes(rank, folder, lost):
    groups = [None, dist.new_group(timeout=timedelta(seconds=2 * SOON_S))]
    dist.barrier()
    if rank == lost:
        sender = (lost + 1) % 3
        pending = dist.irecv(torch.empty(1), group=groups[1], group_src=sender)
        close_connections()
        end_s = time.monotonic() + SOON_S / 4
        while len(list(folder.iterdir())) < 2:
            assert time.monotonic() < end_s, "others wait"
            time.sleep(0.02)
        with pytest.raises(RuntimeError):
            pending.wait()
        with pytest.raises(RuntimeError) as raised:
            dist.barrier()
        return is_lost_connection(raised.value)
    found = []
    for group in groups:
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(1), group=group)
        found.append(is_lost_connection(raised.value))
    (folder / str(rank)).touch()
    return all(found)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_closes_its_connections_lets_no_other_wait(tmp_path, lost):
    """A group of the user's is closed, too, and what this rank waits for itself."""
    assert run_ranks(3, _closes, tmp_path, lost) == [True, True, True]
