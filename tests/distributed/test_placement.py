"""Rows: the DTensor face of unevenly sharded parameters, as optimizers and users treat it."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_cephalo.sharding.context import ShardingContext
from lightning_cephalo.sharding.discovery import find_units
from lightning_cephalo.sharding.layout import Divider
from lightning_cephalo.sharding.placement import (
    Rows,
    as_dtensor,
    default_mesh,
    local_part,
    row_spec,
)
from lightning_cephalo.sharding.unit import Unit

FRACTIONS = [(0.5, 0.5), (0.75, 0.25), (0.75, 0.25, 0.0), (0.0, 0.3, 0.7), (0.0, 1.0)]
SHAPES = {"matrix": (5, 3), "vector": (7,), "cube": (2, 3, 2), "twin": (5, 3), "single": (1, 4)}


class Parameters(nn.Module):
    """Two parameters of one shape, a vector, a cube and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.scale = nn.Parameter(torch.tensor(1.5))


def shard(module: nn.Module, fractions) -> list[Unit]:
    device = torch.device("cpu")
    groups = dist.new_group(), dist.new_group()
    context = ShardingContext(device, default_mesh("cpu"), *groups)
    divider = Divider(fractions)
    units = find_units(module, wanted=())
    return [Unit(members, divider, context) for members in units]


def give_gradients(sharded: nn.Module, single: nn.Module, seed: int) -> None:
    """The same random gradients on one device and in shards."""
    torch.manual_seed(seed)
    for (name, plain), (other, face) in zip(
        single.named_parameters(), sharded.named_parameters(), strict=True
    ):
        assert name == other
        plain.grad = torch.randn_like(plain) * 3
        placement = face.placements[0]
        rank = dist.get_rank()
        local = plain.grad.clone()
        if isinstance(placement, Rows):
            first, end = placement.rows[rank]
            local = local[first:end].clone()
        face.grad = as_dtensor(local, face._spec)


# -- what a parameter shows -------------------------------------------------------------------


def _shows(rank, fractions):
    single, module = Parameters(), Parameters()
    if rank:  # values of other ranks than the first do not count
        for parameter in module.parameters():
            parameter.data.fill_(float("nan"))
    shard(module, fractions)
    for (name, plain), (other, face) in zip(
        single.named_parameters(), module.named_parameters(), strict=True
    ):
        assert name == other
        assert isinstance(face, nn.Parameter) and isinstance(face, DTensor)
        assert face.shape == plain.shape and face.ndim == plain.ndim
        assert face.numel() == plain.numel() and face.stride() == plain.stride()
        assert torch.equal(face.full_tensor(), plain)
        zeros = torch.zeros_like(face)
        assert zeros.placements == face.placements
        assert local_part(zeros).shape == local_part(face).shape
        assert torch.equal(zeros.full_tensor(), torch.zeros_like(plain))
        if plain.ndim:
            first, end = face.placements[0].rows[rank]
            assert torch.equal(local_part(face), plain[first:end])
        else:
            assert face.placements == (Replicate(),)
    held = sum(local_part(face).numel() for face in module.parameters()) - 1
    total = sum(plain.numel() for plain in single.parameters()) - 1
    assert abs(held - fractions[rank] * total) <= 4
    if fractions[rank] == 0:
        assert held == 0


@pytest.mark.parametrize("fractions", FRACTIONS, ids=str)
def test_every_parameter_keeps_its_name_shape_and_values_whatever_the_shares(fractions):
    run_ranks(len(fractions), _shows, fractions)


def _confused(rank):
    mesh = default_mesh("cpu")
    layouts = [((0, 4), (4, 4)), ((0, 1), (1, 4)), ((0, 0), (0, 4)), ((0, 2), (2, 4))]
    whole = torch.arange(12.0).view(4, 3)
    faces = []
    for rows in layouts:
        first, end = rows[rank]
        spec = row_spec(mesh, Rows(rows), (4, 3), torch.float32)
        faces.append(as_dtensor(whole[first:end].clone(), spec))
    for _ in range(2):  # the second time from DTensor's caches
        for face, rows in zip(faces, layouts, strict=True):
            assert torch.equal(face.full_tensor(), whole)
            first, end = rows[rank]
            assert torch.equal(local_part(torch.zeros_like(face)), torch.zeros(end - first, 3))
            assert torch.equal(local_part(torch.zeros_like(face) + face), whole[first:end])
            assert float(face.square().sum()) == float(whole.square().sum())
    assert len({face.placements[0] for face in faces}) == len(layouts)
    assert len({hash(face._spec) for face in faces}) == len(layouts)


def test_parameters_of_one_shape_and_other_rows_are_not_taken_for_one_another():
    run_ranks(2, _confused)


