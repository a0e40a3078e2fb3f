"""Every step of every rank sees the samples that one device with the global batch would see."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from plans import GLOBAL_BATCH, PLANS, plan_of
from recording import (
    RECORDED,
    Recorder,
    assert_same_weights,
    hook_indices,
    joined,
    loader,
    messages,
    run,
    samples,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from transformers import BatchEncoding


def seeded(seed: int = 11) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class OddsFirst(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        yield from range(1, self.count, 2)
        yield from range(0, self.count, 2)

    def __len__(self) -> int:
        return self.count


class ListsOfFour(BatchSampler):
    """A batch sampler of one's own: neighbours together, the lists in another order."""

    def __init__(self, count: int) -> None:
        super().__init__(SequentialSampler(range(count)), 4, False)

    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


ORDERS: dict[str, Any] = {
    "sequential": lambda plan: loader(plan),
    "sequential, drop_last": lambda plan: loader(plan, drop_last=True),
    "divides": lambda plan: loader(plan, 24),
    "one left over": lambda plan: loader(plan, 17),
    "less than a batch": lambda plan: loader(plan, 5),
    "shuffle": lambda plan: loader(plan, shuffle=True, generator=seeded()),
    "shuffle, drop_last": lambda plan: loader(
        plan, shuffle=True, generator=seeded(), drop_last=True
    ),
    "weighted": lambda plan: loader(
        plan, sampler=WeightedRandomSampler(torch.arange(22) + 1.0, 20, generator=seeded())
    ),
    "with replacement": lambda plan: loader(
        plan,
        sampler=RandomSampler(range(22), replacement=True, num_samples=19, generator=seeded()),
    ),
    "own sampler": lambda plan: loader(plan, sampler=OddsFirst(22)),
    "one worker": lambda plan: loader(plan, num_workers=1),
    "two workers that stay": lambda plan: loader(
        plan, num_workers=2, persistent_workers=True, shuffle=True, generator=seeded()
    ),
}


# of all others, one that begins a second epoch in the middle of a step, and one that does not
NEW_EACH_EPOCH = (
    *("shuffle", "shuffle, drop_last", "weighted", "with replacement", "two workers that stay"),
    *("one left over", "divides"),
)

# where the number of samples decides who has any in the last step
WITH_IDLE_RANKS = ("divides", "one left over", "less than a batch", "shuffle")


@pytest.mark.parametrize(
    ("order", "plan"),
    [
        *((order, "3:1") for order in ORDERS),
        *((order, "idle first") for order in WITH_IDLE_RANKS),
    ],
)
def test_every_step_has_the_samples_of_one_device(order: str, plan: str, tmp_path: Path) -> None:
    alone, together = Recorder(tmp_path), Recorder(tmp_path)
    epochs = 2 if order in NEW_EACH_EPOCH else 1
    wanted = joined(run("fit", None, alone, ORDERS[order](None), max_epochs=epochs))
    ranks = run("fit", plan, together, ORDERS[order](plan), max_epochs=epochs)
    assert joined(ranks) == wanted
    assert hook_indices(ranks, "on_train_batch_start") == wanted
    assert_same_weights(together, alone)


@pytest.mark.parametrize("plan", RECORDED)
def test_full_steps_follow_the_plans_microbatches(plan: str, tmp_path: Path) -> None:
    ranks = run("fit", plan, Recorder(tmp_path), loader(plan), limit_train_batches=2)
    for rank, planned in zip(ranks, PLANS[plan].ranks, strict=True):
        for step in rank.steps:
            assert tuple(map(len, step)) == planned.microbatch_sizes


@pytest.mark.parametrize("exact", [True, False])
def test_lists_of_a_batch_sampler_are_taken_in_order(exact: bool, tmp_path: Path) -> None:
    def batches(size: int) -> DataLoader[Any]:
        data = samples(22)
        lists: Any = ListsOfFour(22)
        if exact:
            lists = BatchSampler(OddsFirst(22), size, True)
        elif size == GLOBAL_BATCH:
            fours = list(lists)
            lists = [list(chain(*fours[i : i + 2])) for i in range(0, len(fours), 2)]
        return DataLoader(data, batch_sampler=lists)

    wanted = joined(run("fit", None, Recorder(tmp_path), batches(8)))
    ranks = run(
        "fit", "3:1", Recorder(tmp_path), batches(4), strategy_options={"global_batch_size": None}
    )
    assert joined(ranks) == wanted


