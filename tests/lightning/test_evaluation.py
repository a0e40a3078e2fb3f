"""Validation, test and prediction see every sample once and give what one device gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from plans import PLANS
from recording import (
    Record,
    Recorder,
    assert_same_weights,
    batch_size,
    loader,
    make_trainer,
    run,
    samples,
)
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from warm_ranks import in_ranks

from lightning_cephalo.common.errors import UnsupportedError


class Evaluated(Recorder):
    """Notes what each step of evaluation was given, and what callbacks see in the end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.error = torchmetrics.MeanSquaredError()

    def seen(self, stage: str, batch: Any, dataloader_idx: int) -> torch.Tensor:
        self.record.note(f"{stage} {dataloader_idx}", self.indices(batch))
        _, x, y = self.parts(batch)
        predicted = self(x)
        self.error(predicted, y)
        self.log(f"{stage} error", self.error, add_dataloader_idx=False)
        self.log(f"{stage} loss", (predicted - y).square().mean(), sync_dist=True)
        largest = self.parts(batch)[0].max().float()
        self.log(f"{stage} max", largest, reduce_fx="max", sync_dist=True)
        return predicted

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.seen("validate", batch, 0)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.seen("test", batch, 0)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.record.note(f"predict {dataloader_idx}", self.indices(batch))
        return {"y": self(self.parts(batch)[1]), "index": self.parts(batch)[0]}

    def finished(self) -> None:
        metrics = {key: float(value) for key, value in self.trainer.callback_metrics.items()}
        self.record.note("metrics", metrics)

    on_validation_end = on_test_end = on_fit_end = finished


def every(ranks: list[Record], key: str) -> list[int]:
    return sorted(i for rank in ranks for step in rank.notes.get(key, []) for i in step)


def assert_same_metrics(ranks: list[Record], wanted: Record) -> None:
    for rank in ranks:
        assert len(rank.notes["metrics"]) == len(wanted.notes["metrics"])
        for found, alone in zip(rank.notes["metrics"], wanted.notes["metrics"], strict=True):
            assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "plan", "count"),
    [
        *(("validate", "three", count) for count in (1, 2, 5, 7)),
        ("validate", "even", 17),
        *(("test", "even", count) for count in (1, 3)),
        ("test", "three", 17),
    ],
)
def test_every_sample_is_evaluated_once(stage: str, count: int, plan: str, tmp_path: Path) -> None:
    data = DataLoader(samples(count), batch_size=2)
    (wanted,) = run(stage, None, Evaluated(tmp_path), data)
    ranks = run(stage, plan, Evaluated(tmp_path), data)
    assert every(ranks, f"{stage} 0") == list(range(count))
    assert_same_metrics(ranks, wanted)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("three", {"num_sanity_val_steps": 2}),
        ("idle first", {"num_sanity_val_steps": -1, "limit_val_batches": 1.0}),
        ("3:1", {"val_check_interval": 2}),
        ("idle first", {"val_check_interval": 2}),
        ("three", {"val_check_interval": 0.5, "limit_val_batches": 1}),
        ("3:1", {"check_val_every_n_epoch": 2}),
    ],
)
def test_validation_inside_training(options: dict[str, Any], plan: str, tmp_path: Path) -> None:
    alone, together = Evaluated(tmp_path), Evaluated(tmp_path)
    # one device's steps hold what a step of all ranks holds, so that limits mean the same
    ranks_of_plan = len(PLANS[plan].ranks)
    whole = DataLoader(samples(10), batch_size=2 * ranks_of_plan)
    (wanted,) = run("fit", None, alone, loader(None), whole, max_epochs=2, **options)
    data = DataLoader(samples(10), batch_size=2)
    ranks = run("fit", plan, together, loader(plan), data, max_epochs=2, **options)
    assert every(ranks, "validate 0") == every([wanted], "validate 0")
    assert_same_metrics(ranks, wanted)
    assert_same_weights(together, alone)


