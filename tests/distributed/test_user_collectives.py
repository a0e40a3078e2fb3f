"""Collectives of the user's step are refused, whoever else communicates."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks

from lightning_cephalo.adapters.user_collectives import CollectiveWatch
from lightning_cephalo.common.errors import UnsupportedError


def _refused(rank):
    alone = dist.new_group([0])
    watch, refused = CollectiveWatch(), []
    value = torch.ones(2)
    dist.all_reduce(value)  # the strategy's own
    calls = [lambda: dist.all_reduce(value), lambda: dist.broadcast(value, 0)]
    if rank == 0:  # the other rank does not come
        calls += [lambda: dist.all_reduce(value, group=alone), lambda: dist.send(value, 1)]
    for call in calls:
        with (
            watch.watched(lambda: False),
            torch.inference_mode(),
            pytest.raises(UnsupportedError) as error,
        ):
            call()
        refused.append(str(error.value).split("(")[0])
    with watch.watched(lambda: True):  # a step of manual optimization, which every rank runs
        dist.all_reduce(value)
    watch.close()
    with watch.watched(lambda: False):
        dist.all_reduce(value)
    return refused, value.tolist()


def test_every_collective_of_a_step_is_refused_and_none_outside_of_it():
    first, second = run_ranks(2, _refused)
    assert first == (["allreduce", "broadcast", "allreduce", "send"], [8.0, 8.0])
    assert second == (["allreduce", "broadcast"], [8.0, 8.0])
