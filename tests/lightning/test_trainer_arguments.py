"""Arguments of the Trainer do what they do on one device."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from common import Net, assert_same_tensors, by_plan, dataset, in_ranks, trainer, values_of
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

TOLERANCE = 1e-5

SHOWN = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
CASES: dict[str, dict[str, Any]] = {
    "epochs": {
        "max_epochs": 3,
        "min_epochs": 2,
        "check_val_every_n_epoch": 2,
        "limit_train_batches": 0.5,
        "limit_val_batches": 0.5,
        "deterministic": "warn",
        "detect_anomaly": True,
        "profiler": "simple",
    },
    "steps": {
        "max_epochs": -1,
        "max_steps": 5,
        "min_steps": 2,
        "val_check_interval": 2,
        "gradient_clip_val": 0.05,
        "gradient_clip_algorithm": "value",
        "profiler": "advanced",
        "inference_mode": False,
        "benchmark": True,
    },
    "intervals over epochs": {
        "max_epochs": 2,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.1,
    },
    "a fraction of an epoch": {
        "val_check_interval": 0.5,
        "max_time": timedelta(hours=12),
        "profiler": "pytorch",
    },
    "sanity check": {"num_sanity_val_steps": -1, "overfit_batches": 2, "max_epochs": 2},
    "fast_dev_run": {"fast_dev_run": 2},
    "barebones": {"barebones": True, "num_sanity_val_steps": None, "max_epochs": 1},
    "no time": {"max_time": {"seconds": 0}},
    "no batches": {"limit_train_batches": 0},
    "no epochs": {"max_epochs": 0},
}


class _Seen(Callback):
    """Where in the run each batch came, and what was logged."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append(("training", trainer.global_step, batch_idx))

    def on_validation_batch_end(self, trainer, *rest) -> None:
        self.seen.append(("validation", trainer.global_step, trainer.sanity_checking))

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.seen.append(("epoch", trainer.current_epoch))


class _Quiet(Net):
    """Reads nothing that ``barebones`` does not log."""

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        pass


def _fit(plan: str | None, name: str, folder: Any):
    options = {"default_root_dir": folder, **CASES[name]}
    seen, model = _Seen(), Net()
    if "barebones" in options:
        options = {**dict.fromkeys(SHOWN, False), **options}
        model = _Quiet()
    else:
        options["callbacks"] = [seen]
    fit = trainer(plan, **options)
    data = DataLoader(dataset(30), batch_size=8)
    # a rank evaluates batches of the loader's size: on one device the batch of all ranks
    fit.fit(model, data, DataLoader(dataset(32), batch_size=8 if plan else 16))
    metrics = {key: float(value) for key, value in fit.callback_metrics.items()}
    return (fit.global_step, fit.current_epoch, seen.seen), metrics, values_of(model)


def _fits(plan: str | None, folder: Any):
    return {name: _fit(plan, name, folder) for name in CASES}


# Lightning's advice on such arguments
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_arguments_of_the_trainer_do_what_they_do_on_one_device(tmp_path):
    wanted = by_plan(None, _fits, tmp_path)
    for found in in_ranks(2, _fits, "3:1", tmp_path):
        for name, (counts, metrics, values) in wanted.items():
            assert found[name][0] == counts, name
            assert found[name][1].keys() == metrics.keys(), name
            for key, value in metrics.items():
                assert math.isclose(found[name][1][key], value, rel_tol=1e-4), (name, key)
            assert_same_tensors(found[name][2], values, TOLERANCE)
