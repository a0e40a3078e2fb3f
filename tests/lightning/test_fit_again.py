"""The same model is fitted again after an error, or refused by name."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from common import Net, assert_same_tensors, by_plan, in_ranks, loader, trainer, values_of
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError

TOLERANCE = 1e-5


class Fails(Net):
    """Fails once, where a test says so."""

    where: str | None = None

    def fail(self, where: str) -> None:
        if self.where == where:
            self.where = None
            raise KeyboardInterrupt if "interrupted" in where else ValueError(where)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("step")
        self.fail(f"step of rank {self.global_rank}")
        self.fail("interrupted")
        self.blocks[0].register_forward_hook(lambda *_: self.fail("interrupted inside"))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("validation")
        return super().validation_step(batch, batch_idx)

    def on_before_zero_grad(self, *args: Any) -> None:
        self.fail(f"hook of rank {self.global_rank}")
        self.fail("hook")
        self.fail("interrupted in a hook")

    def on_train_epoch_start(self) -> None:
        self.fail("epoch")

    def configure_optimizers(self) -> Any:
        self.fail("optimizers")
        return super().configure_optimizers()


def fit_twice(plan: str | None, where: str):
    model = Fails()
    model.where = where if plan is not None else None
    raised = None
    if plan is not None:
        try:
            trainer(plan, max_steps=2).fit(model, loader(), loader(8))
        except (Exception, SystemExit) as error:
            raised = error
        assert raised is not None
        model.where = None  # also on ranks that have not come there
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        model.losses, fresh = [], Net()
        model.steps.zero_()  # counts from before the error, too
        assert_same_tensors(values_of(model), values_of(fresh), 0.0)
    trainer(plan, max_steps=2).fit(model, loader(), loader(8))
    return type(raised).__name__, model.losses, values_of(model)


@pytest.fixture(scope="module")
def wanted():
    return by_plan(None, fit_twice, "nowhere")[1:]


@pytest.mark.parametrize("where", ["step", "step of rank 1", "optimizers"])
def test_a_model_is_whole_after_an_error_that_all_ranks_raise_together(where, wanted):
    kinds = []
    for kind, losses, values in in_ranks(2, fit_twice, "3:1", where):
        kinds.append(kind)
        assert losses == pytest.approx(wanted[0], rel=1e-5)
        assert_same_tensors(values, wanted[1], TOLERANCE)
    assert set(kinds) <= {"ValueError", RemoteRankError.__name__} and "ValueError" in kinds


@pytest.mark.parametrize("where", ["hook", "step", "interrupted", "interrupted inside"])
def test_one_rank_restores_its_model_after_any_error(where, wanted):
    ((_, losses, values),) = in_ranks(1, fit_twice, "one", where)
    assert losses == pytest.approx(wanted[0], rel=1e-5)
    assert_same_tensors(values, wanted[1], TOLERANCE)


@pytest.mark.parametrize("where", ["hook", "epoch"])
def test_a_model_is_whole_after_an_error_that_each_rank_raises_by_itself(where, wanted):
    for kind, losses, values in in_ranks(2, fit_twice, "3:1", where):
        assert kind == "ValueError"
        assert losses == pytest.approx(wanted[0], rel=1e-5)
        assert_same_tensors(values, wanted[1], TOLERANCE)


def test_a_rank_whose_device_is_broken_leaves_no_rank_in_a_gather():
    class Breaks(Fails):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1:
                accelerator = self.trainer.strategy.session.model.accelerator
                accelerator.synchronize = lambda: self.fail("broken")
                self.where = "broken"
            raise ValueError("an error of the device")

    def fit():
        model = Breaks()
        with pytest.raises((ValueError, RemoteRankError), match="an error of the device"):
            trainer("3:1").fit(model, loader(), loader(8))
        with pytest.raises(UnsupportedError, match="holds the shards of an earlier run"):
            trainer("3:1").fit(model, loader(), loader(8))

    in_ranks(2, fit)


class Collects(Net):
    """Collects garbage in its first step, as the collector does by itself in long runs."""

    frozen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            gc.collect()
        type(self).frozen = gc.get_freeze_count()
        if batch_idx == 2:
            raise ValueError("a step")
        return super().training_step(batch, batch_idx)


def fit_with_a_full_collection(plan: str, steps: int):
    gc.unfreeze()  # what starts the ranks of tests has frozen all
    callbacks = list(gc.callbacks)
    try:
        trainer(plan, max_steps=steps).fit(Collects(), loader(), loader(8))
    except ValueError:
        assert steps > 2
    return Collects.frozen, gc.get_freeze_count(), gc.callbacks == callbacks


@pytest.mark.parametrize("steps", [2, 3])
def test_the_collector_walks_all_objects_once_in_training_and_all_behind_it(steps):
    for frozen, left, is_same in in_ranks(2, fit_with_a_full_collection, "3:1", steps):
        assert frozen > 1000
        assert (left, is_same) == (0, True)
