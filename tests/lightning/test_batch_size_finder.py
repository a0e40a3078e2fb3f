"""Lightning's search for a batch size: all ranks find the same one, and train as one device."""

from __future__ import annotations

import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Net, assert_same_tensors, by_plan, dataset, look_soon, trainer, values_of
from common import in_ranks as in_ranks_that_end
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from plans import PLANS, QUIET
from profiled import GPT, SOON_S, fit
from profiled import in_ranks as in_emulated_ranks
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from warm_ranks import in_ranks

from lightning_cephalo import CephaloStrategy, Recovery
from lightning_cephalo.adapters.supported import refuse_searching
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.emulation import Emulation
from lightning_cephalo.sharding.unit import Unit

TOLERANCE = 1e-5
FITS, RANKS = 8, 2
"""The largest batch size per rank that the tests let through, and the number of ranks."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]


class Sized(Net):
    """Runs out of memory on the last rank where its batch size is larger than ``FITS``."""

    def __init__(self, place: str, batch_size: int = 2, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.place, self.batch_size = place, batch_size
        self.tried: list[int] = []
        self.is_second = False
        inside = self.blocks[1].up
        inside.register_forward_pre_hook(self._eat_in_unit)

    @property
    def _is_hungry(self) -> bool:
        trainer = self.trainer
        is_last = 0 < trainer.global_rank == trainer.world_size - 1
        # not in steps that are measured: else the plan would leave the rank without samples
        return is_last and self.batch_size > FITS and (self.is_second or not trainer.training)

    def _eat(self, place: str) -> None:
        if place == self.place and self._is_hungry:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried it")

    def _eat_in_unit(self, *_: object) -> None:
        # units are computed again with gradients in the backward
        if self.trainer.training:
            self._eat("backward" if torch.is_grad_enabled() else "forward")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._eat("step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]):
            self._eat("validation")
        super().validation_step(batch, batch_idx)

    def on_train_start(self) -> None:
        self.tried.append(self.batch_size)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.is_second = batch_idx == 1

    def train_dataloader(self) -> DataLoader:
        self.is_second = False
        return DataLoader(dataset(60), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(dataset(20), batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        if self.place == "update":
            made[0][0].register_step_post_hook(lambda *_: self._eat("update"))
        return made


def searching(folder: Path, devices: int, options: dict[str, Any], **trainers: Any) -> Trainer:
    """A Trainer that searches; ``devices`` 0: on one device, without cephalo."""
    emulation = []
    chosen: Any = "auto"
    if devices:
        emulation = [Emulation((3.0, 1.0)[:devices])]
        # every rank has samples then, whatever was measured, and so runs out of memory where it may
        defaults: dict[str, Any] = {"equal_microbatches": True, "replan": False, "verbose": False}
        defaults["timeout"] = timedelta(seconds=200)
        chosen = CephaloStrategy(**{**defaults, "profile_budget_s": 2.0, **options})
    callbacks = [*emulation, *trainers.pop("callbacks", [])]
    return Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=chosen,
        callbacks=callbacks,
        default_root_dir=folder,
        **{**QUIET, "max_epochs": 2, **trainers},
    )


def _searched(folder: Path, place: str, finder: dict[str, Any], options: dict[str, Any]) -> Any:
    model, found = Sized(place), BatchSizeFinder(**finder)
    runs = searching(folder, RANKS, options, callbacks=[found])
    runs.fit(model)
    plan = runs.strategy.plan
    assert plan.global_batch_size == RANKS * model.batch_size, plan
    assert found.optimal_batch_size == model.batch_size
    assert not list(folder.glob("*.ckpt"))
    return model.batch_size, model.tried, model.losses, values_of(model), runs.global_step


def _trained(plan: None, batch_size: int) -> Any:
    model = Sized("", batch_size * RANKS)
    runs = trainer(None, max_epochs=2)
    runs.fit(model)
    return model.losses, values_of(model), runs.global_step


def assert_trained_as_one_device(found: Any, batch_size: int) -> None:
    losses, values, steps = by_plan(None, _trained, batch_size)
    assert found[4] == steps
    assert found[2][-len(losses) :] == pytest.approx(losses, rel=TOLERANCE)
    assert_same_tensors(found[3], values, TOLERANCE)


@pytest.mark.parametrize(
    "place",
    [
        "backward",
        "update",
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in ("step", "forward", "validation")
        ),
    ],
)
def test_what_one_rank_lacks_memory_for_is_too_large_for_all_and_training_is_that_of_one_device(
    tmp_path: Path, place: str
) -> None:
    for found in in_ranks(RANKS, _searched, tmp_path, place, {"mode": "power"}, {}):
        assert found[0] == FITS
        assert found[1] == [2, 4, 8, 16, 8]
        assert_trained_as_one_device(found, FITS)


@pytest.mark.parametrize("replan", [pytest.param(False, marks=pytest.mark.slow), "auto"])
def test_a_binary_search_ends_at_the_same_size_on_all_ranks(tmp_path: Path, replan: Any) -> None:
    finder = {"mode": "binsearch", "margin": 0.0, "steps_per_trial": 2}
    options = {"replan": replan}
    sizes = in_ranks(RANKS, _searched, tmp_path, "step", finder, options)
    for found in sizes:
        assert found[0] == FITS
        assert found[1] == sizes[0][1]
        assert_trained_as_one_device(found, FITS)


def _validated(folder: Path, way: str) -> tuple[Any, ...]:
    model = Sized("validation")
    if way == "tuner":
        runs = searching(folder, RANKS, {})
        found = Tuner(runs).scale_batch_size(model, method="validate", init_val=2)
    else:
        finder = BatchSizeFinder(init_val=2)
        # in fit() it searches, too, and that is refused under a plan
        runs = searching(folder, RANKS, {}, callbacks=[finder])
        runs.validate(model, verbose=False)
        found = finder.optimal_batch_size
    return found, model.batch_size, float(runs.callback_metrics.get("val", 0.0))


def _validated_on_one_device(plan: None) -> float:
    runs = trainer(None)
    runs.validate(Sized("", 16), verbose=False)
    return float(runs.callback_metrics["val"])


@pytest.mark.parametrize("way", ["tuner", "callback"])
def test_the_batch_size_of_validation_is_found_by_all_ranks_together(
    tmp_path: Path, way: str
) -> None:
    for found, kept, value in in_ranks(RANKS, _validated, tmp_path, way):
        assert (found, kept) == (FITS, FITS)
        if way == "callback":
            wanted = by_plan(None, _validated_on_one_device)
            assert value == pytest.approx(wanted, rel=TOLERANCE)


def _tuned(folder: Path) -> Any:
    model = Sized("step")
    before = values_of(model)
    runs = searching(folder, RANKS, {})
    found = Tuner(runs).scale_batch_size(model, init_val=2)
    unchanged = all(torch.equal(before[name], value) for name, value in values_of(model).items())
    runs.fit(model)
    plan = runs.strategy.plan
    assert found == FITS and plan.global_batch_size == FITS * RANKS and unchanged
    return FITS, [], model.losses, values_of(model), runs.global_step


def test_after_the_tuner_training_is_that_of_one_device_with_what_it_found(tmp_path: Path) -> None:
    for found in in_ranks(RANKS, _tuned, tmp_path):
        assert_trained_as_one_device(found, FITS)


class Growing(GPT):
    """Samples that take much memory until the backward."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(width=64, depth=3, context=32)
        self.batch_size = batch_size
        # an emulated device counts what is made while it is there
        self.samples = TensorDataset(torch.zeros(512, 32, dtype=torch.long))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, batch_size=self.batch_size)


