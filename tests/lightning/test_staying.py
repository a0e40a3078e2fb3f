"""Ranks whose processes stay over losses train as those that nobody has killed."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from common import RankFailure, assert_same_tensors, in_ranks
from killing import STEPS_OF_EPOCH, Kill, assert_repeated, fit, told_by

from lightning_cephalo.ranks import launch, rounds

STAYS = {"stay": True}


class KillIn(Kill):
    """Kills a rank at a place of a step, in one round."""

    def __init__(self, number: int, rank: int, step: int, place: str) -> None:
        super().__init__(rank, step, place)
        self.number = number

    def _kill(self, trainer: Any, *rest: Any, **_: Any) -> None:
        if os.environ[rounds.STAYED] == str(self.number):
            super()._kill(trainer, *rest)


class FailsIn(KillIn):
    """Fails on a rank at a place of a step, in one round."""

    def _kill(self, trainer: Any, *_: Any, **named: Any) -> None:
        is_there = (trainer.global_rank, trainer.global_step) == (self.rank, self.step)
        if is_there and os.environ[rounds.STAYED] == str(self.number):
            raise OSError("planted")


def trained(folder: Path, kills: Any, *rest: Any) -> tuple[Any, str]:
    """Train on ranks that stay; return the model's values, and the rounds that were before."""
    return fit("3:1", folder, kills, *rest, 1, STAYS), os.environ[rounds.STAYED]


@pytest.fixture
def agent(monkeypatch: Any) -> Any:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "100")
    monkeypatch.setenv(rounds.STORE, "")
    return rounds.serve()


def test_after_each_loss_all_ranks_fork_again_and_every_step_is_as_without(
    tmp_path: Path, agent: Any
) -> None:
    kills = [
        KillIn(0, 0, 0, "on_train_batch_start"),
        KillIn(1, 1, 7, "on_before_optimizer_step"),
        KillIn(2, 1, 0, "setup"),
        KillIn(3, 0, 12, "on_train_batch_end"),
        KillIn(3, 1, 12, "on_train_batch_end"),
    ]
    rest = ({"max_epochs": 3}, 0.2)
    wanted = in_ranks(2, fit, "3:1", tmp_path / "whole", [], *rest)
    found, stayed = zip(*in_ranks(2, trained, tmp_path / "killed", kills, *rest), strict=True)
    assert stayed == ("4", "4")
    for rank in (0, 1):
        told, whole = told_by(tmp_path / "killed", rank), told_by(tmp_path / "whole", rank)
        assert_repeated(told, 5)
        assert len(whole) == 3 * STEPS_OF_EPOCH
        assert [step for step in told if step not in whole] == []
        assert_same_tensors(found[rank], wanted[rank], 0)
    assert not list((tmp_path / "killed").glob("kept*/*"))


def _killed_while_connecting(folder: Path, place: str) -> tuple[Any, str]:
    """Train; rank 1 is killed where it connects, in the first round."""
    connects = getattr(launch, place)

    def dies(*args: Any, **options: Any) -> Any:
        if (os.environ["RANK"], os.environ[rounds.STAYED]) == ("1", "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        return connects(*args, **options)

    vars(launch)[place] = dies  # in this process, which ends
    warnings.filterwarnings("ignore", "The ranks were restarted")  # nothing is kept so early
    return trained(folder, [], {"max_epochs": 1}, 0.0)


@pytest.mark.parametrize("place", ["_init_dist_connection", "ranks_for"])
def test_where_a_rank_is_killed_while_all_connect_all_fork_again(
    tmp_path: Path, agent: Any, place: str
) -> None:
    _, stayed = zip(*in_ranks(2, _killed_while_connecting, tmp_path, place), strict=True)
    assert stayed == ("1", "1")
    assert len(told_by(tmp_path)) == STEPS_OF_EPOCH


def test_an_error_of_a_rank_ends_all_as_a_restart_needs_it(
    tmp_path: Path, agent: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(rounds, "_HEAR_S", 0.2)
    kills = [KillIn(0, 1, 1, "on_train_batch_end"), FailsIn(1, 0, 3, "on_train_batch_end")]
    with pytest.raises(RankFailure, match="planted") as said:
        in_ranks(2, fit, "3:1", tmp_path, kills, {"max_epochs": 1}, 0.0, 1, STAYS)
    # the other one has said nothing to the script, whose fork has ended
    assert "rank 1:\ndied without a result" in str(said.value)
    assert len(told_by(tmp_path)) >= 3 and list(tmp_path.glob("kept*/*"))


def test_what_cannot_be_forked_trains_and_says_so(
    tmp_path: Path, agent: Any, monkeypatch: Any
) -> None:
    def beside() -> tuple[str, str]:
        with threading_beside(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit("3:1", tmp_path, [], {"max_epochs": 1}, 0.0, 1, STAYS)
        return os.environ.get(rounds.STAYED, "no fork"), "".join(str(w.message) for w in said)

    for fork, said in in_ranks(2, beside):
        assert fork == "no fork" and "the script runs 2 threads before fit(), among them" in said
    monkeypatch.delenv(rounds.STORE)
    with pytest.raises(RankFailure, match=r"only under `python -m lightning_cephalo.run`"):
        in_ranks(1, fit, "3:1", tmp_path, [], {}, 0.0, 1, STAYS)


@contextmanager
def threading_beside() -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="works beside")
    thread.start()
    yield
    end.set()
    thread.join()
