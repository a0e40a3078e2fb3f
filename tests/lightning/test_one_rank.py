"""One rank: debugging, one GPU, ``devices="auto"``. It is planned and trains like any other."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from common import Net, assert_same_tensors, dataset, loader, trainer, values_of
from launch import run_ranks
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from plans import QUIET, plan_of
from torch.utils.data import DataLoader

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.common.errors import UnsupportedError

ENVIRONMENT = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")


def in_a_script(function: Callable[[], Any]) -> Any:
    """Return what a function gives in a process that no launcher has started."""

    def script(rank: int) -> Any:
        for name in ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ["OMP_NUM_THREADS"] = "1"
        return function()

    return run_ranks(1, script, process_group=False)[0]


def one_rank(**options: Any) -> Trainer:
    strategy = CephaloStrategy(
        planner=Planner(verbose=False, budget_s=1.0), timeout=timedelta(seconds=400)
    )
    return Trainer(strategy=strategy, accelerator="cpu", **{"devices": 1, **QUIET, **options})


def test_one_rank_is_measured_and_planned_and_trains_as_plain_lightning_does():
    def fit(make: Callable[..., Trainer]):
        model = Net()
        run = make(max_epochs=2)
        run.fit(model, loader(), loader(8))
        metrics = {name: float(value) for name, value in run.callback_metrics.items()}
        validated = run.validate(model, loader(8), verbose=False)
        left = [name for name in ENVIRONMENT if name in os.environ]
        plan = getattr(run.strategy, "plan", None)
        return model.losses, metrics, validated, values_of(model), plan, left

    wanted = in_a_script(lambda: fit(lambda **options: trainer(None, **options)))
    found = in_a_script(lambda: fit(one_rank))
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1] == pytest.approx(wanted[1], rel=1e-5)
    assert found[2] == [pytest.approx(wanted[2][0], rel=1e-5)]
    assert_same_tensors(found[3], wanted[3], 1e-5)
    assert [rank.state_fraction for rank in found[4].ranks] == [1.0]
    assert found[4].global_batch_size == 8
    assert found[5] == []  # the next Trainer of the process would take itself for a rank of this


def test_another_trainer_of_the_same_process_trains_too():
    def fit():
        losses = []
        for devices in (1, "auto"):
            model = Net()
            one_rank(max_steps=2, devices=devices).fit(model, loader(), loader(8))
            losses.append(model.losses)
        return losses

    first, second = in_a_script(fit)
    assert second == pytest.approx(first, rel=1e-5)  # the plans may differ


def test_an_interactive_session_needs_no_other_name_for_one_rank(monkeypatch):
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    options = {"accelerator": "cpu", "strategy": "cephalo", **QUIET}
    assert Trainer(devices=1, **options).strategy.launcher is None
    with pytest.raises(MisconfigurationException, match="interactive"):
        Trainer(devices=2, **options)
    assert Trainer(devices=2, **{**options, "strategy": "cephalo_notebook"}).world_size == 2


def test_ranks_that_are_connected_otherwise_are_refused():
    """As in a notebook, after one rank has trained in its own process."""

    def fit():
        one_rank(max_steps=1).fit(Net(), loader(), loader(8))
        os.environ.update(LOCAL_RANK="0", NODE_RANK="0")  # as of a rank that a launcher starts
        try:
            trainer("3:1", max_steps=1).fit(Net(), loader(), loader(8))
        except UnsupportedError as error:
            return str(error), torch.distributed.is_initialized()

    message, is_connected = in_a_script(fit)
    assert "has 2 ranks" in message and "connected to 1" in message
    assert "destroy_process_group()" in message and is_connected


def with_one_microbatch(**options: Any) -> Trainer:
    strategy = CephaloStrategy(plan_of(((1,), 1.0)), planner=Planner(verbose=False))
    return Trainer(strategy=strategy, accelerator="cpu", devices=1, **{**QUIET, **options})


class Predicts(Net):
    """Takes whatever a loader yields."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


def test_one_rank_predicts_from_anything_that_yields() -> None:
    def predict() -> Any:
        run = with_one_microbatch(limit_predict_batches=2)
        return run.predict(Predicts(), itertools.count())

    assert in_a_script(predict) == [0, 1]


class Wrong(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"a": 5}


@pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no")
def test_trainers_are_copied_and_count_and_save_and_restore_outside_of_runs(tmp_path):
    """What scripts do around ``fit``: none of it needs connected ranks."""

    def script() -> None:
        module, made = Net(), with_one_microbatch(max_steps=2)
        made.strategy.connect(module)
        made.save_checkpoint(tmp_path / "before.ckpt")
        made._data_connector.attach_data(module, train_dataloaders=loader(30))
        assert made.estimated_stepping_batches == 2 and made.num_training_batches == 4
        made.fit(module, DataLoader(dataset(), batch_size=1))
        copied = pickle.loads(pickle.dumps(made.strategy))
        assert copied.report.step_s == made.strategy.report.step_s is not None
        assert copy.deepcopy(made.callbacks) is not made.callbacks
        made.save_checkpoint(tmp_path / "after.ckpt")
        module.trainer = None  # as it is where spawned ranks have run it
        made._checkpoint_connector.restore(tmp_path / "after.ckpt")
        with pytest.raises(MisconfigurationException, match="the 'loss' key needs to be present"):
            with_one_microbatch().fit(Wrong(), DataLoader(dataset(), batch_size=1))

    in_a_script(script)
    before, after = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("before", "after")
    )
    assert list(before["state_dict"]) == list(after["state_dict"])
    assert after["global_step"] == 2
