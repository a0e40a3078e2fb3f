"""Ranks meet in a store; those that do not come are named, and waited for no longer than useful."""

from __future__ import annotations

import json
import os
import socket
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launch import SOON_S, port_to_meet, run_ranks, torchrun_environments
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError
from lightning_cephalo.ranks import roll_call
from lightning_cephalo.ranks.connection import Ranks
from lightning_cephalo.ranks.launch import connect
from lightning_cephalo.ranks.roll_call import answer_the_call, patience, store_of_all
from lightning_cephalo.ranks.switchboard import Process

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


HERE = Process.here("na")


def _meet(store, world_size, backends, wait=SHORT):
    """What each rank that comes returns or raises; ``backends`` by rank."""

    def answered(rank):
        try:
            return answer_the_call(store, rank, HERE, world_size, backends[rank], wait).name
        except (RemoteRankError, UnsupportedError) as error:
            return str(error)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(answered, backends))


LONG = timedelta(seconds=60)


def test_ranks_of_each_start_agree_on_a_name_of_its_own():
    store, names = dist.HashStore(), set()
    for _ in range(3):
        (name,) = set(_meet(store, 3, dict.fromkeys(range(3), "gloo"), LONG))
        names.add(name)
    assert len(names) == 3


def test_all_ranks_hear_who_is_missing_also_where_an_earlier_start_was_whole():
    store = dist.HashStore()
    assert len(set(_meet(store, 3, dict.fromkeys(range(3), "gloo"), LONG))) == 1
    for _ in range(2):
        first, second = _meet(store, 3, {0: "gloo", 1: "gloo"}, timedelta(seconds=0.5))
        assert first == second
        assert first.startswith("Rank 2 of 3 has not connected within 0.5 s; all others have, from")
        assert "Its host may be lost" in first and "timeout=..." in first


def test_ranks_with_different_backends_are_named():
    said = _meet(dist.HashStore(), 3, {0: "gloo", 1: "nccl", 2: "gloo"}, LONG)
    assert len(set(said)) == 1 and "'gloo' (ranks [0, 2]) and 'nccl' (ranks [1])" in said[0]


def test_a_first_rank_that_is_silent_or_not_there_is_named(monkeypatch):
    monkeypatch.setattr(roll_call, "_HEARING", SHORT)
    store = dist.HashStore()
    (said,) = _meet(store, 2, {1: "gloo"})
    assert "rank 0, which notes who has come, is silent" in said
    store.set("cephalo/call", "earlier")
    earlier = {"answers": ["answer"], "processes": [], "kind": "w", "words": ""}
    store.set("cephalo/earlier/verdict", json.dumps(earlier))
    assert _meet(store, 2, {1: "gloo"}) == [said]
    port = port_to_meet()
    with pytest.raises(RemoteRankError, match=f"Rank 1 could not reach rank 0 at 127.0.0.1:{port}"):
        store_of_all(1, HERE, 2, "127.0.0.1", port, "gloo", SHORT)


def test_a_port_that_another_job_has_is_named(monkeypatch):
    (environment, _) = torchrun_environments(2)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    port = int(environment["MASTER_PORT"])
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        with pytest.raises(UnsupportedError, match=f"cannot listen on port {port}.*MASTER_PORT"):
            connect(TorchElasticEnvironment(), "gloo", SOON, torch.device("cpu"))


def _connected_by_the_user(rank, environments):
    os.environ.update(
        environments[rank],
        TORCHELASTIC_MAX_RESTARTS="1",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    with pytest.warns(UserWarning, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        connect(TorchElasticEnvironment(), "gloo", SOON, torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        connect(TorchElasticEnvironment(), "gloo", SOON, torch.device("cpu"))


def test_a_group_of_the_users_that_no_restart_can_make_again_is_told_of():
    run_ranks(2, _connected_by_the_user, torchrun_environments(2))


def _connects(rank, environments):
    os.environ.update(environments[rank])
    connect(TorchElasticEnvironment(), "gloo", SOON, torch.device("cpu"))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_meet_again_in_a_store_that_outlives_them():
    """As torch's agent has one, for all restarts."""
    environments = torchrun_environments(2)
    port = int(environments[0]["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    shared = [{**each, "TORCHELASTIC_USE_AGENT_STORE": "True"} for each in environments]
    for _ in range(2):
        run_ranks(2, _connects, shared, process_group=False)
    assert store.check(["cephalo/call"])


def _timeouts_of_groups(rank, environments):
    os.environ.update(environments[rank], TORCHELASTIC_MAX_RESTARTS="1", GROUP_WORLD_SIZE="2")
    connect(TorchElasticEnvironment(), "gloo", timedelta(hours=1), torch.device("cpu"))
    ranks = Ranks.create(timedelta(hours=1), 0)
    groups = (dist.group.WORLD, ranks.groups.gather, ranks.groups.reduce, ranks.control.group)
    found = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    ranks.control.barrier()
    ranks.groups.meeting.close()
    return found


def test_once_ranks_are_connected_collectives_wait_for_the_users_timeout():
    found = run_ranks(2, _timeouts_of_groups, torchrun_environments(2), process_group=False)
    assert found == [[timedelta(hours=1)] * 4] * 2
