"""Code that one rank alone runs in a hook: it works in full_parameters(), and never hangs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Net, dataset, in_ranks, loader, look_soon, trainer
from launch import SOON_S
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from safetensors.torch import load_file, save_file
from test_bad_input import failures
from torch.utils.data import DataLoader, IterableDataset

from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError

X = torch.linspace(-1, 1, 10).view(2, 5)


class Samples(Callback):
    """Calls the model at the end of an epoch, on one rank.

    Args:
        on_rank: The rank.
        inside: Whether all ranks enter full_parameters() around it.
    """

    def __init__(self, on_rank: int, inside: bool) -> None:
        self.on_rank, self.inside = on_rank, inside
        self.seen: list[torch.Tensor] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.inside:
            with trainer.strategy.full_parameters():
                self._call(trainer, module)
        else:
            self._call(trainer, module)

    def _call(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == self.on_rank:
            with torch.no_grad():
                self.seen.append(module(X))
                self.seen.append(module.blocks[1](torch.ones(2, 6)))
                self.seen.append(module.outputs.weight.detach().clone())


def _fit(plan: str | None, samples: Samples, model: Net | None = None) -> list[float]:
    model = model or Net()
    run = trainer(plan, callbacks=[samples], max_epochs=2)
    run.fit(model, loader(), loader(8))
    return model.losses


@pytest.mark.parametrize("on_rank", [0, 1])
def test_one_rank_alone_calls_the_model_inside_full_parameters(on_rank):
    def alone():
        samples = Samples(0, inside=False)
        return samples.seen, _fit(None, samples)

    def together():
        samples = Samples(on_rank, inside=True)
        return samples.seen, _fit("3:1", samples)

    wanted, losses = in_ranks(1, alone)[0]
    found = in_ranks(2, together)
    assert not found[1 - on_rank][0]
    for value, expected in zip(found[on_rank][0], wanted, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    for _, said in found:
        assert said == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("on_rank", [0, 1])
def test_one_rank_alone_outside_of_full_parameters_names_itself_and_the_remedy(on_rank):
    def fit():
        look_soon()
        return _fit("3:1", Samples(on_rank, inside=False))

    found = failures(fit)
    own, other = found[on_rank], found[1 - on_rank]
    assert own.kind == "UnsupportedError"
    said = f"Rank {on_rank} is calling Net outside of a step, in on_train_epoch_end() (_call in"
    assert said in own.message
    assert f"Meanwhile rank {1 - on_rank} waits" in own.message
    assert "with trainer.strategy.full_parameters():" in own.message
    assert other.message.startswith(f"Rank {on_rank} (process") and said in other.message
    assert ") failed: UnsupportedError" in other.message


class Saves(Callback):
    """Writes a part of the model in rank 0, by torch or by safetensors, as users do."""

    def __init__(self, path: Path, inside: bool, save: Callable[[Any, Path], Any]) -> None:
        self.path, self.inside, self.save = path, inside, save

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        with trainer.strategy.full_parameters() if self.inside else nullcontext():
            if trainer.is_global_zero:
                self.save(module.blocks.state_dict(), self.path)


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_a_part_of_the_model_is_saved_inside_full_parameters(save, tmp_path):
    def fit():
        model = Net()
        saves = Saves(tmp_path / "part", inside=True, save=save)
        trainer("3:1", callbacks=[saves], max_epochs=1).fit(model, loader(), loader(8))
        return model.blocks.state_dict()

    whole = in_ranks(2, fit)[0]
    path = tmp_path / "part"
    saved = torch.load(path, weights_only=True) if save is torch.save else load_file(path)
    assert saved.keys() == whole.keys()
    assert all(torch.equal(saved[name], whole[name]) for name in whole)


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_a_part_of_the_model_saved_from_shards_is_refused_with_the_line_to_write(save, tmp_path):
    def fit():
        look_soon()
        saves = Saves(tmp_path / "part", inside=False, save=save)
        trainer("3:1", callbacks=[saves], max_epochs=1).fit(Net(), loader(), loader(8))

    own, other = failures(fit)
    assert own.kind == "UnsupportedError"
    assert "with trainer.strategy.full_parameters():" in own.message
    assert "with trainer.strategy.full_parameters():" in other.message


class Different(Callback):
    """Every rank calls another block."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.blocks[trainer.global_rank](torch.ones(2, 6))


