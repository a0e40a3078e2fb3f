"""Operators on sharded tensors give what they give for whole ones, or are refused by name."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from test_placement import Parameters, shard
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.sharding import transfers
from lightning_cephalo.sharding.owners import on_owner
from lightning_cephalo.sharding.placement import (
    Copies,
    Rows,
    RowsView,
    as_dtensor,
    local_part,
    row_spec,
)
from lightning_cephalo.sharding.same_values import cut_gradients

FRACTIONS = [(0.75, 0.25), (0.0, 0.3, 0.7)]
# the rows of each pair are cut at different places
PAIRS = [("matrix", "twin"), ("vector", "vector"), ("single", "single"), ("scale", "scale")]

READS = {
    "mean": lambda p, q: p.mean(),
    "abs max": lambda p, q: p.abs().max(),
    "mean of squares": lambda p, q: (p**2).mean(),
    "std": lambda p, q: p.std(correction=0),
    "var": lambda p, q: p.var(correction=0),
    "mean of large halves": lambda p, q: (p.abs() + 3e4).half().mean(),
    "sum": lambda p, q: p.sum(),
    "sum of rows": lambda p, q: p.sum(0),
    "min": lambda p, q: p.min(),
    "norms": lambda p, q: torch.stack([p.norm(order) for order in (0, 1, 2, -1, float("inf"))]),
    "distance": lambda p, q: (p - q).abs().mean(),
    "nan": lambda p, q: p.isnan().any(),
    "all": lambda p, q: bool((p > -9).all().item()),
    "counts": lambda p, q: (p > 0).sum(),
    "matrix product": lambda p, q: p.t() @ q,
    "vector": lambda p, q: nn.utils.parameters_to_vector([p, q]),
    "view": lambda p, q: p.view(-1)[: p.numel() // 2].mean(),
    "rows one by one": lambda p, q: [row.sum() for row in p] if p.ndim else p,
    "masked": lambda p, q: p[p > 0],
    "item": lambda p, q: p.sum().item(),
    "arrays": lambda p, q: torch.from_numpy(p.detach().numpy()[..., None] + 1),
    "lists": lambda p, q: [p.tolist(), p.reshape(-1).tolist()],
    "histogram": lambda p, q: torch.histc(p, 4),
    "quantile": lambda p, q: p.quantile(0.3),
    "softmax": lambda p, q: p.softmax(0),
    "foreach norm": lambda p, q: torch.stack(torch._foreach_norm([p, q])),
    "foreach norms": lambda p, q: [
        torch._foreach_norm([p, q.detach() * 2], order) for order in (0, 1, 2, float("inf"), -1)
    ],
    "norms of halves": lambda p, q: torch._foreach_norm([p.bfloat16(), q.bfloat16()]),
    "norms of integers": lambda p, q: torch._foreach_norm([p.long(), q.long()]),
    "norms in double": lambda p, q: torch._foreach_norm([p, q], 2, dtype=torch.float64),
    "norms with a whole one": lambda p, q: torch._foreach_norm([p, torch.ones(3)]),
    "total norm": lambda p, q: nn.utils.get_total_norm([p, q]),
    "unit length": lambda p, q: p / p.norm(),
    "with a whole one": lambda p, q: p + torch.ones(p.shape),
    "broadcast": lambda p, q: p * torch.arange(1, 1 + p.shape[-1]) if p.ndim else p,
    "lerp": lambda p, q: torch.zeros(p.shape).lerp(p, 0.5),
    "where": lambda p, q: torch.where(p > q, p, q * 2),
    "equal": lambda p, q: (torch.equal(p, q), torch.allclose(p, p.clone())),
    "double": lambda p, q: p.double().mean(),
    "pickle": lambda p, q: pickle.loads(pickle.dumps(p.detach())),
}
WRITES = {
    "copy": lambda p, q: p.copy_(torch.ones(p.shape)),
    "add": lambda p, q: p.add_(torch.arange(float(p.numel())).view(p.shape)),
    "lerp": lambda p, q: p.lerp_(q, 0.3),
    "clamp": lambda p, q: p.clamp_(-0.1, 0.1),
    "noise": lambda p, q: p.add_(torch.randn_like(p)),
    "foreach": lambda p, q: torch._foreach_lerp_([p, q], [torch.ones(p.shape), q * 2], 0.5),
    "out": lambda p, q: torch.add(p, q, out=p.data),
    "by columns": lambda p, q: p.div_(p.norm(dim=0, keepdim=True)),
    "by a view": lambda p, q: p.mul_(p.view(p.shape).detach()),
}
REFUSED = {
    "row": lambda p: p.data[0].fill_(3.0),
    "columns": lambda p: p.data[..., 0].mul_(torch.ones(len(p)) * 2),
    "data of a row": lambda p: p[0].data.fill_(3.0),
    "data of a view": lambda p: p.view(-1).data.mul_(3.0),
    "detached view": lambda p: p.t().detach().add_(1.0),
    "other type": lambda p: p.data.view(torch.int32).bitwise_and_(-4096),
    "part of a view": lambda p: p.data.view(-1)[1:3].mul_(7.0),
    "foreach of views": lambda p: torch._foreach_mul_([p.data, p.data[0]], 0.5),
    "out": lambda p: torch.add(p[0], 1.0, out=p.data[0]),
    "item": lambda p: p.data.__setitem__(0, 5.0),
    "mask": lambda p: p.data.__setitem__(p > 0, 5.0),
    "random": lambda p: p.normal_(),
    "sorted": lambda p: torch.sort(p, out=(p.data, torch.empty(p.shape, dtype=torch.long))),
    "with another": lambda p: torch._fused_sgd_(
        *([p.data], [p.data], [torch.zeros(p.shape)]),
        **{"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0},
        **{"nesterov": False, "maximize": False, "is_first_step": False},
    ),
}


def _outcome(function, p, q, written):
    torch.manual_seed(7)
    try:
        found = function(p, q)
    except UnsupportedError:
        raise
    except Exception as error:
        return type(error)
    values = [p.detach(), q.detach()] if written else found
    return torch.utils._pytree.tree_map_only(torch.Tensor, _whole, values)


def _whole(value):
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return (value.full_tensor() if isinstance(value, RowsView) else value).detach().clone()


def _all_alike(rank, fractions):
    single, module = Parameters(), Parameters()
    shard(module, fractions)
    before = {name: local_part(face).clone() for name, face in module.named_parameters()}
    failed = []
    for written, table in ((False, READS), (True, WRITES)):
        for what, function in table.items():
            for names in PAIRS:
                faces = [getattr(module, name) for name in names]
                plains = [nn.Parameter(getattr(single, name).detach().clone()) for name in names]
                if names[0] == names[1]:
                    plains[1] = plains[0]
                with torch.set_grad_enabled(not written):
                    wanted = _outcome(function, *plains, written)
                    found = _outcome(function, *faces, written)
                for name in names:
                    local_part(getattr(module, name)).copy_(before[name])
                try:
                    if isinstance(wanted, type):
                        assert isinstance(found, type), f"{found}, not {wanted}"
                    else:
                        torch.testing.assert_close(found, wanted, equal_nan=True)
                except AssertionError as error:
                    failed.append(f"{what} of {names}: {error}")
    return failed


@pytest.mark.parametrize("fractions", FRACTIONS, ids=str)
def test_every_operator_gives_what_it_gives_for_whole_tensors_on_every_rank(fractions):
    for failed in run_ranks(len(fractions), _all_alike, fractions):
        assert not failed, "\n".join(failed)


def _averages_every_step(rank):
    """What an average in rows costs, and what it and its results are."""
    module = Parameters()
    shard(module, (0.0, 0.3, 0.7))
    averages = [parameter.detach().clone() for parameter in module.parameters()]

    def forbidden(*args, **kwargs):
        raise AssertionError("it communicates")

    kept = dist.all_reduce, transfers.send, dist.batch_isend_irecv, dist.broadcast
    dist.all_reduce = transfers.send = dist.batch_isend_irecv = dist.broadcast = forbidden
    values = [parameter.detach() for parameter in module.parameters()]
    for average, value in zip(averages, values, strict=True):
        average.mul_(0.9).add_(value, alpha=0.1)
        # ranks compare a plain tensor that is written to a 0-d one, of which each has a copy
        factor = torch.tensor(0.1) if average.ndim else 0.1
        average.copy_(average * 0.9 + value * factor)
    torch._foreach_lerp_(averages, values, 0.5)
    faces = [one for one in averages if one.ndim]
    assert all(isinstance(one.placements[0], Rows) for one in faces)
    derived = [(one * 2).double().abs() for one in faces]
    sizes = []

    def counted(tensor, *options):
        sizes.append(tensor.numel())
        return kept[1](tensor, *options)

    transfers.send = counted
    torch._foreach_norm(averages)
    assert set(sizes) == {len(averages)}
    dist.all_reduce, transfers.send, dist.batch_isend_irecv, dist.broadcast = kept
    for one, face in zip(derived, faces, strict=True):
        assert one.placements == face.placements
        torch.testing.assert_close(one.full_tensor(), face.full_tensor().double().abs() * 2)
    for average, parameter in zip(averages, module.parameters(), strict=True):
        torch.testing.assert_close(average.full_tensor(), parameter.full_tensor().detach())


def test_an_average_in_rows_sends_nothing_and_norms_send_one_number_each():
    run_ranks(3, _averages_every_step)


def _waits_for_state(rank, mesh, rows):
    """Whoever reads state of a rank that holds all of it meets the others first."""
    told = []

    def meet(purpose, remedy):
        told.append(purpose)

    for placement in (Rows(rows, meet), Copies(meet)):
        like = as_dtensor(torch.zeros(0, 3), row_spec(mesh, placement, (5, 3), torch.float32))
        own = torch.ones(2) if rank == 1 else None
        state = on_owner(own, 1, like, torch.empty(2, device="meta"))
        assert torch.equal(state.full_tensor(), torch.ones(2))
        assert float(state.sum()) == 2.0
    assert [purpose.split()[1] for purpose in told] == ["full_tensor()", "sum"] * 2


def _refused(rank):
    module = Parameters()
    shard(module, (0.75, 0.25))
    parameter = module.matrix.detach()
    before = parameter.full_tensor()
    told = []
    torch.manual_seed(rank)
    ordered = torch.arange(15.0).view(5, 3)
    mirrored = ordered.flip(rank).contiguous() if rank else ordered
    scale = module.scale.detach()
    for write in (
        lambda: parameter.copy_(mirrored),
        lambda: scale.copy_(torch.tensor(float(rank))),
        lambda: scale.mul_(torch.tensor(1.0 + rank)),
        lambda: parameter.copy_(torch.randn(5, 3)),
        lambda: torch._foreach_add_([parameter], [torch.randn(5, 3)]),
    ):
        with pytest.raises(UnsupportedError) as refused:
            write()
        told.append(str(refused.value))
    assert all("differs between ranks" in one and "strategy.reduce" in one for one in told)
    assert torch.equal(parameter.full_tensor(), before)
    assert float(scale) == 1.5
    for what, write in REFUSED.items():
        for refuses in (write, torch.inference_mode()(write)):
            with torch.no_grad(), pytest.raises(UnsupportedError) as refused:
                refuses(module.matrix)
            assert "lightning_cephalo.writable_parameters" in str(refused.value), what
    for write in (lambda: scale.normal_(), lambda: scale.view(-1).mul_(2.0)):
        with pytest.raises(UnsupportedError, match="writable_parameters"):
            write()
    assert torch.equal(parameter.full_tensor(), before)
    scale.mul_(torch.tensor(2.0))
    assert float(scale) == float(module.scale.detach()) == 3.0
    view = parameter.view(-1)
    parameter.mul_(2)
    with pytest.raises(UnsupportedError, match="Take the view again"):
        view.sum()
    for array in (parameter.numpy(), parameter[0].numpy(), np.asarray(parameter)):
        with pytest.raises(ValueError, match="read-only"):
            array *= 2
    for one in (parameter, parameter[0]):
        with pytest.raises(UnsupportedError, match=r"from_dlpack\(\)"):
            torch.from_dlpack(one)
    mesh, rows = module.matrix.device_mesh, module.matrix.placements
    _waits_for_state(rank, mesh, rows[0].rows)
    matrix = module.matrix
    ((matrix.full_tensor() * 2.0).sum() + matrix.view(-1).sum()).backward()
    assert torch.equal(matrix.grad, torch.full((5, 3), 3.0))
    cut_gradients([matrix])
    assert matrix.grad.placements == rows
    assert torch.equal(matrix.grad.full_tensor(), torch.full((5, 3), 3.0))
    with pytest.raises(UnsupportedError, match=r"full_tensor\(\).*full_parameters\(\)"):
        matrix.redistribute(placements=[Replicate()])
    foreign = DTensor.from_local(local_part(parameter), mesh, rows)
    with pytest.raises(UnsupportedError, match=r"parameter\.clone\(\)"):
        parameter + foreign


def test_what_would_write_other_values_on_each_rank_is_refused_and_writes_nothing():
    run_ranks(2, _refused)
