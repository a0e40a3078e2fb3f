"""What users log is what one device with the global batch would log, and logging never hangs."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from common import Net, assert_same_tensors, dataset, trainer, values_of
from lightning.pytorch.loggers import CSVLogger
from plans import PLANS
from recording import (
    RECORDED,
    Record,
    Recorder,
    assert_same_weights,
    batch_size,
    joined,
    loader,
    make_trainer,
    run,
    samples,
)
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from warm_ranks import by_plan, in_ranks

from lightning_cephalo.common.errors import UnsupportedError

# said for every key that is logged per epoch without sync_dist, which is what is tested
pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use .self.log")


# what holds for uneven ranks and without samples holds for even ones
EVEN = pytest.mark.slow


class Logger(Recorder):
    """Notes what callbacks see after every step and at the end."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.record.note("step", numbers(self.trainer.callback_metrics))
        self.record.note("outputs", outputs)
        self.record.note("shown", numbers(self.trainer.progress_bar_metrics))

    def on_train_end(self) -> None:
        self.record.note("end", numbers(self.trainer.callback_metrics))
        self.record.note("logged", numbers(self.trainer.logged_metrics))

    def on_validation_end(self) -> None:
        self.record.note("validation", numbers(self.trainer.callback_metrics))


def numbers(metrics: Any) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


def assert_close(found: dict[str, float], wanted: dict[str, float], context: Any = "") -> None:
    assert found.keys() == wanted.keys(), context
    for key, value in wanted.items():
        # float32 sums in another order
        assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), (context, key)


def assert_same_notes(ranks: list[Record], wanted: Record, keys: tuple[str, ...]) -> None:
    for key in keys:
        for number, rank in enumerate(ranks):
            assert len(rank.notes[key]) == len(wanted.notes[key])
            for step, (found, alone) in enumerate(
                zip(rank.notes[key], wanted.notes[key], strict=True)
            ):
                assert_close(found, alone, f"{key} {step} on rank {number}")


class MeanLoss(Logger):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("each", loss, sync_dist=True)
        self.log("once", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log_dict({"a": loss + 1, "b": 2 * loss}, on_epoch=True, sync_dist=True)
        for factor in (1, 3):  # a step shows the last value of a key, an epoch has all
            self.log("twice", factor * loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.per_sample(batch).mean()
        self.log("val", loss, sync_dist=True)
        self.log("val_both", loss, on_step=True, on_epoch=True, sync_dist=True)


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=EVEN if plan == "even" else ()) for plan in RECORDED]
)
def test_a_synchronised_mean_is_the_global_one_everywhere(plan: str, tmp_path: Path) -> None:
    alone, together = MeanLoss(tmp_path), MeanLoss(tmp_path)
    data = lambda p: (loader(p), loader(p, 13))  # noqa: E731
    (wanted,) = run("fit", None, alone, *data(None), max_epochs=2)
    ranks = run("fit", plan, together, *data(plan), max_epochs=2)
    for record in [wanted, *ranks]:
        for notes in record.notes["step"]:
            # a step value of validation is per batch, and the last batch is another one
            notes.pop("val_both_step", None)
    assert_same_notes(ranks, wanted, ("step", "shown", "end", "validation"))
    assert_same_weights(together, alone, tolerance=1e-5)


