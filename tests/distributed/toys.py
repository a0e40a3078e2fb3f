"""A model of three small blocks to misuse, and a batch for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import Allocation
from torch import Tensor, nn

from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.sharding.gathered import Residence
from lightning_cephalo.sharding.unit import UnitState

UNEVEN = Allocation(((2, 1), (1,), ()), (0.6, 0.0, 0.4))
WIDTH = 6


class Block(nn.Module):
    def __init__(self, inputs: int = 1) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(inputs)])

    def forward(self, *values: Tensor) -> Tensor:
        pairs = zip(self.linears, values, strict=True)
        return torch.tanh(sum(linear(value) for linear, value in pairs))


class Base(nn.Module):
    """Embedding, three blocks and a head; subclasses say how the blocks are used."""

    blocks_of = staticmethod(lambda: [Block() for _ in range(3)])

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(self.blocks_of())
        self.head = nn.Linear(WIDTH, 1)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.through(self.embed(x)))


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_batch(samples: int) -> dict[str, Tensor]:
    torch.manual_seed(11)
    return {"x": torch.randn(samples, 4), "y": torch.randn(samples, 1)}


def assert_idle(executor: Executor) -> None:
    """Nothing is gathered or armed and torch's modes are as they always are."""
    for unit in executor.units:
        assert unit.state is UnitState.SHARDED
        for flat in unit.flats:
            is_resident = flat.gathered.residence is Residence.RESIDENT
            assert is_resident or flat.gathered.full.untyped_storage().nbytes() == 0
            assert flat.gradient.armed is None
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
