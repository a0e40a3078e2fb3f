"""What cannot work says so: one clear error on every rank within seconds, and nothing left behind.

Ranks are started as torchrun starts them, so that nobody ends the others: each must find out by
itself, under the default timeout of half an hour.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_ranks
from common import in_ranks
from launch import SOON_S, RankFailure
from lightning.pytorch import Callback, Trainer
from plans import PLANS, QUIET, plan_of
from recording import Recorder, assert_same_weights, loader, make_trainer, samples
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.common.errors import (
    BatchSplitError,
    RemoteRankError,
    UnitUseError,
    UnsupportedError,
)
from lightning_cephalo.plan import Plan, PlanError, RankPlan


@dataclass(frozen=True)
class Failure:
    """How a run ended on one rank.

    Attributes:
        kind: Of the exception.
        message: What the user reads.
        seconds: From the start of the ranks.
    """

    kind: str
    message: str
    seconds: float


def processes_of_a_fit() -> set[BaseProcess]:
    """What a fit has left running: not the ranks that stay for other tests."""
    return set(multiprocessing.active_children()) - warm_ranks.processes()


def failures(fit: Callable[[], Any], world_size: int = 2) -> list[Failure]:
    """How ``fit`` fails on every rank; checks what is true of every failure."""
    before = sorted(path.name for path in Path.cwd().iterdir())
    start = time.monotonic()

    def rank() -> Failure:
        try:
            fit()
        except BaseException as failure:
            notes = getattr(failure, "__notes__", [])
            message = "\n".join([str(failure), *notes])
            return Failure(type(failure).__name__, message, time.monotonic() - start)
        return Failure("nothing", "was raised", time.monotonic() - start)

    found = in_ranks(world_size, rank)
    for failure in found:
        assert failure.kind != "nothing", found
        assert failure.seconds < SOON_S, found
    assert not processes_of_a_fit()
    assert sorted(path.name for path in Path.cwd().iterdir()) == before
    return found


def trainer_of(plan: Any = "3:1", strategy_options: Any = None, **options: Any) -> Trainer:
    """With the default start and the default timeout."""
    strategy_options = {
        "start_method": "popen",
        "timeout": timedelta(minutes=30),
        **(strategy_options or {}),
    }
    return make_trainer(plan, strategy_options, **options)


def assert_everywhere(found: list[Failure], kind: type[BaseException], *parts: str) -> None:
    """All ranks raised ``kind``, or the message of a rank that did, with these parts in it."""
    assert any(failure.kind == kind.__name__ for failure in found), found
    for failure in found:
        assert failure.kind in (kind.__name__, RemoteRankError.__name__), found
        for part in parts:
            assert part in failure.message, found


# -- plans ------------------------------------------------------------------------------------


def test_more_ranks_than_samples(tmp_path: Path) -> None:
    def fit() -> None:
        strategy = CephaloStrategy(global_batch_size=1, planner=Planner(verbose=False))
        options = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False}
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(strategy=strategy, enable_model_summary=False, **options, **quiet)
        trainer.fit(Recorder(tmp_path), DataLoader(samples(8), batch_size=1))

    assert_everywhere(failures(fit), PlanError, "more ranks than samples", "batch_size")


STAGES = Plan([RankPlan((4,), 1.0, units=(1, 2)), RankPlan((4,), 1.0, units=(3, 4))], groups=(0, 1))


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        (plan_of(((2, 2), 0.5), ((2,), 0.5)), ("global batch of 8", "sum to 6")),
        (PLANS["three"], ("for 3 ranks, but this run has 2", "Start 3")),
        (STAGES, ("training does not run stages yet", "Leave units out")),
    ],
    ids=["batches", "ranks", "stages"],
)
def test_a_plan_that_does_not_fit(plan: Plan, parts: tuple[str, ...], tmp_path: Path) -> None:
    def fit() -> None:
        strategy = CephaloStrategy(plan=plan, global_batch_size=8, planner=Planner(verbose=False))
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, **QUIET)
        trainer.fit(Recorder(tmp_path), loader("3:1"))

    assert_everywhere(failures(fit), PlanError, *parts)


# -- the user's code fails on one rank ---------------------------------------------------------


class Breaks(Recorder):
    """Raises in one place, on one rank, in one step."""

    def __init__(self, folder: Path, where: str, rank: int, step: int) -> None:
        super().__init__(folder)
        self.where, self.rank, self.step = where, rank, step

    def break_at(self, where: str, step: int) -> None:
        if (where, self.global_rank, step) == (self.where, self.rank, self.step):
            raise ZeroDivisionError(f"boom in {where}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.break_at("training_step", batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.break_at("the end of training_step", batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.break_at("validation_step", batch_idx)
        return self.per_sample(batch).mean()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.break_at("on_before_batch_transfer", len(self.record.steps))
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.break_at("on_train_batch_start", batch_idx)
        super().on_train_batch_start(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.break_at("on_train_batch_end", batch_idx)

    def on_after_backward(self) -> None:
        self.break_at("on_after_backward", self.trainer.global_step)

    def on_train_epoch_end(self) -> None:
        self.break_at("on_train_epoch_end", 0)

    def on_train_end(self) -> None:
        self.break_at("on_train_end", 0)

    def setup(self, stage: str) -> None:
        self.break_at("setup", 0)

    def configure_optimizers(self) -> Any:
        self.break_at("configure_optimizers", 0)
        return super().configure_optimizers()

    def train_dataloader(self) -> Any:
        return loader("3:1")

    def val_dataloader(self) -> Any:
        self.break_at("val_dataloader", 0)
        return loader("3:1", 16)


@pytest.mark.parametrize(
    ("where", "step", "rank"),
    [
        ("training_step", 0, 0),
        ("training_step", 1, 1),
        ("the end of training_step", 2, 0),
        ("validation_step", 1, 1),
        ("on_before_batch_transfer", 0, 1),
        ("on_train_batch_start", 1, 1),
        ("on_train_batch_end", 0, 0),
        ("on_after_backward", 1, 0),
        ("on_train_epoch_end", 0, 1),
        ("on_train_end", 0, 0),
        ("setup", 0, 1),
        ("configure_optimizers", 0, 0),
        ("val_dataloader", 0, 0),
    ],
)
def test_an_error_on_one_rank_reaches_all(where: str, step: int, rank: int, tmp_path: Path) -> None:
    module = Breaks(tmp_path, where, rank, step)
    found = failures(lambda: trainer_of(num_sanity_val_steps=0).fit(module))
    assert found[rank].kind == "ZeroDivisionError"
    for failure in found:
        assert f"boom in {where}" in failure.message, found
    assert f"Rank {rank}" in found[1 - rank].message


class BrokenSamples(Dataset[Any]):
    """Sample 13 cannot be read; it is rank 0's in the second step."""

    def __init__(self, broken: int) -> None:
        self.data, self.broken = samples(22), broken

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise OSError(f"sample {index} is damaged")
        return self.data[index]