def _capped(capacity_bytes: tuple[int, int], batch_size: int, folder: Path) -> tuple[Any, ...]:
    model, finder = Growing(batch_size), BatchSizeFinder(init_val=4, max_val=256)
    runs = fit(
        model,
        None,
        speeds=(3.0, 1.0),
        capacity_bytes=capacity_bytes,
        is_time_shared=False,
        strategy={"profile_budget_s": 0.5},
        callbacks=[finder],
        max_steps=3,
        default_root_dir=folder,
    )
    plan = runs.strategy.plan
    assert plan.global_batch_size == RANKS * model.batch_size == RANKS * finder.optimal_batch_size
    for rank, capacity in zip(plan.ranks, capacity_bytes, strict=True):
        assert rank.memory_bytes <= capacity
    return model.batch_size, runs.global_step


def test_a_search_passes_over_batches_that_no_plan_fits_wherever_it_begins(tmp_path: Path) -> None:
    # the first trial has the batch size of the module: Lightning's first value comes behind it
    found = in_emulated_ranks(RANKS, _capped, (3_600_000, 4_800_000), 64, tmp_path)
    assert found == [found[0]] * RANKS
    size, steps = found[0]
    assert 4 < size < 64 and steps == 3


class _Stream(IterableDataset):
    def __iter__(self) -> Any:
        for _ in range(8):
            yield torch.zeros(4, 5), torch.zeros(4, 1)


class _OfStream(Sized):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Stream(), batch_size=None)


