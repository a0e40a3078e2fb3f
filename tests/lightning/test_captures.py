"""Hooks that a step registers itself take tensors out of units, as those of transformers do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from common import Block, Net, assert_same_tensors, by_plan, loader, trainer, values_of
from torch import Tensor, nn

from lightning_cephalo.common.errors import RemoteRankError, UnitUseError


class Routes(Net):
    """Registers its hooks in its first step, and remembers that."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.has_hooks = False
        self.taken: list[Tensor] = []

    def take(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.taken.append(output)

    def loss(self, batch: Any) -> Tensor:
        if not self.has_hooks:
            for block in self.blocks:
                assert isinstance(block, Block)
                block.up.register_forward_hook(self.take)
            self.has_hooks = True
        self.taken = []
        loss = super().loss(batch)
        return loss + sum(value.square().mean() for value in self.taken)


def fit(plan: str | None) -> Any:
    model = Routes()
    # a given plan: the first step's loss is compared with that of its parts, which leaves no trace
    trainer(plan, max_steps=3).fit(model, loader(), loader(8))
    return model.losses, values_of(model)


def test_their_gradients_are_those_of_one_device_though_the_step_has_run_before():
    wanted, values = by_plan(None, fit)
    losses, found = by_plan("3:1", fit)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same_tensors(found, values, 1e-5)


class Hints(Net):
    """A student learns features of a frozen teacher, which hooks of the constructor take out."""

    def __init__(self, assigns: bool) -> None:
        super().__init__("sgd")
        self.assigns = assigns
        self.features: dict[str, Tensor] = {}
        self.teacher = nn.ModuleList(Block(6) for _ in range(2)).requires_grad_(False)
        self.teacher[1].register_forward_hook(partial(self.take, "teacher"))
        self.blocks[1].register_forward_hook(partial(self.take, "student"))

    def take(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.assigns:
            self.features = {**self.features, name: output}
        else:
            self.features[name] = output

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        x = self.inputs(batch[0]).detach()
        for block in self.teacher:
            x = block(x)
        return loss + nn.functional.mse_loss(self.features["student"], self.features["teacher"])


def fit_hints(plan: str | None, assigns: bool) -> Any:
    model = Hints(assigns)
    try:
        trainer(plan, max_steps=3).fit(model, loader(), loader(8))
    except (UnitUseError, RemoteRankError) as error:
        return str(error)
    return model.losses, values_of(model)


def test_hooks_of_the_constructor_give_features_to_the_loss_by_assignment():
    wanted, values = by_plan(None, fit_hints, True)
    losses, found = by_plan("3:1", fit_hints, True)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same_tensors(found, values, 1e-5)
    assert "self.features = {**self.features, name: output}" in by_plan("3:1", fit_hints, False)