@pytest.mark.parametrize(("broken", "rank"), [(9, 0), (15, 1)])
def test_a_sample_that_cannot_be_read_on_one_rank(broken: int, rank: int, tmp_path: Path) -> None:
    data = DataLoader(BrokenSamples(broken), batch_size=4)
    found = failures(lambda: trainer_of().fit(Recorder(tmp_path), data))
    assert found[rank].kind == "OSError"
    for failure in found:
        assert f"sample {broken} is damaged" in failure.message, found


def test_a_sample_that_a_worker_cannot_read(tmp_path: Path) -> None:
    data = DataLoader(BrokenSamples(15), batch_size=4, num_workers=1)
    start = time.monotonic()
    with pytest.raises(Exception, match="sample 15 is damaged"):
        make_trainer("3:1").fit(Recorder(tmp_path), data)
    assert time.monotonic() - start < SOON_S
    assert not processes_of_a_fit()


def test_a_batch_that_cannot_be_collated_on_one_rank(tmp_path: Path) -> None:
    def collate(rows: list[Any]) -> Any:
        if any(int(row[0]) == 15 for row in rows):
            raise ValueError("cannot collate sample 15")
        return torch.utils.data.default_collate(rows)

    data = DataLoader(samples(22), batch_size=4, collate_fn=collate)
    found = failures(lambda: trainer_of().fit(Recorder(tmp_path), data))
    assert found[1].kind == "ValueError"
    assert "cannot collate sample 15" in found[0].message


