"""A world that is too small to hold the model waits for more hosts, and says so."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch.distributed as dist
from launch import run_ranks
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_cephalo.common.errors import InfeasibleError, RemoteRankError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery.options import MOST_HOSTS
from lightning_cephalo.recovery.waiting import wait_for_hosts

pytestmark = pytest.mark.processes


def _waits(rank, error_of_rank_0, wait_s, noticed_at=None):
    """Return what rank 0 warns of, and whether the agent's signal ended the wait."""
    control = ControlGroup(dist.group.WORLD)

    def fail():
        if rank == 0:
            raise error_of_rank_0

    looks = itertools.count()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            control.together("solving for the plan", fail)
        except (InfeasibleError, RemoteRankError, OSError) as error:
            try:
                wait_for_hosts(
                    error, wait_s, control, lambda: rank == 1 and next(looks) == noticed_at
                )
            except SIGTERMException:
                return [str(one.message) for one in said], True
    return [str(one.message) for one in said], False


def test_it_waits_until_another_host_comes_or_the_time_is_over(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv(MOST_HOSTS, "4")
    error = InfeasibleError("too little memory on rank 1")
    said, others = run_ranks(2, _waits, error, 300.0, 2)
    assert others == ([], True) and said[1]
    (one,) = said[0]
    assert one.startswith("The model does not fit into the ranks of 2 hosts. Waiting up to 300 s")
    assert "of 4 at most. too little memory on rank 1" in one
    assert [ended for _, ended in run_ranks(2, _waits, error, 0.01)] == [False, False]


def test_nobody_waits_for_what_more_hosts_do_not_mend(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv(MOST_HOSTS, "4")
    assert run_ranks(2, _waits, OSError("no such file"), 300.0) == [([], False)] * 2
    monkeypatch.setenv(MOST_HOSTS, "2")
    assert run_ranks(2, _waits, InfeasibleError("too little"), 300.0) == [([], False)] * 2
