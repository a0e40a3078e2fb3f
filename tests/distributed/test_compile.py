"""Blocks under torch.compile are units like any other, forward and recompute."""

from __future__ import annotations

import copy
import itertools
import warnings

import torch
from harness import (
    ALLOCATIONS,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
)
from launch import run_ranks
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 24)
        self.outer = nn.Linear(24, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.outer(torch.relu(self.inner(hidden)))


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([_Block() for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.entry(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def _train(how: str, recompute: bool, rank: int) -> tuple[float, int, float]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = _Network()
    single = copy.deepcopy(model)
    for index, block in enumerate(model.blocks):
        if how == "wrapped":
            model.blocks[index] = torch.compile(block, backend="aot_eager")
        else:
            block.compile(backend="aot_eager")
    allocation = ALLOCATIONS["3:1"]
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 1)}
    executor = make_executor(model, allocation.fractions, recompute)
    sharded_step(executor, model, _loss, microbatches_of(batch, allocation, rank))
    _loss(single, batch).backward()
    found = {name.replace("_orig_mod.", ""): g for name, g in full_gradients(model).items()}
    error = relative_error(found, {name: p.grad for name, p in single.named_parameters()})
    compiled = torch._dynamo.utils.counters["frames"]["ok"]
    executor.reshard()
    executor.hooks.uninstall()
    for unit in executor.units:
        for flat in unit.flats:
            flat.restore({})
    difference = (model(batch["x"]) - single(batch["x"])).abs().max()
    return error, compiled, float(difference.detach())


def _train_all(rank: int) -> dict[tuple[str, bool], tuple[float, int, float]]:
    warnings.simplefilter("ignore")  # the compiler's own
    cases = itertools.product(("wrapped", "in place"), (True, False))
    return {case: _train(*case, rank) for case in cases}


def test_compiled_blocks_train_exactly_and_are_really_compiled():
    """Wrapped and in place, with recompute and without: the compiler's start is most of the time"""
    for of_rank in run_ranks(2, _train_all):
        for case, (error, compiled, difference) in of_rank.items():
            assert error <= 1e-5, case
            assert compiled >= 1, case
            assert difference <= 1e-6, case
