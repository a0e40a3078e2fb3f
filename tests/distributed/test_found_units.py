"""Models of many shapes train as on one device with the units that are found in them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import (
    Allocation,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
)
from launch import run_ranks
from torch import Tensor, nn

from lightning_cephalo.common.errors import RemoteRankError, UnitUseError

ALLOCATION = Allocation(((2, 1), (1,), ()), (0.5, 0.2, 0.3))
WIDTH = 8


def convolutions(width: int) -> nn.Sequential:
    layer = nn.Conv1d(width, width, 3, padding=1)
    return nn.Sequential(layer, nn.Tanh(), nn.Conv1d(width, width, 3, padding=1))


class UNetBlock(nn.Module):
    """Has blocks, and a layer that changes the length; returns what a skip needs."""

    def __init__(self, kind: type[nn.Module], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([UNetLayer() for _ in range(depth)])
        self.resize = nn.ModuleList([kind(WIDTH, WIDTH, 2, stride=2)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return self.resize[0](x), x


class UNetLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = convolutions(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([UNetBlock(nn.Conv1d, 1), UNetBlock(nn.Conv1d, 2)])
        self.middle = UNetLayer()
        # alike, so that they are blocks, and so are the others of their type
        self.up = nn.ModuleList([UNetBlock(nn.ConvTranspose1d, 2) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x, skip = block(x)
            skips.append(skip)
        x = self.middle(x)
        for block in self.up:
            x = block(x)[0] + skips.pop()
        return x


class Layers(nn.Module):
    """Has no repeated block; the embedding and one layer are read elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tied = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = self.attention(x, x, x, need_weights=False)[0]
        return F.linear(self.tied(x), self.tied.weight.t())


class Turns(nn.Module):
    """A list of blocks of two types, one of which is shared."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.layers = nn.ModuleList([convolutions(WIDTH), shared, convolutions(WIDTH), shared])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x) if isinstance(layer, nn.Bilinear) else layer(x)
        return x


MODELS = {UNet: 5, Layers: 3, Turns: 3}
"""The models, and how many units they have in addition to the root unit."""


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def _train(rank: int) -> list[tuple[str, int, float]]:
    found = []
    for kind in MODELS:
        torch.manual_seed(4)
        model = kind()
        single = copy.deepcopy(model)
        executor = make_executor(model, ALLOCATION.fractions, True)
        for _ in range(2):
            batch = {"x": torch.randn(4, WIDTH, WIDTH)}
            model.zero_grad()
            single.zero_grad()
            sharded_step(executor, model, loss_of, microbatches_of(batch, ALLOCATION, rank))
            loss_of(single, batch).backward()
            wanted = {name: parameter.grad for name, parameter in single.named_parameters()}
            error = relative_error(full_gradients(model), wanted)
            found.append((kind.__name__, len(executor.units) - 1, error))
    return found


def _reads(rank: int) -> float:
    def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_of(model, batch) + model.first.weight.square().sum()

    torch.manual_seed(4)
    model = Layers()
    single = copy.deepcopy(model)
    batch = {"x": torch.randn(4, WIDTH, WIDTH)}
    parts = microbatches_of(batch, ALLOCATION, rank)
    executor = make_executor(copy.deepcopy(model), ALLOCATION.fractions, True)
    module = executor.units[0].module
    with pytest.raises((UnitUseError, RemoteRankError), match=r"'first.weight'.*units=\["):
        sharded_step(executor, module, penalised, parts)
    executor = make_executor(model, ALLOCATION.fractions, True, wanted=[])
    sharded_step(executor, model, penalised, parts)
    penalised(single, batch).backward()
    wanted = {name: parameter.grad for name, parameter in single.named_parameters()}
    return relative_error(full_gradients(model), wanted)


def test_code_that_reads_a_unit_from_outside_is_refused_by_name_and_may_in_one_unit():
    assert max(run_ranks(3, _reads)) <= 1e-5


def test_models_of_many_shapes_equal_one_device_with_the_units_that_are_found():
    expected = {kind.__name__: count for kind, count in MODELS.items()}
    for of_rank in run_ranks(3, _train):
        assert max(error for _, _, error in of_rank) <= 1e-5
        assert {name: count for name, count, _ in of_rank} == expected


class Activation(nn.Module):
    """Has a block without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x * self.scale)).square().mean()


def _units_without_parameters(rank):
    torch.manual_seed(2)
    model = Activation()
    alone = copy.deepcopy(model)
    batch = {"x": torch.randn(4, WIDTH)}
    alone(batch["x"]).backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    names = ["layer", "activation"]
    executor = make_executor(model, ALLOCATION.fractions, recompute=True, wanted=names)
    assert not executor.units[2].flats
    parts = microbatches_of(batch, ALLOCATION, rank)
    sharded_step(executor, model, lambda net, part: net(part["x"]), parts)
    return relative_error(full_gradients(model), expected)


def test_a_unit_may_have_no_parameters():
    assert max(run_ranks(3, _units_without_parameters)) < 1e-6
