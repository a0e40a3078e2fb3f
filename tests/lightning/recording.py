"""Runs through the real Trainer on ranks that stay, and what every rank saw, brought to the parent.

Each rank writes what its module recorded into a file when a run ends well, so that tests compare
in the parent: several ranks under a plan against one device with the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from plans import GLOBAL_BATCH, PLANS, QUIET, quiet_strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from warm_ranks import in_ranks

from lightning_cephalo import Plan

RECORDED = ("even", "3:1", "idle last", "idle first", "three")


@dataclass
class Record:
    """What one rank saw.

    Attributes:
        steps: Per step, per microbatch, the indices of the samples that ``training_step`` got.
        hooks: Per step, the indices that each hook saw, by the hook's name.
        notes: Whatever a test's module adds.
    """

    steps: list[list[list[int]]] = field(default_factory=list)
    hooks: dict[str, list[list[int]]] = field(default_factory=dict)
    notes: dict[str, list[Any]] = field(default_factory=dict)

    def note(self, key: str, value: Any) -> None:
        self.notes.setdefault(key, []).append(value)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Recorder(LightningModule):
    """A small network that notes which samples it is given; tests override what they look at."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inputs = nn.Linear(3, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 1)
        self.folder = folder
        self.record = Record()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def parts(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Indices, inputs and targets of a batch."""
        return batch[0], batch[1], batch[2]

    def per_sample(self, batch: Any) -> Tensor:
        _, x, y = self.parts(batch)
        return (self(x) - y).square().mean(1)

    def indices(self, batch: Any) -> list[int]:
        return [int(index) for index in self.parts(batch)[0]]

    def see(self, hook: str, batch: Any) -> None:
        session = getattr(self.trainer.strategy, "_session", None)
        seen = self.indices(batch)
        assert seen, "a hook sees an empty batch"
        # without samples a repeated one, which counts nowhere
        lacks = session is not None and session.batches.are_lacking
        self.record.hooks.setdefault(hook, []).append([] if lacks else seen)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.record.steps.append([])
        self.see("on_train_batch_start", batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see("on_train_batch_end", batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.record.steps[-1].append(self.indices(batch))
        return self.per_sample(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def teardown(self, stage: str) -> None:
        torch.save(self.record, self.folder / f"rank{self.global_rank}.pt")


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 3, generator=generator)
    return TensorDataset(torch.arange(count), x, x.sum(1, keepdim=True))


def batch_size(plan: str | None) -> int:
    """What to give a DataLoader for a global batch of 8; 8 on the one device (plan None)."""
    return GLOBAL_BATCH if plan is None else -(-GLOBAL_BATCH // len(PLANS[plan].ranks))


def loader(plan: str | None, count: int = 22, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=batch_size(plan), **options)


def make_trainer(
    plan: str | Plan | None, strategy_options: dict[str, Any] | None = None, **options: Any
) -> Trainer:
    """A quiet Trainer: forked ranks under a plan, or one device when it is None."""
    options = {"accelerator": "cpu", **QUIET, **options}
    if plan is None:
        return Trainer(strategy="auto", devices=1, **options)
    defaults: dict[str, Any] = {
        "start_method": "fork",
        "timeout": timedelta(seconds=100),
    }
    if isinstance(plan, str):
        plan = PLANS[plan]
        defaults["global_batch_size"] = GLOBAL_BATCH
    strategy = quiet_strategy(plan=plan, **{**defaults, **(strategy_options or {})})
    return Trainer(strategy=strategy, devices=len(plan.ranks), **options)


def records(folder: Path) -> list[Record]:
    """The ranks' records of the last run."""
    paths = sorted(folder.glob("rank*.pt"))
    found = [torch.load(path, weights_only=False) for path in paths]
    for path in paths:
        path.unlink()
    return found


def run(
    stage: str,
    plan: str | Plan | None,
    module: Recorder,
    *data: Any,
    strategy_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[Record]:
    """``Trainer.fit``, ``validate``, ``test`` or ``predict``; the record of every rank.

    Under a plan, module and data are sent to ranks that stay, and the trained values come back.
    """
    if plan is None:
        _go_through(stage, make_trainer(None, **options), module, data)
        return records(module.folder)
    ranks = len((PLANS[plan] if isinstance(plan, str) else plan).ranks)
    values, *_ = in_ranks(ranks, _on_rank, stage, plan, module, data, strategy_options, options)
    module.load_state_dict(values)
    return records(module.folder)


def messages(plan: str, module: Recorder, **options: Any) -> list[str]:
    """What each rank raises in ``Trainer.fit``."""
    return in_ranks(len(PLANS[plan].ranks), _message, plan, module, options)


def _message(plan: str, module: Recorder, options: dict[str, Any]) -> str:
    try:
        _on_rank("fit", plan, module, (), None, options)
    except Exception as error:
        return str(error)
    raise AssertionError("it trained")


def _on_rank(
    stage: str,
    plan: str | Plan,
    module: Recorder,
    data: tuple[Any, ...],
    strategy_options: dict[str, Any] | None,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    trainer = make_trainer(plan, {"start_method": "popen", **(strategy_options or {})}, **options)
    _go_through(stage, trainer, module, data)
    return module.state_dict()


def _go_through(stage: str, trainer: Trainer, module: Recorder, data: tuple[Any, ...]) -> None:
    if stage == "predict":
        options = {"return_predictions": False}
    else:
        options = {} if stage == "fit" else {"verbose": False}
    getattr(trainer, stage)(module, *data, **options)


def joined(ranks: list[Record]) -> list[list[int]]:
    """Per step, the samples of all ranks in rank order and microbatch order."""
    steps = {len(rank.steps) for rank in ranks}
    assert len(steps) == 1, f"ranks took different numbers of steps: {steps}"
    return [
        [index for rank in ranks for microbatch in rank.steps[step] for index in microbatch]
        for step in range(steps.pop())
    ]


def hook_indices(ranks: list[Record], hook: str) -> list[list[int]]:
    """Per step, the samples that a hook saw, of all ranks in order."""
    return [
        [index for part in parts for index in part]
        for parts in zip(*(rank.hooks[hook] for rank in ranks), strict=True)
    ]


def assert_same_weights(found: nn.Module, wanted: nn.Module, tolerance: float = 1e-6) -> None:
    values = found.state_dict()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(
            values[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
