"""Ranks that are killed go on from the newest step in the host's memory, as if nothing had been."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import pickle
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from common import (
    Net,
    RankFailure,
    assert_same_tensors,
    dataset,
    in_ranks,
    loader,
    strategy,
    values_of,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from plans import QUIET, plan_of
from torch import nn
from torch.utils.data import DataLoader

from lightning_cephalo import CephaloStrategy, Recovery
from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.recovery import store

DATA = 40
STEPS_OF_EPOCH = 5


class Told(Net):
    """Draws masks, changes a buffer behind each batch, and tells each step."""

    def __init__(self, folder: Path, dropout: float) -> None:
        super().__init__()
        self.folder = folder
        self.mask = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        return super().forward(self.mask(x))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += self.steps
        loss = float(self.trainer.callback_metrics["loss_step"])
        batches = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
        told = [batches, loss, float(self.seen), batch[0][:, 0].tolist()]
        with open(self.folder / f"rank{self.global_rank}", "a") as file:
            file.write(json.dumps(told) + "\n")


class Kill(Callback):
    """Kills a rank at a place of a step."""

    def __init__(self, rank: int, step: int, place: str) -> None:
        self.rank, self.step = rank, step
        setattr(self, place, self._kill)

    def _kill(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class MovesRows(Callback):
    """Gives the ranks other rows in the second epoch; a start afterwards begins with the first."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            plan = trainer.strategy.plan
            shares = zip(plan.ranks, (0.2, 0.8), strict=True)
            ranks = tuple(dataclasses.replace(r, state_fraction=share) for r, share in shares)
            trainer.strategy.change_plan(dataclasses.replace(plan, ranks=ranks))


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


def _fit(
    plan: str,
    folder: Path,
    kills: Any,
    options: Any,
    dropout: float,
    hosts: int = 1,
    **given: Any,
) -> Any:
    folder.mkdir(exist_ok=True)
    # what a script draws before it trains differs from run to run
    torch.manual_seed(os.getpid() if (folder / "kept0").exists() else 1)
    host = min(int(os.environ["RANK"]), hosts - 1)
    recover = Recovery(folder=folder / f"kept{host}", job="test")
    used = Trainer(
        accelerator="cpu",
        strategy=strategy(plan, recover=recover, **given),
        devices=int(os.environ["WORLD_SIZE"]),
        callbacks=[MovesRows(), *kills] if plan == "3:1" else kills,
        **{**QUIET, **options},
    )
    model = Told(folder, dropout)
    generator = torch.Generator().manual_seed(11)
    data = DataLoader(dataset(DATA), batch_size=8, shuffle=True, generator=generator)
    used.fit(model, data, DataLoader(dataset(8), batch_size=8))
    return values_of(model)


def _told(folder: Path, rank: int = 0) -> list[Any]:
    return [json.loads(line) for line in (folder / f"rank{rank}").read_text().splitlines()]


def _is_repeated(told: list[Any], starts: int) -> None:
    """Every step comes, in order; each start but the first repeats one step at most."""
    steps = [step for step, *_ in told]
    back = [a - b for a, b in itertools.pairwise(steps) if b <= a]
    assert max(back, default=0) == 0 and len(back) < starts
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))


def _killed(starts: list[Any], plan: str, folder: Path, *rest: Any) -> None:
    for kills in starts:
        with pytest.raises(RankFailure, match="died without a result"):
            in_ranks(2, _fit, plan, folder, kills, *rest)


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
    wanted = in_ranks(2, _fit, "3:1", tmp_path / "whole", [], *rest)
    _killed(starts, "3:1", tmp_path / "killed", *rest)
    found = in_ranks(2, _fit, "3:1", tmp_path / "killed", [], *rest)
    for rank in (0, 1):
        told, whole = _told(tmp_path / "killed", rank), _told(tmp_path / "whole", rank)
        _is_repeated(told, len(starts) + 1)
        assert len(whole) == 3 * STEPS_OF_EPOCH
        assert [step for step in told if step not in whole] == []
        assert_same_tensors(found[rank], wanted[rank], 0)
    assert not list((tmp_path / "killed").glob("kept*/*"))


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
    wanted = in_ranks(2, _fit, "3:1", tmp_path / "whole", [], *rest)
    _killed(starts, "3:1", tmp_path / "killed", *rest)
    found = in_ranks(
        3, partial(_fit, global_batch_size=None), "three", tmp_path / "killed", [], *rest
    )
    told, whole = _told(tmp_path / "killed"), _told(tmp_path / "whole")
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
    recover = options.pop("recover", Recovery(folder=folder, job="test"))
    steps: list[int] = []

    class Steps(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            steps.append(trainer.global_step)

    fit = {"ckpt_path": options.pop("ckpt_path", None)}
    plan = plan_of((options.pop("microbatches", (4, 4)), 1.0))
    given = {"plan": plan, "global_batch_size": 8, "recover": recover, "verbose": False}
    used = Trainer(
        accelerator="cpu",
        strategy=CephaloStrategy(**given),
        devices=1,
        callbacks=[Steps(), *callbacks],
        **{**QUIET, **options},
    )
    try:
        trained = Net() if model is None else model
        used.fit(trained, loader(24), loader(8) if isinstance(trained, Net) else None, **fit)
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
        with pytest.raises(RecoveryError, match=said):
            _one(tmp_path, *callbacks, recover=True, **options)
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


def test_the_search_for_a_learning_rate_is_not_kept(tmp_path: Path) -> None:
    class Looks(Searched):
        def on_fit_start(self) -> None:
            assert not _pieces(tmp_path / "kept")

    def run() -> None:
        search = LearningRateFinder(num_training_steps=4, early_stop_threshold=None)
        options = {"default_root_dir": tmp_path, "model": Looks()}
        assert _one(tmp_path / "kept", search, Fails(2), **options) == [1, 2]
        assert (kept := _pieces(tmp_path / "kept"))
        recover = Recovery(folder=tmp_path / "kept", job="test")
        given = {"strategy": strategy("one", recover=recover), "devices": 1, **QUIET}
        used = Trainer(accelerator="cpu", default_root_dir=tmp_path, **given)
        Tuner(used).lr_find(Searched(), loader(24), loader(8), num_training=4)
        assert _pieces(tmp_path / "kept") == kept and "LIGHTNING_CEPHALO_FITS" not in os.environ

    in_ranks(1, run)
