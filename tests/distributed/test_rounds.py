"""The waiting processes of ranks fork together, or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lightning_cephalo.ranks import rounds
from lightning_cephalo.ranks.rounds import STORE, Rounds


@pytest.fixture
def two(monkeypatch: Any) -> Any:
    """Two ranks, of which at most two forks may be lost."""
    monkeypatch.setenv(STORE, "")
    monkeypatch.setattr(rounds, "_HEAR_S", 0.1)
    monkeypatch.setattr(rounds, "_END_S", 0.2)
    store = rounds.serve()
    yield tuple(Rounds(rounds.os.environ[STORE], 2, 0, 2) for _ in range(2))
    del store


def _agreed(two: Any, number: int, killed: Any, asked: Any = (False, False)) -> list[bool]:
    with ThreadPoolExecutor(2) as pool:
        tried = [
            pool.submit(each.agree, number, was, lambda ends=ends: ends)
            for each, was, ends in zip(two, killed, asked, strict=True)
        ]
        return [each.result() for each in tried]


def test_all_fork_again_after_a_loss_so_often_as_the_agent_would(two: Any) -> None:
    assert not two[0].is_lost(0)
    assert _agreed(two, 0, (True, False)) == [True, True]
    assert two[1].is_lost(0) and not two[1].is_lost(1)
    assert _agreed(two, 1, (False, True)) == [True, True]
    assert _agreed(two, 2, (True, False)) == [False, False]


def test_without_a_killed_fork_or_with_one_that_goes_on_none_forks(two: Any) -> None:
    assert _agreed(two, 0, (False, False)) == [False, False]
    assert not two[0].agree(1, True, lambda: False)
    assert _agreed(two, 2, (True, False), (False, True)) == [False, False]


def test_where_training_has_ended_on_a_rank_none_forks(two: Any) -> None:
    two[1].tell_over()
    assert not two[0].agree(0, True, lambda: False)
    assert not two[1].is_lost(0)
