"""Loggers that other packages provide get on rank 0 what they get on one device."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from common import Net, by_plan, in_ranks, loader, trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that are not ours


def _fit(plan: str | None, make: Any, folder: Path) -> None:
    options = {"logger": make(folder), "log_every_n_steps": 1, "default_root_dir": folder}
    fit = trainer(plan, max_epochs=2, **options)
    fit.fit(Net(), loader(14), loader(8))
    if isinstance(fit.logger, WandbLogger) and fit.is_global_zero:
        # the format of its files is its own
        summary = fit.logger.experiment.summary
        values = [(int(summary["trainer/global_step"]), summary["loss_step"])]
        (folder / "summary.json").write_text(json.dumps(values))


def _tensorboard(folder: Path) -> TensorBoardLogger:
    return TensorBoardLogger(folder, name="", version="")


def _read_tensorboard(folder: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss_step")]


def _mlflow(folder: Path) -> MLFlowLogger:
    return MLFlowLogger("fits", tracking_uri=f"file:{folder}/runs", run_name="fit")


def _read_mlflow(folder: Path) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{folder}/runs")
    (experiment,) = [e for e in client.search_experiments() if e.name == "fits"]
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss_step")
    return sorted((metric.step, metric.value) for metric in history)


def _wandb(folder: Path) -> WandbLogger:
    return WandbLogger(project="fits", save_dir=folder, offline=True)


def _read_wandb(folder: Path) -> list[Any]:
    (run,) = folder.glob("wandb/offline-run-*")  # one rank alone writes
    assert list(run.glob("run-*.wandb"))
    return json.loads((folder / "summary.json").read_text())


LOGGERS = {
    "tensorboard": (_tensorboard, _read_tensorboard),
    "mlflow": (_mlflow, _read_mlflow),
    "wandb": (_wandb, _read_wandb),
}


@pytest.mark.parametrize("package", LOGGERS)
def test_a_logger_of_another_package_gets_what_it_gets_on_one_device(
    package, tmp_path, monkeypatch
):
    if find_spec(package) is None:
        pytest.skip(f"needs the package: pip install {package}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    make, read = LOGGERS[package]
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    by_plan(None, _fit, make, folders[0])
    in_ranks(2, _fit, "3:1", make, folders[1])
    wanted, found = map(read, folders)
    assert wanted and [step for step, _ in found] == [step for step, _ in wanted]
    for (_, value), (_, expected) in zip(found, wanted, strict=True):
        assert value == pytest.approx(expected, rel=1e-4)