def test_rows_equal_rows_alike_and_a_plain_shard_but_hash_apart():
    rows = Rows([(0, 3), (3, 4)])
    assert rows == Rows(((0, 3), (3, 4)))
    assert hash(rows) == hash(Rows([(0, 3), (3, 4)]))
    assert rows != Rows([(0, 2), (2, 4)])
    assert rows == Shard(0)  # DTensorSpec insists
    assert rows != Shard(1)
    assert rows != Replicate()
    assert rows.is_shard() and rows.is_shard(0) and not rows.is_shard(1)
    assert not rows.is_replicate() and not rows.is_partial()
    assert repr(rows) == "Rows([(0, 3), (3, 4)])"


# -- optimizers -------------------------------------------------------------------------------

# each with every optimizer, or with two
FEW = {
    (0.5, 0.5): ("adamw loop", "adamw fused"),
    (0.75, 0.25): ("adamw foreach", "sgd momentum"),
    (0.0, 0.3, 0.7): ("adamw loop", "sgd foreach"),
    (0.0, 1.0): ("adamw fused", "adamw foreach"),
}
OPTIMIZERS = {
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


def _optimizes(rank, fractions):
    for index, name in enumerate(FEW.get(fractions, OPTIMIZERS)):
        make = OPTIMIZERS[name]
        single, module = Parameters(), Parameters()
        shard(module, fractions)
        ours, theirs = make(module.parameters()), make(single.parameters())
        for step in range(2):  # the second finds the state of the first
            give_gradients(module, single, step)
            for foreach in (None, False, True) if index == step == 0 else ():
                norm = nn.utils.get_total_norm(
                    [p.grad for p in module.parameters()], foreach=foreach
                )
                torch.testing.assert_close(
                    norm,
                    nn.utils.get_total_norm([p.grad for p in single.parameters()]),
                )
            norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            expected = nn.utils.clip_grad_norm_(single.parameters(), 1.0)
            torch.testing.assert_close(norm, expected)
            nn.utils.clip_grad_value_(module.parameters(), 0.2)
            nn.utils.clip_grad_value_(single.parameters(), 0.2)
            ours.step()
            theirs.step()
        for face, plain in zip(module.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(face.full_tensor(), plain.detach(), msg=name)
            for key, value in ours.state[face].items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    assert type(value.placements[0]) is type(face.placements[0])
                    assert value.placements == face.placements
                    torch.testing.assert_close(value.full_tensor(), theirs.state[plain][key])


@pytest.mark.parametrize("fractions", FRACTIONS, ids=str)
def test_optimizers_and_clipping_do_what_they_do_on_one_device(fractions):
    run_ranks(len(fractions), _optimizes, fractions)


# -- copies -----------------------------------------------------------------------------------


def _copies(rank):
    module = Parameters()
    shard(module, (0.75, 0.25))
    for face in module.parameters():
        again = pickle.loads(pickle.dumps(face.placements))
        assert again == face.placements
        # torch 2.13 itself can neither pickle nor deep-copy a DTensor whose local part is a view
        twin = face.detach().clone()
        assert twin.placements == face.placements
        assert type(twin.placements[0]) is type(face.placements[0])
        assert torch.equal(local_part(twin), local_part(face))
        assert torch.equal(twin.full_tensor(), face.full_tensor())
        if local_part(face).numel():
            assert local_part(twin).data_ptr() != local_part(face).data_ptr()
    rows = Rows([(0, 3), (3, 4)])
    for twin in (pickle.loads(pickle.dumps(rows)), copy.deepcopy(rows), copy.copy(rows)):
        assert isinstance(twin, Rows) and twin.rows == rows.rows


def test_clones_of_a_parameter_and_pickles_of_its_placement_keep_its_rows():
    run_ranks(2, _copies)


# -- torch's private API ----------------------------------------------------------------------


def test_the_method_of_shard_that_rows_overrides_is_still_what_it_was():
    theirs = getattr(Shard, "_local_shard_size_and_offset", None)
    assert theirs is not None, "torch's Shard lost a method: look at how Rows must do it now"
    found = list(inspect.signature(theirs).parameters)
    assert found == ["self", "curr_local_size", "num_chunks", "rank"], "adapt Rows"


def _mesh_beside_cuda(rank):
    torch.cuda.is_available = lambda: True  # this process ends with the test
    before = len(dist.distributed_c10d._world.pg_names)
    mesh = default_mesh("cpu")
    assert len(dist.distributed_c10d._world.pg_names) == before
    assert mesh.get_group() is dist.group.WORLD and mesh.ndim == 1


def test_the_mesh_makes_no_group_of_its_own():
    """With gloo on a machine with CUDA ``init_device_mesh`` does, one for every model."""
    run_ranks(2, _mesh_beside_cuda)


class OddTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 3))
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)


def _aligned(rank):
    module = OddTable()
    single = copy.deepcopy(module)
    (unit,) = shard(module, (0.6, 0.4))
    unit.wait_gather()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, single.get_parameter(name))
        if name != "table":
            assert parameter.storage_offset() % 16 == 0
    unit.free()


def test_a_parameter_of_odd_size_leaves_the_others_aligned():
    run_ranks(2, _aligned)
