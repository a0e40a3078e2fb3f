"""What is reserved of the host suffices for what is taken, and is less than the double of it."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cephalo.accelerator import host_room
from lightning_cephalo.accelerator.host_room import HostRoom, aligned_bytes, taken_bytes
from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.plan import moving
from lightning_cephalo.plan.moving import most_taken


class _Pins:
    """Pins host memory, and counts pieces."""

    pins_host_memory = True

    def __init__(self) -> None:
        self.pieces: list[int] = []

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self.pieces.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


def _room(capacity_bytes: float) -> tuple[HostRoom, list[int]]:
    device: Any = _Pins()
    return HostRoom(device, capacity_bytes), device.pieces


def test_the_example_of_the_documentation_holds():
    assert doctest.testmod(host_room).failed == 0
    assert doctest.testmod(moving).failed == 0


@given(st.lists(st.lists(st.integers(0, 5000), max_size=4), min_size=1, max_size=20), st.randoms())
def test_what_is_reserved_suffices_in_any_order(pieces, order):
    needed = [sum(aligned_bytes(4 * numel) for numel in each) for each in pieces]
    taken = taken_bytes(needed, pins=True)
    assert sum(needed) <= taken < 2 * sum(needed) or not any(needed)
    room, allocated = _room(taken)
    room.reserve(needed)
    assert room.held_bytes == taken and all(size.bit_count() == 1 for size in allocated)
    left = [(owner, numel) for owner, each in enumerate(pieces) for numel in each if numel]
    order.shuffle(left)
    found = [room.take(numel, torch.float32, owner) for owner, numel in left]
    assert room.held_bytes == taken
    spans = sorted((part.data_ptr(), part.nbytes) for part in found)
    ends = [start + nbytes for start, nbytes in spans]
    assert all(end <= start for end, (start, _) in zip(ends, spans[1:], strict=False))
    if any(needed):
        short, allocated = _room(taken - 1)
        with pytest.raises(HostMemoryError, match="this rank may use"):
            short.reserve(needed)
        assert not allocated  # nothing is left half-taken


@given(
    st.integers(20_000, 10**6),
    st.lists(st.floats(0.01, 1.0), max_size=60),
    st.integers(1, 40),
)
def test_pieces_take_no_more_than_a_plan_counts_for_them(largest, parts, equal):
    needed = [*[largest] * equal, *(int(part * largest) for part in parts)]
    aligned = [aligned_bytes(each) for each in needed]
    share = most_taken(sum(aligned) / max(aligned))
    assert taken_bytes(needed, pins=True) <= share * sum(aligned) * (1 + 1e-12)


def test_a_plan_counts_little_more_for_many_units():
    shares = [most_taken(float(units)) for units in (1, 2, 8, 32, 96)]
    assert shares == sorted(shares, reverse=True) and shares[0] == 2.0
    assert shares[3] < 1.3 and shares[4] < 1.2


def test_units_of_equal_size_that_a_plan_may_use_fit():
    for units in range(2, 33):
        for numel in range(75_000, 325_000, 50_001):
            needed = [aligned_bytes(4 * numel)] * units
            room, _ = _room(2 * sum(needed))
            room.reserve(needed)
            held = room.held_bytes
            for owner in range(units):
                room.take(numel, torch.float32, owner)
            assert room.held_bytes == held


def test_what_was_not_reserved_is_taken_in_powers_of_two_or_refused():
    room, allocated = _room(2**20)
    assert room.take(2**16, torch.uint8, 0).nbytes == 2**16
    room.take(70_000, torch.uint8, 3)
    assert allocated == [2**16, 2**17]
    with pytest.raises(HostMemoryError, match="this rank may use"):
        room.take(2**19 + 1, torch.uint8, 0)
    assert room.held_bytes == 2**16 + 2**17
