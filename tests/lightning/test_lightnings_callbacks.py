"""Lightning's own callbacks, all in one start of ranks: as on one device, or as documented."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Net, assert_same_tensors, by_plan, in_ranks, loader, trainer, values_of
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    LambdaCallback,
    LearningRateFinder,
    RichModelSummary,
    SpikeDetection,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.utils import parametrizations, prune

import lightning_cephalo

TOLERANCE = 1e-5


class _WithBackbone(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))

    def forward(self, x):
        return super().forward(self.backbone(x))

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=1e-2)


def _finetuned(plan, folder):
    thaws = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.1, backbone_initial_lr=1e-3
    )
    epochs: list[int] = []
    notes = LambdaCallback(on_train_epoch_end=lambda fit, _: epochs.append(fit.current_epoch))
    model = _WithBackbone()
    fit = trainer(plan, max_epochs=3, callbacks=[thaws, notes])
    fit.fit(model, loader(14), loader(8))
    rates = [group["lr"] for group in fit.optimizers[0].param_groups]
    return values_of(model), (epochs, rates)


def _summarised(plan, folder):
    model = Net()
    summary = RichModelSummary(max_depth=2)
    options = {"callbacks": [summary], "enable_model_summary": True}
    trainer(plan, **options).fit(model, loader(14), loader(8))
    return values_of(model), None


def _searched(plan, folder):
    model = Net()
    finder = LearningRateFinder(1e-4, 1e-1, num_training_steps=6, update_attr=False)
    fit = trainer(plan, max_epochs=2, callbacks=[finder], default_root_dir=folder)
    fit.fit(model, loader(14), loader(8))
    assert finder.optimal_lr is not None
    found = finder.optimal_lr.results
    # of rank 0's own samples, as under DDP: the losses are compared between ranks only
    return values_of(model), (found["lr"], list(Path(folder).glob(".lr_find*")))


class _PrunedBefore(Net):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.blocks[0].up, "weight", 0.5)
        prune.l1_unstructured(self.inputs, "weight", 0.5)


class _Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.blocks[0].up)
        parametrizations.spectral_norm(self.blocks[2].up)
        parametrizations.weight_norm(self.inputs)


class _MasksItself(Net):
    """Masks half of a block's and of the root's weights from the second epoch on."""

    def on_train_epoch_end(self) -> None:
        layers = (self.blocks[0].up, self.inputs)
        with lightning_cephalo.writable_parameters(*layers):
            sizes = [layer.weight.abs() for layer in layers]
            self.masks = [size >= size.median() for size in sizes]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.current_epoch == 0:
            return
        layers = (self.blocks[0].up, self.inputs)
        with lightning_cephalo.writable_parameters(*layers):
            for layer, mask in zip(layers, self.masks, strict=True):
                layer.weight.data.mul_(mask)


def _trained(kind):
    def fit(plan, folder):
        model = kind()
        trainer(plan, max_epochs=2).fit(model, loader(14), loader(8))
        return values_of(model), None

    return fit


SAME = {
    "BackboneFinetuning": _finetuned,
    "RichModelSummary": _summarised,
    "LearningRateFinder": _searched,
    "pruned before": _trained(_PrunedBefore),
    "parametrizations": _trained(_Normed),
    "own masks": _trained(_MasksItself),
}


def _all_of(plan, folder):
    found = {}
    for name, fit in SAME.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        found[name] = fit(plan, place)
    return found


# SGD without a weight decay has no schedule; the finder says what it found
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_are_those_of_one_device_under_lightnings_callbacks_and_with_masks(tmp_path):
    wanted = by_plan(None, _all_of, tmp_path / "one")
    for found in in_ranks(2, _all_of, "3:1", tmp_path / "two"):
        for name, (values, rest) in wanted.items():
            assert_same_tensors(found[name][0], values, TOLERANCE)
            assert found[name][1] == rest, name
    masked = wanted["own masks"][0]["inputs.weight"]
    assert (masked == 0).float().mean() >= 0.4


class _Spikes(Net):
    """Its loss leaps in the third step, for the samples of the last rank alone."""

    def training_step(self, batch: Any, batch_idx: int):
        loss = super().training_step(batch, batch_idx)
        leaps = batch_idx == 2 and self.trainer.global_rank == self.trainer.world_size - 1
        return loss * (1e4 if leaps else 1.0)


def _spiked(plan, folder):
    path = folder / "skipped.json"
    detection = SpikeDetection(window=2, warmup=1, atol=50.0, rtol=2.0, exclude_batches_path=path)
    try:
        trainer(plan, callbacks=[detection]).fit(_Spikes(), loader(), loader(8))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "it trained"


def test_a_spike_on_any_rank_ends_all_of_them_as_on_one_device(tmp_path):
    wanted = by_plan(None, _spiked, tmp_path)
    assert wanted == ("TrainingSpikeException", "Training spike detected in batch 2")
    (tmp_path / "skipped.json").unlink()
    assert in_ranks(2, _spiked, "3:1", tmp_path) == [wanted] * 2
    assert json.loads((tmp_path / "skipped.json").read_text()) == [1, 2]


def _monitored(folder):
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: 8 / 2, window_size=2)
    logger = CSVLogger(folder, name="", version="")
    options = {"logger": logger, "log_every_n_steps": 1, "callbacks": [monitor]}
    trainer("3:1", **options).fit(Net(), loader(32), loader(8))


@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`")
def test_a_monitor_that_counts_the_mean_of_the_ranks_is_right(tmp_path):
    in_ranks(2, _monitored, tmp_path)
    with open(tmp_path / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["train/samples_per_sec"]]
    for row in rows:
        steps = float(row["train/batches_per_sec"]) / 2  # the callback counts those of all ranks
        assert float(row["train/samples_per_sec"]) == pytest.approx(8 * steps)
    assert rows