class Various(Logger):
    """Logs what is summed, weighed, of other types, and of this rank alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.per_sample(batch)
        self.record.steps[-1].append(self.indices(batch))
        self.log_reduced(losses)
        self.log_with_batch_sizes(self.parts(batch)[0])
        self.log_other_types(self.parts(batch)[0], losses.mean())
        self.log(OWN, losses.mean(), on_step=True, on_epoch=True)
        return losses.mean()

    def log_reduced(self, losses: Tensor) -> None:
        for on_epoch in (False, True):
            for reduce, value in (
                ("sum", losses.sum()),
                ("max", losses.max()),
                ("min", losses.min()),
            ):
                self.log(
                    f"{reduce} {on_epoch}",
                    value,
                    on_step=True,
                    on_epoch=on_epoch,
                    reduce_fx=reduce,
                    sync_dist=True,
                )

    def log_with_batch_sizes(self, index: Tensor) -> None:
        even = index % 2 == 0
        # a mean over a part of the samples, with how many they are
        share = index[even].double().mean() if even.any() else torch.zeros(())
        for on_step, on_epoch in ((True, False), (False, True), (True, True)):
            self.log(
                f"even {on_step} {on_epoch}",
                share.float(),
                on_step=on_step,
                on_epoch=on_epoch,
                sync_dist=True,
                batch_size=int(even.sum()),
            )
        self.log("whole", float(index.sum()), reduce_fx="sum", sync_dist=True)
        self.log("number", 3.0, sync_dist=True)

    def log_other_types(self, index: Tensor, loss: Tensor) -> None:
        self.log("index", index.sum(), reduce_fx="sum", sync_dist=True)
        self.log("count", len(index), on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("half", loss.half() * 0 + 0.5, sync_dist=True, on_epoch=True)


OWN = "of each rank"


@pytest.mark.filterwarnings("ignore:You called .self.log.*needs to be floating")
@pytest.mark.parametrize("plan", ["idle first", "idle last", "three"])
def test_sums_weighed_means_and_integers_are_over_all_samples(plan: str, tmp_path: Path) -> None:
    (wanted,) = run("fit", None, Various(tmp_path), loader(None), max_epochs=2)
    ranks = run("fit", plan, Various(tmp_path), loader(plan), max_epochs=2)
    if plan == "three":  # else a rank without samples shows what the one with all of them logs
        for record in [wanted, *ranks]:
            for notes in record.notes["step"] + record.notes["end"]:
                for key in (OWN, f"{OWN}_step", f"{OWN}_epoch"):
                    notes.pop(key, None)
    assert_same_notes(ranks, wanted, ("step", "end"))


class Conditional(Logger):
    """Logs what only some batches have, for this rank alone or for all of them."""

    sync_dist = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        indices = self.indices(batch)
        self.log("of all", 2.0, on_epoch=True, sync_dist=True)
        if 1 in indices:
            self.log("with 1", 1.0, on_step=True, on_epoch=True, sync_dist=self.sync_dist)
        return super().training_step(batch, batch_idx)


def test_keys_that_only_some_ranks_log_for_themselves_keep_their_values(tmp_path: Path) -> None:
    ranks = run("fit", "three", Conditional(tmp_path), loader("three"), max_epochs=2)
    ends = [rank.notes["end"][0] for rank in ranks]
    assert [end.get("with 1_epoch") for end in ends] == [1.0, None, None]
    assert [end["of all"] for end in ends] == pytest.approx([2.0] * 3)


def _refusal(folder: Path) -> str:
    module = Conditional(folder)
    module.sync_dist = True
    with pytest.raises(UnsupportedError) as refused:
        make_trainer("3:1", {"start_method": "popen"}, max_epochs=1).fit(module, loader("3:1"))
    return str(refused.value)


def test_synchronised_keys_that_only_some_ranks_log_are_refused_on_all(tmp_path: Path) -> None:
    first, second = in_ranks(2, _refusal, tmp_path)
    assert first == second
    assert "Ranks have logged different keys" in first
    assert "training_step.with 1. " in first


class Boxes(torchmetrics.Metric):
    """Holds a tensor of another shape for each sample, as metrics of detection do."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", default=[], dist_reduce_fx=None)

    def update(self, rows: torch.Tensor, target: Any, indexes: torch.Tensor) -> None:
        for row, index in zip(rows, indexes.tolist(), strict=True):
            self.boxes += [row.expand(index % 3, 2)]

    def compute(self) -> torch.Tensor:
        return sum((len(box) * box.sum() for box in self.boxes), torch.zeros(()))