class TwoLoaders(Evaluated):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.record.note(f"validate {dataloader_idx}", self.indices(batch))
        loss = self.per_sample(batch).mean()
        self.log("val", loss, sync_dist=True)
        self.log(f"only {dataloader_idx}", loss, sync_dist=True, add_dataloader_idx=False)


@pytest.mark.parametrize(
    ("plan", "counts"), [("even", (7, 5)), ("even", (1, 9)), ("three", (7, 5)), ("three", (2, 1))]
)
def test_several_dataloaders_are_evaluated_each(
    counts: tuple[int, int], plan: str, tmp_path: Path
) -> None:
    data = [DataLoader(samples(count), batch_size=2) for count in counts]
    (wanted,) = run("validate", None, TwoLoaders(tmp_path), data)
    ranks = run("validate", plan, TwoLoaders(tmp_path), data)
    for index, count in enumerate(counts):
        assert every(ranks, f"validate {index}") == list(range(count))
    assert_same_metrics(ranks, wanted)
    assert set(wanted.notes["metrics"][0]) == {
        "val/dataloader_idx_0",
        "val/dataloader_idx_1",
        "only 0",
        "only 1",
    }


class Predicting(Evaluated):
    """Also keeps what hooks are given."""

    def on_predict_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.record.note("outputs", outputs)

    def on_predict_end(self) -> None:
        self.record.note("kept", self.trainer.predict_loop.predictions)


@pytest.mark.filterwarnings("ignore:predict returned None")
@pytest.mark.parametrize(
    ("plan", "count"), [("even", 1), ("even", 5), ("three", 2), ("three", 3), ("three", 7)]
)
def test_predictions_of_all_ranks_are_those_of_one_device(
    count: int, plan: str, tmp_path: Path
) -> None:
    data = DataLoader(samples(count), batch_size=2)
    (wanted,) = run("predict", None, Predicting(tmp_path), data)
    ranks = run("predict", plan, Predicting(tmp_path), data)
    found: dict[int, float] = {}
    for rank in ranks:
        for outputs in rank.notes["outputs"]:
            if outputs is None:  # a rank that never had a sample has nothing to be like
                assert not rank.notes.get("predict 0")
                continue
            assert outputs["y"].shape[1:] == (1,)
            for index, y in zip(outputs["index"], outputs["y"], strict=True):
                assert int(index) not in found
                found[int(index)] = float(y)
    one_device = {
        int(index): float(y)
        for outputs in wanted.notes["outputs"]
        for index, y in zip(outputs["index"], outputs["y"], strict=True)
    }
    assert found == pytest.approx(one_device, rel=1e-5)


class Writer(BasePredictionWriter):
    def __init__(self, folder: Path, counts: tuple[int, ...]) -> None:
        super().__init__("batch_and_epoch")
        self.folder, self.counts = folder, counts

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert list(batch_indices) == prediction["index"].tolist()
        repeated = [self.counts[dataloader_idx] - 1]
        assert pl_module.indices(batch) == (list(batch_indices) or repeated)

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        # several dataloaders: a list per loader; one: the list
        nested = predictions if isinstance(predictions[0], list) else [predictions]
        indices = [[int(i) for p in per_loader for i in p["index"]] for per_loader in nested]
        assert indices == [[i for step in per_loader for i in step] for per_loader in batch_indices]
        path = self.folder / f"written{trainer.global_rank}.json"
        path.write_text(json.dumps(indices))


@pytest.mark.parametrize(("workers", "counts"), [(0, (7,)), (0, (5,)), (0, (9, 5)), (1, (9, 5))])
def test_a_prediction_writer_gets_the_indices_of_its_predictions(
    workers: int, counts: tuple[int, ...], tmp_path: Path
) -> None:
    data = [DataLoader(samples(count), batch_size=2, num_workers=workers) for count in counts]
    module = Evaluated(tmp_path)
    run(
        "predict",
        "even",
        module,
        data if len(data) > 1 else data[0],
        callbacks=[Writer(tmp_path, counts)],
    )
    written = [json.loads((tmp_path / f"written{rank}.json").read_text()) for rank in range(2)]
    for loader_index, count in enumerate(counts):
        indices = [i for rank in written for i in rank[loader_index]]
        assert sorted(indices) == list(range(count))


