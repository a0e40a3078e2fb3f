"""Hooks of tensors between units, and in them, see the gradients of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from harness import (
    Allocation,
    batch_size_of,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
)
from launch import run_ranks
from torch import Tensor, nn

_WIDTH = 6
_ALLOCATION = Allocation(((3, 2), (2,)), (0.75, 0.25))  # 7 samples: no power of two


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class _Notes:
    """What tests note: how many gradients hooks have seen, and tensors that retain theirs."""

    def __init__(self) -> None:
        self.seen = 0
        self.held: list[Tensor] = []
        self.shared: Tensor | None = None

    def see(self, gradient: Tensor) -> None:
        self.seen += 1


class _Blocks(nn.Module):
    """Blocks; ``between`` handles the output of each of them."""

    def __init__(self, between: Callable[[_Blocks, Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.between = between
        self.notes = _Notes()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = self.between(self, x, block)
        return x.square().mean()


def _halved(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    y = block(x)
    y.register_hook(lambda gradient: gradient * 0.5)
    return y


def _cut_off(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    y = block(x)
    y.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    y.register_hook(model.notes.see)
    return y


def _retained(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    y = block(x)
    y.retain_grad()
    model.notes.held.append(y)
    return y


def _by_module(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))

    handle = block.register_forward_hook(hook)
    y = block(x)
    handle.remove()
    return y


def _removed(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    y = block(x)
    y.register_hook(lambda gradient: gradient * 3.0).remove()
    return y


def _of_input(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    x = x * 2.0
    x.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return block(x)


def _after_the_call(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    y = block(x)
    x.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return y


def _retained_after_the_call(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    y = block(x)
    x.retain_grad()
    model.notes.held.append(x)
    return y


def _inside(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    def hook(module: nn.Module, inputs: tuple[Tensor]) -> None:
        inputs[0].register_hook(lambda gradient: gradient * 0.5)

    if not block.linear._forward_pre_hooks:  # else one for each microbatch that waits
        block.linear.register_forward_pre_hook(hook)
    return block(x)


def _around(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    x = x * 2.0
    x.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return x - block(x)


def _around_views(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    own = x.view_as(x)
    own.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return x - block(own)


def _shared(model: _Blocks, x: Tensor, block: nn.Module) -> Tensor:
    notes = model.notes
    if notes.shared is None:  # the microbatches behind the first one use its tensor
        notes.shared = (model.scale * 2.0).unsqueeze(0)
    return block(x) + block(notes.shared)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["x"])
    return loss


def _of_ranks(rank: int, between: Callable[..., Tensor], recompute: bool) -> tuple[float, int]:
    torch.manual_seed(3)
    alone = _Blocks(between)
    batch = {"x": torch.randn(batch_size_of(_ALLOCATION), _WIDTH)}
    model = copy.deepcopy(alone)
    executor = make_executor(model, _ALLOCATION.fractions, recompute)
    executor.weighing.whole_batch = float(batch_size_of(_ALLOCATION))
    parts = microbatches_of(batch, _ALLOCATION, rank)
    for _ in range(2):  # the first finds the order of visits
        alone.zero_grad()
        model.zero_grad()
        for each in (alone, model):
            each.notes = _Notes()
        alone(batch["x"]).backward()
        sharded_step(executor, model, _loss, parts)
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    first = 0 if rank == 0 else sum(_ALLOCATION.microbatches[0])
    for place, held in enumerate(model.notes.held):  # all microbatches pass a block, then the next
        block, part = divmod(place, len(parts))
        whole = alone.notes.held[block].grad
        start = first + sum(len(each["x"]) for each in parts[:part])
        assert held.grad is not None and whole is not None
        assert torch.allclose(held.grad, whole[start : start + len(held)])
    return relative_error(full_gradients(model), expected), model.notes.seen


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    "between",
    [
        _halved,
        _cut_off,
        _retained,
        _by_module,
        _removed,
        _of_input,
        _around_views,
        _shared,
        _retained_after_the_call,
        _after_the_call,
        _around,
        _inside,
    ],
)
def test_hooks_between_units_see_the_gradients_of_one_device(between, recompute):
    for rank, (error, seen) in enumerate(run_ranks(2, _of_ranks, between, recompute)):
        assert error < 1e-6
        if between is _cut_off:
            assert seen == 3 * len(_ALLOCATION.microbatches[rank])


def _behind_a_smaller_batch(rank: int, tokens: float) -> float:
    torch.manual_seed(3)
    alone = _Blocks(_cut_off)
    model = copy.deepcopy(alone)
    executor = make_executor(model, _ALLOCATION.fractions, recompute=True)
    executor.weighing.whole_batch = float(batch_size_of(_ALLOCATION))
    smaller = Allocation(((1,), (1,)), _ALLOCATION.fractions)
    for allocation in (_ALLOCATION, smaller, _ALLOCATION):
        alone.zero_grad()
        model.zero_grad()
        batch = {"x": torch.randn(batch_size_of(allocation), _WIDTH)}
        alone(batch["x"]).backward()
        parts = microbatches_of(batch, allocation, rank)
        sharded_step(executor, model, _loss, parts, tokens)
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    return relative_error(full_gradients(model), expected)


@pytest.mark.parametrize("tokens", [1.0, 64.0])  # a power of two: the factor is one
def test_hooks_see_the_gradients_of_one_device_behind_a_smaller_batch(tokens):
    assert max(run_ranks(2, _behind_a_smaller_batch, tokens)) < 1e-6