class Metrics(Logger):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.error = torchmetrics.MeanSquaredError()
        self.ranking = torchmetrics.classification.BinaryAUROC()
        self.many = torchmetrics.MetricCollection(
            {"mae": torchmetrics.MeanAbsoluteError(), "r2": torchmetrics.R2Score()}
        )
        self.val_error = torchmetrics.MeanSquaredError()
        self.val_ranking = torchmetrics.classification.BinaryAUROC()
        lists = torchmetrics.MetricCollection(
            {
                "map": torchmetrics.retrieval.RetrievalMAP(),
                "ndcg": torchmetrics.retrieval.RetrievalNormalizedDCG(),
                "boxes": Boxes(),
            }
        )
        self.lists, self.val_lists = lists.clone("in_"), lists.clone("val_")
        self.in_a_dict = {"boxes": Boxes()}  # not among the module's modules

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        _, x, y = self.parts(batch)
        predicted = self(x).detach()
        self.error(predicted, y)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.ranking.update(predicted.sigmoid(), (y > 0).long())
        self.log("ranking", self.ranking, on_step=False, on_epoch=True)
        self.many.update(predicted, y)
        self.log_dict(self.many, on_step=False, on_epoch=True)
        index = batch[0].long().flatten()
        self.lists.update(predicted.flatten(), (y > 0).flatten(), indexes=index % 3)
        self.log_dict(self.lists, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, x, y = self.parts(batch)
        predicted = self(x)
        self.val_error(predicted, y)
        self.log("val_error", self.val_error)
        self.val_ranking.update(predicted.sigmoid(), (y > 0).long())
        index = batch[0].long().flatten()
        self.val_lists.update(predicted.flatten(), (y > 0).flatten(), indexes=index % 3)
        self.log_dict(self.val_lists)
        self.in_a_dict["boxes"].update(predicted.flatten(), None, index)

    def on_validation_epoch_end(self) -> None:
        self.log("in_a_dict", self.in_a_dict["boxes"].compute())
        self.in_a_dict["boxes"].reset()
        self.log("val_ranking", self.val_ranking.compute())
        self.val_ranking.reset()


@pytest.mark.parametrize("plan", ["idle last", "three"])
def test_torchmetrics_are_those_of_one_device(plan: str, tmp_path: Path) -> None:
    # 17 in validation: some rank has one more, another none in the last step
    (wanted,) = run("fit", None, Metrics(tmp_path), loader(None), loader(None, 17), max_epochs=2)
    ranks = run("fit", plan, Metrics(tmp_path), loader(plan), loader(plan, 17), max_epochs=2)
    for record in [wanted, *ranks]:
        for metrics in record.notes["end"] + record.notes["validation"]:
            for key in ("error_step", "error"):  # the rank's own: see the next test
                metrics.pop(key, None)
    assert_same_notes(ranks, wanted, ("end", "validation"))


class OwnValues(Metrics):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.record.note("losses", self.per_sample(batch).detach().tolist())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def test_values_that_are_not_synchronised_are_those_of_the_ranks_own_batch(tmp_path: Path) -> None:
    (wanted,) = run("fit", None, OwnValues(tmp_path), loader(None), loader(None, 5))
    ranks = run("fit", "3:1", OwnValues(tmp_path), loader("3:1"), loader("3:1", 5))
    for rank in ranks:
        own = iter(rank.notes["losses"])
        everything = []
        for microbatches, seen in zip(rank.steps, rank.notes["step"], strict=True):
            step = [loss for _ in microbatches for loss in next(own)]
            everything += step
            assert step, (rank.steps, rank.notes)
            assert seen["loss_step"] == pytest.approx(sum(step) / len(step), rel=1e-5)
        (end,) = rank.notes["end"]
        assert end["loss_epoch"] == pytest.approx(sum(everything) / len(everything), rel=1e-5)
    for step, alone in enumerate(wanted.notes["step"]):
        errors = [rank.notes["step"][step]["error_step"] for rank in ranks]
        assert over_ranks(ranks, step, errors) == pytest.approx(alone["error_step"], rel=1e-5)
    for step, alone in enumerate(wanted.notes["outputs"]):
        losses = [float(rank.notes["outputs"][step]["loss"]) for rank in ranks]
        assert over_ranks(ranks, step, losses) == pytest.approx(float(alone["loss"]), rel=1e-5)


def over_ranks(ranks: list[Record], step: int, values: list[float]) -> float:
    """Mean over the samples of a step, from one value of each rank."""
    counts = [len(rank.hooks["on_train_batch_end"][step]) for rank in ranks]
    return sum(c * value for c, value in zip(counts, values, strict=True)) / sum(counts)


@pytest.mark.parametrize("plan", [None, "idle first"])
def test_a_logger_gets_every_key_once_per_step(plan: str | None, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="log", version=0)
    data = loader(plan), loader(plan, 5)
    run("fit", plan, MeanLoss(tmp_path), *data, logger=logger, log_every_n_steps=1, max_epochs=2)
    with open(tmp_path / "log/version_0/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    # the CSV file is sorted by step within what was written at once
    steps = sorted(int(row["step"]) for row in rows if row["both_step"])
    assert steps == list(range(6))
    epochs = [row for row in rows if row["both_epoch"]]
    assert [row["epoch"] for row in epochs] == ["0", "1"]
    assert all(math.isfinite(float(row["both_epoch"])) for row in epochs)


def sentences(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [
        torch.randint(1, 9, (1 + (5 * index) % 7,), generator=generator) for index in range(count)
    ]


def pad(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"tokens": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}


class Tokens(Logger):
    """A language model's loss: the mean over tokens that are not padding."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.embedding = torch.nn.Embedding(9, 3, padding_idx=0)

    def indices(self, batch: Any) -> list[int]:
        parts = batch if isinstance(batch, list) else [batch]
        return [int(total) for part in parts for total in part["tokens"].sum(1)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.record.steps[-1].append(self.indices(batch))
        outputs = self.token_loss(batch)
        loss = outputs["loss"]
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("epoch loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.token_loss(batch)
        self.log("val", outputs["loss"], sync_dist=True)
        return outputs

    def token_loss(self, batch: Any) -> Any:
        tokens = batch["tokens"]
        real = tokens > 0
        predicted = self(self.embedding(tokens))[..., 0]
        return {
            "loss": (predicted - tokens).square()[real].mean(),
            "weight": real.sum(),
            "logits": predicted[:, 0],
            "note": "kept",
        }


@pytest.mark.parametrize(
    "plan", ["3:1", "three", pytest.param("even", marks=EVEN), "idle first", "idle last"]
)
def test_token_means_are_those_of_one_device(plan: str, tmp_path: Path) -> None:
    def data(count: int, size: int) -> DataLoader[Any]:
        return DataLoader(sentences(count), batch_size=size, collate_fn=pad)  # type: ignore[arg-type]

    alone, together = Tokens(tmp_path), Tokens(tmp_path)
    size, ranks_of_plan = batch_size(plan), len(PLANS[plan].ranks)
    one_device = data(22, 8), data(13, size * ranks_of_plan)
    (wanted,) = run("fit", None, alone, *one_device, max_epochs=2)
    ranks = run(
        "fit",
        plan,
        together,
        data(22, size),
        data(13, size),
        max_epochs=2,
    )
    assert joined(ranks) == joined([wanted])
    assert_same_weights(together, alone, tolerance=1e-5)
    assert_same_notes(ranks, wanted, ("step", "end"))
    assert_same_outputs(ranks, wanted)


def assert_same_outputs(ranks: list[Record], wanted: Record) -> None:
    """Outputs of a step are those of the rank's batch."""
    for step, one_device in enumerate(wanted.notes["outputs"]):
        outputs = [rank.notes["outputs"][step] for rank in ranks]
        busy = [o for rank, o in zip(ranks, outputs, strict=True) if rank.steps[step]]
        assert all(o["note"] == "kept" and not o["loss"].requires_grad for o in busy)
        weights = torch.stack([o["weight"] for o in busy])
        losses = torch.stack([o["loss"] for o in busy])
        assert int(weights.sum()) == int(one_device["weight"])
        torch.testing.assert_close((losses * weights).sum() / weights.sum(), one_device["loss"])
        logits = torch.cat([o["logits"] for o in busy])
        torch.testing.assert_close(logits, one_device["logits"])


class Hooks(MeanLoss):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.log("start", float(batch_idx), on_step=True, on_epoch=True, sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("rank", float(self.global_rank), on_step=True, sync_dist=True, batch_size=1)
        super().on_train_batch_end(outputs, batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("done", 4.0, sync_dist=True)


def test_hooks_may_log_beside_the_steps(tmp_path: Path) -> None:
    ranks = run("fit", "3:1", Hooks(tmp_path), loader("3:1"), loader("3:1", 5), max_epochs=2)
    for rank in ranks:
        assert [step["rank"] for step in rank.notes["step"]] == [0.5] * 6
        assert [step["start_step"] for step in rank.notes["step"]] == [0.0, 1.0, 2.0] * 2
        assert rank.notes["end"][0]["done"] == 4.0


class SomeTokens(Net):
    """Only some samples of a batch count; a microbatch may have none, and a loss of 0/0."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        counts = x[:, 1:2] >= 0
        loss = ((self(x) - y) ** 2 * counts).sum() / counts.sum()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "weight": counts.sum()}


def _logged_losses(plan: str | None) -> tuple[list[float], dict[str, Tensor]]:
    model = SomeTokens()
    # the first samples of each global batch do not count: those of the first microbatch
    data = TensorDataset(*dataset(32).tensors)
    data.tensors[0][torch.arange(32) % 8 < 3, 1] = -1.0
    data.tensors[0][torch.arange(32) % 8 >= 3, 1] = 1.0
    trainer(plan, max_epochs=1).fit(
        model, DataLoader(data, batch_size=8), DataLoader(dataset(8), batch_size=8)
    )
    return model.losses, values_of(model)


def test_a_microbatch_without_weight_is_left_out_of_means() -> None:
    wanted, weights = by_plan(None, _logged_losses)
    found, found_weights = by_plan("3:1", _logged_losses)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert_same_tensors(found_weights, weights, 1e-5)


class _LogsInHooks(SomeTokens):
    """Logs what callbacks do: losses of outputs, and means of the rank's batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        mean = batch[0].sum() / max(len(batch[0]), 1)
        self.log("start", mean, sync_dist=True, on_epoch=True)
        self.log("start of steps", mean, sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.gain.grad.norm(), sync_dist=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.log("end", outputs["loss"], sync_dist=True, on_epoch=True)
        self.log("end of steps", outputs["loss"], sync_dist=True)
        mean = batch[1].sum() / max(len(batch[1]), 1)
        self.log("given", mean, sync_dist=True, on_epoch=True, batch_size=len(batch[0]))
        names = (
            "start_step",
            "start of steps",
            "norm_step",
            "end_step",
            "end of steps",
            "given_step",
        )
        self.steps_seen.append({name: self._logged(name) for name in names})

    def on_train_epoch_end(self) -> None:
        names = ("start_epoch", "norm_epoch", "end_epoch", "given_epoch")
        self.steps_seen.append({name: self._logged(name) for name in names})

    def _logged(self, name: str) -> float:
        return float(self.trainer.callback_metrics[name])


def _logged_in_hooks(plan: str | None) -> list[dict[str, float]]:
    model = _LogsInHooks()
    model.steps_seen = []
    trainer(plan, max_epochs=2).fit(
        model, DataLoader(dataset(30), batch_size=8), DataLoader(dataset(8), batch_size=8)
    )
    return model.steps_seen


@pytest.mark.parametrize("plan", ["3:1", "no data", pytest.param("three", marks=pytest.mark.slow)])
def test_what_hooks_log_is_the_mean_of_the_global_batch(plan: str) -> None:
    wanted, found = by_plan(None, _logged_in_hooks), by_plan(plan, _logged_in_hooks)
    for step, (own, of_one) in enumerate(zip(found, wanted, strict=True)):
        assert own == pytest.approx(of_one, rel=1e-5, abs=1e-6), step


def test_samples_are_found_where_the_collection_is_private(tmp_path: Path) -> None:
    """Fails when Lightning changes what adapters/logging.py leans on."""
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _ResultCollection,
        _ResultMetric,
    )

    results = _ResultCollection(training=True)
    results.log("training_step", "key", torch.tensor(1.0), on_step=True, batch_size=2)
    metric = results["training_step.key"]
    assert isinstance(metric, _ResultMetric) and not metric.has_reset
    assert float(metric._forward_cache) == 1.0
    assert float(metric.value) == 2.0 and int(metric.cumulated_batch_size) == 2
    assert results.batch_size is None and results.dataloader_idx is None
    assert len(samples(3)) == 3


class _CountsSteps(Recorder):
    """Logs a constant where the guide says that it counts once a step."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.log("steps", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def on_fit_end(self):
        self.record.note("steps", float(self.trainer.callback_metrics["steps"]))


def test_a_constant_logged_after_the_step_counts_once_a_step_and_rank(tmp_path):
    for plan in ("3:1", "idle last", None):
        ranks = run("fit", plan, _CountsSteps(tmp_path), loader(plan))
        assert [rank.notes["steps"][-1] for rank in ranks] == [3.0] * len(ranks)


class _LogsInMicrobatches(Recorder):
    """Logs sums: a constant, samples, and values of samples."""

    def training_step(self, batch, batch_idx):
        index = self.parts(batch)[0]
        sums = {"one": 1.0, "samples": len(index), "even": (index % 2 == 0).sum()}
        for key, value in sums.items():
            self.log(key, float(value), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def _sums(folder):
    module = _LogsInMicrobatches(folder)
    make_trainer("3:1", {"start_method": "popen"}, max_epochs=2).fit(module, loader("3:1"))
    return {key: float(value) for key, value in module.trainer.callback_metrics.items()}


def test_a_constant_that_is_summed_counts_once_a_microbatch_and_samples_once(tmp_path):
    first, second = in_ranks(2, _sums, tmp_path)
    assert (first["one"], second["one"]) == (6.0, 3.0)
    assert first["samples"] + second["samples"] == 22.0
    assert first["even"] + second["even"] == 11.0
