"""Boundaries in host memory change nothing but where the bytes are."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness import (
    Allocation,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
)
from launch import RankFailure, run_ranks
from torch import nn
from zoo import ZOO, build, hugging_face_loss

from lightning_cephalo.accelerator.cpu import Cpu
from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.emulation import MemoryTracker
from lightning_cephalo.execution.offload import HostArena, OffloadedTensor, powers_of_two

TWO = Allocation(((2, 1, 2), (1, 2)), (0.7, 0.3))
WIDTH = 64


@pytest.fixture
def llama_imported():
    build("llama", 1)


def host_memory(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class Device(Cpu):
    """A CPU for which the test gives host memory."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], pins: bool) -> None:
        super().__init__(torch.device("cpu"))
        self.allocate_host, self.pins_host_memory = allocate, pins


def make_arena(
    capacity_bytes: float = math.inf,
    allocate: Callable[[int], torch.Tensor] = host_memory,
    pins: bool = False,
) -> HostArena:
    return HostArena(Device(allocate, pins), capacity_bytes)


def _gradients(rank: int, name: str) -> list[int]:
    model, batch = build(name, 8)
    twin = copy.deepcopy(model)
    parts = microbatches_of(batch, TWO, rank)
    plain = make_executor(twin, TWO.fractions, recompute=True)
    offloading = make_executor(model, TWO.fractions, recompute=True)
    offloading.arena = make_arena()
    used = []
    for step in range(3):
        torch.manual_seed(step)
        expected = sharded_step(plain, twin, hugging_face_loss, parts)
        torch.manual_seed(step)
        assert sharded_step(offloading, model, hugging_face_loss, parts) == expected
        wanted = full_gradients(twin)
        for key, gradient in full_gradients(model).items():
            assert (gradient is None) == (wanted[key] is None), key
            assert gradient is None or torch.equal(gradient, wanted[key]), key
        used.append(offloading.arena._used_bytes)
    return used


@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_the_same_to_the_last_bit(name):
    build(name, 1)  # imports the model's code, which takes each forked rank seconds
    for first, *later in run_ranks(2, _gradients, name):
        # of its two units with a backward one has an input without gradient, the other is the last
        assert (first > 0) == (name != "half-frozen gpt2")
        # the first step, which finds the order, does not know yet that the last units stay
        assert all(0 <= used <= first for used in later) and later[0] == later[1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(value))


class Blocks(nn.Module):
    """Blocks with residuals in the glue, of which the first's output is used again at the end."""

    def __init__(self, skips: bool, residual: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.head = nn.Linear(WIDTH, 1)
        self.skips, self.residual = skips, residual

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.blocks:
            value = value + block(value) if self.residual else block(value)
            kept.append(value if self.skips else None)
        if self.skips:
            value = value + kept[0] * kept[5]
        return self.head(value)


def squared(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def _peak(offload: bool, skips: bool, residual: bool) -> tuple[int, int, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Blocks(skips, residual)
    executor = make_executor(model, [1.0], recompute=True)
    host: list[torch.Tensor] = []

    def allocate(nbytes: int) -> torch.Tensor:
        host.append(torch.empty(nbytes, dtype=torch.uint8))
        tracker.untrack(host[-1])
        return host[-1]

    if offload:
        executor.arena = make_arena(allocate=allocate)
    parts = [{"x": torch.randn(256, WIDTH)} for _ in range(4)]
    tracker = MemoryTracker()
    with tracker:
        for _ in range(2):
            sharded_step(executor, model, squared, parts)
        tracker.reset_peak()
        before = tracker.current_bytes
        sharded_step(executor, model, squared, parts)
        peak = tracker.peak_bytes - before
    return (
        peak,
        executor.arena.most_bytes if executor.arena else 0,
        list(full_gradients(model).values()),
    )


def _peaks(rank: int, skips: bool, residual: bool) -> tuple[float, float, int]:
    boundary = 256 * WIDTH * 4 * 4  # of one unit, all four microbatches
    plain, _, wanted = _peak(False, skips, residual)
    offloaded, host, gradients = _peak(True, skips, residual)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))
    return plain / boundary, offloaded / boundary, host


def test_the_device_holds_the_boundaries_of_few_units():
    ((plain, offloaded, host),) = run_ranks(1, _peaks, False, False)
    assert plain > 12
    # two units' values and one's gradients, and the inside of one of four microbatches
    assert offloaded < 3 + 4 * 0.27
    assert host > 0


def test_residuals_in_the_glue_hold_one_gradient():
    ((plain, offloaded, host),) = run_ranks(1, _peaks, False, True)
    # the backward takes them in its turn, not all at once
    assert offloaded < 5 < plain - 7
    assert host > 0


def test_what_is_used_again_stays_on_the_device():
    ((plain, offloaded, _),) = run_ranks(1, _peaks, True, False)
    assert plain > 11 and offloaded > 10  # the user's list holds them all


def _kept(rank: int) -> int:
    model, batch = build("llama", 8)
    executor = make_executor(model, TWO.fractions, recompute=False)
    executor.arena = make_arena()
    sharded_step(executor, model, hugging_face_loss, microbatches_of(batch, TWO, rank))
    return executor.arena.most_bytes


def test_kept_graphs_hold_their_inputs_and_nothing_is_copied(llama_imported):
    assert run_ranks(2, _kept) == [0, 0]


def _too_small(rank: int) -> None:
    model, batch = build("llama", 8)
    executor = make_executor(model, TWO.fractions, recompute=True)
    executor.arena = make_arena(100.0 if rank else math.inf)
    sharded_step(executor, model, hugging_face_loss, microbatches_of(batch, TWO, rank))


def test_a_host_with_too_little_memory_stops_all_ranks(llama_imported):
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, _too_small)
    text = str(failure.value)
    assert "HostMemoryError: Offloaded boundaries need" in text and "host_memory_cap=" in text
    assert "RemoteRankError: Rank 1 failed" in text


