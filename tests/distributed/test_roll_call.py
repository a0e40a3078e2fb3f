"""Ranks meet in a store; those that do not come are named, and waited for no longer than useful."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launch import SOON_S, port_to_meet, run_ranks, torchrun_environments
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError
from lightning_cephalo.ranks import roll_call
from lightning_cephalo.ranks.launch import Ranks, connect
from lightning_cephalo.ranks.roll_call import answer_the_call, patience, store_of_all

SHORT = timedelta(milliseconds=50)
SOON = timedelta(seconds=SOON_S)


def test_ranks_wait_two_minutes_where_agents_of_several_hosts_start_them_again(monkeypatch):
    assert patience(timedelta(hours=1)) == timedelta(hours=1)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert patience(timedelta(hours=1)) == timedelta(hours=1)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert patience(timedelta(hours=1)) == timedelta(minutes=2)
    assert patience(timedelta(seconds=5)) == timedelta(seconds=5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")  # the next failure ends the job
    assert patience(timedelta(hours=1)) == timedelta(hours=1)


def test_a_rank_that_never_comes_is_named_long_before_the_timeout(monkeypatch):
    monkeypatch.setattr(roll_call, "RESTARTING", SHORT)
    (environment, *_) = torchrun_environments(3)
    for name, value in {
        **environment,
        "TORCHELASTIC_MAX_RESTARTS": "1",
        "GROUP_WORLD_SIZE": "3",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RemoteRankError) as raised:
        connect(TorchElasticEnvironment(), "gloo", SOON, torch.device("cpu"))
    said = str(raised.value)
    assert said.startswith("Ranks 1, 2 of 3 have not connected within 0.05 s; all others have")
    assert "the agent starts all again" in said


class Here(dist.HashStore):
    """A store to which some ranks have come, and hear what rank 0 finds."""

    def __init__(self, *backends):
        super().__init__()
        for rank, backend in enumerate(backends):
            self.set(f"cephalo/backend/{rank}", f"{backend} n{rank}")
            self.set(f"cephalo/heard/{rank}", "")

    def delete_key(self, key):
        self.deleted = key  # as if all who are there had not read it yet
        return True


def _verdict(store, rank, world_size):
    with pytest.raises((RemoteRankError, UnsupportedError)) as raised:
        answer_the_call(store, rank, world_size, "gloo", SHORT)
    return str(raised.value)


def test_all_ranks_hear_who_is_missing():
    store = Here("gloo", "gloo")
    said = _verdict(store, 0, 3)
    assert said.startswith("Rank 2 of 3 has not connected within 0.05 s; all others have, from ")
    assert "n1" in said and "Its host may be lost" in said and "timeout=..." in said
    assert store.deleted == "cephalo/verdict"
    assert _verdict(store, 1, 3) == said
    assert _verdict(store, 2, 3) == said  # it comes too late


def test_ranks_with_different_backends_are_named():
    store = Here("gloo", "nccl", "gloo")
    assert "'gloo' (ranks [0, 2]) and 'nccl' (ranks [1])" in _verdict(store, 0, 3)


def test_a_first_rank_that_is_silent_or_not_there_is_named(monkeypatch):
    monkeypatch.setattr(roll_call, "_HEARING", SHORT)
    assert "rank 0, which notes who has come, is silent" in _verdict(Here("gloo"), 1, 2)
    port = port_to_meet()
    with pytest.raises(RemoteRankError, match=f"Rank 1 could not reach rank 0 at 127.0.0.1:{port}"):
        store_of_all(1, 2, "127.0.0.1", port, "gloo", SHORT)


def _timeouts_of_groups(rank, environments):
    os.environ.update(environments[rank], TORCHELASTIC_MAX_RESTARTS="1", GROUP_WORLD_SIZE="2")
    connect(TorchElasticEnvironment(), "gloo", timedelta(hours=1), torch.device("cpu"))
    ranks = Ranks.create(timedelta(hours=1), 0)
    groups = (dist.group.WORLD, ranks.groups.gather, ranks.groups.reduce, ranks.control._group)
    found = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    ranks.control.barrier()
    ranks.close()
    return found


def test_once_ranks_are_connected_collectives_wait_for_the_users_timeout():
    found = run_ranks(2, _timeouts_of_groups, torchrun_environments(2), process_group=False)
    assert found == [[timedelta(hours=1)] * 4] * 2
