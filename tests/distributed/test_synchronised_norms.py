"""SyncBatchNorm gives what BatchNorm gives for the whole global batch on one device."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import (
    Allocation,
    batch_size_of,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
)
from launch import run_ranks
from torch import Tensor, nn
from toys import assert_idle

from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.execution.offload import HostArena
from lightning_cephalo.execution.step import MicrobatchCall

UNEVEN = Allocation(((3, 1), (2,)), (0.75, 0.25))
IDLE = Allocation(((2, 1, 2), (3,), ()), (0.2, 0.0, 0.8))
STEPS = 3
EXACT = 1e-12  # in double precision; what single precision loses would hide a wrong count


class Residual(nn.Module):
    """Two layers in a unit, the second without affine parameters, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.SyncBatchNorm(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.plain = nn.SyncBatchNorm(4, affine=False, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.plain(self.second(F.relu(self.norm(self.first(x))))))


class Before(nn.Module):
    """Normalises what enters the unit, and the same again; one layer is frozen in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(4)
        self.norm.weight.data.uniform_(0.5, 1.5)
        self.other = nn.SyncBatchNorm(4, track_running_stats=False)
        self.frozen = nn.SyncBatchNorm(4).requires_grad_(False)
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.frozen(self.conv(self.other(x)))


class Net(nn.Module):
    """Layers in units, between units, and behind the last one; one unit is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.stem_norm = nn.SyncBatchNorm(4, momentum=0.3)
        self.blocks = nn.ModuleList([Residual(), Before(), Residual()])
        self.head = nn.Linear(4, 5)
        self.head_norm = nn.SyncBatchNorm(5, eps=1e-3)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x))
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.out(self.head_norm(self.head(x.mean((2, 3)))))


def _make() -> Net:
    torch.manual_seed(2)
    net = Net().double().train()
    net.blocks[1].frozen.eval()
    return net


def _batch(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 2, 5, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (samples,), generator=generator)
    weight = torch.rand(samples, generator=generator, dtype=torch.float64) + 0.5
    weight[3] = 0.0  # the only sample of its microbatch: it counts in the statistics
    return {"x": 2 * x + 1, "y": y, "weight": weight}


def _loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(net(batch["x"]), batch["y"], reduction="none")
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)


def _one_device(samples: int) -> list[tuple[dict[str, Tensor | None], dict[str, Tensor]]]:
    net, batch, found = _make(), _batch(samples), []
    optimizer = _sgd(net)
    for _ in range(STEPS):
        optimizer.zero_grad()
        _loss(net, batch).backward()
        gradients = {name: p.grad for name, p in net.named_parameters()}
        buffers = copy.deepcopy(dict(net.named_buffers()))
        found.append(({k: None if g is None else g.clone() for k, g in gradients.items()}, buffers))
        optimizer.step()
    return found


def _call(net: nn.Module, part: dict[str, Tensor]) -> MicrobatchCall:
    weight = float(part["weight"].sum())
    return MicrobatchCall(
        lambda: _loss(net, part), lambda loss: (loss, weight), samples=len(part["y"])
    )


def _equals_one_device(rank: int, allocation: Allocation, expected: list[Any]) -> None:
    samples = batch_size_of(allocation)
    modes = ((True, True, False), (False, True, False), (rank == 0, False, False))
    for recompute, reshard, offloads in (*modes, (True, True, True)):
        net = _make()
        executor = make_executor(net, allocation.fractions, recompute, reshard=reshard)
        if offloads:
            executor.arena = HostArena(executor.accelerator, math.inf)
        optimizer = _sgd(net)
        parts = microbatches_of(_batch(samples), allocation, rank)
        for gradients, buffers in expected:
            optimizer.zero_grad()
            executor.forward([_call(net, part) for part in parts])
            executor.backward()
            assert relative_error(full_gradients(net), gradients) < EXACT
            for name, buffer in net.named_buffers():
                torch.testing.assert_close(buffer, buffers[name], rtol=EXACT, atol=EXACT, msg=name)
            optimizer.step()
            assert_idle(executor)
        assert not offloads or not parts or executor.arena.most_bytes
        executor.hooks.uninstall()


def test_it_is_batch_normalisation_of_the_global_batch():
    for allocation in (UNEVEN, IDLE):
        # without process groups, torch's layer is plain batch normalisation
        expected = _one_device(batch_size_of(allocation))
        run_ranks(allocation.world_size, _equals_one_device, allocation, expected)


class Random(Residual):
    """Draws random numbers before, between and behind its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.2)) + torch.rand(1), 0.3)


def _random(rank: int) -> None:
    found = []
    for recompute in (True, False):
        net = _make()
        net.blocks = nn.ModuleList([Random() for _ in range(2)])
        for index, parameter in enumerate(net.parameters()):
            torch.manual_seed(index)
            nn.init.normal_(parameter, std=0.3)
        net.double()
        executor = make_executor(net, UNEVEN.fractions, recompute)
        torch.manual_seed(100 + rank)
        for _ in range(2):
            parts = microbatches_of(_batch(6), UNEVEN, rank)
            executor.forward([_call(net, part) for part in parts])
            executor.backward()
        found.append((full_gradients(net), dict(net.named_buffers())))
    for kept, again in zip(*found, strict=True):
        for name, value in kept.items():
            assert value is again[name] is None or torch.equal(value, again[name]), name


def test_dropout_beside_it_is_bit_identical_with_and_without_recompute():
    run_ranks(2, _random)


class Fails(Net):
    """Fails between two layers of a unit, on rank 1, in the second step; then it does not."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        fails = Fails.steps == 2 and dist.get_rank() == 1
        hook = self.blocks[0].second.register_forward_pre_hook(_raise) if fails else None
        try:
            return super().forward(x)
        finally:
            if hook is not None:
                hook.remove()


def _raise(*args: Any) -> None:
    raise FloatingPointError("on purpose")


def _fails(rank: int, expected: list[Any]) -> None:
    net = Fails().double()
    net.load_state_dict(_make().state_dict())
    net.blocks[1].frozen.eval()
    executor = make_executor(net, IDLE.fractions, True)
    calls = [_call(net, part) for part in microbatches_of(_batch(8), IDLE, rank)]
    for Fails.steps in (1, 2, 3):
        if Fails.steps == 2:
            with pytest.raises(FloatingPointError if rank == 1 else RemoteRankError):
                executor.forward(calls)
        else:
            executor.forward(calls)
            executor.backward()
        assert_idle(executor)
    # the second step has changed no buffer: two steps without an update
    assert net.stem_norm.num_batches_tracked == 2
    twice = {k: None if g is None else 2 * g for k, g in expected[0][0].items()}
    assert relative_error(full_gradients(net), twice) < EXACT

    single = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3))
    executor = make_executor(single, IDLE.fractions, True)
    batch = {"x": torch.ones(1, 2), "y": torch.zeros(1)}
    call = MicrobatchCall(lambda: single(batch["x"]).sum(), lambda loss: (loss, 1.0), samples=1)
    with pytest.raises(ValueError if rank == 0 else RemoteRankError, match="one value per channel"):
        executor.forward([call] if rank == 0 else [])


def test_a_failure_between_meetings_reaches_all_ranks_and_the_next_step_is_right():
    run_ranks(3, _fails, _one_device(8))
