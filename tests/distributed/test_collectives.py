"""Gathers and reduces of unequal slices on gloo, zeros included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks

from lightning_cephalo.sharding.collectives import (
    all_gather_rows,
    communicates,
    gather_slices,
    reduce_slices,
)

SIZES = [
    (5,),
    (4, 4),
    (7, 2),
    (0, 9),
    (9, 0),
    (0, 0),
    (3, 0, 5),
    (0, 1, 0),
    (6, 3, 2, 0),
    (4, 1, 0, 3, 2),
]


def _offset(sizes, rank):
    return sum(sizes[:rank])


def _gather(rank, sizes):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        _gather_of(rank, sizes, dtype)


def _gather_of(rank, sizes, dtype):
    start = _offset(sizes, rank)
    expected = torch.arange(sum(sizes)).to(dtype)
    full = torch.full((sum(sizes),), 99).to(dtype)
    full[start : start + sizes[rank]] = expected[start : start + sizes[rank]]
    pending = gather_slices(full, sizes, dist.group.WORLD)
    pending.wait()
    pending.wait()  # waiting twice is harmless
    assert torch.equal(full, expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_gather_puts_every_slice_in_its_place(sizes):
    run_ranks(len(sizes), _gather, sizes)


def _reduce(rank, sizes):
    for sent in (torch.float32, torch.bfloat16):
        _reduce_in(rank, sizes, sent)


def _reduce_in(rank, sizes, sent):
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(sum(sizes), generator=generator).to(sent) for _ in sizes]
    start = _offset(sizes, rank)
    own = slice(start, start + sizes[rank])
    output = torch.full((sizes[rank],), 0.5)
    full = parts[rank].clone()
    pending = reduce_slices(full, sizes, dist.group.WORLD, output.copy_, output.dtype)
    assert torch.equal(output, torch.full_like(output, 0.5)), "written before it was waited for"
    pending.wait()
    pending.wait()
    total = parts[0].float()  # also of what has travelled in another dtype
    for part in parts[1:]:
        total += part  # the order of the ranks, hence bit-identical
    assert torch.equal(output, total[own])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_reduce_gives_the_sum_of_this_ranks_slice(sizes):
    run_ranks(len(sizes), _reduce, sizes)


def _both_under_way(rank):
    gathers, reduces = dist.new_group(), dist.new_group()
    sizes = (6, 0, 3)
    pending = []
    for step in range(4):
        full = torch.full((9,), float(rank))
        output = torch.empty(sizes[rank])
        reduce = reduce_slices(
            torch.full((9,), 1.0 + step), sizes, reduces, output.copy_, output.dtype
        )
        gather = gather_slices(full, sizes, gathers)
        pending.append((step, full, output, gather, reduce))
    for step, full, output, gather, reduce in reversed(pending):
        gather.wait()
        reduce.wait()
        assert full.tolist() == [0.0] * 6 + [2.0] * 3
        assert output.tolist() == [3.0 * (1 + step)] * sizes[rank]


def test_gathers_and_reduces_may_be_under_way_together_and_be_waited_for_in_any_order():
    run_ranks(3, _both_under_way)


def _in_a_part_of_the_ranks(rank):
    """Ranks of a group are not those of the job there."""
    group = dist.new_group([3, 1])  # torch sorts them
    if rank not in (1, 3):
        return
    own = (1, 3).index(rank)
    full = torch.full((3,), float(rank))
    gather_slices(full, (2, 1), group).wait()
    assert full.tolist() == [1.0, 1.0, 3.0]
    output, sent = torch.empty((2, 1)[own]), torch.full((3,), float(rank))
    reduce_slices(sent, (2, 1), group, output.copy_, output.dtype).wait()
    assert output.tolist() == [4.0] * (2, 1)[own]


def test_slices_travel_in_a_group_of_a_part_of_the_ranks():
    run_ranks(4, _in_a_part_of_the_ranks)


def _kept_slices(rank, sizes):
    """Slices that a caller cuts once serve all of its collectives."""
    full, summands = torch.empty(sum(sizes)), torch.empty(sum(sizes))
    slices, sent = full.split(list(sizes)), summands.split(list(sizes))
    for step in range(3):
        slices[rank].fill_(rank + step)
        summands.fill_(1.0 + step)
        output = torch.empty(sizes[rank])
        reduce = reduce_slices(
            summands, sizes, dist.group.WORLD, output.copy_, output.dtype, slices=sent
        )
        gather_slices(full, sizes, dist.group.WORLD, slices=slices).wait()
        reduce.wait()
        assert full.tolist() == [
            1.0 * owner + step for owner in range(len(sizes)) for _ in range(sizes[owner])
        ]
        assert output.tolist() == [len(sizes) * (1.0 + step)] * sizes[rank]


@pytest.mark.parametrize("sizes", [(4, 2), (3, 0, 5)], ids=str)
def test_slices_may_be_cut_once_for_many_collectives(sizes):
    run_ranks(len(sizes), _kept_slices, sizes)


def _rows(rank, sizes):
    for row_shape in ((), (3,), (2, 2), (0,)):
        _rows_of(rank, sizes, row_shape)


def _rows_of(rank, sizes, row_shape):
    expected = torch.arange(sum(sizes) * max(1, torch.Size(row_shape).numel())).float()
    expected = expected[: sum(sizes) * torch.Size(row_shape).numel()].view(sum(sizes), *row_shape)
    start = _offset(sizes, rank)
    local = expected[start : start + sizes[rank]]
    assert torch.equal(all_gather_rows(local, sizes, dist.group.WORLD), expected)


@pytest.mark.parametrize("sizes", [(3, 1), (0, 4), (0, 0), (2, 0, 1)], ids=str)
def test_rows_of_all_ranks_are_stacked(sizes):
    run_ranks(len(sizes), _rows, sizes)


def test_without_process_groups_every_tensor_counts_as_communicated():
    assert communicates(torch.empty(1, device="meta"), None)
