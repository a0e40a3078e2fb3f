"""Trainings whose first and last layers are gathered apart, or used where they are away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import assert_same_tensors, in_ranks, values_of
from lightning.pytorch import LightningModule, Trainer
from plans import GLOBAL_BATCH, PLANS, QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_cephalo import CephaloStrategy

TOKENS, LENGTH, WIDTH = 23, 5, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Language(LightningModule):
    """A language model; from a step on it may use an end elsewhere."""

    def __init__(self, where: str = "", since: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.where, self.since = where, since
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.mean = MeanMetric()
        self.losses: list[float] = []
        self.is_apart: bool | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        uses = self.where if self.global_step >= self.since else ""
        x = self.embed(tokens)
        decay = None
        if uses == "embedding's values":
            x = x * (1 + self.embed.weight.square().mean())
        if uses == "decay of the embedding":
            decay = self.embed.weight.square().sum()
        if uses == "head ahead":
            x = x + self.head.weight.mean(0)
        for block in self.blocks:
            x = block(x)
        if uses == "embedding again":
            x = x + self.embed(tokens.flip(1))
        logits = self.head(self.norm(x))
        if uses == "weight of the head":
            logits = logits + x @ self.head.weight.T
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        if decay is not None:
            loss = loss + 0.1 * decay
        self.mean(loss.detach(), len(tokens))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (tokens,) = batch
        logits = self.head(self.norm(self.blocks[0](self.embed(tokens))))
        self.log("val", logits.square().mean(), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def on_train_end(self) -> None:
        if self.trainer.world_size > 1:
            self.is_apart = self.trainer.strategy.session.model.executor.ends_policy.is_on

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _loader() -> DataLoader:
    tokens = torch.randint(0, TOKENS, (40, LENGTH), generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(tokens), batch_size=GLOBAL_BATCH)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as they stand": ({}, {}),
    "clipped": ({}, {"gradient_clip_val": 0.1}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "embedding again": ({"where": "embedding again"}, {}),
    "embedding's values": ({"where": "embedding's values"}, {}),
    "head ahead": ({"where": "head ahead"}, {}),
    "weight of the head": ({"where": "weight of the head"}, {}),
    "embedding again, later": ({"where": "embedding again", "since": 2}, {}),
    "embedding's values, later": ({"where": "embedding's values", "since": 2}, {}),
    "embedding's values, later, clipped": (
        {"where": "embedding's values", "since": 2},
        {"gradient_clip_val": 0.1},
    ),
    "decay of the embedding, later": ({"where": "decay of the embedding", "since": 2}, {}),
    "head ahead, later": ({"where": "head ahead", "since": 2}, {}),
}


def _trained(plan: str | None) -> dict[str, Any]:
    found = {}
    for name, (module, options) in CASES.items():
        strategy: Any = "auto"
        if plan is not None:
            strategy = CephaloStrategy(
                plan=PLANS[plan],
                global_batch_size=GLOBAL_BATCH,
                verbose=False,
                unit_types=[Block],
            )
        devices = 1 if plan is None else len(PLANS[plan].ranks)
        run = Trainer(strategy=strategy, devices=devices, accelerator="cpu", **{**QUIET, **options})
        model = Language(**module)
        run.fit(model, _loader(), _loader())
        metrics = {key: float(value) for key, value in run.callback_metrics.items()}
        found[name] = (model.losses, values_of(model), metrics, model.is_apart)
    return found


@pytest.mark.parametrize("plan", ["3:1", "no data", "three"])
def test_trainings_are_those_of_one_device_wherever_ends_are_used(plan):
    wanted = in_ranks(1, _trained, None)[0]
    for rank in in_ranks(len(PLANS[plan].ranks), _trained, plan):
        for name, (losses, values, metrics, _) in wanted.items():
            assert rank[name][0] == pytest.approx(losses, abs=1e-6), name
            assert_same_tensors(rank[name][1], values, 1e-5)
            assert rank[name][2] == pytest.approx(metrics, abs=1e-5), name
            module = CASES[name][0]
            elsewhere = module.get("where", "") not in ("", "weight of the head")
            assert rank[name][3] is not elsewhere, name