def test_shuffling_without_a_generator_covers_every_sample_in_a_new_order_each_epoch(
    tmp_path: Path,
) -> None:
    ranks = run("fit", "3:1", Recorder(tmp_path), loader("3:1", 24, shuffle=True), max_epochs=2)
    order = list(chain(*joined(ranks)))
    assert sorted(order[:24]) == sorted(order[24:]) == list(range(24))
    assert order[:24] != order[24:]


class Stream(IterableDataset[Any]):
    """What rank r reads, as users shard a stream: r-dependent, and of different lengths."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.id:
            return
        yield from list(samples(1000))[100 * rank : 100 * rank + self.lengths[rank]]


class Listed(Stream):
    items: list[Any]

    def __iter__(self) -> Any:
        return iter(self.items)


class Streaming(Recorder):
    def __init__(self, folder: Path, lengths: tuple[int, ...], workers: int) -> None:
        super().__init__(folder)
        self.lengths, self.workers = lengths, workers

    def train_dataloader(self) -> DataLoader[Any]:
        # workers know no process group: the rank's own share is cut out beforehand
        stream = Stream(self.lengths)
        own = list(stream)
        if self.workers:
            stream.__class__ = Listed
            stream.items = own
        return DataLoader(stream, batch_size=4, num_workers=self.workers)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("lengths", [(14, 3), (3, 8), (0, 9)])
def test_streams_of_different_lengths_end_together_and_lose_nothing(
    lengths: tuple[int, int], workers: int, tmp_path: Path
) -> None:
    module = Streaming(tmp_path, lengths, workers)
    options: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False}
    if 0 in lengths:
        # two samples per rank are read to learn how batches are cut
        for message in messages("3:1", module, **options):
            assert "Expects at least one sample" in message
        return
    ranks = run("fit", "3:1", module, **options)
    steps = max(-(-lengths[0] // 6), -(-lengths[1] // 2))
    for index, rank in enumerate(ranks):
        assert len(rank.steps) == 2 * steps
        seen = [sample for step in rank.steps[:steps] for part in step for sample in part]
        assert seen == [100 * index + number for number in range(lengths[index])]


class Several(Recorder):
    """Batches from two loaders, ``{"a": ..., "b": ...}`` or a list of them."""

    def keys(self, batch: Any) -> Any:
        return sorted(batch) if isinstance(batch, dict) else range(len(batch))

    def parts(self, batch: Any) -> Any:
        present = [batch[key] for key in self.keys(batch) if batch[key] is not None]
        return [torch.cat(column) for column in zip(*present, strict=True)]

    def indices(self, batch: Any) -> list[int]:
        # the loaders apart, so that dealing them apart shows
        return [
            100 * number + int(index)
            for number, key in enumerate(self.keys(batch))
            if batch[key] is not None
            for index in batch[key][0]
        ]


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("dict", "3:1"),
        ("list", "idle last"),
        ("max_size_cycle", "idle last"),
        ("min_size", "3:1"),
        ("max_size", "3:1"),
        ("max_size", "idle last"),
    ],
)
def test_several_loaders_are_dealt_each_in_its_own_order(
    kind: str, plan: str, tmp_path: Path
) -> None:
    def loaders(world_size: int) -> Any:
        pair = {
            "a": DataLoader(samples(22), batch_size=8 // world_size),
            "b": DataLoader(samples(10), batch_size=4 // world_size),
        }
        if kind == "list":
            return list(pair.values())
        return pair if kind == "dict" else CombinedLoader(pair, kind)

    alone, together = Several(tmp_path), Several(tmp_path)
    wanted = joined(run("fit", None, alone, loaders(1), max_epochs=2))
    ranks = run(
        "fit",
        plan,
        together,
        loaders(2),
        max_epochs=2,
        strategy_options={"global_batch_size": None},
    )
    assert [sorted(step) for step in joined(ranks)] == [sorted(step) for step in wanted]
    assert_same_weights(together, alone, tolerance=1e-5)


class Hooked(Recorder):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert isinstance(batch, list) and isinstance(batch[0], torch.Tensor)
        self.see("before", batch)
        return [batch[0], batch[1] + 1.0, batch[2]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.see("transfer", batch)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.see("after", batch)
        return batch[0], batch[1] - 0.5, batch[2]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.testing.assert_close(batch[1].sum(1, keepdim=True), batch[2] + 1.5)
        assert isinstance(batch, tuple)
        return super().training_step(batch, batch_idx)


def test_transfer_hooks_see_one_ordinary_batch_of_the_ranks_samples(tmp_path: Path) -> None:
    ranks = run("fit", "idle last", Hooked(tmp_path), loader("idle last"))
    for hook in ("before", "transfer", "after", "on_train_batch_start", "on_train_batch_end"):
        assert hook_indices(ranks, hook) == joined(ranks), hook


class Nested(Dataset[Any]):
    """A sample as users write them: a dict of a tuple, a word, a number and a nested dict."""

    def __init__(self, count: int = 22) -> None:
        self.data = samples(count)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        number, x, y = self.data[index]
        return {
            "pair": (x, y),
            "word": f"sample {int(number)}",
            "deep": {"index": int(number), "mask": torch.ones(4) * number},
        }


class OfNested(Recorder):
    def parts(self, batch: Any) -> Any:
        words = [int(word.removeprefix("sample ")) for word in batch["word"]]
        assert words == batch["deep"]["index"].tolist() == batch["deep"]["mask"][:, 0].tolist()
        return batch["deep"]["index"], *batch["pair"]


def test_nested_batches_with_strings_are_cut_alike(tmp_path: Path) -> None:
    alone, together = OfNested(tmp_path), OfNested(tmp_path)
    wanted = joined(run("fit", None, alone, DataLoader(Nested(), batch_size=8)))
    ranks = run("fit", "3:1", together, DataLoader(Nested(), batch_size=4))
    assert joined(ranks) == wanted
    assert hook_indices(ranks, "on_train_batch_end") == wanted
    assert_same_weights(together, alone)


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    """As a language model's collate function pads: to the longest of the batch."""
    tokens = [torch.full((1 + int(row[0]) % 5,), float(row[0]) + 1) for row in rows]
    return {
        "tokens": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        "index": torch.stack([row[0] for row in rows]),
        "x": torch.stack([row[1] for row in rows]),
        "y": torch.stack([row[2] for row in rows]),
    }


