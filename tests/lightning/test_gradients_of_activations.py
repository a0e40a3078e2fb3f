"""Gradients of activations, and code that changes them, against one device."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from common import Net, assert_same_tensors, loader, trainer, values_of
from lightning.pytorch import Trainer
from plans import QUIET
from torch import Tensor, nn
from warm_ranks import in_ranks

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.common.errors import RemoteRankError, UnitUseError

_TOLERANCE = 1e-5
_LIMIT = 2e-3
"""Hooks clip gradients to it, which one device divides by the batches between updates."""

# what code in the backward sees; not on the module, whose containers microbatches share
_seen: list[tuple[int, str, Tensor]] = []


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-_LIMIT, _LIMIT)


class _Activations(Net):
    """``behind`` handles the output of each block, and ``at_end`` all of them."""

    def __init__(self) -> None:
        super().__init__("sgd")

    def see(self, name: str, gradient: Tensor) -> Tensor:
        _seen.append((self.global_step, name, gradient.detach().clone()))
        return gradient.clamp(-_LIMIT, _LIMIT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        hidden = []
        for index, block in enumerate(self.blocks):
            x = self.behind(block(x), f"x{index}")
            hidden.append(x)
        self.at_end(hidden)
        return self.outputs(x).sum(1, keepdim=True)

    def behind(self, x: Tensor, name: str) -> Tensor:
        return x

    def at_end(self, hidden: list[Tensor]) -> None:
        pass


class _Hooks(_Activations):
    def behind(self, x: Tensor, name: str) -> Tensor:
        x.register_hook(partial(self.see, name))
        return x


class _HooksOfNodes(_Activations):
    def behind(self, x: Tensor, name: str) -> Tensor:
        assert x.grad_fn is not None
        x.grad_fn.register_prehook(lambda gradients: (self.see(name, gradients[0]),))
        return x


class _HooksOfTaken(_Activations):
    """A hook of a tensor in a block that the loss uses, too."""

    def setup(self, stage: str) -> None:
        self.blocks[1].up.register_forward_hook(self.take)

    def take(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self.see, "up"))
        self.taken = output

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.taken.square().mean()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.scores(x).softmax(-1)
        return x * weights, weights


class _AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = _Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)[0]


class _HooksOfAttention(_Activations):
    """Hooks, late, of what a module returns beside what it has computed with it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_AttentionBlock() for _ in range(3))

    def setup(self, stage: str) -> None:
        self.blocks[1].attention.register_forward_hook(self.take)

    def take(self, module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        self.weights = output[1]

    def at_end(self, hidden: list[Tensor]) -> None:
        if self.weights.requires_grad:
            self.weights.register_hook(partial(self.see, "weights"))


class _StoresGradients(_Activations):
    """Grad-CAM of a layer in a block."""

    def setup(self, stage: str) -> None:
        self.blocks[1].up.register_forward_hook(self.take)
        self.blocks[1].up.register_full_backward_hook(self.take_gradient)

    def take(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.activation = output.detach()

    def take_gradient(self, module: nn.Module, inputs: Any, outputs: tuple[Tensor]) -> None:
        self.gradient = outputs[0].detach().clone()

    def on_after_backward(self) -> None:
        self.see("map", self.activation * self.gradient)


class _ListsGradients(_StoresGradients):
    """The same for several microbatches, whose backwards come in another order."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.gradients: list[Tensor] = []
        return super().training_step(batch, batch_idx)

    def take_gradient(self, module: nn.Module, inputs: Any, outputs: tuple[Tensor]) -> None:
        self.gradients.append(outputs[0].detach().clone())

    def on_after_backward(self) -> None:
        self.see("map", self.activation * torch.cat(self.gradients[::-1]))


class _ResidualsOutside(_Activations):
    """Pre-norm layers whose residual is the model's code."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for index, block in enumerate(self.blocks):
            x = self.behind(x, f"x{index}")
            x = x + torch.tanh(block(nn.functional.layer_norm(x, (6,))))
        return self.outputs(x).sum(1, keepdim=True)


class _HooksOfResiduals(_ResidualsOutside):
    def behind(self, x: Tensor, name: str) -> Tensor:
        if x.requires_grad:
            x.register_hook(partial(self.see, name))
        return x


class _ClipsResiduals(_ResidualsOutside):
    def behind(self, x: Tensor, name: str) -> Tensor:
        return _Clip.apply(x)


class _HookOfLeaf(_Activations):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x).detach().requires_grad_()
        if torch.is_grad_enabled():
            x.register_hook(partial(self.see, "x"))
        y = x
        for block in self.blocks:
            y = block(y)
        return self.outputs(x + y).sum(1, keepdim=True)


class _Manual(_Hooks):
    """Losses behind every block, whose backward the step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def at_end(self, hidden: list[Tensor]) -> None:
        self.hidden = hidden

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch) + sum(each.square().mean() for each in self.hidden)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class _ManualStores(_Manual):
    """A hook stores a gradient, which the step finds behind its backward."""

    def behind(self, x: Tensor, name: str) -> Tensor:
        x.register_hook(self.take)
        return x

    def take(self, gradient: Tensor) -> None:
        self.gradient = gradient.detach().clone()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.see("x0", self.gradient)


_EQUAL = {
    "several batches per update": (_Hooks, {"accumulate_grad_batches": 3}),
    "hooks of nodes": (_HooksOfNodes, {}),
    "hooks of what leaves a unit": (_HooksOfTaken, {}),
    "gradients that hooks store": (_StoresGradients, {}),
    "gradients that hooks append to a list": (_ListsGradients, {}),
    "late hooks of what leaves a unit": (_HooksOfAttention, {}),
    "hooks of residuals": (_HooksOfResiduals, {}),
    "manual optimization": (_Manual, {}),
    "manual optimization with a gradient that a hook stores": (_ManualStores, {}),
    "a hook of what enters a unit": (_HookOfLeaf, {}),
}


def _fit(plan: str | None, kind: type[Net], options: dict[str, Any], recompute: bool = True) -> Any:
    _seen.clear()
    torch.manual_seed(2)
    module = kind()
    ready = trainer(plan, {"recompute": recompute} if plan else None, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ready.fit(module, loader(24))
    return values_of(module), [*_seen], [str(each.message) for each in said]


def _rows(seen: list[tuple[int, str, Tensor]]) -> dict[tuple[int, str], list[Tensor]]:
    found: dict[tuple[int, str], list[Tensor]] = {}
    for step, name, gradient in seen:
        found.setdefault((step, name), []).extend(gradient)
    return found


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("case", _EQUAL)
def test_gradients_of_activations_are_those_of_one_device(case, recompute):
    kind, options = _EQUAL[case]
    wanted, wanted_seen, _ = _fit(None, kind, options)
    # one microbatch per rank: hooks store, and the code calls its backwards
    plan = "whole" if kind in (_StoresGradients, _Manual, _ManualStores) else "3:1"
    ranks = in_ranks(2, _fit, plan, kind, options, recompute)
    for values, _, _ in ranks:
        assert_same_tensors(values, wanted, _TOLERANCE)
    found = _rows([each for _, seen, _ in ranks for each in seen])
    expected = _rows(wanted_seen)
    assert found.keys() == expected.keys() and expected
    for key, rows in expected.items():
        ours, theirs = torch.stack(found[key]).flatten(1), torch.stack(rows).flatten(1)
        assert ours.shape == theirs.shape, key
        # samples of a batch lie on the ranks in an order that a plan chooses
        nearest = torch.cdist(theirs, ours, compute_mode="donot_use_mm_for_euclid_dist").min(1)
        assert nearest.values.max() < 1e-6 * max(1.0, theirs.abs().max()), key
    assert any(each.abs().max() > _LIMIT for rows in expected.values() for each in rows)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_function_that_clips_residuals_sees_their_whole_gradient(recompute):
    wanted, _, _ = _fit(None, _ClipsResiduals, {})
    for values, _, _ in in_ranks(2, _fit, "3:1", _ClipsResiduals, {}, recompute):
        assert_same_tensors(values, wanted, _TOLERANCE)


def _measured() -> bool:
    _seen.clear()
    torch.manual_seed(2)
    strategy = CephaloStrategy(
        global_batch_size=4, planner=Planner(single_microbatch=True, verbose=False)
    )
    ready = Trainer(accelerator="cpu", devices=2, strategy=strategy, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ready.fit(_StoresGradients(), loader(16), loader(8))
    return bool(_seen)


def test_a_hook_may_store_a_gradient_where_a_plan_is_measured_for_one_microbatch():
    assert in_ranks(2, _measured) == [True, True]


def _refused(recompute: bool) -> tuple[str, bool]:
    try:
        _fit("3:1", _StoresGradients, {}, recompute)
    except (UnitUseError, RemoteRankError) as error:
        return str(error), bool(_seen)
    return "", True


@pytest.mark.parametrize("recompute", [True, False])
def test_a_gradient_that_a_hook_stores_is_refused_on_all_ranks_with_several_microbatches(recompute):
    for message, has_trained in in_ranks(2, _refused, recompute):
        assert "A hook stores 'gradient'" in message and "self.gradients.append" in message
        assert not has_trained
