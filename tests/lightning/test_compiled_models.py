"""Models and blocks that users compile train as on one device, and are really compiled."""

from __future__ import annotations

import pytest
import torch
from common import Block, assert_same_tensors, by_plan, in_ranks, loader, trainer, values_of
from lightning.pytorch import LightningModule
from torch import nn


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class _Compiled(LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.net = _Inner()
        if how == "torch.compile(model)":
            self.net = torch.compile(self.net, backend="aot_eager")
        if how == "model.compile()":
            self.net.compile(backend="aot_eager")
        if how == "block.compile()":
            for block in self.net.blocks:
                block.compile(backend="aot_eager")

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit(plan, ways):
    found = []
    for how in ways:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        module = _Compiled(how)
        trainer(plan, max_epochs=1).fit(module, loader(32))
        found.append((values_of(module), torch._dynamo.utils.counters["frames"]["ok"]))
    return found


# torch.compile's own imports
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_trains_as_on_one_device_and_is_really_compiled():
    ((wanted, _),) = by_plan(None, _fit, [""])
    ways = ["torch.compile(model)", "model.compile()", "block.compile()"]
    for ranks in in_ranks(2, _fit, "3:1", ways):
        for values, frames in ranks:
            named = {name.replace("_orig_mod.", ""): value for name, value in values.items()}
            assert_same_tensors(named, wanted, 1e-5)
            assert frames > 0