def test_ranks_that_call_different_units_outside_of_a_step_all_say_so():
    def fit():
        trainer("3:1", callbacks=[Different()], max_epochs=1).fit(Net(), loader(), loader(8))

    for failure in failures(fit):
        assert failure.kind == "UnsupportedError"
        assert "rank 0 is calling blocks.0 outside of a step" in failure.message
        assert "rank 1 is calling blocks.1 outside of a step" in failure.message


def test_full_parameters_inside_of_a_step_is_refused():
    class Inside(Net):
        def training_step(self, batch, batch_idx):
            with self.trainer.strategy.full_parameters():
                return super().training_step(batch, batch_idx)

    def fit():
        with pytest.raises(UnsupportedError, match=r"inside of a step.*on_train_batch_end"):
            trainer("even", max_epochs=1).fit(Inside(), loader(), loader(8))
        return True

    assert in_ranks(2, fit) == [True, True]


class Writes(Callback):
    """Writes where parameters are shown for reading."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        with trainer.strategy.full_parameters(), torch.no_grad():
            module.blocks[0].up.weight.data.mul_(2)


def test_a_write_inside_full_parameters_is_refused_by_name():
    def fit():
        trainer("3:1", callbacks=[Writes()], max_epochs=1).fit(Net(), loader(), loader(8))

    for failure in failures(fit):
        assert failure.kind == "UnitUseError"
        assert "the block of full_parameters() writes to" in failure.message
        assert "'blocks.0.up.weight'" in failure.message
        assert "writable_parameters" in failure.message


class FailsAlone(Callback):
    """Raises after the second step, on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 2:
            raise KeyError("only here")


class SavesByHand(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / "by_hand.ckpt")


SAVERS = {
    "OnExceptionCheckpoint": OnExceptionCheckpoint,
    # a name that is taken makes the callback ask all ranks first
    "ModelCheckpoint": lambda folder: ModelCheckpoint(
        folder, "{step}", every_n_train_steps=1, save_last=True, save_on_exception=True
    ),
    "by hand": SavesByHand,
}


@pytest.mark.parametrize("saver", SAVERS)
def test_no_checkpoint_is_saved_after_a_failure_of_one_rank_and_the_cause_is_seen(tmp_path, saver):
    def fit() -> None:
        callbacks = [FailsAlone(1), SAVERS[saver](tmp_path)]
        options = {"max_epochs": 2, "enable_checkpointing": True, "default_root_dir": tmp_path}
        warnings.filterwarnings("always")
        with warnings.catch_warnings(record=True) as caught:
            try:
                trainer("three", callbacks=callbacks, **options).fit(Net(), loader())
            finally:
                said = [str(one.message) for one in caught if "is refused" in str(one.message)]
                own = f"Rank {os.environ['RANK']} ends with "
                assert said and said[0].startswith(own) and "do not share this failure" in said[0]

    first, second, third = failures(fit, world_size=3)
    assert second.kind == "KeyError" and second.message == "'only here'"
    for other in (first, third):
        assert other.kind == "RuntimeError"
        assert other.message.startswith("Rank 1 (process")
        assert ") failed: KeyError: 'only here'\n" in other.message
    assert not (tmp_path / "on_exception.ckpt").exists() and not list(tmp_path.glob("by_hand*"))
    for saved in tmp_path.glob("*.ckpt"):  # those of before are whole
        assert torch.load(saved, weights_only=False)["global_step"] in (1, 2)


class CallsOnOneRank(Callback):
    """Calls what needs all ranks on one of them."""

    def __init__(self, rank: int, what: str, folder: Path) -> None:
        self.rank, self.what, self.folder = rank, what, folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank != self.rank or trainer.global_step != 2:
            return
        if self.what == "a barrier":
            trainer.strategy.barrier()
        elif self.what == "should_stop":
            trainer.should_stop = True
        else:
            trainer.save_checkpoint(self.folder / "alone.ckpt")


DOING = {
    "a barrier": "waiting in a barrier, in on_train_batch_end()",
    "a checkpoint": "saving a checkpoint, in on_train_batch_end()",
    "should_stop": "beginning a validation",
}


