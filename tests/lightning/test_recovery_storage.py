"""Hosts' memory is lost, some of it or all: training goes on from the storage, and never anew."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from common import RankFailure, assert_same_tensors, in_ranks
from killing import Kill, assert_repeated, fit, told_by
from launch import SOON_S
from lightning.pytorch import Callback

from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.recovery import storage


class Waits(Callback):
    """Lets what is under way to the storage arrive behind each batch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        task = trainer.strategy._recovering._keeper._uploading._task
        if task is not None:
            with suppress(RecoveryError):  # told in the next step
                task.wait(SOON_S)


class KillInUpload(Callback):
    """Kills a rank that has sent a part of a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:

            def dies(*_: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            vars(storage)["_packed"] = dies  # in this process, which will die


class StorageGoes(Callback):
    """Puts a file in the place of the storage."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            shutil.rmtree(self.folder)
            self.folder.touch()


def _start(ranks: int, folder: Path, kills: Any, epochs: int = 3) -> list[Any]:
    plan = {1: "one", 2: "3:1", 3: "three"}[ranks]
    kept = {"storage": str(folder / "sent"), "storage_every_s": 0.0}
    callbacks = [Waits(), *kills]
    return in_ranks(ranks, _told, plan, folder, callbacks, {"max_epochs": epochs}, 0.0, 2, kept)


def _told(*args: Any) -> tuple[Any, list[str]]:
    """Train, and return what it gives and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(*args)
    return found, [str(one.message) for one in caught if one.category is UserWarning]


def _killed(ranks: int, folder: Path, kills: Any) -> None:
    with pytest.raises(RankFailure, match="died without a result"):
        _start(ranks, folder, kills)


def _sent(folder: Path) -> list[Path]:
    return sorted(path.parent for path in (folder / "sent").glob("step-*/COMMIT"))


def test_what_hosts_have_lost_is_read_from_the_storage_and_nothing_else(tmp_path: Path) -> None:
    wanted = _start(2, tmp_path / "whole", [])
    assert not list((tmp_path / "whole" / "sent").iterdir())
    folder = tmp_path / "killed"
    # the host of rank 1 is lost: of the newest step that was sent, rank 0's rows are in memory
    _killed(2, folder, [Kill(1, 6, "on_train_batch_start")])
    shutil.rmtree(folder / "kept1")
    newest = _sent(folder)[-1]
    for path in newest.glob("rank0.0*"):
        path.unlink()
    _killed(1, folder, [Kill(0, 8, "on_train_batch_start")])
    # a rank is killed in mid-upload, and both hosts are lost: a step that was sent before
    _killed(2, folder, [KillInUpload(1, 12)])
    begun = {path for path in (folder / "sent").iterdir() if path.is_dir()} - {*_sent(folder)}
    assert len(begun) == 1
    for host in (0, 1):
        shutil.rmtree(folder / f"kept{host}")
    # the newest of these is damaged
    chunk = _sent(folder)[-1] / "rank0.000000"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\0")
    found = _start(3, folder, [])
    (older,) = [one for one in found[0][1] if "an older step" in one]
    assert str(chunk) in older
    assert_same_tensors(found[0][0], wanted[0][0], 1e-6)
    told, whole = told_by(folder), told_by(tmp_path / "whole")
    assert_repeated(told, 4, 5)
    last = {step: rest for step, *rest in told}
    assert [step for step, *_ in whole] == sorted(last)
    for step, loss, seen, _ in whole:
        assert last[step][0] == pytest.approx(loss, abs=1e-6) and last[step][1] == seen
    assert not list(folder.glob("kept*/*")) and not list((folder / "sent").iterdir())


def test_a_storage_that_is_away_is_told_and_never_makes_training_begin_anew(
    tmp_path: Path,
) -> None:
    # in training: it goes on, from memory if it is killed
    kills = [StorageGoes(tmp_path / "sent", 3), Kill(0, 9, "on_train_batch_start")]
    _killed(1, tmp_path, kills)
    ((found, said),) = _start(1, tmp_path, [])
    assert found is not None
    assert_repeated(told_by(tmp_path), 2)
    assert told_by(tmp_path)[-1][0] == 15
    assert any("could not send a step: storage=" in one and "goes on" in one for one in said)
    # at a start without memory: an error on every rank, before training
    with pytest.raises(
        RankFailure, match=r"RecoveryError: storage='.*sent': writing to it.* start again"
    ):
        _start(2, tmp_path, [])