class Generating(Recorder):
    """Calls the model once per token until it is done, which depends on the sample."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        index, x, _ = self.parts(batch)
        for _ in range(1 + 3 * self.global_rank + int(index[0]) % 3):
            x = x + self(x)
        self.record.note("x", (self.indices(batch), x.sum(1)))
        self.log("x", x.mean(), sync_dist=True)

    predict_step = test_step = validation_step


@pytest.mark.parametrize("stage", ["validate", "fit"])
def test_ranks_may_call_the_model_differently_often(stage: str, tmp_path: Path) -> None:
    data = DataLoader(samples(5), batch_size=1)
    module = Generating(tmp_path)
    ranks = run(stage, "3:1", module, *([loader("3:1")] if stage == "fit" else []), data)
    ranks_of = {i: number for number, rank in enumerate(ranks) for (i,), _ in rank.notes["x"]}
    assert sorted(ranks_of) == list(range(5))
    with torch.no_grad():
        for rank in ranks:
            for (index,), found in rank.notes["x"]:
                x = samples(5)[index][1][None]
                for _ in range(1 + 3 * ranks_of[index] + index % 3):
                    x = x + module(x)
                torch.testing.assert_close(found, x.sum(1), rtol=1e-4, atol=1e-5)


class Normalised(Recorder):
    """Batch normalisation: its running statistics are those of all microbatches of all ranks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.record.note("mean", self.norm.running_mean.tolist())
        self.record.note("loss", self.per_sample(batch).tolist())

    test_step = validation_step


@pytest.mark.filterwarnings("ignore:The layers .'norm'. .1 in all. are batch normalisation")
@pytest.mark.parametrize("plan", ["3:1", "idle first", "idle last"])
def test_running_statistics_are_those_of_the_global_batch(plan: str, tmp_path: Path) -> None:
    alone = Normalised(tmp_path)
    run("fit", None, alone, loader(None, 16), DataLoader(samples(4), batch_size=2))
    wanted = alone.norm.running_mean
    module = Normalised(tmp_path)
    ranks = run("fit", plan, module, loader(plan, 16), DataLoader(samples(4), batch_size=2))
    means = [mean for rank in ranks for mean in rank.notes["mean"]]
    assert len(means) == 2 and means[0] == means[1] != [0.0, 0.0, 0.0]
    torch.testing.assert_close(torch.tensor(means[0]), wanted)
    assert module.norm.num_batches_tracked == alone.norm.num_batches_tracked == 2
    module.record = Record()
    # the last steps of an epoch need not be followed by validation
    data = loader(plan, 16), DataLoader(samples(4), batch_size=2)
    run("fit", plan, module, *data, check_val_every_n_epoch=5)
    assert module.norm.num_batches_tracked == 4
    assert module.norm.running_mean.tolist() != means[0]
    tested = run("test", plan, module, DataLoader(samples(4), batch_size=2))
    left = module.norm.running_mean.tolist()
    assert all(mean == left for rank in tested for mean in rank.notes["mean"])


class Unequal(IterableDataset[Any]):
    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Any:
        rank = torch.distributed.get_rank()
        yield from list(samples(100))[50 * rank : 50 * rank + self.lengths[rank]]


@pytest.mark.parametrize("lengths", [(7, 2), (1, 8), (0, 3)])
def test_streams_are_evaluated_to_the_last_rank(lengths: tuple[int, int], tmp_path: Path) -> None:
    data = DataLoader(Unequal(lengths), batch_size=2)
    module = Evaluated(tmp_path)
    ranks = run("validate", "even", module, data, use_distributed_sampler=False)
    wanted = [*range(lengths[0]), *range(50, 50 + lengths[1])]
    assert every(ranks, "validate 0") == wanted
    assert ranks[0].notes["metrics"] == ranks[1].notes["metrics"]


