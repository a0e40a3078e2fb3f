"""A run that is resumed in the middle of an epoch goes on with the samples that come next."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Net, assert_same_tensors, dataset, in_ranks, trainer, values_of
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

SAVED = 5 + 3
"""A checkpoint is saved at step 3 of the second epoch."""


class Stream(IterableDataset[Any]):
    """Draws its samples from the global generator."""

    def __iter__(self) -> Any:
        x, y = dataset(40).tensors
        for index in torch.randperm(40).tolist()[:37]:
            yield x[index], y[index]


def _loader(kind: str) -> Any:
    data: Dataset[Any] = dataset(40)
    generator = torch.Generator().manual_seed(11)
    if kind == "several":
        pair = {
            "long": DataLoader(data, batch_size=8, shuffle=True, generator=generator),
            "short": DataLoader(dataset(16), batch_size=8, shuffle=True),
        }
        return CombinedLoader(pair, "max_size_cycle")
    if kind == "stream":
        return DataLoader(Stream(), batch_size=8)
    options: dict[str, Any] = {"generator": generator} if kind == "workers" else {}
    workers = 2 if kind == "workers" else 0
    return DataLoader(data, batch_size=8, shuffle=True, num_workers=workers, **options)


KINDS = ["workers", "several", "stream"]


class Both(Net):
    """Also trains on two loaders."""

    def loss(self, batch: Any) -> Any:
        if not isinstance(batch, dict):
            return super().loss(batch)
        return super().loss(batch["long"]) + 2 * super().loss(batch["short"])


class Save(Callback):
    """Saves a checkpoint in a hook, after a step."""

    def __init__(self, path: Path, step: int, hook: str) -> None:
        self.path, self.step = path, step
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _fit(
    plan: str | None, kind: str, saves: Any = (), resumed: Path | None = None, **options: Any
) -> Any:
    """Train, and return the losses and the weights."""
    model = Both()
    # what a script draws before it trains differs from run to run
    torch.manual_seed(1 if resumed is None else 2)
    # workers are processes, which daemons may not start
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
    options = {"max_epochs": 3, "limit_val_batches": 0, "callbacks": list(saves), **options}
    resume = {} if resumed is None else {"ckpt_path": resumed, "weights_only": True}
    trainer(plan, **options).fit(
        model, _loader(kind), DataLoader(dataset(8), batch_size=8), **resume
    )
    return model.losses, values_of(model)


def _save_all(plan: str, folder: Path) -> dict[str, Any]:
    hook = "on_train_batch_end"
    return {kind: _fit(plan, kind, [Save(folder / kind, SAVED, hook)]) for kind in KINDS}


def _resume_all(plan: str, folder: Path) -> dict[str, Any]:
    return {kind: _fit(plan, kind, resumed=folder / kind) for kind in KINDS}


def _assert_same_rest(found: Any, wanted: Any, step: int, name: str) -> None:
    torch.testing.assert_close(
        found[0], wanted[0][step:], rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}"
    )
    assert_same_tensors(found[1], wanted[1], 1e-5)


def test_in_mid_epoch_a_run_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    wanted = in_ranks(2, _save_all, "3:1", tmp_path)[0]
    found = in_ranks(3, _resume_all, "three", tmp_path)[0]
    alone = _fit(None, "workers")
    for kind in KINDS:
        _assert_same_rest(found[kind], wanted[kind], SAVED, kind)
    _assert_same_rest(found["workers"], alone, SAVED, "one device")
    # plain Lightning reads the same file; it begins the epoch anew
    with pytest.warns(UserWarning, match="You're resuming from a checkpoint"):
        losses, _ = _fit(None, "seeded", resumed=tmp_path / "workers")
    assert len(losses) == len(found["workers"][0])


def _whenever(folder: Path) -> dict[str, Any]:
    """What resumed runs, and runs that were not interrupted, give; by where they were saved."""

    def resumed(kind: str, wanted: Any, saves: list[Save], **options: Any) -> dict[str, Any]:
        return {
            save.path.name: (_fit("one", kind, resumed=save.path, **options), wanted)
            for save in saves
        }

    found: dict[str, Any] = {}
    always = {"val_check_interval": 1, "limit_val_batches": 1}
    hooks = [
        Save(folder / "behind a validation", 8, "on_validation_end"),
        Save(folder / "behind the last batch", 5, "on_train_batch_end"),
        Save(folder / "behind the last validation", 5, "on_validation_end"),
        Save(folder / "behind an epoch", 5, "on_train_epoch_end"),
    ]
    wanted = _fit("one", "workers", hooks, **always)
    found |= resumed("workers", wanted, hooks, **always)
    # with max_steps Lightning counts an epoch that ends early, or has just ended, once more
    steps = {"max_steps": 14, "max_epochs": -1}
    epoch = Save(folder / "behind an epoch, by steps", 5, "on_train_epoch_end")
    wanted = _fit("one", "seeded", [epoch], **steps)
    cut = Save(folder / "in an epoch that max_steps has cut", 7, "on_train_end")
    _fit("one", "seeded", [cut], max_steps=7)
    found |= resumed("seeded", wanted, [epoch, cut], **steps)
    for kind, options in (
        ("stream", {}),
        ("workers", {"limit_train_batches": 3}),
        ("seeded", {"accumulate_grad_batches": 2}),
        ("workers", {"reload_dataloaders_every_n_epochs": 1}),
    ):
        hook = Save(folder / str(options), 5, "on_train_batch_end")
        wanted = _fit("one", kind, [hook], **options)
        found |= resumed(kind, wanted, [hook], **options)
    return found


@pytest.mark.slow
def test_it_does_so_wherever_in_an_epoch_the_checkpoint_was_saved(tmp_path: Path) -> None:
    for name, (rest, whole) in in_ranks(1, _whenever, tmp_path)[0].items():
        assert 0 < len(rest[0]) < len(whole[0]), name
        _assert_same_rest(rest, whole, len(whole[0]) - len(rest[0]), name)
