"""What starts ranks for tests waits for them, and not for long once one has failed."""

from __future__ import annotations

import time

import launch
import pytest


def _fails_first(rank):
    if rank == 0:
        raise ValueError("boom")
    time.sleep(launch.SOON_S)


def test_ranks_that_outlive_a_failure_are_ended_and_named(monkeypatch):
    monkeypatch.setattr(launch, "AFTER_FAILURE_S", 0.1)
    with pytest.raises(launch.RankFailure) as failed:
        launch.run_ranks(3, _fails_first, process_group=False)
    said = str(failed.value)
    assert "rank 0:\n" in said and "ValueError: boom" in said
    assert said.endswith("ranks [1, 2] were still running 0.1 s after rank 0 had failed")


def _hangs(rank):
    time.sleep(launch.SOON_S)


def test_ranks_that_hang_are_ended_after_their_time():
    with pytest.raises(launch.RankFailure, match=r"ranks \[0, 1\] were still running after 0.2 s$"):
        launch.run_ranks(2, _hangs, timeout_s=0.2, process_group=False)


def _has_a_slow_neighbour(rank):
    time.sleep(0.3 * rank)
    return rank


def test_ranks_that_end_one_after_another_are_waited_for():
    assert launch.run_ranks(3, _has_a_slow_neighbour, process_group=False) == [0, 1, 2]