REFUSED: dict[str, dict[str, Any]] = {
    "plan=": {"options": {"plan": PLANS["3:1"]}},
    "global_batch_size=": {"options": {"global_batch_size": 8}},
    "use_distributed_sampler=False": {"use_distributed_sampler": False},
    "batches that its dataset has made": {"kind": _OfStream},
}


def _refused(folder: Path) -> dict[str, str]:
    said = {}
    for name, given in REFUSED.items():
        given = dict(given)
        options, kind = given.pop("options", {}), given.pop("kind", Sized)
        model: LightningModule = kind("step")
        runs = searching(folder, RANKS, options, callbacks=[BatchSizeFinder()], **given)
        with pytest.raises(UnsupportedError) as raised:
            runs.fit(model)
        assert not model.tried
        said[name] = str(raised.value)
    return said


def test_what_fixes_the_batch_size_is_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    for said in in_ranks_that_end(RANKS, _refused, tmp_path):
        for name, message in said.items():
            assert name in message and "BatchSizeFinder" in message, (name, message)
            assert "Remove it from Trainer(callbacks=...)" in message


class _InHook(Sized):
    """One rank runs out of memory in a hook, which no exchange of a step follows."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self._eat("hook")


def _fails_alone(folder: Path) -> tuple[str, float]:
    look_soon()
    model = _InHook("hook")
    runs = searching(folder, RANKS, {}, callbacks=[BatchSizeFinder()])
    started_s = time.monotonic()
    with pytest.raises(Exception) as raised:
        runs.fit(model)
    # behind an error in a validation Lightning raises another one
    said = "".join(traceback.format_exception(raised.value))
    return said, time.monotonic() - started_s


def test_a_rank_that_lacks_memory_in_a_hook_alone_lets_no_other_wait(tmp_path: Path) -> None:
    for said, seconds in in_ranks_that_end(RANKS, _fails_alone, tmp_path):
        assert " on rank 0, 16 on rank 1" in said or "Rank 1 is" in said, said
        assert seconds < SOON_S


def _fails_alone_in_a_reduce(folder: Path, is_measured: bool) -> tuple[str, float]:
    look_soon()
    model = Sized("")
    runs = searching(folder, RANKS, {}, callbacks=[BatchSizeFinder()])
    reduce = Unit.start_reduce

    def is_hungry() -> bool:
        # the second size is measured before it is tried
        return model.batch_size == 4 if is_measured else bool(model.tried)

    def start_reduce(unit: Unit, *args: Any, **options: Any) -> None:
        if unit.name == "blocks.1" and runs.global_rank == 1 and is_hungry():
            raise torch.OutOfMemoryError("out of memory in a reduce")
        reduce(unit, *args, **options)

    started_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "start_reduce", start_reduce)
        with pytest.raises(Exception) as raised:
            runs.fit(model)
    return str(raised.value), time.monotonic() - started_s


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_rank_that_lacks_memory_in_a_reduce_alone_lets_no_other_wait(
    tmp_path: Path, is_measured: bool
) -> None:
    ends = in_ranks_that_end(RANKS, _fails_alone_in_a_reduce, tmp_path, is_measured)
    for said, seconds in ends:
        assert "the search for a batch size cannot go on" in said, said
        assert "Rank 1 ran out of memory in the reduce" in said, said
        assert seconds < SOON_S


class _Looks(Sized):
    """Notes whether steps are kept while it is tried, and while it trains."""

    def __init__(self, folder: Path) -> None:
        super().__init__("")
        self.folder, self.kept = folder, set()

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        is_trial = not self.trainer.callbacks
        if is_trial or self.global_step > 1:
            self.kept.add((is_trial, any(path.is_file() for path in self.folder.rglob("*"))))


def _kept(folder: Path) -> None:
    kept = folder / "kept"
    recover = Recovery(every=1, folder=kept, job="test")
    model, finder = _Looks(kept), BatchSizeFinder(max_trials=3)
    searching(folder, 1, {"recover": recover}, callbacks=[finder]).fit(model)
    assert model.kept == {(True, False), (False, True)}


def test_trials_are_not_kept_for_a_restart(tmp_path: Path) -> None:
    in_ranks_that_end(1, _kept, tmp_path)


def test_the_tuner_is_refused_where_the_script_would_not_learn_what_is_found() -> None:
    finder = BatchSizeFinder()
    runs = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=CephaloStrategy(start_method="fork"),
        callbacks=[finder],
        **QUIET,
    )
    refuse_searching(runs, {})  # a callback: training goes on with what it finds
    finder._early_exit = True  # as the tuner marks its own
    with pytest.raises(UnsupportedError, match="Use start_method='popen' or torchrun"):
        refuse_searching(runs, {})