@pytest.mark.parametrize(
    ("rank", "what"), [(0, "a checkpoint"), (1, "a barrier"), (1, "should_stop")]
)
def test_a_call_on_one_rank_alone_says_who_waits_for_what_and_since_when(tmp_path, rank, what):
    def fit():
        look_soon()
        callback = CallsOnOneRank(rank, what, tmp_path)
        trainer("three", callbacks=[callback], max_epochs=2).fit(Net(), loader(), loader(8))

    found = failures(fit, world_size=3)
    own = found[rank]
    assert own.kind == "UnsupportedError"
    assert own.message.startswith(f"Rank {rank} is {DOING[what]}")
    assert f"rank {1 - rank} waits" in own.message and "This rank has waited" in own.message
    for other in (0, 1, 2):
        if other != rank:
            assert found[other].message.startswith(f"Rank {rank} (process")
            assert DOING[what] in found[other].message
    assert not (tmp_path / "alone.ckpt").exists()


class LeavesLoop(Callback):
    """Raises StopIteration, which Lightning takes as the end of the loop around the hook."""

    def __init__(self, hook: str, ranks: tuple[int, ...]) -> None:
        def leave(trainer: Any, *_: Any) -> None:
            if trainer.global_rank in ranks and trainer.global_step in (2, 4):
                raise StopIteration

        setattr(self, hook, leave)


class SkipsRest(Net):
    """Returns -1 from on_train_batch_start()."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        super().on_train_batch_start(batch, batch_idx)
        leaves = self.global_rank in self.ranks and self.trainer.global_step == 2
        return -1 if leaves else None


def _leave(plan: str | None, how: str, ranks: tuple[int, ...]) -> list[float]:
    model = SkipsRest(ranks) if how == "-1" else Net()
    callbacks = [] if how == "-1" else [LeavesLoop(how, ranks)]
    trainer(plan, callbacks=callbacks, max_epochs=2).fit(model, loader(), loader(8))
    return model.losses


LEAVING = {
    "on_train_batch_start": "is ending an epoch behind batch 2",
    "on_train_batch_end": "is ending an epoch behind batch 1",
    "-1": "is ending an epoch behind batch 2",
    "on_validation_batch_start": "is ending an evaluation",
    "on_train_epoch_end": "is ending training",
    "on_validation_start": "is beginning an epoch",
}


@pytest.mark.parametrize("how", LEAVING)
def test_a_rank_that_leaves_an_epoch_alone_names_itself_and_the_remedy(how):
    rank = 0 if how == "-1" else 1

    def fit() -> None:
        look_soon()
        _leave("three", how, (rank,))

    for failure in failures(fit, world_size=3):
        assert f"ank {rank} {LEAVING[how]}" in failure.message, failure.message
        assert "A StopIteration in a hook, a -1 that on_train_batch_start()" in failure.message
        assert "reduce_boolean_decision(leave, all=False)" in failure.message


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(dataset())


class LogsNothing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def test_no_rank_reads_the_next_epoch_of_a_stream_beside_one_that_others_have_not_ended():
    def fit() -> None:
        look_soon()
        run = trainer("3:1", callbacks=[LeavesLoop("on_train_batch_end", (1,))], max_epochs=2)
        run.fit(LogsNothing(), DataLoader(Stream(), batch_size=8), loader(8))

    for failure in failures(fit):
        assert "ank 1 is reading the first batch of an epoch" in failure.message
        assert "reduce_boolean_decision(leave, all=False)" in failure.message


@pytest.mark.parametrize("how", ["on_train_batch_start", "-1"])
def test_all_ranks_leave_an_epoch_together_as_one_device_does(how):
    losses = in_ranks(1, _leave, None, how, (0,))[0]
    for found in in_ranks(2, _leave, "3:1", how, (0, 1)):
        assert found == pytest.approx(losses, rel=1e-4)


def test_a_rank_that_ends_between_two_trainers_leaves_no_rank_waiting():
    ended = Event()

    def fit() -> None:
        trainer("3:1", max_steps=1).fit(Net(), loader(), loader(8))
        if torch.distributed.get_rank() == 1:
            torch.distributed.destroy_process_group()
            ended.set()
            return
        ended.wait()
        with pytest.raises(RemoteRankError, match=r"^Rank 1 .*is gone(.|\n)*an earlier Trainer"):
            trainer("3:1").validate(Net(), loader(8), verbose=False)

    in_ranks(2, fit, timeout_s=SOON_S)
