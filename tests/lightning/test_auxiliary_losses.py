"""Losses that layers store on themselves train as on one device, in any kind of step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import assert_same_tensors, by_plan, dataset, trainer, values_of
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from warm_ranks import in_ranks

TOLERANCE = 1e-5


class Layer(nn.Module):
    def __init__(self, has_statistics: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.norm = nn.BatchNorm1d(12) if has_statistics else nn.Identity()
        self.sparsity: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        up = torch.tanh(self.up(x))
        self.before = up.square().mean()
        hidden = self.norm(up)
        self.sparsity = hidden.abs().mean()
        return x + self.down(hidden)


class Net(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind, self.automatic_optimization = kind, kind != "manual"
        self.inputs = nn.Linear(5, 6)
        self.layers = nn.ModuleList(Layer(kind == "statistics") for _ in range(3))
        self.head = nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x = self.inputs(batch[0])
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.mse_loss(self.head(x), batch[1])
        loss = loss + sum(0.3 * layer.sparsity + 0.1 * layer.before for layer in self.layers)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def _trained(plan: str | None, kind: str, recompute: bool = True) -> dict[str, Tensor]:
    model = Net(kind)
    clip = {} if kind == "manual" else {"gradient_clip_val": 0.5}
    options = {"units": [Layer], "recompute": recompute}
    runs = trainer(plan, options, sync_batchnorm=plan is not None, max_epochs=2, **clip)
    runs.fit(model, DataLoader(dataset(24), batch_size=8))
    return values_of(model)


def _both(plan: str, kind: str) -> list[dict[str, Tensor]]:
    return [_trained(plan, kind, recompute) for recompute in (True, False)]


@pytest.mark.parametrize("kind", ["plain", "statistics", "manual"])
def test_they_are_those_of_one_device(kind: str) -> None:
    expected = by_plan(None, _trained, kind)
    plan = "whole" if kind == "manual" else "3:1"
    for values in in_ranks(2, _both, plan, kind)[0]:
        assert_same_tensors(values, expected, TOLERANCE)
