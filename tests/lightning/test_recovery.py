"""Ranks that are killed go on from the newest step in the host's memory, as if nothing had been."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import pickle
import shutil
import signal
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from common import Net, RankFailure, assert_same_tensors, in_ranks, loader, strategy
from killing import STEPS_OF_EPOCH, Kill, assert_repeated, fit, told_by
from launch import SOON_S
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from plans import QUIET, plan_of, quiet_strategy
from torch.utils import _pytree as pytree

from lightning_cephalo import Recovery
from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.ranks import refusals
from lightning_cephalo.recovery import store
from lightning_cephalo.recovery.keeper import Keeper
from lightning_cephalo.recovery.options import AGENT


class KillInCopy(Callback):
    """Kills a rank when a copy has its tensors, and not yet its header."""

    def __init__(self, rank: int, copy: int) -> None:
        self.rank, self.copy = rank, copy

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank != self.rank:
            return
        whole, counted = store._HEAD, itertools.count()

        class Head:
            size, unpack = whole.size, whole.unpack

            @staticmethod
            def pack(*values: Any) -> bytes:
                if next(counted) == self.copy:
                    os.kill(os.getpid(), signal.SIGKILL)
                return whole.pack(*values)

        vars(store)["_HEAD"] = Head  # in this process, which will die


def _killed(starts: list[Any], plan: str, folder: Path, *rest: Any) -> None:
    for kills in starts:
        with pytest.raises(RankFailure, match="died without a result"):
            in_ranks(2, fit, plan, folder, kills, *rest)


def test_after_each_kill_every_step_is_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    starts = [
        [Kill(0, 0, "on_train_batch_start")],
        [Kill(1, 7, "on_before_optimizer_step")],
        [KillInCopy(0, 1)],
        [Kill(0, 10, "on_train_epoch_end")],
        [Kill(1, 10, "on_train_epoch_start")],
        [Kill(0, 12, "on_train_batch_end"), Kill(1, 12, "on_train_batch_end")],
    ]
    rest = ({"max_epochs": 3}, 0.2)
    wanted = in_ranks(2, fit, "3:1", tmp_path / "whole", [], *rest)
    _killed(starts, "3:1", tmp_path / "killed", *rest)
    found = in_ranks(2, fit, "3:1", tmp_path / "killed", [], *rest)
    for rank in (0, 1):
        told, whole = told_by(tmp_path / "killed", rank), told_by(tmp_path / "whole", rank)
        assert_repeated(told, len(starts) + 1)
        assert len(whole) == 3 * STEPS_OF_EPOCH
        assert [step for step in told if step not in whole] == []
        assert_same_tensors(found[rank], wanted[rank], 0)
    assert not list((tmp_path / "killed").glob("kept*/*"))


@pytest.mark.slow
def test_other_ranks_go_on_with_the_first_global_batch(tmp_path: Path) -> None:
    """Validation in mid-epoch, accumulation, and an end by steps; hosts see only their files."""
    options = {
        "max_steps": 9,
        "max_epochs": -1,
        "val_check_interval": 4,
        "accumulate_grad_batches": 2,
        "limit_val_batches": 1,
    }
    starts = [
        [Kill(0, 2, "on_validation_start")],
        [Kill(1, 2, "on_validation_end")],
        [Kill(1, 3, "on_train_epoch_start")],
    ]
    rest = (options, 0.0, 2)
    wanted = in_ranks(2, fit, "3:1", tmp_path / "whole", [], *rest)
    _killed(starts, "3:1", tmp_path / "killed", *rest)
    found = in_ranks(
        3, partial(fit, global_batch_size=None), "three", tmp_path / "killed", [], *rest
    )
    told, whole = told_by(tmp_path / "killed"), told_by(tmp_path / "whole")
    last = {step: rest for step, *rest in told}
    assert [step for step, *_ in whole] == sorted(last)
    for step, loss, seen, _ in whole:
        assert last[step][0] == pytest.approx(loss, abs=1e-6) and last[step][1] == seen
    assert_same_tensors(found[0], wanted[0], 1e-6)
    assert not list((tmp_path / "killed").glob("kept*/*"))


# -- what cannot be, on a single rank -------------------------------------------------------------


class Fails(Callback):
    """Ends training with an error after some steps."""

    def __init__(self, step: int, place: str = "on_train_batch_start") -> None:
        self.step = step
        setattr(self, place, self._fail)

    def _fail(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise OSError("planted")


def _one(folder: Path, *callbacks: Callback, model: Any = None, **options: Any) -> list[int]:
    """Train on one rank, and return the steps that are trained."""
    recover = options.pop("recover", Recovery(every=1, folder=folder, job="test"))
    steps: list[int] = []

    class Steps(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            steps.append(trainer.global_step)

    begin = {"ckpt_path": options.pop("ckpt_path", None)}
    plan = plan_of((options.pop("microbatches", (4, 4)), 1.0))
    given = {"plan": plan, "global_batch_size": 8, "recover": recover}
    used = Trainer(
        accelerator="cpu",
        strategy=quiet_strategy(**given),
        devices=1,
        callbacks=[Steps(), *callbacks],
        **{**QUIET, **options},
    )
    try:
        trained = Net() if model is None else model
        used.fit(trained, loader(24), loader(8) if isinstance(trained, Net) else None, **begin)
    except OSError as error:
        assert str(error) == "planted"
    return steps


def _pieces(folder: Path) -> list[Path]:
    return sorted(folder.rglob("rank*"))


def _said(function: Any, *args: Any, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = function(*args, **options)
    return found, [str(one.message) for one in caught if one.category is UserWarning]


class Deep(Net):
    """A model of many small tensors."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.more = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(layers))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_a_kept_step_takes_few_calls_for_each_tensor(tmp_path: Path) -> None:
    """What training waits for: everything but the copy, which a thread makes."""

    def calls(layers: int) -> int:
        counts: list[int] = []
        keep = Keeper._keep

        def counted(keeper: Keeper, kind: Any) -> None:
            began = itertools.count()
            sys.setprofile(lambda frame, event, arg: next(began) if event == "call" else None)
            try:
                keep(keeper, kind)
            finally:
                sys.setprofile(None)
                counts.append(next(began))

        with patch.object(Keeper, "_keep", counted):
            _one(tmp_path / str(layers), model=Deep(layers))
        return counts[1]

    def run() -> None:
        few, many = calls(10), calls(30)
        # a layer has two parameters, and six tensors of the optimizer's
        assert (many - few) / 20 < 100

    in_ranks(1, run)


