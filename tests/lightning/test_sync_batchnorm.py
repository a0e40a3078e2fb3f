"""Batch normalisation over the whole global batch, in a Trainer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from common import Net, assert_same_tensors, by_plan, in_ranks, loader, trainer, values_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from plans import GLOBAL_BATCH, QUIET
from torch import Tensor, nn

from lightning_cephalo import CephaloStrategy, Planner

TOLERANCE = 2e-5


class Normalised(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, 7), nn.BatchNorm1d(7)
        self.down, self.last = nn.Linear(7, width), nn.BatchNorm1d(width, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.down(torch.tanh(self.norm(self.up(x)))))


class Norms(Net):
    """Layers in units and between them; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normalised(6) for _ in range(3))
        self.before = nn.BatchNorm1d(5)
        self.frozen = nn.BatchNorm1d(5)
        self.validated: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.frozen.eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.frozen(self.before(x)))

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def _callbacks() -> dict[str, list[Callback]]:
    return {
        "none": [],
        "EMA": [EMAWeightAveraging(decay=0.6, use_buffers=True)],
        "SWA": [StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1)],
    }


def _fit(plan: str | None, options: dict[str, Any], names: tuple[str, ...]) -> Any:
    found: dict[str, Any] = {}
    for name in names:
        callbacks, model = _callbacks()[name], Norms()
        run = trainer(plan, options, max_epochs=2, callbacks=callbacks, sync_batchnorm=True)
        run.fit(model, loader(24), loader(8))
        assert not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        found[name] = (model.losses, model.validated, values_of(model))
    return found


@pytest.mark.parametrize(
    ("plan", "options", "names"),
    [
        pytest.param("three", {}, ("EMA", "SWA"), marks=pytest.mark.slow),
        ("no data", {"recompute": False}, ("none",)),
    ],
)
def test_training_and_averages_are_those_of_one_device(
    plan: str, options: dict[str, Any], names: tuple[str, ...]
) -> None:
    wanted, found = by_plan(None, _fit, {}, names), by_plan(plan, _fit, options, names)
    for name, (losses, validated, values) in wanted.items():
        assert found[name][0] == pytest.approx(losses, rel=TOLERANCE), name
        assert found[name][1] == pytest.approx(validated, rel=TOLERANCE), name
        assert_same_tensors(found[name][2], values, TOLERANCE)


class _Recomputes(Norms):
    def on_train_start(self) -> None:
        self.recomputes = self.trainer.strategy.session.model.executor.recompute


def _measured() -> Any:
    model = _Recomputes()
    strategy = CephaloStrategy(
        global_batch_size=GLOBAL_BATCH,
        planner=Planner(verbose=False, budget_s=0.5, remeasure=True),
        timeout=timedelta(seconds=400),
    )
    run = Trainer(strategy=strategy, accelerator="cpu", devices=2, sync_batchnorm=True, **QUIET)
    run.fit(model, loader(16))
    return model.losses, values_of(model), model.recomputes


def _alone() -> Any:
    model = Norms()
    trainer(None).fit(model, loader(16))
    return model.losses, values_of(model)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_a_measured_plan_retains_activations_and_trains_as_on_one_device() -> None:
    losses, values = in_ranks(1, _alone)[0]
    found = in_ranks(2, _measured)[0]
    assert found[0] == pytest.approx(losses, rel=TOLERANCE)
    assert_same_tensors(found[1], values, TOLERANCE)
    assert not found[2]
