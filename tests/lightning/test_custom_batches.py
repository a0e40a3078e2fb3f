"""Batches of the user's own types train as on one device, or are refused with the remedy."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
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

    def split(self, sizes: list[int]) -> list[Graphs]:
        rows = iter(list(zip(self.index, self.x, self.y, strict=True)))
        return [Graphs(list(islice(rows, size))) for size in sizes]


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


def as_nodes(rows: Rows) -> dict[str, Any]:
    """As graphs without a class of their own: 1 to 5 nodes for each sample come first."""
    index, x, y = default_collate(rows)
    owner = torch.repeat_interleave(torch.arange(len(rows)), 1 + index % 5)
    return {"nodes": x[owner], "owner": owner, "index": index, "y": y}


def split_nodes(batch: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    ends = batch["owner"].bincount().cumsum(0)
    rows = iter(list(zip(batch["index"], batch["nodes"][ends - 1], batch["y"], strict=True)))
    return [as_nodes(list(islice(rows, size))) for size in sizes]


def without_damaged(rows: Rows) -> Any:
    """Drops samples, here all of rank 1 in the second step of 3:1; None if nothing is left."""
    rows = [row for row in rows if int(row[0]) not in (11, 14, 15)]
    return default_collate(rows) if rows else None


KINDS: dict[str, tuple[Callable[[Rows], Any], dict[str, Any]]] = {
    "dataclass": (record, {}),
    "named tuple": (named, {}),
    "ragged": (ragged, {}),
    "graphs": (Graphs, {"split_batch": Graphs.split}),
    "nodes": (as_nodes, {"split_batch": split_nodes}),
    "sealed": (Sealed, {"split_batch": split}),
    "dropped": (without_damaged, {}),
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
        if isinstance(batch, dict) and "nodes" in batch:
            ends = batch["owner"].bincount().cumsum(0)
            return batch["index"], batch["nodes"][ends - 1], batch["y"]
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
        for name, value in weights.items():
            torch.testing.assert_close(
                found[0][kind][1][name], value, rtol=1e-6, atol=1e-6, msg=f"{kind}: {name}"
            )


def refused(folder: Path) -> str:
    data = DataLoader(samples(22), batch_size=4, collate_fn=Sealed)
    with pytest.raises(BatchSplitError) as raised:
        make_trainer("3:1", {"start_method": "popen"}).fit(Custom(folder), data)
    return str(raised.value)


def test_what_hides_its_rows_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for message in in_ranks(2, refused, tmp_path):
        assert re.search("Sealed.*split_batch", message, re.DOTALL)


class Evaluated(Custom):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", batch["nodes"].mean(), sync_dist=True, batch_size=len(batch["y"]))


def evaluate_graphs(folder: Path, plan: str) -> float:
    options = {"start_method": "popen", "split_batch": split_nodes}
    train, val = (DataLoader(samples(24), batch_size=4, collate_fn=as_nodes) for _ in range(2))
    fit = make_trainer(plan, options, max_epochs=1)
    fit.fit(Evaluated(folder), train, val)
    return float(fit.callback_metrics["val"])


def test_samples_that_evaluation_logs_are_believed_without_a_warning(tmp_path: Path) -> None:
    parts = [as_nodes([samples(24)[i] for i in range(at, at + 4)]) for at in range(0, 24, 4)]
    wanted = sum(float(part["nodes"].mean()) for part in parts) / len(parts)
    # warnings are errors here
    for found in in_ranks(2, evaluate_graphs, tmp_path, "3:1"):
        assert found == pytest.approx(wanted, rel=1e-5)
