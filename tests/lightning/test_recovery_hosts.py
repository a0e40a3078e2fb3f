"""Hosts that are lost with their memory, or are about to be: training goes on from copies."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from common import RankFailure, assert_same_tensors, in_ranks
from killing import STEPS_OF_EPOCH, Kill, Notice, assert_repeated, fit, told_by
from lightning.pytorch import Callback

from lightning_cephalo.recovery import store


class KillInCopying(Callback):
    """Kills a rank that has received a copy of a step, and not yet given it its header."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank != self.rank or trainer.global_step != self.step:
            return
        finish = store.Slot.finish

        def dies(slot: Any, piece: Any) -> None:
            if slot.path.name.startswith("copy"):
                os.kill(os.getpid(), signal.SIGKILL)
            finish(slot, piece)

        vars(store)["Slot"].finish = dies  # in this process, which will die


def _start(ranks: int, folder: Path, kills: Any, epochs: int = 2, **kept: Any) -> list[Any]:
    plan = {1: "one", 2: "3:1", 3: "three"}[ranks]
    return in_ranks(ranks, fit, plan, folder, kills, {"max_epochs": epochs}, 0.0, 2, kept)


def _killed(ranks: int, folder: Path, kills: Any, **kept: Any) -> None:
    with pytest.raises(RankFailure, match="died without a result"):
        _start(ranks, folder, kills, **kept)


def _assert_equal(folder: Path, whole: Path, starts: int, most: int) -> None:
    told, wanted = told_by(folder), told_by(whole)
    assert_repeated(told, starts, most)
    last = {step: rest for step, *rest in told}
    assert [step for step, *_ in wanted] == sorted(last)
    for step, loss, seen, _ in wanted:
        assert last[step][0] == pytest.approx(loss, abs=1e-6) and last[step][1] == seen


# the last rank is told that there is no other host
@pytest.mark.filterwarnings("ignore:Kept steps have fewer copies than:UserWarning")
def test_hosts_that_are_lost_with_their_memory_are_gone_on_without(tmp_path: Path) -> None:
    """At an epoch's end ranks wait for copies, so that an epoch's start has some."""
    given = {"epochs": 3, "copies": 1}
    wanted = _start(3, tmp_path / "whole", [], **given)
    folder = tmp_path / "killed"
    # rank 0 is alone on its host, which is lost
    _killed(3, folder, [Kill(0, 7, "on_train_batch_start")], **given)
    shutil.rmtree(folder / "kept0")
    # a host is lost that has received a copy in part
    _killed(3, folder, [KillInCopying(0, 8)], **given)
    shutil.rmtree(folder / "kept0")
    # the host with two of three ranks is lost; one rank goes on, where there is no other host
    _killed(3, folder, [Kill(2, 12, "on_train_batch_start")], **given)
    shutil.rmtree(folder / "kept1")
    found = _start(1, folder, [], **given)
    assert_same_tensors(found[0], wanted[0], 1e-6)
    _assert_equal(folder, tmp_path / "whole", 4, 5)
    assert not list(folder.glob("kept*/*"))


@pytest.mark.parametrize("noticed", [0, 1])
def test_what_a_host_has_that_is_about_to_leave_is_moved_to_others(
    tmp_path: Path, noticed: int
) -> None:
    """A notice to one host, with steps kept seldom and no copies: no step is repeated."""
    _start(2, tmp_path / "whole", [])
    folder = tmp_path / "left"
    kept = {"every": 100}
    assert _start(2, folder, [Notice(noticed, 3, "on_train_batch_start")], **kept) == [None, None]
    shutil.rmtree(folder / f"kept{noticed}")
    _start(3, folder, [], **kept)
    _assert_equal(folder, tmp_path / "whole", 1, 0)
    assert len(told_by(folder)) == 2 * STEPS_OF_EPOCH


class Removes(Callback):
    """Removes what a host keeps, in the middle of training."""

    def __init__(self, folder: Path, rank: int, step: int) -> None:
        self.folder, self.rank, self.step = folder, rank, step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            shutil.rmtree(self.folder)


@pytest.mark.filterwarnings("ignore:Rank 1. somebody has removed files:UserWarning")
def test_files_that_are_removed_while_training_runs_are_kept_anew_on_all_ranks(
    tmp_path: Path,
) -> None:
    """Steps are kept seldom; after a removal, also of copies, the next one is kept at once."""
    folder, kept = tmp_path / "removed", {"every": 100, "copies": 1}
    _start(2, tmp_path / "whole", [])
    removes = [Removes(folder / "kept1", 1, step) for step in (1, 6)]
    _killed(2, folder, [*removes, Kill(0, 9, "on_train_batch_start")], **kept)
    _start(2, folder, [], **kept)
    _assert_equal(folder, tmp_path / "whole", 2, 3)