class Numbered(Recorder):
    """Evaluates batches that are plain numbers."""

    def see(self, hook: str, batch: Any) -> None:
        """Hooks see numbers."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.record.note("batch", batch)
        self.log("x", float(batch), sync_dist=True)

    def on_validation_end(self) -> None:
        self.record.note("x", float(self.trainer.callback_metrics["x"]))


def test_batches_that_cannot_be_cut_are_evaluated_once(tmp_path: Path) -> None:
    ranks = run("validate", "even", Numbered(tmp_path), [1, 2, 6])
    assert [rank.notes["batch"] for rank in ranks] == [[1, 6], [2]]
    assert [rank.notes["x"] for rank in ranks] == [[3.0], [3.0]]


def test_fit_then_validate_test_and_predict_with_one_trainer_per_stage(tmp_path: Path) -> None:
    alone, together = Evaluated(tmp_path), Evaluated(tmp_path)
    for stage, count in (("fit", 22), ("validate", 7), ("test", 5), ("predict", 3)):
        loaders = [[loader(plan, count)] * (2 if stage == "fit" else 1) for plan in (None, "3:1")]
        wanted = run(stage, None, alone, *loaders[0])
        ranks = run(stage, "3:1", together, *loaders[1])
        if stage != "fit":
            assert every(ranks, f"{stage} 0") == every(wanted, f"{stage} 0") == list(range(count))
        for module in (alone, together):
            module.record = Record()
    assert_same_weights(together, alone)


class OwnShare(Evaluated):
    def val_dataloader(self) -> DataLoader[Any]:
        own = range(self.global_rank, 8, 2)
        return DataLoader(torch.utils.data.Subset(samples(8), own), batch_size=2)


def test_a_user_may_deal_evaluation_himself(tmp_path: Path) -> None:
    ranks = run("validate", "even", OwnShare(tmp_path), use_distributed_sampler=False)
    assert [rank.notes["validate 0"] for rank in ranks] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_the_batch_of_a_step_is_a_slice_of_the_global_one(tmp_path: Path) -> None:
    ranks = run("validate", "three", Evaluated(tmp_path), loader("three", 20))
    assert batch_size("three") == 3
    assert [rank.notes["validate 0"] for rank in ranks] == [
        [[0, 1, 2], [9, 10, 11], [18]],
        [[3, 4, 5], [12, 13, 14], [19]],
        [[6, 7, 8], [15, 16, 17]],
    ]


class Parts(LightningModule):
    """Logs the mean index of the samples of several dataloaders together."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows = torch.cat([part[0] for part in batch if part is not None]).float()
        self.log("mean", rows.mean(), sync_dist=True, batch_size=len(rows))

    test_step = validation_step


def evaluate_combined(plan: str | None, stage: str, mode: str) -> Any:
    size = 8 if plan is None else 4
    parts = CombinedLoader([DataLoader(samples(n), batch_size=size) for n in (24, 8)], mode)
    fit = make_trainer(plan, plan and {"start_method": "popen", "units": []})
    try:
        (found,) = getattr(fit, stage)(Parts(), parts, verbose=False)
    except UnsupportedError as refused:
        return str(refused)
    return found["mean"]


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_modes_of_combined_loaders_that_count_otherwise_are_refused(stage: str) -> None:
    for mode in ("min_size", "max_size_cycle"):
        for refused in in_ranks(2, evaluate_combined, "3:1", stage, mode):
            assert f"{mode!r}" in refused and "'max_size'" in refused
    wanted = evaluate_combined(None, stage, "max_size")
    for found in in_ranks(2, evaluate_combined, "3:1", stage, "max_size"):
        assert found == pytest.approx(wanted)