class Padded(Recorder):
    def parts(self, batch: Any) -> Any:
        assert batch["tokens"][:, 0].tolist() == (batch["index"] + 1.0).tolist()
        return batch["index"], batch["x"], batch["y"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.record.note("width", batch["tokens"].shape[1])
        return super().training_step(batch, batch_idx)


def of_padded(size: int) -> DataLoader[Any]:
    return DataLoader(samples(21), batch_size=size, collate_fn=padded)


def test_padded_batches_keep_the_padding_of_the_ranks_batch(tmp_path: Path) -> None:
    wanted = joined(run("fit", None, Padded(tmp_path), of_padded(8)))
    ranks = run("fit", "3:1", Padded(tmp_path), of_padded(4))
    assert joined(ranks) == wanted
    # samples 0 to 2 are up to 3 long, 3 to 5 up to 5
    assert ranks[0].notes["width"][:2] == [5, 5]


def encode(rows: list[Any]) -> Any:
    return BatchEncoding(padded(rows))


class Encoded(Recorder):
    def parts(self, batch: Any) -> Any:
        assert isinstance(batch, BatchEncoding)
        return batch["index"], batch.x, batch.y


def test_a_tokenizers_batch_encoding_stays_one(tmp_path: Path) -> None:
    data = DataLoader(samples(22), batch_size=4, collate_fn=encode)
    ranks = run("fit", "idle last", Encoded(tmp_path), data)
    assert joined(ranks) == [list(range(8)), list(range(8, 16)), list(range(16, 22))]


def time_major(rows: list[Any]) -> Any:
    return torch.stack([row[0] for row in rows])[None], torch.stack(
        [torch.cat(row[1:]) for row in rows], dim=1
    )


def split(batch: Any, sizes: list[int]) -> list[Any]:
    return [tuple(column) for column in zip(*(p.split(sizes, 1) for p in batch), strict=True)]


class TimeMajor(Recorder):
    def parts(self, batch: Any) -> Any:
        return batch[0][0], batch[1][:3].T, batch[1][3:].T


def of_time_major(size: int) -> DataLoader[Any]:
    return DataLoader(samples(16), batch_size=size, collate_fn=time_major)


def test_batches_cut_by_the_users_own_function(tmp_path: Path) -> None:
    alone = TimeMajor(tmp_path)
    wanted = joined(run("fit", None, alone, of_time_major(8)))
    options = {"split_batch": split}
    together = TimeMajor(tmp_path)
    ranks = run("fit", "3:1", together, of_time_major(4), strategy_options=options)
    assert joined(ranks) == wanted
    assert_same_weights(together, alone)


class OwnShare(Recorder):
    def train_dataloader(self) -> DataLoader[Any]:
        rank = self.global_rank
        own = torch.utils.data.Subset(samples(24), range(rank, 24, 2))
        return DataLoader(own, batch_size=6 if rank == 0 else 2, drop_last=True)


def test_without_lightnings_sampler_every_rank_deals_for_itself(tmp_path: Path) -> None:
    ranks = run(
        "fit", "3:1", OwnShare(tmp_path), use_distributed_sampler=False, limit_train_batches=2
    )
    assert [step for rank in ranks for step in rank.steps] == [
        [[0, 2, 4], [6, 8, 10]],
        [[12, 14, 16], [18, 20, 22]],
        [[1, 3]],
        [[5, 7]],
    ]


class Growing(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        epoch = self.trainer.current_epoch
        size = 8 if self.trainer.world_size == 1 else 4
        return DataLoader(samples(10 + 6 * epoch), batch_size=size)


def test_a_datamodule_whose_loaders_are_reloaded_every_epoch(tmp_path: Path) -> None:
    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    wanted = joined(run("fit", None, Recorder(tmp_path), Growing(), **options))
    assert [len(step) for step in wanted] == [8, 2, 8, 8, 8, 8, 6]
    assert joined(run("fit", "3:1", Recorder(tmp_path), Growing(), **options)) == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 2},
        {"limit_train_batches": 0.5},
        {"overfit_batches": 1},
        {"max_steps": 5, "max_epochs": -1},
        {"accumulate_grad_batches": 2},
        {"fast_dev_run": 2},
    ],
)
def test_limits_count_steps_as_on_one_device(options: dict[str, Any], tmp_path: Path) -> None:
    options = {"max_epochs": 2, **options}
    alone, together = Recorder(tmp_path), Recorder(tmp_path)
    wanted = joined(run("fit", None, alone, loader(None), **options))
    assert joined(run("fit", "3:1", together, loader("3:1"), **options)) == wanted
    assert_same_weights(together, alone)


