"""Under a given plan, the first step compares losses of manual backwards with those of parts."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from common import assert_same_tensors, dataset, in_ranks, trainer, values_of
from lightning.pytorch import Callback
from plans import GLOBAL_BATCH
from test_manual_optimization import ActorCritic, Gan, WithClosures, _is
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_cephalo.preparation.training import Training
from lightning_cephalo.sharding.placement import local_part

SAID = "The loss of backward"


class Contrasts(Gan):
    """The generator's loss compares the samples of a batch with each other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        generating, discriminating = self.optimizers()
        discriminating.zero_grad()
        self.manual_backward(_is(True, self.discriminator(x)))
        discriminating.step()
        one, other = self.generator(x), self.generator(x + 0.1)
        generating.zero_grad()
        self.manual_backward(cross_entropy(one @ other.T, torch.arange(len(x))))
        generating.step()
        self.log_dict(
            {"loss": one.mean(), "d_loss": other.mean()},
            on_step=True,
            on_epoch=True,
            sync_dist=True,
        )


class ContrastsInClosure(Contrasts):
    """With the optimizer's own step, by a closure."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        generating, _ = self.optimizers(use_pl_optimizer=False)

        def contrast() -> Tensor:
            one, other = self.generator(x), self.generator(x + 0.1)
            generating.zero_grad()
            loss = cross_entropy(one @ other.T, torch.arange(len(x)))
            self.manual_backward(loss)
            return loss

        loss = generating.step(contrast)
        self.log_dict({"loss": loss, "d_loss": loss}, on_step=True, on_epoch=True, sync_dist=True)


class Sums(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generating, _ = self.optimizers()
        loss = self.generator(batch[0]).square().sum()
        generating.zero_grad()
        self.manual_backward(loss)
        generating.step()
        self.log_dict({"loss": loss, "d_loss": loss}, on_step=True, on_epoch=True, sync_dist=True)


class Noisy(Gan):
    """Draws noise and drops units: nothing can be said of its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.generator.last = nn.Sequential(nn.Dropout(0.2), self.generator.last)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((x + 0.1 * torch.randn_like(x), y), batch_idx)


class CountsHooks(Callback):
    def __init__(self) -> None:
        self.called: list[str] = []

    def on_before_backward(self, *_: Any) -> None:
        self.called.append("before")

    def on_after_backward(self, *_: Any) -> None:
        self.called.append("after")


KINDS = {
    Gan: 0,
    WithClosures: 0,
    ActorCritic: 0,
    Noisy: 0,
    Contrasts: 2,
    ContrastsInClosure: 1,
    Sums: 1,
}
"""Kinds of steps, and the backward that a warning names; 0: none is warned of."""


def fit(plan: str, kind: type[Any], compares: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    model = kind()
    before: list[Any] = []
    model.configure_optimizers = _counted(model.configure_optimizers, before)
    hooks = CountsHooks()
    fitting = trainer(plan, callbacks=[hooks])
    without = nullcontext() if compares else mock.patch.object(Training, "compare_losses")
    with without, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting.fit(model, DataLoader(dataset(16), batch_size=GLOBAL_BATCH))
    states = [
        float(local_part(value).double().sum())
        for optimizer in fitting.strategy.optimizers
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, Tensor)
    ]
    return {
        "said": [str(each.message) for each in caught if SAID in str(each.message)],
        "losses": model.losses,
        "values": values_of(model),
        "states": states,
        "drawn": float(torch.rand(())),
        "hooks": hooks.called,
        "steps": fitting.global_step,
        "metrics": {name: float(value) for name, value in fitting.callback_metrics.items()},
        "optimizers": len(before),
    }


def _counted(function: Any, calls: list[Any]) -> Any:
    def counted() -> Any:
        calls.append(function)
        return function()

    return counted


def fit_each(plan: str, compares: bool) -> dict[type[Any], Any]:
    return {kind: fit(plan, kind, compares) for kind in KINDS}


@cache
def ranks(compares: bool) -> list[dict[type[Any], Any]]:
    return in_ranks(3, fit_each, "whole three", compares)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_that_are_no_mean_over_samples_are_warned_of_once_and_nothing_changes(kind):
    for rank, (own, other) in enumerate(zip(ranks(True), ranks(False), strict=True)):
        found, wanted = dict(own[kind]), dict(other[kind])
        said = found.pop("said")
        assert wanted.pop("said") == []
        assert len(said) == (rank == 0 and KINDS[kind] > 0)
        for text in said:
            assert f"The loss of backward {KINDS[kind]} in training_step" in text
            assert "loss_over_batch" in text and "on_train_batch_start" in text
        assert_same_tensors(found.pop("values"), wanted.pop("values"), 0.0)
        assert str(found) == str(wanted)
        assert found["optimizers"] == 1
