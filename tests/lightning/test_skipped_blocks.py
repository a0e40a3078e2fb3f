"""Blocks that some microbatches skip give the gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import Net, assert_same_tensors, in_ranks, loader, trainer, values_of
from plans import GLOBAL_BATCH, PLANS
from torch import Tensor


class Decides(Net):
    """Decides by its samples which blocks they pass, and in which order."""

    def forward(self, x: Tensor) -> Tensor:
        first = float(x[0, 0])
        chosen = [block for at, block in enumerate(self.blocks) if first > 0.8 * at - 1.2]
        x = self.inputs(x)
        for block in reversed(chosen) if float(x[0, 1].detach()) > 1.0 else chosen:
            x = block(x)
        return self.outputs(torch.tanh(self.head(x))).sum(1, keepdim=True) * self.gain

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class OneDevice(Decides):
    """Makes the same decisions for the microbatches of a plan."""

    def __init__(self, plan: str) -> None:
        super().__init__()
        self.sizes = [size for rank in PLANS[plan].ranks for size in rank.microbatch_sizes]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = zip(*(values.split(self.sizes) for values in batch), strict=True)
        return sum(self.loss(part) * (len(part[0]) / len(batch[0])) for part in parts)


def fitted(plan: str | None, like: str) -> dict[str, Tensor]:
    module = Decides() if plan else OneDevice(like)
    trainer(plan, max_epochs=1).fit(module, loader(5 * GLOBAL_BATCH), loader(8))
    return values_of(module)


# it is no mean over samples, as microbatches decide
@pytest.mark.filterwarnings("ignore:The loss of . samples is")
@pytest.mark.parametrize("plan", [pytest.param("three", marks=pytest.mark.slow), "no data"])
def test_blocks_that_microbatches_skip_are_those_of_one_device(plan):
    wanted = in_ranks(1, fitted, None, plan)[0]
    for found in in_ranks(len(PLANS[plan].ranks), fitted, plan, plan):
        assert_same_tensors(found, wanted, 1e-5)
