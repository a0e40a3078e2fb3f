"""Collectives of the user's step are seen, whoever else communicates."""

from __future__ import annotations

import torch
import torch.distributed as dist
from launch import run_ranks

from lightning_cephalo.adapters.user_collectives import CollectiveWatch


def _seen(rank):
    alone = dist.new_group([0])
    seen = []
    collectives = CollectiveWatch(lambda *call: seen.append(call))
    dist.all_reduce(torch.ones(2))  # the strategy's own
    with collectives.watched():
        dist.all_reduce(torch.ones(2))
        if rank == 0:  # the other rank does not come
            dist.all_reduce(torch.ones(2), group=alone)
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)
        with torch.inference_mode():
            dist.broadcast(torch.ones(2), 0)
    collectives.close()
    with collectives.watched():
        dist.all_reduce(torch.ones(2))
    return seen


def test_collectives_are_reported_with_whether_all_ranks_take_part():
    first, second = run_ranks(2, _seen)
    of_all = [("allreduce", True), ("broadcast", True)]
    assert first == [of_all[0], ("allreduce", False), ("send", False), of_all[1]]
    assert second == [of_all[0], ("recv", False), of_all[1]]
