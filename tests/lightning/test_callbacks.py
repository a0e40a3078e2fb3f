"""Callbacks under cephalo do what they do on one device, or are refused by name."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from common import Net, assert_same_tensors, dataset, loader, trainer, values_of
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from warm_ranks import by_plan, in_ranks

from lightning_cephalo import CephaloStrategy

TOLERANCE = 1e-5
CLOSE = {"rtol": TOLERANCE, "atol": TOLERANCE}


class _Watched(Net):
    """Logs one metric of all ranks and one of each rank by itself, the latter growing."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if not isinstance(self.trainer.strategy, CephaloStrategy):
            return
        worse = float(self.trainer.current_epoch + self.trainer.global_rank)
        self.log("own", worse, sync_dist=False)


def _fit_stopping(plan, monitor, min_delta):
    model = _Watched()
    stop = EarlyStopping(monitor, min_delta=min_delta, patience=1, verbose=False)
    runs = trainer(plan, max_epochs=8, limit_train_batches=2, callbacks=[stop])
    runs.fit(model, loader(), loader(8))
    return runs.current_epoch, stop.stopped_epoch, values_of(model)


@pytest.mark.filterwarnings("ignore:It is recommended to use .self.log.'own'")
@pytest.mark.parametrize("monitor", ["val", "loss_epoch"])
def test_early_stopping_on_a_shared_metric_stops_when_one_device_does(monitor):
    wanted = by_plan(None, _fit_stopping, monitor, 0.3)
    assert 0 < wanted[1] < 7
    for epochs, stopped, values in in_ranks(3, _fit_stopping, "three", monitor, 0.3):
        assert (epochs, stopped) == wanted[:2]
        assert_same_tensors(values, wanted[2], TOLERANCE)


@pytest.mark.filterwarnings("ignore:It is recommended to use .self.log.'own'")
def test_early_stopping_on_a_metric_of_each_rank_stops_all_ranks_together():
    results = in_ranks(2, _fit_stopping, "3:1", "own", 0.0)
    assert [result[:2] for result in results] == [(2, 1), (2, 1)]


class _Samples(Callback):
    """Calls the module outside of any step, on all ranks, where users do."""

    def __init__(self):
        self.outputs = []

    def _sample(self, trainer, pl_module):
        assert torch.is_grad_enabled() or not pl_module.training
        self.outputs.append(pl_module(dataset(3).tensors[0]).detach())

    def on_train_start(self, trainer, pl_module):
        self._sample(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._sample(trainer, pl_module)

    def on_train_epoch_end(self, trainer, pl_module):
        self._sample(trainer, pl_module)

    def on_validation_epoch_end(self, trainer, pl_module):
        self._sample(trainer, pl_module)


class _Norms(Callback):
    """Logs what users log of gradients."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        norms = grad_norm(pl_module, norm_type=2)
        pl_module.log_dict(norms)
        self.norms.append({name: float(value) for name, value in norms.items()})


def _fit_sampling(plan):
    model = Net()
    samples, norms = _Samples(), _Norms()
    trainer(plan, max_epochs=2, callbacks=[samples, norms], gradient_clip_val=0.5).fit(
        model, loader(14), loader(8)
    )
    return samples.outputs, norms.norms, values_of(model)


@pytest.mark.parametrize("plan", ["3:1", "no data"])
def test_callbacks_that_sample_and_log_norms_see_what_one_device_sees(plan):
    outputs, norms, values = by_plan(plan, _fit_sampling)
    wanted_outputs, wanted_norms, wanted = by_plan(None, _fit_sampling)
    torch.testing.assert_close(outputs, wanted_outputs, rtol=1e-4, atol=1e-4)
    assert len(norms) == len(wanted_norms) == 4
    for found, expected in zip(norms, wanted_norms, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert_same_tensors(values, wanted, TOLERANCE)


class _FreezesAfterSampling(_Samples):
    """What thaws a part of the model may run right after something has called the module."""

    def on_train_epoch_start(self, trainer, pl_module):
        self._sample(trainer, pl_module)
        frozen = trainer.current_epoch == 1
        pl_module.inputs.requires_grad_(not frozen)
        pl_module.blocks[2].requires_grad_(not frozen)


def _fit_freezing(plan):
    model = Net()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=1e-2)
    runs = trainer(plan, max_epochs=3, callbacks=[_FreezesAfterSampling()])
    runs.fit(model, loader(14), loader(8))
    return values_of(model)


def test_freezing_after_sampling_freezes_what_the_optimizer_holds():
    assert_same_tensors(by_plan("3:1", _fit_freezing), by_plan(None, _fit_freezing), TOLERANCE)


class _SeesSummary(ModelSummary):
    def on_fit_start(self, trainer, pl_module):
        summary = self._summary(trainer, pl_module)
        self.counts = (
            summary.total_parameters,
            summary.trainable_parameters,
            summary.param_nums,
            summary.model_size,
        )
        super().on_fit_start(trainer, pl_module)


def _fit_with_display(plan, folder, bar):
    summary = _SeesSummary(max_depth=2)
    callbacks = [
        summary,
        bar(),
        LearningRateMonitor(logging_interval="step"),
        Timer(duration=timedelta(hours=1)),
        DeviceStatsMonitor(cpu_stats=False),
        GradientAccumulationScheduler({0: 2, 1: 1}),
    ]
    logger = CSVLogger(folder, name="", version="")
    model = Net()
    runs = trainer(
        plan,
        max_epochs=2,
        callbacks=callbacks,
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=True,
        enable_model_summary=True,
    )
    runs.fit(model, loader(14), loader(8))
    return summary.counts, values_of(model)


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_displays_monitors_and_loggers_work_and_count_the_whole_model(tmp_path, bar):
    counts, values = by_plan("three", _fit_with_display, tmp_path / "cephalo", bar)
    wanted_counts, wanted = by_plan(None, _fit_with_display, tmp_path / "one", bar)
    assert counts == wanted_counts
    assert_same_tensors(values, wanted, TOLERANCE)
    tables = [_columns(tmp_path / name / "metrics.csv") for name in ("cephalo", "one")]
    assert tables[0].keys() == tables[1].keys() and "lr-AdamW/pg1" in tables[0]
    for name, column in tables[1].items():
        assert tables[0][name] == pytest.approx(column, rel=1e-4), name


def _columns(path):
    lines = path.read_text().splitlines()
    names = lines[0].split(",")
    rows = [line.split(",") for line in lines[1:]]
    return {
        name: [float(row[index]) for row in rows if row[index]] for index, name in enumerate(names)
    }
