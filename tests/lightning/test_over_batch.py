"""Losses over the whole global batch, such as contrastive ones, are those of one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from common import Block, assert_same_tensors, loader, trainer, values_of
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from warm_ranks import by_plan, in_ranks

from lightning_cephalo import loss_over_batch

TOLERANCE = 1e-5


class Contrasts(LightningModule):
    """Two views, a temperature, a mask of the samples, and a term for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 1)
        self.log_scale = nn.Parameter(torch.tensor(0.5))
        self.losses: list[float] = []

    def embed(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def contrast(self, first: Tensor, second: Tensor, counts: Tensor) -> Tensor:
        logits = self.log_scale.exp() * normalize(first) @ normalize(second).T
        found = cross_entropy(logits, torch.arange(len(first)), reduction="none")
        return found[counts].mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        first, second = self.embed(x), self.embed(x.flip(1))
        loss = loss_over_batch(self.contrast, first, second, x[:, 0] > -1.0)
        loss = loss + 0.3 * mse_loss(self.head(first), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        first = self.embed(batch[0])
        own = loss_over_batch(lambda rows: rows.square().mean(), first)
        self.log("own", own, sync_dist=True)

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class BalancesInTheMiddle(Contrasts):
    """Twice in a step, before units, and in steps that visit more units than those before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = self.blocks[0](self.first(x))
        balance = loss_over_batch(lambda x: x.softmax(1).mean(0).square().sum(), x)
        for _ in range(batch_idx % 2):
            x = self.blocks[0](x)
        x = self.blocks[1](x)
        spread = loss_over_batch(lambda x: x.std(0).log().sum(), x.repeat_interleave(2, 0))
        loss = mse_loss(self.head(x), y) + 0.5 * balance - 0.1 * spread
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def fit(
    plan: str | None, kind: Callable[[], Contrasts], options: dict[str, Any] | None = None
) -> Any:
    model = kind()
    fitting = trainer(plan, options, max_epochs=2, accumulate_grad_batches=2)
    fitting.fit(model, loader(32), loader(8))
    return model.losses, values_of(model)


@cache
def fit_alone(kind: type[Contrasts]) -> Any:
    return fit(None, kind)


@pytest.mark.parametrize("kind", [Contrasts, BalancesInTheMiddle])
@pytest.mark.parametrize(
    ("plan", "options"), [("3:1", {}), ("three", {"recompute": False}), ("no data", {})]
)
@pytest.mark.filterwarnings("ignore:In . of the last . steps, microbatches visited")
def test_a_loss_over_the_batch_is_that_of_one_device(plan, options, kind):
    wanted_losses, wanted = fit_alone(kind)
    losses, values = by_plan(plan, fit, kind, options)
    assert losses == pytest.approx(wanted_losses, rel=TOLERANCE)
    assert_same_tensors(values, wanted, TOLERANCE)


def _uses_another(model: Contrasts, x: Tensor) -> Any:
    first = model.embed(x)
    return loss_over_batch(lambda rows: (rows - first.mean()).square().mean(), first)


def _calls_a_unit(model: Contrasts, x: Tensor) -> Any:
    first = model.embed(x)
    return loss_over_batch(lambda rows: model.blocks[0](rows).mean(), first)


def _has_a_weight(model: Contrasts, x: Tensor) -> Any:
    return {"loss": loss_over_batch(torch.mean, model.embed(x)), "weight": 3.5}


def _sometimes(model: Contrasts, x: Tensor) -> Any:
    first = model.embed(x)
    return loss_over_batch(torch.mean, first) if len(x) != 2 else first.mean()


def _no_rows(model: Contrasts, x: Tensor) -> Any:
    return loss_over_batch(lambda rows, scale: rows.mean() * scale, model.embed(x), 2.0)


def _no_scalar(model: Contrasts, x: Tensor) -> Any:
    return loss_over_batch(lambda rows: rows.mean(0), model.embed(x))


def _other_widths(model: Contrasts, x: Tensor) -> Any:
    return loss_over_batch(torch.mean, model.embed(x)[:, : len(x)])


def _fails_on_one_rank(model: Contrasts, x: Tensor) -> Any:
    def function(rows: Tensor) -> Tensor:
        if model.global_rank == 1:
            raise KeyError("in the function")
        return rows.mean()

    return loss_over_batch(function, model.embed(x))


REFUSED = {
    _uses_another: "uses a unit, or a tensor with a gradient",
    _calls_a_unit: "uses a unit, or a tensor with a gradient",
    _has_a_weight: "returns the weight 3.5 for",
    _sometimes: "Some microbatches call loss_over_batch, and others return without it",
    _no_rows: "got float; expected tensors",
    _no_scalar: r"returned a tensor of shape \(6,\); expected a loss",
    _other_widths: "with different tensors: rows of shape",
    _fails_on_one_rank: "in the function",
}


class Misuses(Contrasts):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch[0])


def failures() -> list[str]:
    said = []
    for step in REFUSED:
        with pytest.raises(Exception) as raised:
            fit("three", partial(Misuses, step))
        said.append(str(raised.value))
    return said


def test_what_has_no_loss_over_the_batch_is_refused_by_name_on_every_rank():
    for said in in_ranks(3, failures):
        for message, wanted in zip(said, REFUSED.values(), strict=True):
            assert re.search(wanted, message), (wanted, message)


def test_without_the_strategy_it_is_the_function_itself():
    assert loss_over_batch(torch.mean, torch.tensor([1.0, 3.0])) == 2.0
