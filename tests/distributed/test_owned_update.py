"""What a step on one rank writes beside parameters: every rank knows it, and the owner keeps it."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from harness import make_executor
from launch import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cephalo.adapters.optimizer import local_update
from lightning_cephalo.adapters.owned_update import OwnedUpdate
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.owners import Owners
from lightning_cephalo.sharding.placement import local_part

SHARES = (0.25, 0.75)


class _Ledger(torch.optim.Optimizer):
    """Its state belongs to no parameter, its options are new tensors, it evaluates twice a step."""

    def __init__(self, params):
        super().__init__(params, {"rate": torch.tensor(0.1), "first": 0.0})
        self.kept = self.made = None

    @torch.no_grad()
    def step(self, closure):
        group = self.param_groups[0]
        for evaluation in range(2):
            with torch.enable_grad():
                loss = closure()
            size = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            if not evaluation:
                group["first"] = float(loss)
                group["rate"] = 0.9 * group["rate"]
                self.state["all"]["calls"] = self.state["all"].get("calls", 0) + 1
            sizes = self.state["all"].setdefault("sizes", torch.zeros(2))
            sizes[evaluation] += size
            for p in group["params"]:
                p.sub_(p.grad, alpha=float(group["rate"] / size))
        self.state["last"] = torch.stack([size, size])[1:]
        self.kept, self.made = self.state["all"], group["rate"]
        return loss


def _gradient(shape, *place):
    generator = torch.Generator().manual_seed(sum(10**n * one for n, one in enumerate(place)))
    return torch.randn(shape, generator=generator)


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
            gradient = _gradient(parameter.shape, evaluations, index)
            if isinstance(parameter, DTensor):
                rows = parameter.placements[0].rows[dist.get_rank()]
                parameter.grad = torch.zeros_like(parameter)
                local_part(parameter.grad).copy_(gradient[slice(*rows)])
            else:
                parameter.grad = gradient
        return torch.tensor(1.0 + evaluations)

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
    group = optimizer.param_groups[0]
    options = {name: value for name, value in group.items() if name != "params"}
    return copy.deepcopy((options, dict(optimizer.state)))


def _trained_by_owner(rank):
    model = _model()
    make_executor(model, SHARES, recompute=False)
    parameters = list(model.parameters())
    optimizer = _Ledger(parameters)
    control = _Counting(dist.group.WORLD)
    owned = OwnedUpdate(optimizer, Owners(SHARES, rank, True), control, True)
    _train(parameters, optimizer, owned)
    kept = None
    if rank == 1:
        state, group = optimizer.state, optimizer.param_groups[0]
        kept = state["all"] is optimizer.kept and group["rate"] is optimizer.made
    values = [parameter.full_tensor().detach() for parameter in parameters]
    return _written(optimizer), values, kept, control.gathers


def test_state_of_no_parameter_and_new_options_are_those_of_one_device_on_every_rank():
    model = _model()
    whole = _Ledger(model.parameters())
    _train(list(model.parameters()), whole)
    wanted = _written(whole)
    assert wanted[0]["first"] == 4.0 and wanted[1]["all"]["calls"] == 2
    for rank, (found, values, kept, gathers) in enumerate(run_ranks(2, _trained_by_owner)):
        for one, other in zip(found, wanted, strict=True):
            assert one.keys() == other.keys(), rank
        torch.testing.assert_close(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1])
        torch.testing.assert_close(values, [p.detach() for p in model.parameters()])
        assert kept is (None if rank == 0 else True), "the owner keeps its own objects"
        assert gathers == 2, "one for each step"
