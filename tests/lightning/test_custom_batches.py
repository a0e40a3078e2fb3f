"""Batches of the user's own types train as on one device, or are refused with the remedy."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from recording import Recorder, make_trainer, samples
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from warm_ranks import in_ranks

from lightning_cephalo.common.errors import BatchSplitError

Rows = list[tuple[Tensor, Tensor, Tensor]]


@dataclass
class Record:
    index: Tensor
    x: Tensor
    y: Tensor
    names: list[str]
    scale: float = 2.0


class Target(NamedTuple):
    y: Tensor
    names: tuple[str, ...]


class Graphs:
    """As graph libraries batch: one large graph with edges, and an owner for each node."""

    def __init__(self, rows: Rows) -> None:
        self.num_graphs = len(rows)
        self.index, self.x, self.y = default_collate(rows)
        self.owner = torch.arange(len(rows)).repeat_interleave(3)

    def to(self, device: Any) -> Graphs:
        moved = copy.copy(self)
        moved.x, moved.y = self.x.to(device), self.y.to(device)
        return moved


class Sealed:
    """An object with a length that only the user's function can cut."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: Any) -> Sealed:
        return Sealed([tuple(part.to(device) for part in row) for row in self.rows])


def split(batch: Sealed, sizes: list[int]) -> list[Sealed]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [Sealed(batch.rows[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def record(rows: Rows) -> Record:
    index, x, y = default_collate(rows)
    return Record(index, x, y, [f"sample {number}" for number in index.tolist()])


def named(rows: Rows) -> dict[str, Any]:
    index, x, y = default_collate(rows)
    names = tuple(f"sample {number}" for number in index.tolist())
    return {"index": index, "x": x, "target": Target(y, names)}


def ragged(rows: Rows) -> dict[str, Any]:
    """Lists of tensors of different lengths, and of numbers."""
    return {
        "index": [int(row[0]) for row in rows],
        "x": [torch.cat([row[1], torch.ones(int(row[0]) % 3)]) for row in rows],
        "y": [row[2] for row in rows],
    }


def without_damaged(rows: Rows) -> Any:
    """Drops samples, here all of rank 1 in the first step of 3:1; None if nothing is left."""
    rows = [row for row in rows if int(row[0]) not in (6, 7, 11)]
    return default_collate(rows) if rows else None


KINDS: dict[str, tuple[Callable[[Rows], Any], dict[str, Any]]] = {
    "dataclass": (record, {}),
    "named tuple": (named, {}),
    "ragged": (ragged, {}),
    "graphs": (Graphs, {"collate_per_microbatch": True}),
    "sealed": (Sealed, {"split_batch": split}),
    "dropped": (without_damaged, {}),
    "dropped per microbatch": (without_damaged, {"collate_per_microbatch": True}),
}


class Custom(Recorder):
    def parts(self, batch: Any) -> Any:
        if isinstance(batch, Record):
            assert batch.names == [f"sample {number}" for number in batch.index.tolist()]
            return batch.index, batch.x, batch.y
        if isinstance(batch, Graphs):
            assert len(batch.owner) == 3 * len(batch.x)
            return batch.index, batch.x, batch.y
        if isinstance(batch, Sealed):
            return default_collate(batch.rows)
        if isinstance(batch, dict) and "target" in batch:
            y, names = batch["target"]
            assert names == tuple(f"sample {number}" for number in batch["index"].tolist())
            return batch["index"], batch["x"], y
        if isinstance(batch, dict):
            x = [row[:3] for row in batch["x"]]
            assert [len(row) for row in batch["x"]] == [3 + n % 3 for n in batch["index"]]
            return torch.tensor(batch["index"]), torch.stack(x), torch.stack(batch["y"])
        return batch

    def see(self, hook: str, batch: Any) -> None:
        """Hooks see types of their own; see test_data_order."""


def fit_all(plan: str | None, folder: Path) -> dict[str, Any]:
    found = {}
    for kind, (collate, options) in KINDS.items():
        module = Custom(folder)
        data = DataLoader(samples(22), batch_size=8 if plan is None else 4, collate_fn=collate)
        strategy_options = None if plan is None else {"start_method": "popen", **options}
        make_trainer(plan, strategy_options, max_epochs=1).fit(module, data)
        steps = [[i for part in step for i in part] for step in module.record.steps]
        found[kind] = steps, {name: value.clone() for name, value in module.state_dict().items()}
    return found


@pytest.mark.parametrize(
    ("plan", "ranks"), [("3:1", 2), pytest.param("three", 3, marks=pytest.mark.slow)]
)
def test_batches_of_all_kinds_train_as_on_one_device(plan: str, ranks: int, tmp_path: Path) -> None:
    wanted = fit_all(None, tmp_path)
    found = in_ranks(ranks, fit_all, plan, tmp_path)
    for kind, (steps, weights) in wanted.items():
        joined = [
            [index for step in parts for index in step]
            for parts in zip(*(own[kind][0] for own in found), strict=True)
        ]
        assert joined == steps, kind
        if kind == "dropped per microbatch":
            continue  # it weights microbatches by the samples that they were made of
        for name, value in weights.items():
            torch.testing.assert_close(
                found[0][kind][1][name], value, rtol=1e-6, atol=1e-6, msg=f"{kind}: {name}"
            )


def refused(folder: Path) -> str:
    data = DataLoader(samples(22), batch_size=4, collate_fn=Sealed)
    with pytest.raises(BatchSplitError) as raised:
        make_trainer("3:1", {"start_method": "popen"}).fit(Custom(folder), data)
    return str(raised.value)


def test_what_hides_its_rows_is_refused_with_the_remedies(tmp_path: Path) -> None:
    for message in in_ranks(2, refused, tmp_path):
        assert re.search("Sealed.*collate_per_microbatch.*split_batch", message, re.DOTALL)
