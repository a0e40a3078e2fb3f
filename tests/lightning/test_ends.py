"""Trainings whose embedding and head are units, or are read where no unit is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import assert_same_tensors, in_ranks, values_of
from lightning.pytorch import LightningModule, Trainer
from plans import GLOBAL_BATCH, PLANS, QUIET, quiet_strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_cephalo import CephaloStrategy
from lightning_cephalo.common.errors import CephaloError

TOKENS, LENGTH, WIDTH = 23, 5, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Language(LightningModule):
    """A language model; from a step on it may use an end in other ways."""

    def __init__(self, where: str = "", since: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.where, self.since = where, since
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.mean = MeanMetric()
        self.losses: list[float] = []
        self.kinds: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        uses = self.where if self.global_step >= self.since else ""
        x = self.embed(tokens)
        decay = None
        if uses == "embedding's values":
            x = x * (1 + _weight(self.embed).square().mean())
        if uses == "decay of the embedding":
            decay = _weight(self.embed).square().sum()
        if uses == "head ahead":
            x = x + _weight(self.head).mean(0)
        for block in self.blocks:
            x = block(x)
        if uses == "embedding again":
            x = x + self.embed(tokens.flip(1))
        logits = self.head(self.norm(x))
        if uses == "weight of the head":
            logits = logits + x @ _weight(self.head).T
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
        if isinstance(self.trainer.strategy, CephaloStrategy):
            units = self.trainer.strategy.session.model.units
            self.kinds = [unit.kind.value for unit in units]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _weight(layer: nn.Module) -> torch.Tensor:
    """A weight in a way that the search for units does not see."""
    return layer.weight


def _loader() -> DataLoader:
    tokens = torch.randint(0, TOKENS, (40, LENGTH), generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(tokens), batch_size=GLOBAL_BATCH)


AS_IT_STANDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as they stand": ({}, {}),
    "clipped": ({}, {"gradient_clip_val": 0.1}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "embedding again": ({"where": "embedding again"}, {}),
    "embedding again, later": ({"where": "embedding again", "since": 2}, {}),
    "weight of the head": ({"where": "weight of the head"}, {}),
}
ELSEWHERE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: ({"where": name, "since": since}, {})
    for since, name in enumerate(("head ahead", "decay of the embedding", "embedding's values"))
}


def _strategy(plan: str, **options: Any) -> CephaloStrategy:
    return quiet_strategy(plan=PLANS[plan], global_batch_size=GLOBAL_BATCH, **options)


def _trained(plan: str | None) -> dict[str, Any]:
    found = {}
    for name, (module, options) in {**AS_IT_STANDS, **ELSEWHERE}.items():
        strategy: Any = "auto"
        if plan is not None:
            strategy = _strategy(plan, **({"units": [Block]} if name in ELSEWHERE else {}))
        devices = 1 if plan is None else len(PLANS[plan].ranks)
        run = Trainer(strategy=strategy, devices=devices, accelerator="cpu", **{**QUIET, **options})
        model = Language(**module)
        run.fit(model, _loader(), _loader())
        metrics = {key: float(value) for key, value in run.callback_metrics.items()}
        found[name] = (model.losses, values_of(model), metrics, model.kinds)
    return found


@pytest.mark.parametrize("plan", ["3:1", "no data", "three"])
def test_trainings_are_those_of_one_device(plan):
    wanted = in_ranks(1, _trained, None)[0]
    for rank in in_ranks(len(PLANS[plan].ranks), _trained, plan):
        for name, (losses, values, metrics, _) in wanted.items():
            assert rank[name][0] == pytest.approx(losses, abs=1e-6), name
            assert_same_tensors(rank[name][1], values, 1e-5)
            assert rank[name][2] == pytest.approx(metrics, abs=1e-5), name
            own = ["root", *["block"] * 4]
            has_ends = ["root", "embedding", *["block"] * 4, "head"]
            assert rank[name][3] == (own if name in ELSEWHERE else has_ends), name


def _refused() -> dict[str, str]:
    found = {}
    for name, (module, _) in ELSEWHERE.items():
        run = Trainer(strategy=_strategy("3:1"), devices=2, accelerator="cpu", **QUIET)
        try:
            run.fit(Language(**module), _loader(), _loader())
        except CephaloError as refusal:
            found[name] = str(refusal)
    return found


def test_reading_an_end_without_a_call_is_refused_on_all_ranks_with_a_remedy():
    for rank in in_ranks(2, _refused):
        assert set(rank) == set(ELSEWHERE)
        for name, told in rank.items():
            assert "units=[Block]" in told, (name, told)
            assert ("head" if name == "head ahead" else "embed") in told, (name, told)
