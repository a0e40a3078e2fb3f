"""Shards and optimizer state that move to other ranks in place, in the middle of training."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from test_placement import Parameters, shard
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cephalo.adapters.held_state import RowsOfState
from lightning_cephalo.adapters.optimizer import local_update
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.gathered import Residence
from lightning_cephalo.sharding.layout import Divider
from lightning_cephalo.sharding.placement import as_dtensor, local_part, own_part, rows_of, set_rows

SHARES = [(0.5, 0.5, 0.0), (0.9, 0.0, 0.1), (0.0, 1.0, 0.0), (0.2, 0.3, 0.5)]

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
}


class Net(Parameters):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(6, 2), requires_grad=False)
        self.flags = nn.Parameter(torch.arange(5) % 2 == 0, requires_grad=False)


def give_gradients(single, module, seed: int) -> None:
    torch.manual_seed(seed)
    for plain, face in zip(single.parameters(), module.parameters(), strict=True):
        if plain.requires_grad:
            plain.grad = torch.randn_like(plain)
            face.grad = as_dtensor(own_part(plain.grad, face).clone(), face._spec)


def move(units, shares, optimizers, **others) -> None:
    state = RowsOfState(optimizers, **others)
    flats = [flat for unit in units for flat in unit.flats]
    state.check(flats, ControlGroup(dist.group.WORLD))
    divider = Divider(shares)
    for flat in flats:
        flat.change_layout(divider, state.of(flat))


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def _moves(rank, name):
    single, module = Net(), Net()
    units = shard(module, SHARES[0])
    plain, optimizer = (
        OPTIMIZERS[name]([p for p in m.parameters() if p.requires_grad]) for m in (single, module)
    )
    averages = [as_dtensor(local_part(p).detach().clone(), p._spec) for p in module.parameters()]
    pairs = list(zip(averages, module.parameters(), strict=True))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    states: list = []
    for step in range(8):
        give_gradients(single, module, seed=step)
        plain.step()
        with local_update(optimizer):
            optimizer.step()
        for average, parameter in pairs:
            average.copy_(parameter.detach())
        if step % 2:
            states = [dict(optimizer.state[p]) for p in held]
            expected = [whole(average) for average in averages]
            shares = SHARES[(step // 2 + 1) % len(SHARES)]
            move(units, shares, [optimizer], averages=[pairs])
            assert all(p.grad is None for p in held if p.ndim)
            now = [dict(optimizer.state[p]) for p in held]
            assert [{k: id(v) for k, v in s.items()} for s in now] == [
                {k: id(v) for k, v in s.items()} for s in states
            ]
            for parameter in (p for p in module.parameters() if p.ndim):
                rows = rows_of(parameter).rows
                assert len(local_part(parameter)) == rows[rank][1] - rows[rank][0]
                if shares[rank] in (0.0, 1.0):
                    assert len(local_part(parameter)) == shares[rank] * len(parameter)
            for average, wanted in zip(averages, expected, strict=True):
                assert torch.equal(whole(average), wanted)
    found = dict(module.named_parameters())
    for key, wanted in single.named_parameters():
        assert torch.equal(found[key].full_tensor().detach(), wanted), key
        for entry, value in plain.state.get(wanted, {}).items():
            assert torch.equal(whole(optimizer.state[found[key]][entry]), value), (key, entry)
    # the same objects all the time, in groups and in modules
    assert all(a is b for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True))
    assert {id(p) for p in held} == {id(p) for p in module.parameters() if p.requires_grad}


def _move_all(rank):
    for name in OPTIMIZERS:
        _moves(rank, name)


def test_parameters_and_state_are_bit_for_bit_those_of_one_device_wherever_they_move():
    run_ranks(3, _move_all)


def _is_used_between_moves(rank):
    """Memory that a unit has used before is cut by the new fractions."""
    single, module = Net(), Net()
    units = shard(module, SHARES[0])
    for residence in (Residence.POOLED, Residence.OWN):
        for shares in SHARES:
            move(units, shares, [])
            for unit in units:
                unit.choose_residence(residence)
                unit.wait_gather()
                unit.arm()
                pairs = zip(unit.named_sharded(), unit.parameter_pairs(), strict=True)
                for (name, _), (_, gathered) in pairs:
                    assert torch.equal(gathered, single.get_parameter(name)), (name, shares)
                    if gathered.requires_grad:
                        gathered.grad.add_(torch.arange(gathered.numel()).view_as(gathered))
                used = unit.used()
                unit.free()
                unit.start_reduce(0.5)
                unit.wait_reduce()
                unit.publish(used)
                for name, parameter in unit.named_sharded():
                    if parameter.requires_grad:
                        wanted = torch.arange(float(parameter.numel())).view(parameter.shape)
                        assert torch.equal(whole(parameter.grad), 1.5 * wanted), (name, shares)
                        parameter.grad = None
                unit.drop_gradients()


def test_units_are_gathered_and_reduced_by_the_fractions_of_now():
    run_ranks(3, _is_used_between_moves)


def _keeps_gradients(rank):
    module, single = Net(), Net()
    units = shard(module, (0.5, 0.5))
    give_gradients(single, module, seed=3)
    single.cube.grad = module.cube.grad = None
    move(units, (0.1, 0.9), [], with_gradients=[flat for unit in units for flat in unit.flats])
    for (name, parameter), wanted in zip(
        module.named_parameters(), single.parameters(), strict=True
    ):
        if wanted.grad is None or not wanted.requires_grad:
            assert parameter.grad is None or not parameter.requires_grad, name
        elif parameter.ndim:
            assert torch.equal(parameter.grad.full_tensor(), wanted.grad), name


def _refuses(rank):
    module = Net()
    units = shard(module, (0.5, 0.5))
    optimizer = torch.optim.SGD([module.matrix], lr=0.1)
    before = local_part(module.matrix).clone()
    optimizer.state[module.matrix]["sketch"] = torch.zeros(7)
    with pytest.raises(UnsupportedError, match=r"state 0\['sketch'\] has the shape \(7,\)"):
        move(units, (0.1, 0.9), [optimizer])
    optimizer.state.clear()
    if rank:
        optimizer.state[module.matrix]["momentum_buffer"] = torch.zeros_like(module.matrix)
    with pytest.raises(UnsupportedError, match="Rank 1 holds other optimizer state than rank 0"):
        move(units, (0.1, 0.9), [optimizer])
    if not rank:
        optimizer.state[module.matrix]["momentum_buffer"] = torch.zeros(5, 3)
    with pytest.raises(UnsupportedError, match="momentum_buffer"):
        move(units, (0.1, 0.9), [optimizer])
    assert torch.equal(local_part(module.matrix), before)


def _gets_rows(rank):
    module = Parameters()
    shard(module, (0.5, 0.5))
    parameter, values = module.matrix, module.matrix.full_tensor().detach()
    first, end = ((0, 1), (1, 5))[rank]
    placement = type(rows_of(parameter))([(0, 1), (1, 5)])
    set_rows(parameter, values[first:end].clone(), placement)
    assert rows_of(parameter) == placement and rows_of(parameter.detach()) == placement
    assert torch.equal(parameter.full_tensor().detach(), values)
    assert torch.equal((parameter * 2).full_tensor().detach(), values * 2)
    assert local_part(torch.zeros_like(parameter)).shape == (end - first, 3)
    parameter.grad = torch.ones_like(parameter)
    assert local_part(parameter.grad).shape == (end - first, 3)


CASES = {
    "gradients that move too are kept": _keeps_gradients,
    "state that cannot move is named on every rank before anything moves": _refuses,
    "a DTensor whose rows are set computes with them (private attributes of torch)": _gets_rows,
}


def _cases(rank):
    failed = {}
    for name, case in CASES.items():
        try:
            case(rank)
        except AssertionError:
            failed[name] = traceback.format_exc()
        dist.barrier()
    return failed


def test_moves_keep_gradients_refuse_by_name_and_set_rows():
    assert run_ranks(2, _cases) == [{}, {}]