def test_a_step_without_all_rows_is_not_gone_on_from(tmp_path: Path) -> None:
    def run() -> None:
        assert _one(tmp_path / "kept", Fails(2)) == [1, 2]
        kept = store.Store(tmp_path / "kept", store.job_named("test"))
        # the newest step lacks a rank's rows: the one before is whole
        slots = kept.pieces()
        newest = max(slots)
        half = dataclasses.replace(newest, world_size=2)
        slots[newest].write(half, b"", [])
        assert _one(tmp_path / "kept", Fails(2)) == [2]
        for slot in store.Store(kept.base.parent, kept.folder.name).pieces().values():
            slot.write(half, b"", [])
        with pytest.raises(RecoveryError, match=r"lacks the rows of rank 1.*ckpt_path"):
            _one(tmp_path / "kept")
        used = Trainer(accelerator="cpu", strategy=strategy("one"), devices=1, **QUIET)
        used.fit(Net(), loader(24), loader(8))
        used.save_checkpoint(tmp_path / "whole.ckpt")
        options = {"ckpt_path": tmp_path / "whole.ckpt", "max_epochs": 2}
        steps, said = _said(_one, tmp_path / "kept", **options)
        assert steps == [4, 5, 6]
        assert any("Training begins at" in one and "lacks the rows" in one for one in said)

    in_ranks(1, run)


