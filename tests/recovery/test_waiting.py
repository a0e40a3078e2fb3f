"""A world that is too small to hold the model waits for more hosts, and says so."""

from __future__ import annotations

import time
import warnings

import pytest
import torch.distributed as dist
from launch import run_ranks

from lightning_cephalo.common.errors import InfeasibleError, RemoteRankError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery.options import MOST_HOSTS
from lightning_cephalo.recovery.waiting import wait_for_hosts

pytestmark = pytest.mark.processes


def _waits(rank, error_of_rank_0, wait_s):
    """Return what a rank warns of, and how long it has waited."""
    control = ControlGroup(dist.group.WORLD)

    def fail():
        if rank == 0:
            raise error_of_rank_0

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        begin_s = time.monotonic()
        try:
            control.together("solving for the plan", fail)
        except (InfeasibleError, RemoteRankError, OSError) as error:
            wait_for_hosts(error, wait_s, control)
    return [str(one.message) for one in said], time.monotonic() - begin_s


def test_it_waits_until_the_time_is_over(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv(MOST_HOSTS, "4")
    error = InfeasibleError("too little memory on rank 1")
    (said, waited_s), (others, others_s) = run_ranks(2, _waits, error, 0.5)
    assert min(waited_s, others_s) >= 0.5 and others == []
    (one,) = said
    assert one.startswith("The model does not fit into the ranks of 2 hosts. Waiting up to 0.5 s")
    assert "of 4 at most. too little memory on rank 1" in one


def test_nobody_waits_for_what_more_hosts_do_not_mend(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    for error, most in ((OSError("no such file"), "4"), (InfeasibleError("too little"), "2")):
        monkeypatch.setenv(MOST_HOSTS, most)
        found = run_ranks(2, _waits, error, 300.0)
        assert all(not said and waited_s < 100.0 for said, waited_s in found)
