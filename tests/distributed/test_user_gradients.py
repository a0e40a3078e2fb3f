"""Gradients that training_step computes itself are those of one device, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from harness import full_gradients, make_executor, microbatches_of, relative_error
from launch import run_ranks
from torch import Tensor
from toys import UNEVEN, Base, assert_idle, make_batch

from lightning_cephalo import loss_over_batch
from lightning_cephalo.common.errors import RemoteRankError, UnitUseError
from lightning_cephalo.execution.step import MicrobatchCall

EXACT = 1e-6
Penalty = Callable[[Base, Tensor], Tensor]


def _at_input(model: Base, x: Tensor) -> Tensor:
    """Each sample's slope, as in a gradient penalty."""
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum(1).mean()


def _beside_units(model: Base, x: Tensor) -> Tensor:
    """A path beside the units would give a part of the slope."""
    score = model(x) * x.sum(1, keepdim=True)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return slope.square().sum(1).mean()


def _past_a_unit(model: Base, x: Tensor) -> Tensor:
    hidden = model.embed(x)
    after = hidden + model.blocks[0](hidden)
    (slope,) = torch.autograd.grad(after.sum(), hidden, create_graph=True)
    return slope.square().sum(1).mean()


def _by_backward(model: Base, x: Tensor) -> Tensor:
    model(x).sum().backward(create_graph=True)
    return model(x).mean()


def _by_torch_backward(model: Base, x: Tensor) -> Tensor:
    torch.autograd.backward([model(x).sum()])
    return model(x).mean()


REFUSED: tuple[Penalty, ...] = (
    _at_input,
    _beside_units,
    _past_a_unit,
    _by_backward,
    _by_torch_backward,
)


def _before_units(model: Base, x: Tensor) -> Tensor:
    hidden = torch.tanh(model.embed(x))
    (slope,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
    return slope.square().sum(1).mean() + model.head(model.through(hidden)).mean()


def _behind_units(model: Base, x: Tensor) -> Tensor:
    hidden = model.through(model.embed(x))
    (slope,) = torch.autograd.grad(torch.tanh(model.head(hidden)).sum(), hidden, create_graph=True)
    return slope.square().sum(1).mean() + hidden.mean()


def _of_all_rows(model: Base, x: Tensor) -> Tensor:
    """The function uses a parameter from which units' inputs were computed."""
    hidden = model.through(model.embed(x))
    return loss_over_batch(lambda rows: (rows @ model.embed.weight).square().mean(), hidden)


ALLOWED: tuple[Penalty, ...] = (_before_units, _behind_units, _of_all_rows)


def _calls(model: Base, penalty: Penalty, rank: int) -> list[MicrobatchCall]:
    parts = [part["x"].requires_grad_() for part in microbatches_of(make_batch(4), UNEVEN, rank)]
    return [_call(model, penalty, part) for part in parts]


def _call(model: Base, penalty: Penalty, x: Tensor) -> MicrobatchCall:
    weight = float(len(x))
    return MicrobatchCall(lambda: penalty(model, x), lambda loss: (loss, weight), samples=len(x))


def _refused(rank: int) -> None:
    for penalty in REFUSED:
        torch.manual_seed(3)
        model = Base()
        executor = make_executor(model, UNEVEN.fractions, rank == 0)
        calls = _calls(model, penalty, rank)
        # a graph that is kept goes as far as its unit is gathered, on the ranks that keep it
        kinds = (UnitUseError, RemoteRankError) if calls else RemoteRankError
        with pytest.raises(kinds, match="computes a gradient through a unit itself"):
            executor.forward(calls)
        assert_idle(executor)
        executor.hooks.uninstall()


def test_gradients_through_units_are_refused_by_name_on_all_ranks():
    run_ranks(UNEVEN.world_size, _refused)


def _same(rank: int, expected: list[dict[str, Tensor | None]]) -> None:
    cases = [(penalty, None) for penalty in ALLOWED] + [(penalty, ()) for penalty in REFUSED[:3]]
    for (penalty, names), gradients in zip(cases, expected, strict=True):
        torch.manual_seed(3)
        model = Base()
        # the way out that the refusal names: no units
        executor = make_executor(model, UNEVEN.fractions, True, wanted=names)
        for _ in range(2):
            model.zero_grad()
            executor.forward(_calls(model, penalty, rank))
            executor.backward()
            assert relative_error(full_gradients(model), gradients) < EXACT, penalty
        executor.hooks.uninstall()


def test_other_gradients_and_those_without_units_are_those_of_one_device():
    torch.manual_seed(3)
    start, expected = Base(), []
    for penalty in (*ALLOWED, *REFUSED[:3]):
        model = copy.deepcopy(start)
        loss: Tensor = penalty(model, make_batch(4)["x"].requires_grad_())
        loss.backward()
        expected.append({name: p.grad for name, p in model.named_parameters()})
    run_ranks(UNEVEN.world_size, _same, expected)