def test_a_restart_that_finds_nothing_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    def run() -> None:
        steps, said = _said(_one, tmp_path)
        assert steps == [1, 2, 3] and not _pieces(tmp_path)
        (one,) = said
        assert one.startswith("The ranks were restarted (attempt 1), but") and "at step 0" in one

    in_ranks(1, run)


def test_too_little_room_is_told_before_training(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(store.Store, "free_bytes", 64 * 2**10)
    monkeypatch.setattr(store, "MEMORY", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")

    def run() -> None:
        steps, said = _said(_one, tmp_path, recover="auto", model=Net(width=64))
        assert steps == [1, 2, 3]
        assert any("which would begin anew: Keeping steps takes about" in one for one in said)
        with pytest.raises(RecoveryError, match=r"has room for 0\.1 MiB.*--shm-size"):
            _one(tmp_path, recover=True, model=Net(width=64))

    in_ranks(1, run)


def test_a_memory_that_fills_up_ends_keeping_and_not_training(tmp_path: Path) -> None:
    class Fills(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                vars(store.os)["posix_fallocate"] = self._full

        def _full(self, *_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def run() -> None:
        steps, said = _said(_one, tmp_path, Fills(), Fails(3), max_epochs=2)
        assert steps == [1, 2, 3]
        (one,) = said
        assert one.startswith("Rank 0 keeps no more steps: No space left on device in")
        assert len(_pieces(tmp_path)) == 2

    in_ranks(1, run)


def test_files_that_are_removed_while_training_runs_are_told_once_and_kept_anew(
    tmp_path: Path,
) -> None:
    """Steps are kept seldom; after a removal the next one is kept at once."""

    class Removes(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step in (0, 3):
                shutil.rmtree(tmp_path / "kept")

    def run() -> None:
        recover = Recovery(every=100, folder=tmp_path / "kept", job="test")
        steps, said = _said(_one, tmp_path, Removes(), Fails(5), recover=recover, max_epochs=2)
        (one,) = said
        assert one.startswith("Rank 0: somebody has removed files of kept steps in")
        assert steps + _one(tmp_path, recover=recover, max_epochs=2) == [1, 2, 3, 4, 5, 5, 6]

    in_ranks(1, run)


def test_a_hook_that_cannot_save_ends_automatic_keeping_and_not_training(
    tmp_path: Path, monkeypatch: Any
) -> None:
    class Saves(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            if trainer.global_step:
                checkpoint["mine"] = lambda: None  # cannot be pickled

    monkeypatch.setattr(store, "MEMORY", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")

    def run() -> None:
        steps, said = _said(_one, tmp_path, Saves(), recover="auto")
        assert steps == [1, 2, 3]
        (one,) = said
        assert "keeps no more steps: " in one and "pickle" in one
        assert "on_save_checkpoint() and state_dict() of callbacks run at each" in one
        with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
            _one(tmp_path, Saves(), recover=True)

    in_ranks(1, run)


class AddsUp(Net):
    """Updates behind its first and its third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx != 1:
            optimizer.step()
            optimizer.zero_grad()

    def on_train_batch_end(self, *_: Any) -> None:
        pass


class FailsBehindTwo(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise OSError("planted")


class Clips(Net):
    """Writes to its weights before some batches; steps are copied while it computes."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.told = first, []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step >= self.first:
            for parameter in self.parameters():
                parameter.data.mul_(0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        self.told.append(float(self.trainer.callback_metrics["loss_step"]))


@pytest.mark.parametrize("first", [0, 2])
def test_no_copy_is_torn_by_a_hook_that_writes_to_weights(tmp_path: Path, first: int) -> None:
    def run() -> None:
        whole, begun, ended = Clips(first), Clips(first), Clips(first)
        assert _one(tmp_path / "whole", model=whole) == [1, 2, 3]
        _one(tmp_path / "killed", Fails(2, "on_before_zero_grad"), model=begun)
        assert begun.told == whole.told[:2]
        _one(tmp_path / "killed", model=ended)
        # hooks that write from the first batch on let nothing be copied meanwhile
        assert ended.told == whole.told[2 if first == 0 else 1 :]

    in_ranks(1, run)


def test_a_step_is_copied_while_the_next_one_computes(tmp_path: Path, monkeypatch: Any) -> None:
    computes, fill = threading.Event(), store.Slot.fill
    seen: list[bool] = []

    def filled(slot: Any, *args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            seen.append(computes.wait(SOON_S))
        fill(slot, *args)

    class Computes(Clips):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            computes.set()
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            computes.clear()

        def on_train_end(self) -> None:
            computes.set()

    monkeypatch.setattr(store.Slot, "fill", filled)

    def run() -> None:
        assert _one(tmp_path, model=Computes(9), limit_train_batches=3) == [1, 2, 3]
        assert seen == [True, True, True]

    in_ranks(1, run)


class WritesTo(Callback):
    """Writes to what is saved."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        assert not any(value.requires_grad for value in checkpoint["state_dict"].values())
        for value in pytree.tree_leaves(checkpoint[self.name]):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.zero_()


def test_what_hooks_write_to_a_kept_step_does_not_reach_the_training(tmp_path: Path) -> None:
    def run() -> None:
        whole, written = Clips(9), Clips(9)
        _one(tmp_path, model=whole)
        _one(tmp_path, WritesTo("state_dict"), model=written)
        assert written.told == whole.told
        with pytest.raises(RecoveryError, match=r"on_save_checkpoint\(\) writes to.*copies"):
            _one(tmp_path, WritesTo("optimizer_states"))

    in_ranks(1, run)


def test_no_step_is_kept_while_gradients_add_up(tmp_path: Path) -> None:
    def run() -> None:
        given = {"microbatches": (8,)}
        assert _one(tmp_path, FailsBehindTwo(), model=AddsUp(), **given) == [1, 1]
        assert _one(tmp_path, model=AddsUp(), **given) == [1, 2]

    in_ranks(1, run)


def test_the_steps_of_another_model_are_refused(tmp_path: Path) -> None:
    def run() -> None:
        _one(tmp_path, Fails(2))
        with pytest.raises(RecoveryError, match=r"another model.*Recovery\(job=...\)"):
            _one(tmp_path, model=Wrapped())
        os.environ["LIGHTNING_CEPHALO_FITS"] = "1"
        with pytest.raises(RecoveryError, match=r"steps of fit\(\) number 1.*this is number 2"):
            _one(tmp_path)

    in_ranks(1, run)


def test_automatic_recovery_drops_what_it_cannot_go_on_from(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(store, "MEMORY", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    search = LearningRateFinder(num_training_steps=4, early_stop_threshold=None)

    def begins(said: str, *callbacks: Callback, **options: Any) -> None:
        kept = _pieces(tmp_path)
        with pytest.raises(RecoveryError, match=said) as raised:
            _one(tmp_path, *callbacks, recover=True, **options)
        # a storage or a host may come again, and may have what is damaged here
        assert refusals.is_refusal(raised.value) == ("damaged" not in said)
        assert _pieces(tmp_path) == kept
        found = _said(_one, tmp_path, *callbacks, recover="auto", **options)
        assert found[0][-3:] == [1, 2, 3] and not _pieces(tmp_path)
        assert any("Kept steps are removed" in one and said in one for one in found[1])

    def run() -> None:
        fails = partial(_one, tmp_path, Fails(2), recover=True)
        os.environ["LIGHTNING_CEPHALO_FITS"] = "1"
        assert fails() == [1, 2]
        os.environ["LIGHTNING_CEPHALO_FITS"] = "0"
        begins("number 2 of the script")
        fails()
        for path in _pieces(tmp_path):
            with path.open("r+b") as file:
                file.seek(store._read_head(path)[-3])
                file.write(b"damaged")
        begins("void or damaged")
        fails()
        given = {"default_root_dir": tmp_path, "model": Searched()}
        begins("LearningRateFinder cannot run", search, **given)

    in_ranks(1, run)


@pytest.mark.parametrize("recover", ["auto", True])
def test_where_the_newest_step_is_damaged_the_older_one_is_gone_on_from(
    tmp_path: Path, monkeypatch: Any, recover: Any
) -> None:
    monkeypatch.setattr(store, "MEMORY", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")

    def run() -> None:
        assert _one(tmp_path, Fails(2), recover=True) == [1, 2]
        newest = max(_pieces(tmp_path), key=lambda path: store.Slot(path).piece())
        with newest.open("r+b") as file:
            file.seek(store._read_head(newest)[-3])
            file.write(b"damaged")
        steps, said = _said(_one, tmp_path, recover=recover)
        assert steps == [2, 3] and not _pieces(tmp_path)
        (one,) = said
        assert one.startswith("Training goes on from an older kept step: ") and newest.name in one

    in_ranks(1, run)


class Searched(Net):
    learning_rate = 1e-3

    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Distilled(Net):
    """Loads a teacher before it trains."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def setup(self, stage: str) -> None:
        teacher = self.trainer.strategy.load_checkpoint(self.path)
        assert teacher["global_step"] == 9


def test_a_file_that_a_hook_loads_stays_that_file(tmp_path: Path) -> None:
    def run() -> None:
        torch.save({"global_step": 9}, path := tmp_path / "teacher.ckpt")
        assert _one(tmp_path, Fails(2), model=Distilled(path)) == [1, 2]
        assert _one(tmp_path, model=Distilled(path)) == [3]

    in_ranks(1, run)


class Wrapped(LightningModule):
    """The same model under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.inner.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_restart_at_the_end_ends_and_the_next_fit_trains(tmp_path: Path) -> None:
    def run() -> None:
        assert _one(tmp_path, Fails(3, "on_train_end")) == [1, 2, 3] and _pieces(tmp_path)
        assert _one(tmp_path) == [] and not _pieces(tmp_path)
        assert os.environ["LIGHTNING_CEPHALO_FITS"] == "1"
        assert _one(tmp_path) == [1, 2, 3]

    in_ranks(1, run)


def test_a_rank_that_is_lost_behind_fit_lets_nothing_be_trained_anew(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The launcher removes what is kept when all ranks have ended."""
    monkeypatch.setattr(store, "MEMORY", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv(AGENT, str(os.getpid()))

    def run() -> None:
        first, again = Clips(9), Clips(9)
        assert _one(tmp_path, recover=True, model=first) == [1, 2, 3]
        del os.environ["LIGHTNING_CEPHALO_FITS"]  # a rank that is started again
        assert _one(tmp_path, recover=True, model=again) == []
        assert_same_tensors(again.state_dict(), first.state_dict(), 0)
        # another fit of the same script trains, and keeps steps of its own
        steps, said = _said(_one, tmp_path, Fails(2), recover=True)
        assert steps == [1, 2] and not said
        os.environ["LIGHTNING_CEPHALO_FITS"] = "0"
        with pytest.raises(RecoveryError, match=r"fit\(\) number 2"):
            _one(tmp_path, recover=True)

    in_ranks(1, run)


def test_the_search_for_a_learning_rate_is_not_kept(tmp_path: Path) -> None:
    class Looks(Searched):
        def on_fit_start(self) -> None:
            assert not _pieces(tmp_path / "kept")

    def run() -> None:
        search = LearningRateFinder(num_training_steps=4, early_stop_threshold=None)
        options = {"default_root_dir": tmp_path, "model": Looks()}
        assert _one(tmp_path / "kept", search, Fails(2), **options) == [1, 2]
        assert (kept := _pieces(tmp_path / "kept"))
        recover = Recovery(every=1, folder=tmp_path / "kept", job="test")
        given = {"strategy": strategy("one", recover=recover), "devices": 1, **QUIET}
        used = Trainer(accelerator="cpu", default_root_dir=tmp_path, **given)
        Tuner(used).lr_find(Searched(), loader(24), loader(8), num_training=4)
        assert _pieces(tmp_path / "kept") == kept and "LIGHTNING_CEPHALO_FITS" not in os.environ

    in_ranks(1, run)
