"""Slices are copied into equal slots and out of them, and only where that adds little."""

import pytest
import torch

from lightning_cephalo.sharding.buffers import BufferPool
from lightning_cephalo.sharding.padding import Padding, Slots, slot_numel


@pytest.mark.parametrize(
    ("sizes", "slot"),
    [
        ((1000, 1010, 1000, 1005), 1024),
        ((7_084_800, 7_087_872), 7_087_872),
        ((1024, 1024), None),  # equal already
        ((3000, 1000), None),
        ((10, 9), None),  # a slot of 16 elements would be mostly padding
        ((0, 500), None),
    ],
)
def test_slots_are_aligned_and_hardly_larger_than_the_slices(sizes, slot):
    assert slot_numel(sizes) == slot


def test_nothing_is_padded_unless_the_plan_says_so():
    padding, full = Padding(), torch.zeros(2010)
    assert padding.slots(full, (1000, 1010)) is None
    padding.is_on = True
    assert padding.slots(full, (1000, 1010)).whole.numel() == 2 * 1024
    (sums,) = padding.slots(full, (1000, 1010), has_sum=True).more
    assert sums.numel() == 1024


def test_what_goes_into_slots_comes_out_again():
    sizes, pool = (5, 8, 6), BufferPool()
    full = torch.arange(19.0)
    slots = Slots(full, sizes, 8, pool, more=1)
    slots.whole.fill_(-1)
    slots.fill(full)
    assert slots.whole.tolist() == [
        *(0, 1, 2, 3, 4, -1, -1, -1),
        *(5, 6, 7, 8, 9, 10, 11, 12),
        *(13, 14, 15, 16, 17, 18, -1, -1),
    ]
    assert [extra.numel() for extra in slots.more] == [8]
    found = torch.zeros(19)
    version = found._version
    slots.empty_into(found)
    assert torch.equal(found, full)
    assert found._version == version  # graphs that hold it stay valid
    # the buffer is free for the next slices
    assert pool.held_bytes == 4 * 8 * 4
    Slots(full, sizes, 8, pool)
    assert pool.held_bytes == 4 * 8 * 4