class OneCycle(Recorder):
    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches
        self.record.note("steps", steps)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=int(steps))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


@pytest.mark.parametrize("plan", ["idle first", "three"])
def test_the_number_of_steps_is_known_inside_configure_optimizers(
    plan: str, tmp_path: Path
) -> None:
    alone, together = OneCycle(tmp_path), OneCycle(tmp_path)
    wanted = run("fit", None, alone, loader(None), max_epochs=2)
    ranks = run("fit", plan, together, loader(plan), max_epochs=2)
    assert {rank.notes["steps"][0] for rank in ranks} == {wanted[0].notes["steps"][0]} == {6}
    assert joined(ranks) == joined(wanted)
    assert_same_weights(together, alone, tolerance=1e-5)


def test_a_global_batch_size_of_ones_own(tmp_path: Path) -> None:
    plan = plan_of(((2, 1), 0.5), ((2,), 0.5))
    ranks = run(
        "fit", plan, Recorder(tmp_path), loader("3:1"), strategy_options={"global_batch_size": 5}
    )
    assert [len(step) for step in joined(ranks)] == [5, 5, 5, 5, 2]
    assert list(chain(*joined(ranks))) == list(range(22))


class Reads(Dataset[Any]):
    """Counts what is read of it."""

    def __init__(self) -> None:
        self.data, self.read = samples(22), Counter[int]()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        return self.data[index]


class CountsReads(Recorder):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.data = Reads()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=4)

    def on_train_start(self) -> None:
        self.data.read.clear()

    def on_train_end(self) -> None:
        self.record.note("read", dict(self.data.read))


def test_a_rank_reads_only_its_own_samples(tmp_path: Path) -> None:
    ranks = run("fit", "3:1", CountsReads(tmp_path))
    reads = Counter[int]()
    for rank in ranks:
        reads.update(rank.notes["read"][0])
    assert reads == dict.fromkeys(range(22), 1)
