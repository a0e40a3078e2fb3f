"""What a step on owners writes beside parameters: every rank knows it, and the owner keeps it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import make_executor
from launch import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cephalo.adapters.optimizer import local_update
from lightning_cephalo.adapters.owned_update import OwnedUpdate
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.owners import Owners
from lightning_cephalo.sharding.placement import local_part

SHARES = (0.25, 0.75)


class _Ledger(torch.optim.Optimizer):
    """Its state has lists and numbers, and its groups count updates of what is in them."""

    def __init__(self, params, evaluations=1, more=lambda p: 0):
        super().__init__([{"params": [p]} for p in params], {"updates": 0})
        self.evaluations, self.more, self.kept = evaluations, more, {}

    @torch.no_grad()
    def step(self, closure):
        for _ in range(self.evaluations):
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                group["updates"] += 1
                entries = self.state[p]
                if not entries:
                    entries.update(sides=[torch.zeros_like(p), torch.zeros(2)], count=0, size=None)
                entries["sides"][0] += p.grad
                entries["count"] += 1
                entries["more"] = self.more(p)
                entries["size"] = p.grad.norm()
                p.data = p.data - entries["sides"][0] / entries["size"]
                assert self.kept.setdefault(id(p), entries["sides"][0]) is entries["sides"][0]
        return loss


class _Counting(ControlGroup):
    """Counts the objects that it gathers."""

    gathers = 0

    def gather(self, value):
        is_number = isinstance(value, (int, float, list))
        self.gathers += not is_number
        return super().gather(value)


def _train(parameters, optimizer, owned=None):
    evaluations = 0

    def closure():
        nonlocal evaluations
        evaluations += 1
        for index, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(10 * evaluations + index)
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                rows = parameter.placements[0].rows[dist.get_rank()]
                parameter.grad = torch.zeros_like(parameter)
                local_part(parameter.grad).copy_(gradient[slice(*rows)])
            else:
                parameter.grad = gradient
        return torch.tensor(1.0)

    for _ in range(2):
        if owned is None:
            optimizer.step(closure)
        else:
            with local_update(optimizer, owned):
                optimizer.step(closure)


def _model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def _written(optimizer):
    options = [{n: v for n, v in g.items() if n != "params"} for g in optimizer.param_groups]
    return copy.deepcopy((options, list(optimizer.state.values())))


def _trained_by_owner(rank):
    model = _model()
    make_executor(model, SHARES, recompute=False)
    parameters = list(model.parameters())
    control = _Counting(dist.group.WORLD)
    twice = _Ledger(parameters, evaluations=2)
    with pytest.raises(UnsupportedError, match="_Ledger evaluates its closure several times"):
        _train(parameters, twice, OwnedUpdate(twice, Owners(SHARES, rank), control))
    for kind, more in {"set": lambda p: {1}, "view of a parameter": lambda p: p.detach()}.items():
        keeps = _Ledger(parameters, more=more)
        with pytest.raises(UnsupportedError, match=f"_Ledger keeps a {kind} in its state"):
            _train(parameters, keeps, OwnedUpdate(keeps, Owners(SHARES, rank), control))
    optimizer = _Ledger(parameters)
    owned, control.gathers = OwnedUpdate(optimizer, Owners(SHARES, rank), control), 0
    _train(parameters, optimizer, owned)
    values = [parameter.full_tensor().detach() for parameter in parameters]
    held = sum(local_part(e["sides"][0]).numel() for e in optimizer.state.values())
    return _written(optimizer), values, held, control.gathers


def test_state_and_options_are_those_of_one_device_on_every_rank_and_lie_on_owners():
    model = _model()
    whole = _Ledger(model.parameters())
    _train(list(model.parameters()), whole)
    options, state = _written(whole)
    found = run_ranks(2, _trained_by_owner)
    assert sum(held for *_, held, _ in found) == sum(p.numel() for p in model.parameters())
    for (found_options, found_state), values, held, gathers in found:
        assert found_options == options and held > 0
        torch.testing.assert_close(found_state, state)
        torch.testing.assert_close(values, [p.detach() for p in model.parameters()])
        assert gathers == 2, "one for each step"