class Dies(Recorder):
    rank = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == self.rank:
            self.die()
        return super().training_step(batch, batch_idx)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Exits(Dies):
    def die(self) -> None:
        os._exit(3)


class FirstDies(Dies):
    rank = 0


class Freezes(Dies):
    """The first rank, on which the store of the process group lives, is stopped."""

    rank = 0

    def die(self) -> None:
        (self.folder / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("kind", [Dies, Exits, FirstDies, Freezes])
def test_a_rank_that_dies_or_freezes_ends_the_others(kind: type[Dies], tmp_path: Path) -> None:
    reports, stopped = tmp_path / "reports", tmp_path / "stopped"
    reports.mkdir()
    timeout = timedelta(seconds=10) if kind is Freezes else timedelta(minutes=30)

    def fit() -> None:
        start = time.monotonic()
        try:
            trainer_of("three", {"timeout": timeout}).fit(kind(tmp_path), loader("three"))
        except Exception as failure:
            text = f"{time.monotonic() - start}\n{failure}\n{getattr(failure, '__notes__', '')}"
            (reports / os.environ["RANK"]).write_text(text)
            while (
                kind is Freezes and os.environ["RANK"] == "1" and len(list(reports.iterdir())) < 2
            ):
                time.sleep(0.1)
            if stopped.exists() and os.environ["RANK"] == "1":
                os.kill(int(stopped.read_text()), signal.SIGKILL)
            raise

    with pytest.raises(RankFailure, match=f"rank {kind.rank}:\ndied without a result"):
        in_ranks(3, fit)
    first, second = reports.iterdir()
    for report in (first, second):
        seconds, message = report.read_text().split("\n", 1)
        assert float(seconds) < SOON_S
        assert message.startswith(f"Rank {kind.rank} (process"), message
        assert ("is silent" if kind is Freezes else "is gone") in message


class FailsAlone(Recorder):
    """Outside of a step, where nothing tells the other ranks; its groups end as NCCL's must."""

    def on_fit_start(self) -> None:
        self.trainer.strategy._process_group_backend = "nccl"

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("only here")


def test_a_rank_that_fails_alone_leaves_no_collective_to_wait_for(tmp_path: Path) -> None:
    def fit() -> tuple[float, str, bool]:
        start, trainer = time.monotonic(), trainer_of()
        with pytest.raises((ValueError, RuntimeError)) as failure:
            trainer.fit(FailsAlone(tmp_path), loader("3:1"))
        is_left = dist.is_initialized() or trainer.strategy._ranks is not None
        return time.monotonic() - start, str(failure.value), is_left

    (first_s, first, is_first), (second_s, second, is_second) = in_ranks(2, fit)
    assert max(first_s, second_s) < SOON_S
    assert second == "only here"
    assert "Rank 1 (process" in first and " failed: ValueError: only here" in first
    assert not is_first and not is_second


# -- models and modules that cannot work -------------------------------------------------------


class Checkpointed(Recorder):
    def forward(self, x: Any) -> Any:
        x = self.inputs(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_checkpointing_around_units(tmp_path: Path) -> None:
    found = failures(lambda: trainer_of().fit(Checkpointed(tmp_path), loader("3:1")))
    assert_everywhere(found, UnitUseError, "torch.utils.checkpoint", "switch gradient")


class TwoOptimizers(Recorder):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


# torch.compile's own imports
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_two_optimizers_and_a_compiled_module_are_lightnings_own_errors(tmp_path: Path) -> None:
    found = failures(lambda: trainer_of().fit(TwoOptimizers(tmp_path), loader("3:1")))
    for failure in found:
        assert "multiple optimizers is only supported with manual" in failure.message, found
    module = torch.compile(Recorder(tmp_path))
    found = failures(lambda: trainer_of().fit(module, loader("3:1")))
    for failure in found:
        assert "compiled model is incompatible" in failure.message, found


class Gathers(Recorder):
    """A contrastive loss: gathers something of all ranks inside the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.record.note("gathered", self.all_gather(loss.detach()).shape)
        return loss


def test_gathering_in_a_step_is_refused(tmp_path: Path) -> None:
    for plan in ("3:1", "even", "idle first", "idle last"):
        found = failures(lambda plan=plan: trainer_of(plan).fit(Gathers(tmp_path), loader(plan)))
        assert_everywhere(found, UnsupportedError, "allgather()", "loss_over_batch()")


class Reduces(Recorder):
    """Uses torch.distributed itself inside the step, from one of the steps on."""

    first = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx >= self.first:
            with torch.inference_mode():
                torch.distributed.all_reduce(loss.detach().clone())
        return loss


class ReducesLater(Reduces):
    first = 1


def test_collectives_of_torch_in_a_step_are_treated_like_gathers(tmp_path: Path) -> None:
    for plan, kind in (("3:1", Reduces), ("idle first", ReducesLater)):
        found = failures(lambda p=plan, k=kind: trainer_of(p).fit(k(tmp_path), loader(p)))
        assert_everywhere(found, UnsupportedError, "allreduce()", "loss_over_batch()")


def test_gathering_in_validation_is_refused_in_steps_and_of_other_shapes(tmp_path: Path) -> None:
    class GathersLater(Recorder):
        gathers = True

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            if self.gathers:
                self.all_gather(self.per_sample(batch).mean())

        def on_validation_epoch_end(self) -> None:
            with pytest.raises(UnsupportedError, match=r"rank 0: \[1\] .* rank 1: \[2\] "):
                self.all_gather({"rows": torch.zeros(1 + self.global_rank)})

    def fit(count: int, gathers: bool = True) -> None:
        module = GathersLater(tmp_path)
        module.gathers = gathers
        trainer_of("3:1").fit(module, loader("3:1"), loader("3:1", count))

    in_ranks(2, fit, 16, False)
    for count in (9, 1):  # the last step, or the only one, has one sample, on the first rank
        found = failures(lambda count=count: fit(count))
        assert_everywhere(found, UnsupportedError, "allgather()", "in a hook")


def test_manual_steps_may_gather_and_their_validation_may_not(tmp_path: Path) -> None:
    class Gathers(Recorder):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.per_sample(batch).mean()
            assert self.all_gather(loss.detach()).shape == (2,)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if len(batch[0]) == 1:
                self.all_gather(self.per_sample(batch).mean())

    def fit(count: int) -> None:
        trainer_of("whole").fit(Gathers(tmp_path), loader("whole"), loader("whole", count))

    in_ranks(2, fit, 16)
    found = failures(lambda: fit(1))  # the other rank has no sample, and would not come
    assert_everywhere(found, UnsupportedError, "allgather()", "in a hook")


# transformers names the switch anew
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_gradient_checkpointing_inside_the_units_of_a_hugging_face_model(tmp_path: Path) -> None:
    """Newer versions of transformers checkpoint inside a block's forward: that is harmless."""
    from transformers.modeling_layers import GradientCheckpointingLayer
    from zoo import build

    if "__call__" in vars(GradientCheckpointingLayer):
        pytest.skip("this version of transformers checkpoints around a block, which is refused")

    class Llama(Recorder):
        def __init__(self, folder: Path, checkpointing: bool) -> None:
            super().__init__(folder)
            del self.inputs, self.blocks, self.head
            self.model, self.batch = build("llama", 8)
            if checkpointing:
                self.model.gradient_checkpointing_enable()

        def indices(self, batch: Any) -> list[int]:
            return list(range(len(batch["input_ids"])))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def data(self, size: int) -> DataLoader[Any]:
            rows = [{key: value[i] for key, value in self.batch.items()} for i in range(8)]
            return DataLoader(rows, batch_size=size)  # type: ignore[arg-type]

    alone, together = Llama(tmp_path, False), Llama(tmp_path, True)
    make_trainer(None, max_epochs=2).fit(alone, alone.data(8))
    make_trainer("3:1", max_epochs=2).fit(together, together.data(4))
    assert_same_weights(together, alone)


# -- data that cannot be dealt -----------------------------------------------------------------


def test_a_distributed_sampler_of_the_users(tmp_path: Path) -> None:
    class Sharded(Recorder):
        def train_dataloader(self) -> Any:
            sampler = DistributedSampler(samples(22))
            return DataLoader(samples(22), batch_size=4, sampler=sampler)

    found = failures(lambda: trainer_of().fit(Sharded(tmp_path)))
    assert_everywhere(found, ValueError, "DistributedSampler", "shuffle=True")


def test_batches_that_cannot_be_split(tmp_path: Path) -> None:
    def time_major(rows: list[Any]) -> Any:
        return torch.stack([row[1] for row in rows], dim=1)

    data = DataLoader(samples(22), batch_size=4, collate_fn=time_major)
    found = failures(lambda: trainer_of().fit(Recorder(tmp_path), data))
    assert_everywhere(found, BatchSplitError, "Tensor[3, 5] for 5", "split_batch")


def test_ready_batches_of_a_map_style_dataset(tmp_path: Path) -> None:
    class Ready(Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return samples(8)[:]

    data = DataLoader(Ready(), batch_size=None)
    found = failures(lambda: trainer_of().fit(Recorder(tmp_path), data))
    assert_everywhere(found, ValueError, "batch_size=None", "single samples")

    def measured() -> None:
        strategy = CephaloStrategy(planner=Planner(verbose=False))
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, **QUIET)
        trainer.fit(Recorder(tmp_path), data)

    assert_everywhere(failures(measured), PlanError, "batch_size=None", "DataLoader(batch_size=")


def test_dataloaders_that_give_nothing_are_refused_by_name(tmp_path: Path) -> None:
    for data, *parts in (
        ([DataLoader(samples(0), batch_size=4)], "at least one sample", "TensorDataset"),
        ([[]], "training dataloader", "empty list"),
        ([iter([torch.ones(4, 3)])], "list_iterator", "read once"),
        ([], "no training dataloader", "fit(module, loader)"),
    ):
        found = failures(lambda data=data: trainer_of().fit(Recorder(tmp_path), *data))
        kinds = {failure.kind for failure in found}
        assert kinds <= {"ValueError", "PlanError", "UnsupportedError"}, found
        assert all(part in failure.message for part in parts for failure in found), found


class Returns(Recorder):
    value: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {
            "none": None,
            "no loss": {"prediction": loss},
            "vector": loss.expand(3),
            "number": 1.0,
            "detached": loss.detach(),
            "negative": {"loss": loss, "weight": -1},
            "weightless": {"loss": loss, "weight": 0},
        }[self.value]


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("none", "'weight': 0.0"),
        ("no loss", "'loss'"),
        ("vector", "shape (3,)"),
        ("number", "float"),
        ("detached", "does not require a gradient"),
        ("negative", "weight -1"),
        ("weightless", "more than 0"),
    ],
)
def test_a_step_that_returns_something_else(value: str, part: str, tmp_path: Path) -> None:
    module = Returns(tmp_path)
    module.value = value
    found = failures(lambda: trainer_of().fit(module, loader("3:1")))
    for failure in found:
        assert part in failure.message, found


# -- what the user sees with Lightning's own launchers -----------------------------------------


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_start"])
def test_the_forked_ranks_parent_raises_with_the_original_text(where: str, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(Exception, match=f"boom in {where}"):
        make_trainer("3:1").fit(Breaks(tmp_path, where, 1, 1))
    assert time.monotonic() - start < SOON_S
    assert not processes_of_a_fit()


class Hidden(Callback):
    """A callback of rank 0's own that fails: a full disk, a logger's server that is gone."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            raise OSError("No space left on device")


def test_a_failure_of_rank_zero_alone_is_known_to_all(tmp_path: Path) -> None:
    trainer = lambda: trainer_of(callbacks=[Hidden()])  # noqa: E731
    found = failures(lambda: trainer().fit(Recorder(tmp_path), loader("3:1")))
    assert found[0].kind == "OSError"
    assert "Rank 0" in found[1].message and "No space left" in found[1].message
