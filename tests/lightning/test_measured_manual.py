"""Measuring steps that optimize manually leaves no trace."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from common import assert_same_tensors, dataset, in_ranks, values_of
from lightning.pytorch import Trainer
from plans import QUIET
from test_manual_optimization import TOLERANCE, Gan, Stack, _is
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from lightning_cephalo import CephaloStrategy, Planner

BATCH = 512


class Wide(Gan):
    """Whose activations take more memory than its weights; a target is written in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.target = Stack(5, 5, 8)
        self.generator = Stack(5, 5, 8)
        self.target.requires_grad_(False)
        self.history: list[float] = []

    def look(self) -> None:
        self.history.append(float(self.center.sum()) * 0.0 + 1.0)
        with torch.no_grad():
            for mine, its in zip(
                self.target.parameters(), self.generator.parameters(), strict=True
            ):
                mine.data.mul_(0.9).add_(its.data, alpha=0.1)


class Pool:
    def __init__(self) -> None:
        self.seen = 0


class LeavesTraces(Wide):
    """Clamps weights, steps its optimizer itself, and fills an object: once on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        generating, discriminating = self.optimizers(use_pl_optimizer=False)
        self.pool.seen += 1
        for parameter in self.discriminator.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        loss = _is(True, self.discriminator(x)) + _is(False, self.discriminator(x.flip(1)))
        discriminating.zero_grad()
        self.manual_backward(loss)
        discriminating.step()
        loss_g = mse_loss(self.generator(x), x)
        generating.zero_grad()
        self.manual_backward(loss_g)
        generating.step()
        values = {"d_loss": loss, "loss": loss_g}
        self.log_dict(values, on_step=True, on_epoch=True, sync_dist=True)
        return loss_g


def fit(kind: type[Any], devices: int) -> Any:
    model = kind()
    strategy: Any = "auto"
    if devices > 1:
        strategy = CephaloStrategy(
            planner=Planner(verbose=False, budget_s=1.0, remeasure=True), replan=False
        )
    fitting = Trainer(accelerator="cpu", strategy=strategy, devices=devices, **QUIET)
    fitting.fit(model, DataLoader(dataset(3 * BATCH), batch_size=BATCH // devices))
    found = model.losses, values_of(model), len(model.history), getattr(model, "pool", Pool()).seen
    if devices == 1:
        return found
    plan, held = fitting.strategy.plan, fitting.strategy.report.memory
    planned = [rank.memory_bytes for rank in plan.ranks]
    sizes = [rank.microbatch_sizes for rank in plan.ranks]
    return *found, sizes, planned, [rank.peak_bytes for rank in held]


KINDS = {"plain": Wide, "traces": LeavesTraces}


def measured() -> dict[str, Any]:
    return {case: fit(kind, 2) for case, kind in KINDS.items()}


@cache
def ranks() -> list[dict[str, Any]]:
    return in_ranks(2, measured)


@pytest.mark.parametrize("case", KINDS)
def test_measured_plans_train_as_on_one_device(case):
    kind = KINDS[case]
    wanted_losses, wanted, steps, seen = fit(kind, 1)
    for of_rank in ranks():
        losses, values, own_steps, own_seen, *_ = of_rank[case]
        assert losses == pytest.approx(wanted_losses, rel=TOLERANCE)
        assert_same_tensors(values, wanted, TOLERANCE)
        assert (own_steps, own_seen) == (steps, seen)


def test_each_rank_runs_one_microbatch_in_the_planned_memory():
    for of_rank in ranks():
        *_, sizes, planned, held = of_rank["plain"]
        assert [len(each) for each in sizes] == [1, 1]
        assert sum(map(sum, sizes)) == BATCH
        for planned_bytes, held_bytes in zip(planned, held, strict=True):
            assert held_bytes <= planned_bytes


class Contrasts(Wide):
    """Compares samples with each other: no mean over them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        generating, _ = self.optimizers()
        one, other = self.generator(x), self.generator(x + 0.1)
        loss = torch.nn.functional.cross_entropy(one @ other.T, torch.arange(len(x)))
        generating.zero_grad()
        self.manual_backward(loss)
        generating.step()
        self.log_dict({"d_loss": loss, "loss": loss}, on_step=True, on_epoch=True, sync_dist=True)


def fit_and_listen() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Contrasts, 2)
    return [str(each.message) for each in caught]


def test_a_loss_that_compares_samples_is_warned_of():
    said = in_ranks(2, fit_and_listen)
    for rank, texts in enumerate(said):
        found = [text for text in texts if "The loss of backward 1 in training_step" in text]
        assert len(found) == (rank == 0)