def _refused_later(rank: int) -> None:
    model, batch = build("llama", 8)
    executor = make_executor(model, TWO.fractions, recompute=True)
    taken = []

    def allocate(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        if rank and len(taken) > 1:
            raise RuntimeError("no pinned memory")
        return host_memory(nbytes)

    executor.arena = make_arena(allocate=allocate)
    parts = microbatches_of(batch, TWO, rank)
    sharded_step(executor, model, hugging_face_loss, parts)
    # as if the step had taken several pieces, which the next one wants in one
    executor.arena._chunks *= 2
    sharded_step(executor, model, hugging_face_loss, parts)


def test_a_host_that_gives_no_memory_between_steps_stops_all_ranks(llama_imported):
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, _refused_later)
    text = str(failure.value)
    assert "HostMemoryError: This rank's host did not give" in text
    assert "RemoteRankError: Rank 1 failed" in text


def test_the_ring_is_allocated_once():
    taken = []

    def allocate(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return host_memory(nbytes)

    arena = make_arena(allocate=allocate)
    arena.reserve(2**20)
    for _ in range(3):
        arena.start()
        for size in (10, 1000, 100_000):
            leaf = torch.randn(size).requires_grad_()
            values = leaf.detach().clone()
            away = arena.offload(leaf)
            assert leaf.untyped_storage().nbytes() == 4 and leaf.shape == (size,)
            away.fetch()
            away.restore()
            assert torch.equal(leaf.detach(), values)
    assert taken == [2**20]


def test_a_ring_that_grew_is_one_piece_from_the_next_step_on():
    taken = []

    def allocate(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return host_memory(nbytes)

    arena = make_arena(allocate=allocate)
    for _ in range(3):
        arena.start()
        for _ in range(5):
            arena.offload(torch.randn(2_000_000).requires_grad_())
    assert len(taken) > 2 and taken[-1] == arena.held_bytes == arena.most_bytes


def test_layouts_come_back_as_they_were():
    arena = make_arena()
    arena.start()
    leaf = torch.randn(4, 6).t().requires_grad_()
    stride, values = leaf.stride(), leaf.detach().clone()
    away = arena.offload(leaf)
    away.restore()
    assert leaf.stride() == stride and torch.equal(leaf.detach(), values)
    assert arena.offload(torch.zeros(1).expand(5).requires_grad_()) is None


class NotingArena(HostArena):
    """Keeps what was fetched."""

    def __init__(self) -> None:
        super().__init__(Device(host_memory, pins=False), math.inf)
        self.fetched: list[OffloadedTensor] = []

    def offload(self, leaf: torch.Tensor) -> OffloadedTensor | None:
        away = super().offload(leaf)
        return None if away is None else Noting(**vars(away), fetched=self.fetched)


@dataclass
class Noting(OffloadedTensor):
    fetched: list[OffloadedTensor] = field(kw_only=True)

    def fetch(self) -> tuple[torch.Tensor, Any]:
        self.fetched.append(self)
        return super().fetch()


class SideBranch(Blocks):
    """Nothing comes of its second half."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:6]:
            value = block(value)
        side = value
        for block in self.blocks[6:]:
            side = block(side)
        return self.head(value)


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        # a number would count steps
        self.calls: list[int] = []
        self.most_calls = math.inf

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        if len(self.calls) > self.most_calls:
            raise ArithmeticError("refused")
        return super().forward(value)


TWO_PARTS = [{"x": torch.ones(2, WIDTH)} for _ in range(2)]


def _fetched_in_vain(rank: int) -> None:
    model = SideBranch(skips=False, residual=False)
    executor = make_executor(model, [0.5, 0.5], recompute=True)
    executor.arena = NotingArena()
    sharded_step(executor, model, squared, TWO_PARTS)
    assert executor.arena.fetched
    assert all(away.returning is None for away in executor.arena.fetched)


def _stopped_before_use(rank: int) -> None:
    model = Blocks(skips=False, residual=False)
    model.blocks = nn.ModuleList(Counting() for _ in range(12))
    model.blocks[8].most_calls = len(TWO_PARTS)  # and not once more to compute it again
    executor = make_executor(model, [0.5, 0.5], recompute=True)
    executor.arena = NotingArena()
    with pytest.raises(ArithmeticError, match="refused"):
        sharded_step(executor, model, squared, TWO_PARTS)
    assert executor.arena.fetched
    assert all(away.returning is None for away in executor.arena.fetched)


@pytest.mark.parametrize("reason", [_fetched_in_vain, _stopped_before_use])
def test_what_was_fetched_in_vain_is_given_back_by_the_ring(reason):
    """On CUDA its memory must not be used again before the copy into it is done."""
    run_ranks(2, reason)


class NestedBlocks(Blocks):
    """Its blocks pass sequences of unequal lengths in one tensor that has no strides of its own."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        rows = [row[: 1 + index].unsqueeze(-1) for index, row in enumerate(value)]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
        for block in self.blocks:
            nested = block(nested * 1.5)
        return self.head(nested).values()


def _nested(rank: int) -> None:
    torch.manual_seed(0)
    single = NestedBlocks(skips=False, residual=False)
    for block in single.blocks:
        block.inner = nn.Linear(1, 1)
    single.head = nn.Linear(1, 1)
    batch = {"x": torch.randn(3, WIDTH)}
    squared(single, batch).backward()
    wanted = {name: parameter.grad for name, parameter in single.named_parameters()}
    for offload in (False, True):
        model = copy.deepcopy(single)
        model.zero_grad()
        executor = make_executor(model, [0.5, 0.5], recompute=True)
        executor.arena = make_arena() if offload else None
        sharded_step(executor, model, squared, [] if rank else [batch])
        assert relative_error(full_gradients(model), wanted) <= 1e-5


def test_nested_tensors_between_units_stay_where_they_are():
    run_ranks(2, _nested)


def test_what_the_host_does_not_give_is_said():
    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError("no pinned memory")

    arena = make_arena(allocate=refuse)
    with pytest.raises(HostMemoryError, match=r"did not give .* no pinned memory"):
        arena.reserve(100)


def test_what_is_on_the_host_already_stays_where_it_is():
    class ElsewhereOnly(Cpu):
        def holds(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type != "cpu"

    arena = HostArena(ElsewhereOnly(torch.device("cpu")), math.inf)
    leaf = torch.ones(8)
    assert arena.offload(leaf) is None
    assert torch.equal(leaf, torch.ones(8))


@pytest.mark.parametrize("nbytes", [0, 1, 2**24, 2**24 + 1, 33 * 2**30, 21_904_333_209])
def test_powers_of_two_hold_what_is_asked_for_and_little_more(nbytes):
    pieces = powers_of_two(nbytes)
    assert all(piece.bit_count() == 1 for piece in pieces)
    assert nbytes <= sum(pieces) < nbytes + 2**24
    assert pieces == sorted(pieces, reverse=True)


def test_a_pinned_ring_takes_powers_of_two_and_keeps_them():
    """What torch pins it rounds up to these, and what it is given back it keeps."""
    taken = []

    def allocate(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return host_memory(nbytes)

    arena = make_arena(allocate=allocate, pins=True)
    arena.reserve(5 * 2**24)
    assert taken == [2**26, 2**24]
    for _ in range(3):
        arena.start()
        kept = []
        for index in range(30):
            leaf = torch.full((1_000_000,), float(index)).requires_grad_()
            kept.append((index, leaf, arena.offload(leaf)))
        for index, leaf, away in kept:
            away.restore()
            assert torch.equal(leaf.detach(), torch.full((1_000_000,), float(index)))
    assert taken == [2**26, 2**24, 2**26] and arena.held_bytes == sum(taken)


def test_a_pinned_ring_stays_within_its_capacity():
    arena = make_arena(3 * 2**24 + 5, pins=True)
    arena.reserve(3 * 2**24 + 5)
    assert arena.held_bytes == 3 * 2**24 + 5
    arena = make_arena(100.0, pins=True)
    with pytest.raises(HostMemoryError, match="this rank may use"):
        arena.reserve(101)
