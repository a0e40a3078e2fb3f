"""Tensors that units store on their modules have the gradients of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import (
    batch_size_of,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
)
from launch import run_ranks
from torch import Tensor, nn
from toys import UNEVEN, WIDTH, Base, Block, assert_idle, make_batch

STEPS = 4


class Penalty(nn.Module):
    """A module in a unit that stores its penalty, as layers of Bayesian networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kl: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kl = self.scale.weight.square().mean() + x.mean()
        return self.scale(x)


class Storing(Block):
    """Stores tensors of its input, result and parameters, also in containers and inside."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty = Penalty()
        self.late: Tensor | None = None
        self.sometimes: Tensor | None = None
        self.taken: list[Tensor] = []
        self.begins_at, self.step = 2, 0
        self.neighbour: list[Storing] = []
        self.appends = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.penalty(x))
        self.of_result = y.square().mean()
        self.of_input, self.input = x.square().mean(), x
        self.of_parameters = self.linears[0].weight.square().mean()
        self.all = {"result": y, "more": [y.sin().mean(), "text", None, 3]}
        self.seen = y.detach()
        self.sometimes = y.cos().mean() if y.sum() > 0 else None
        if self.step >= self.begins_at:
            self.late = y.tanh().mean()
            if self.step > self.begins_at:
                self.unheard = y.exp().mean()
        if self.appends:
            self.taken.append(y.mean())
        for other in self.neighbour:
            y = y + other.of_result
        return y


class Model(Base):
    """Adds to the loss what a function takes from its blocks."""

    def __init__(self, take: Callable[[Any], Any], way: str, kind: type[Block] = Storing) -> None:
        self.blocks_of = lambda: [kind() for _ in range(3)]
        super().__init__()
        self.take, self.way = take, way
        self.blocks[1].neighbour = [self.blocks[0]] if way == "neighbour" else []
        for block in self.blocks:
            block.appends = way == "list"

    def through(self, x: Tensor) -> Tensor:
        extra = torch.zeros((), dtype=x.dtype)
        for block in self.blocks:
            x = block(x)
            extra = extra + self.take(block)
            if self.way == "twice":
                x = block(x + 1)
                extra = extra + self.take(block)
        return self.blocks[0](x + extra) if self.way == "enters" else x + extra


TAKEN: dict[str, Callable[[Storing], Any]] = {
    "result": lambda block: block.of_result,
    "input": lambda block: block.of_input + block.input.sin().mean(),
    "parameters": lambda block: block.of_parameters,
    "inside": lambda block: block.penalty.kl,
    "container": lambda block: block.all["result"].mean() * block.all["more"][0],
    "detached": lambda block: block.seen.mean() * float(block.seen.numpy().mean() > 0),
    "sometimes": lambda block: 0.0 if block.sometimes is None else block.sometimes,
    "late": lambda block: 0.0 if block.late is None else block.late,
    "new": lambda block: getattr(block, "unheard", 0.0),
    "nothing": lambda block: 0.0,
    "list": lambda block: block.taken[-1] if block.appends else 0.0,
}


# of these, where the code around units differs
SOME = ("result", "inside", "late", "new")


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def _made(name: str, way: str) -> Model:
    torch.manual_seed(5)
    return Model(TAKEN[name], way).double()


def _batch() -> dict[str, Tensor]:
    return {key: value.double() for key, value in make_batch(batch_size_of(UNEVEN)).items()}


def _at(model: Model, step: int) -> Model:
    model.zero_grad()
    for block in model.blocks:
        block.step = step
    return model


def _one_device(name: str, way: str) -> list[dict[str, Tensor | None]]:
    return _steps_of(_made(name, way))


def _steps_of(model: Model) -> list[dict[str, Tensor | None]]:
    """Gradients of each step: the mean of those of the microbatches, which the loss allows."""
    batch, steps = _batch(), []
    sizes = [size for rank in UNEVEN.microbatches for size in rank]
    for step in range(STEPS):
        _at(model, step)
        for part, size in zip(torch.arange(len(batch["x"])).split(sizes), sizes, strict=True):
            own = {key: value[part] for key, value in batch.items()}
            (_loss(model, own) * (size / sum(sizes))).backward()
        steps.append({key: p.grad for key, p in model.named_parameters()})
    return steps


def _equal(rank: int, way: str, expected: dict[str, list[dict[str, Tensor | None]]]) -> None:
    parts = microbatches_of(_batch(), UNEVEN, rank)
    for name, steps in expected.items():
        for recompute in (True, False):
            model = _made(name, way)
            executor = make_executor(model, UNEVEN.fractions, recompute)
            for step, gradients in enumerate(steps):
                sharded_step(executor, _at(model, step), _loss, parts)
                error = relative_error(full_gradients(model), gradients)
                assert error < 1e-12, (name, recompute, step, error)
                assert_idle(executor)
            executor.hooks.uninstall()


@pytest.mark.filterwarnings("ignore:training_step changes 'blocks")
@pytest.mark.parametrize("way", ["", "enters", "twice", "neighbour", "list"])
def test_what_a_unit_stores_on_its_modules_has_the_gradients_of_one_device(way: str) -> None:
    names = ("list",) if way == "list" else SOME if way else TAKEN
    run_ranks(UNEVEN.world_size, _equal, way, {name: _one_device(name, way) for name in names})


class Turning(Block):
    """Stores a loss without its graph at first."""

    step = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.balance = y.square().mean() if self.step > 1 else y.square().mean().detach()
        return y


def _equal_later(rank: int, expected: list[dict[str, Tensor | None]]) -> None:
    parts = microbatches_of(_batch(), UNEVEN, rank)
    torch.manual_seed(5)
    model = Model(lambda block: block.balance, "", Turning).double()
    executor = make_executor(model, UNEVEN.fractions, True)
    for step, gradients in enumerate(expected):
        sharded_step(executor, _at(model, step), _loss, parts)
        assert relative_error(full_gradients(model), gradients) < 1e-12, step
    executor.hooks.uninstall()


def test_a_loss_that_had_no_graph_at_first_counts_as_soon_as_it_has_one() -> None:
    torch.manual_seed(5)
    model = Model(lambda block: block.balance, "", Turning).double()
    run_ranks(UNEVEN.world_size, _equal_later, _steps_of(model))
