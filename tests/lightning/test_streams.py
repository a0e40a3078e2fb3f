"""Loaders that cannot be indexed train and evaluate as on one device, under the real Trainer."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from plans import QUIET
from recording import Recorder, assert_same_weights, batch_size, joined, make_trainer, run, samples
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from warm_ranks import in_ranks

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.common.errors import UnsupportedError


class Lines(IterableDataset[Any]):
    """Divides itself between workers, as users' streams do."""

    def __init__(self, count: int = 22) -> None:
        self.data = list(samples(count))

    def own(self) -> list[Any]:
        worker = get_worker_info()
        return self.data if worker is None else self.data[worker.id :: worker.num_workers]

    def __iter__(self) -> Any:
        return iter(self.own())


class Shuffled(Lines):
    """Draws from a global generator, which differs between ranks."""

    def __iter__(self) -> Any:
        return iter(random.sample(self.own(), len(self.own())))


class ByRank(Lines):
    """Divides itself between ranks, as under DDP."""

    def __iter__(self) -> Any:
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        return iter(self.own()[rank::ranks])


class ReadyBatches:
    """No DataLoader: ready batches of tensors, arrays and words, and a constant."""

    def __init__(self, count: int = 22) -> None:
        self.data = samples(count)

    def __iter__(self) -> Any:
        for numbers, x, y in DataLoader(self.data, batch_size=8):
            names = [f"sample {number}" for number in numbers.tolist()]
            yield {"index": numbers.numpy(), "x": x, "y": [y, names], "scale": 2.0}


