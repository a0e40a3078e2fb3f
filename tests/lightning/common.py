"""What the tests of the strategy share: a model with every kind of state, plans, and whole scripts.

``in_ranks`` runs a function in every rank the way torchrun runs a script: the ranks are forked from
the test process, and Lightning takes ranks and world size from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from launch import RankFailure as RankFailure
from launch import run_ranks, torchrun_environments
from lightning.pytorch import LightningModule, Trainer
from plans import GLOBAL_BATCH, PLANS, QUIET, quiet_strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import CephaloStrategy
from lightning_cephalo.ranks import meeting

# Ranks are forks of the test process: what is imported here none of them needs a second for.
for solver in ("cvxpy", "highspy"):
    import_module(solver)


def strategy(plan: str, **options: Any) -> CephaloStrategy:
    given = {"global_batch_size": GLOBAL_BATCH, "timeout": timedelta(seconds=400)}
    return quiet_strategy(plan=PLANS[plan], **{**given, **options})


def trainer(plan: str | None, strategy_options: dict[str, Any] | None = None, **options: Any):
    """A quiet Trainer on the CPU; ``plan`` None: on one device, without cephalo."""
    options = {"accelerator": "cpu", **QUIET, **options}
    if plan is None:
        return Trainer(strategy="auto", devices=1, **options)
    devices = len(PLANS[plan].ranks)
    return Trainer(strategy=strategy(plan, **strategy_options or {}), devices=devices, **options)


def in_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 450.0
) -> list[Any]:
    """Return ``function(*args)`` of every rank, each run as torchrun would run a script."""
    environments = torchrun_environments(world_size)

    def script(rank: int) -> Any:
        # Lightning would give a lone rank all cores; OpenMP's threads, which the test process may
        # have used, do not survive the fork, and a rank that wants them waits forever
        os.environ.update(environments[rank], OMP_NUM_THREADS="1")
        try:
            return function(*args)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    return run_ranks(world_size, script, process_group=False, timeout_s=timeout_s)


def by_plan(plan: str | None, function: Callable[..., Any], *args: Any) -> Any:
    """Return what ``function(plan, *args)`` gives on rank 0 of the plan, or on one device."""
    if plan is None:
        return in_ranks(1, function, None, *args)[0]
    return in_ranks(len(PLANS[plan].ranks), function, plan, *args)[0]


def look_soon() -> None:
    """Let a rank, which is a process of its own, look sooner where others are."""
    meeting.FIRST_LOOK_S = meeting.LOOK_S = 0.3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(LightningModule):
    """Tied, frozen and 0-d parameters, buffers (one of which training changes), three blocks."""

    def __init__(self, optimizer: str = "adamw", width: int = 6, features: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters("optimizer", "width", "features")
        torch.manual_seed(1)
        self.inputs = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, width)
        self.outputs = nn.Linear(width, width)
        self.outputs.weight = self.head.weight
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.blocks[1].up.weight.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.outputs(torch.tanh(self.head(x))).sum(1, keepdim=True) * self.gain

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        if self.hparams["optimizer"] == "sgd":
            chosen: Any = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
        else:
            chosen = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(chosen, step_size=2, gamma=0.5)
        return [chosen], [{"scheduler": schedule, "interval": "step"}]


def dataset(samples: int = 30, features: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, features, generator=generator)
    return TensorDataset(x, torch.sin(x).sum(1, keepdim=True))


def loader(samples: int = 30, shuffle: bool = False, **options: Any) -> DataLoader:
    if shuffle:
        options["generator"] = torch.Generator().manual_seed(11)
    return DataLoader(dataset(samples), batch_size=GLOBAL_BATCH, shuffle=shuffle, **options)


def values_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same_tensors(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    """Same keys in the same order, same shapes and dtypes, and values within ``tolerance``."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, Tensor):
            assert found[name].shape == value.shape, name
            assert found[name].dtype == value.dtype, name
            torch.testing.assert_close(
                found[name],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        else:
            assert found[name] == value, name


def assert_same_optimizer_state(found: Any, wanted: Any, tolerance: float) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert list(found["state"]) == list(wanted["state"])
    for index, entries in wanted["state"].items():
        assert_same_tensors(found["state"][index], entries, tolerance)
