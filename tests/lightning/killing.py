"""Trainings whose ranks are killed, and what they tell of each step."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from common import Net, dataset, strategy, values_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from plans import QUIET
from torch import nn
from torch.utils.data import DataLoader

from lightning_cephalo import Recovery
from lightning_cephalo.recovery.peers import DOMAIN

DATA = 40
STEPS_OF_EPOCH = 5


class Told(Net):
    """Draws masks, changes a buffer behind each batch, and tells each step."""

    def __init__(self, folder: Path, dropout: float) -> None:
        super().__init__()
        self.folder = folder
        self.mask = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        return super().forward(self.mask(x))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += self.steps
        loss = float(self.trainer.callback_metrics["loss_step"])
        batches = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
        told = [batches, loss, float(self.seen), batch[0][:, 0].tolist()]
        with open(self.folder / f"rank{self.global_rank}", "a") as file:
            file.write(json.dumps(told) + "\n")


class Kill(Callback):
    """Kills a rank at a place of a step."""

    def __init__(self, rank: int, step: int, place: str) -> None:
        self.rank, self.step = rank, step
        setattr(self, place, self._kill)

    def _kill(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Notice(Kill):
    """Tells a rank's host that it will be taken away."""

    def _kill(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class MovesRows(Callback):
    """Gives the ranks other rows in the second epoch; a start afterwards begins with the first."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            plan = trainer.strategy.plan
            shares = zip(plan.ranks, (0.2, 0.8), strict=True)
            ranks = tuple(dataclasses.replace(r, state_fraction=share) for r, share in shares)
            trainer.strategy.change_plan(dataclasses.replace(plan, ranks=ranks))


def fit(
    plan: str,
    folder: Path,
    kills: Any,
    options: Any,
    dropout: float,
    hosts: int = 1,
    kept: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    """Train, and return the model's values; None if all ranks ended by SIGTERM.

    Ranks of several hosts see the files of their own host only.
    """
    folder.mkdir(exist_ok=True)
    # what a script draws before it trains differs from run to run
    torch.manual_seed(os.getpid() if (folder / "kept0").exists() else 1)
    host = min(int(os.environ["RANK"]), hosts - 1)
    os.environ[DOMAIN] = f"host {host}"
    recover = Recovery(
        **{"every": 1, "folder": folder / f"kept{host}", "job": "test", **(kept or {})}
    )
    used = Trainer(
        accelerator="cpu",
        strategy=strategy(plan, recover=recover, **given),
        devices=int(os.environ["WORLD_SIZE"]),
        callbacks=[MovesRows(), *kills] if plan == "3:1" else kills,
        **{**QUIET, **options},
    )
    model = Told(folder, dropout)
    generator = torch.Generator().manual_seed(11)
    data = DataLoader(dataset(DATA), batch_size=8, shuffle=True, generator=generator)
    try:
        used.fit(model, data, DataLoader(dataset(8), batch_size=8))
    except SIGTERMException:
        return None
    return values_of(model)


def told_by(folder: Path, rank: int = 0) -> list[Any]:
    return [json.loads(line) for line in (folder / f"rank{rank}").read_text().splitlines()]


def assert_repeated(told: list[Any], starts: int, most: int = 1) -> None:
    """Every step comes, in order; each start but the first repeats one step, or some, at most."""
    steps = [step for step, *_ in told]
    back = [a - b + 1 for a, b in itertools.pairwise(steps) if b <= a]
    assert max(back, default=0) <= most and len(back) < starts
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))