class SizedReadyBatches(ReadyBatches):
    def __len__(self) -> int:
        return -(-len(self.data) // 8)


class OfReady(Recorder):
    def parts(self, batch: Any) -> Any:
        y, names = batch["y"]
        assert names == [f"sample {number}" for number in batch["index"].tolist()]
        assert batch["scale"] == 2.0
        return batch["index"], batch["x"], y


class Validates(Recorder):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.record.note("validated", self.indices(batch))
        self.log("val", self.per_sample(batch).mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.record.note("val", float(self.trainer.callback_metrics["val"]))


@pytest.mark.parametrize(("plan", "workers"), [("3:1", 2), ("idle first", 0)])
def test_a_stream_that_every_rank_reads_whole_is_that_of_one_device(
    plan: str, workers: int, tmp_path: Path
) -> None:
    def loaders(plan: str | None) -> list[DataLoader[Any]]:
        size = batch_size(plan)
        training = DataLoader(Lines(), batch_size=size, num_workers=workers)
        return [training, DataLoader(Lines(13), batch_size=size)]

    alone, together = Validates(tmp_path), Validates(tmp_path)
    first = run("fit", None, alone, *loaders(None), max_epochs=2)
    ranks = run("fit", plan, together, *loaders(plan), max_epochs=2)
    assert joined(ranks) == joined(first)
    assert_same_weights(together, alone)
    for rank in ranks:
        assert rank.notes["val"] == pytest.approx(first[0].notes["val"], rel=1e-6)
    validated = [i for rank in ranks for step in rank.notes["validated"] for i in step]
    assert sorted(validated) == sorted(2 * list(range(13)))


def test_a_shuffle_without_a_seed_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    def fit(workers: int) -> Any:
        seed_everything(3, workers=True, verbose=False)
        data = DataLoader(Shuffled(), batch_size=4, num_workers=workers)
        return joined(run("fit", "3:1", Recorder(tmp_path), data, max_epochs=2))

    try:
        for workers in (0, 2):
            steps = fit(workers)
            order = [index for step in steps for index in step]
            assert sorted(order[:22]) == sorted(order[22:]) == list(range(22))
            assert order[:22] != order[22:]
            assert order != sorted(order[:22]) * 2
    finally:
        os.environ.pop("PL_SEED_WORKERS", None)
        os.environ.pop("PL_GLOBAL_SEED", None)


def refused(folder: Path, plan: str) -> str:
    with pytest.raises(UnsupportedError) as raised:
        make_trainer(plan, {"start_method": "popen"}).fit(
            Recorder(folder), DataLoader(ByRank(), batch_size=4)
        )
    return str(raised.value)


def test_a_stream_that_divides_itself_is_trained_to_its_end_where_the_user_says_so(
    tmp_path: Path,
) -> None:
    for message in in_ranks(2, refused, tmp_path, "3:1"):
        assert "Step 0 of the stream ByRank has other samples on some ranks" in message
        assert "Trainer(use_distributed_sampler=False)" in message

    together, alone = Recorder(tmp_path), Recorder(tmp_path)
    data = DataLoader(ByRank(), batch_size=4)
    steps = joined(run("fit", "3:1", together, data, use_distributed_sampler=False))
    evens, odds = list(range(0, 22, 2)), list(range(1, 22, 2))
    assert steps[0] == [*evens[:6], *odds[:2]]
    assert sorted(chain(*steps)) == sorted(evens + odds)

    # one device that takes the same steps has the same weights: small steps count their samples
    run("fit", None, alone, DataLoader(samples(22), batch_sampler=steps))
    assert_same_weights(together, alone)


LOADERS: dict[str, Callable[[], Any]] = {
    "iterable": ReadyBatches,
    "with a length": SizedReadyBatches,
    "iterable dataset": lambda: DataLoader(AsDataset(), batch_size=None, num_workers=1),
}


class AsDataset(ReadyBatches, IterableDataset[Any]):
    pass


@pytest.mark.parametrize(
    ("loader", "plan"),
    [("iterable", "3:1"), ("with a length", "idle last"), *[("iterable dataset", "three")]],
)
def test_ready_batches_are_cut_by_the_plan(loader: str, plan: str, tmp_path: Path) -> None:
    alone, together = OfReady(tmp_path), OfReady(tmp_path)
    options: Any = {"max_epochs": 2, "limit_train_batches": 3}
    wanted = joined(run("fit", None, alone, LOADERS[loader](), **options))
    assert joined(run("fit", plan, together, LOADERS[loader](), **options)) == wanted
    assert_same_weights(together, alone)


class OfPair(Recorder):
    def parts(self, batch: Any) -> Any:
        ready, lines = batch["ready"], batch["lines"]
        columns = [[torch.as_tensor(ready["index"]), ready["x"], ready["y"][0]]] if ready else []
        columns += [lines] if lines else []
        return [torch.cat(column) for column in zip(*columns, strict=True)]


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_streams_of_a_combined_loader_are_dealt_each_in_its_own_order(
    mode: Any, tmp_path: Path
) -> None:
    def loaders(ranks: int) -> CombinedLoader:
        lines = DataLoader(Lines(10), batch_size=4 // ranks)
        return CombinedLoader({"ready": ReadyBatches(), "lines": lines}, mode)

    alone, together = OfPair(tmp_path), OfPair(tmp_path)
    options: Any = {"strategy_options": {"global_batch_size": None}, "max_epochs": 2}
    wanted = joined(run("fit", None, alone, loaders(1), max_epochs=2))
    found = joined(run("fit", "3:1", together, loaders(2), **options))
    assert [sorted(step) for step in found] == [sorted(step) for step in wanted]
    assert_same_weights(together, alone, tolerance=1e-5)


class Measured(OfReady):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.per_sample(batch).mean()  # measuring calls no other hook


class Sealed:
    """Ready rows that only their user can cut."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def to(self, device: Any) -> Sealed:
        return Sealed(*(column.to(device) for column in self.columns))

    @staticmethod
    def split(batch: Sealed, sizes: Any) -> list[Sealed]:
        columns = (column.split(list(sizes)) for column in batch.columns)
        return [Sealed(*parts) for parts in zip(*columns, strict=True)]


class SealedBatches(ReadyBatches):
    def __iter__(self) -> Any:
        return (Sealed(*batch) for batch in DataLoader(self.data, batch_size=8))


class BatchesByRank(ReadyBatches):
    """Batches of each rank's own; those of rank 1 are smaller than its share of a step."""

    def __iter__(self) -> Any:
        rank = int(os.environ.get("RANK", 0))
        for batch in list(super().__iter__())[rank::2]:
            rows, scale = slice(0, 4 if rank else 8), batch.pop("scale")
            y = [part[rows] for part in batch.pop("y")]
            yield {**{name: part[rows] for name, part in batch.items()}, "y": y, "scale": scale}


class MeasuredSealed(Measured):
    def parts(self, batch: Any) -> Any:
        return batch.columns if isinstance(batch, Sealed) else super().parts(batch)

    def see(self, hook: str, batch: Any) -> None:
        """Ignores batches of hooks: a measured plan may give a rank none, or several parts."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        known = len(batch) if self.trainer.world_size == 1 else None  # Lightning cannot count them
        self.log("val", self.per_sample(batch).mean(), sync_dist=True, batch_size=known)


def fit(
    ranks: int, folder: Path, data: Any, *validated: Any, is_divided: bool = False, **options: Any
) -> Any:
    module, strategy = MeasuredSealed(folder), "auto"
    if ranks > 1:
        fast = Planner(verbose=False, budget_s=0.5, remeasure=True)
        strategy = CephaloStrategy(planner=fast, **options)
    given = {"accelerator": "cpu", "devices": ranks, "use_distributed_sampler": not is_divided}
    trainer = Trainer(strategy=strategy, **given, **QUIET)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You defined a `validation_step` but")
        trainer.fit(module, data, *validated)
    batch = getattr(getattr(trainer.strategy, "plan", None), "global_batch_size", None)
    return batch, module.state_dict(), float(trainer.callback_metrics.get("val", 0.0))


def fit_all(ranks: int, folder: Path) -> Any:
    # the rows of the first batch are the global batch
    found = [fit(ranks, folder, ReadyBatches())]
    found.append(fit(ranks, folder, SealedBatches(), SealedBatches(7), split_batch=Sealed.split))
    return [*found, fit(ranks, folder, BatchesByRank(), is_divided=True)]


def test_ready_batches_are_measured_planned_and_evaluated(tmp_path: Path) -> None:
    found, wanted = in_ranks(2, fit_all, 2, tmp_path), fit_all(1, tmp_path)
    for of_rank in found:
        assert [batch for batch, _, _ in of_rank] == [8, 8, 12]
        assert of_rank[1][2] == pytest.approx(wanted[1][2], rel=1e-5)
    for (_, values, _), (_, right, _) in zip(found[0][:2], wanted, strict=False):
        for name, value in right.items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6)


class OwnShare(Recorder):
    """Deals for itself, ranks having different numbers of batches."""

    def train_dataloader(self) -> DataLoader[Any]:
        own = samples(22)
        if self.trainer.world_size > 1:
            own = torch.utils.data.Subset(
                own, range(18) if self.global_rank == 0 else range(18, 22)
            )
        return DataLoader(own, batch_size=2)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.record.note("validated", self.indices(batch))


def test_ranks_that_deal_for_themselves_end_together(tmp_path: Path) -> None:
    together, alone = OwnShare(tmp_path), Recorder(tmp_path)
    ranks = run("fit", "even", together, use_distributed_sampler=False)
    steps = joined(ranks)
    assert steps[:3] == [[0, 1, 18, 19], [2, 3, 20, 21], [4, 5]]
    assert sorted(chain(*steps)) == list(range(22))
    seen = [index for rank in ranks for step in rank.notes["validated"] for index in step]
    assert sorted(seen) == list(range(22))
    run("fit", None, alone, DataLoader(samples(22), batch_sampler=steps))
    assert_same_weights(together, alone)
