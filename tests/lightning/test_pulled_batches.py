"""Steps that pull their own batches train, validate and predict as on one device."""

from __future__ import annotations

from typing import Any

import pytest
from common import Net, assert_same_tensors, loader, trainer, values_of
from plans import PLANS
from torch import Tensor
from warm_ranks import by_plan, in_ranks

from lightning_cephalo.common.errors import UnsupportedError

# Lightning calls this signature experimental, in two warnings
pytestmark = [
    pytest.mark.filterwarnings("ignore:Found .dataloader_iter. argument"),
    pytest.mark.filterwarnings("ignore:You are using the .dataloader_iter. step flavor"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no"),
]


class Pulls(Net):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, batch_idx, _ = next(dataloader_iter)
        assert batch_idx == self.trainer.global_step % self.trainer.num_training_batches
        loss = self.loss(batch)
        # Lightning demands the size from steps that pull
        size = len(batch[0])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=size)
        return loss

    def validation_step(self, dataloader_iter: Any) -> None:
        batch, *_ = next(dataloader_iter)
        self.log("val", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))


class PullsTwice(Pulls):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        next(dataloader_iter)
        return super().training_step(dataloader_iter)


class PullsNothing(Pulls):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        return self.gain * 1.0


def fit(plan: str | None) -> tuple[list[float], dict[str, Tensor], float]:
    module, made = Pulls(), trainer(plan, max_epochs=2)
    made.fit(module, loader(13), loader(9))
    return module.losses, values_of(module), float(made.callback_metrics["val"])


@pytest.mark.parametrize("plan", ["3:1", "no data"])
def test_training_and_validation_that_pull_are_those_of_one_device(plan):
    losses, values, validation = by_plan(None, fit)
    found, found_values, found_validation = by_plan(plan, fit)
    assert len(found) == 4
    assert found == pytest.approx(losses, rel=1e-5)
    assert_same_tensors(found_values, values, 1e-5)
    assert found_validation == pytest.approx(validation, rel=1e-5)


class PullsByPlan(Pulls):
    """Notes how many samples this rank pulls in each step, and how many its plan gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.pulled: list[tuple[int, int]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        strategy: Any = self.trainer.strategy
        self.pulled.append((len(batch[0]), strategy.plan.ranks[self.global_rank].batch_size))
        if self.trainer.global_step == 2:
            strategy.change_plan(PLANS["even"])


def pulled() -> list[tuple[int, int]]:
    module = PullsByPlan()
    trainer("3:1").fit(module, loader(48))
    return module.pulled


def test_a_plan_that_changes_is_followed_from_the_first_batch_of_its_sizes():
    for rank in in_ranks(2, pulled):
        assert all(samples == planned for samples, planned in rank), rank
        assert len(set(rank)) == 2


def errors(kind: type[Pulls]) -> str:
    with pytest.raises((UnsupportedError, RuntimeError)) as caught:
        trainer("3:1").fit(kind(), loader(13))
    return str(caught.value)


@pytest.mark.parametrize(("kind", "came"), [(PullsTwice, "several"), (PullsNothing, "no batch")])
def test_a_step_that_does_not_pull_one_batch_is_refused_on_every_rank(kind, came):
    for said in in_ranks(2, errors, kind):
        assert f"has pulled {came}" in said and "Call next(dataloader_iter) once" in said
