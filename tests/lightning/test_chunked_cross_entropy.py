"""Unmodified language models whose training step returns the loss in chunks of tokens."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cases import Cases, on_one_device
from common import assert_same_tensors, trainer, values_of
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from zoo import VOCABULARY, llama

from lightning_cephalo import chunked_cross_entropy

TOKENS = 7


class LanguageModel(LightningModule):
    """The code of the recipe, with a chunk that small batches fill."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.model = llama(tied=is_tied)
        self.losses: list[float] = []

    def _loss(self, ids):
        hidden = self.model.model(ids).last_hidden_state
        return chunked_cross_entropy(self.model.lm_head, hidden[:, :-1], ids[:, 1:], chunk_tokens=5)

    def training_step(self, ids):
        return self._loss(ids)

    def validation_step(self, ids):
        self.log("seen", self._loss(ids), batch_size=len(ids), sync_dist=True)

    def on_train_batch_end(self, outputs, *_):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def fit(plan, is_tied, strategy_options, **options):
    torch.manual_seed(9)
    ids = torch.randint(VOCABULARY, (24, TOKENS))
    module = LanguageModel(is_tied)
    loader = DataLoader(ids, batch_size=8)
    fitted = trainer(plan, None if plan is None else strategy_options, **options)
    fitted.fit(module, loader, loader)
    return values_of(module), module.losses, float(fitted.callback_metrics["seen"])


HEAD = {"units": ["LlamaDecoderLayer"]}
OPTIONS = {
    "as it is": {},
    "the head is of the root": HEAD,
    "the head is a unit": {"units": [f"model.model.layers.{n}" for n in range(3)]
                           + ["model.lm_head"]},
    "nothing is recomputed": {"recompute": False},
    "a unit, and nothing is recomputed": {"units": ["model.model", "model.lm_head"],
                                          "recompute": False},
    "units stay gathered": {**HEAD, "reshard_after_forward": False},
    "one unit": {"units": []},
}  # fmt: skip
WAYS = {
    **{(name, False): options for name, options in OPTIONS.items()},
    ("as it is", True): {},
    ("nothing is recomputed", True): {"recompute": False},
}
FITS = Cases({(n, t): ("3:1", fit, t, o) for (n, t), o in WAYS.items()})


@cache
def alone(is_tied):
    return on_one_device(fit, is_tied, {})


@pytest.mark.parametrize(("name", "is_tied"), WAYS)
def test_training_is_that_of_one_device(name, is_tied):
    weights, losses, seen = alone(is_tied)
    ranks = FITS[name, is_tied]
    pairs = zip(*(own_losses for _, own_losses, _ in ranks), strict=True)
    # of 6 samples on one rank and 2 on the other
    assert [(6 * a + 2 * b) / 8 for a, b in pairs] == pytest.approx(losses, rel=1e-6)
    for found, _, own_seen in ranks:
        assert own_seen == pytest.approx(seen, rel=1e-6)
        assert_same_tensors(found, weights, 1e-6)
