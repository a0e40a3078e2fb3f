"""Gradients in hooks are those of one device, also between a forward and its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import Net, assert_same_tensors, by_plan, in_ranks, loader, trainer, values_of
from lightning.pytorch import Callback
from plans import PLANS
from torch import Tensor
from torch.distributed.tensor import DTensor

TOLERANCE = 1e-5


class _Gradients(Callback):
    """Reads every gradient in every hook of a step, as a whole tensor."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Tensor | None]]] = []

    def _see(self, hook: str, module: Net) -> None:
        found: dict[str, Tensor | None] = {}
        for name, parameter in module.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            found[name] = None if gradient is None else gradient.detach().clone()
        self.seen.append((hook, found))

    def on_train_batch_start(self, trainer, pl_module, *rest) -> None:
        self._see("on_train_batch_start", pl_module)

    def on_before_zero_grad(self, trainer, pl_module, *rest) -> None:
        self._see("on_before_zero_grad", pl_module)

    def on_before_backward(self, trainer, pl_module, *rest) -> None:
        self._see("on_before_backward", pl_module)

    def on_after_backward(self, trainer, pl_module) -> None:
        self._see("on_after_backward", pl_module)

    def on_before_optimizer_step(self, trainer, pl_module, *rest) -> None:
        self._see("on_before_optimizer_step", pl_module)

    def on_train_batch_end(self, trainer, pl_module, *rest) -> None:
        self._see("on_train_batch_end", pl_module)


class _ModuleZeroes(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad()


class _HookZeroes(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.zero_grad()


class _FillsWithZeros(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad(set_to_none=False)


class _Assigns(Net):
    """Halves what earlier steps have added up, by a gradient of its own."""

    def on_before_backward(self, loss: Tensor) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5


class _Scales(Net):
    def on_before_backward(self, loss: Tensor) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


KINDS = (Net, _ModuleZeroes, _HookZeroes, _FillsWithZeros, _Assigns, _Scales)


def _fit(plan: str | None, kind: type[Net], precision: str = "32-true"):
    gradients, model = _Gradients(), kind()
    options = {"precision": precision} if plan else {}
    fit = trainer(plan, accumulate_grad_batches=2, callbacks=[gradients], **options)
    fit.fit(model, loader(22), loader(8))
    return gradients.seen, values_of(model)


def _fits(plan: str | None, kinds: tuple[type[Net], ...]):
    return [_fit(plan, kind) for kind in kinds]


@pytest.mark.parametrize(
    ("plan", "kinds"), [pytest.param("3:1", KINDS, marks=pytest.mark.slow), ("no data", KINDS[:2])]
)
def test_gradients_in_every_hook_are_those_of_one_device_on_every_rank(plan, kinds):
    wanted = by_plan(None, _fits, kinds)
    for fits in in_ranks(len(PLANS[plan].ranks), _fits, plan, kinds):
        for kind, (seen, values), (wanted_seen, wanted_values) in zip(
            kinds, fits, wanted, strict=True
        ):
            _assert_same(seen, wanted_seen, TOLERANCE)
            assert_same_tensors(values, wanted_values, TOLERANCE)
            # the first step behind one that only adds up
            before = [found for hook, found in seen if hook == "on_before_backward"][1]
            assert before["gain"] is not None, kind


def test_gradients_of_earlier_steps_are_shown_in_full_precision():
    seen, _ = by_plan("3:1", _fit, Net, "bf16-true")
    wanted, _ = by_plan(None, _fit, Net)
    _assert_same(seen, wanted, 0.05)
    shown = [found["gain"] for hook, found in seen if hook == "on_before_backward"]
    assert shown[1].dtype == torch.float32


def _assert_same(seen, wanted, tolerance: float) -> None:
    assert [hook for hook, _ in seen] == [hook for hook, _ in wanted]
    for (hook, found), (_, expected) in zip(seen, wanted, strict=True):
        none = {name for name, value in expected.items() if value is None}
        assert {name for name, value in found.items() if value is None} == none, hook
        for name in expected.keys() - none:
            torch.testing.assert_close(
                found[name],
                expected[name],
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, where=f"{name} in {hook}": f"{where}: {text}",
            )
