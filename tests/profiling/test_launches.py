"""Times of a device that runs behind its host, whose operations take less than starting them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from launch import run_ranks
from torch import nn

from lightning_cephalo.accelerator.cpu import Cpu
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.features.install import install
from lightning_cephalo.profiling.probe import Prober, ProfiledStep
from lightning_cephalo.ranks.groups import Groups

LAUNCH_S = 1e-3


class Behind(Cpu):
    """A device that works beside its host; both take the time that the test says."""

    computes_on_host = False

    def __init__(self, work_s: float) -> None:
        super().__init__(torch.device("cpu"))
        self.host_s = self.done_s = 0.0
        self.work_s = work_s

    def launch(self) -> None:
        self.host_s += LAUNCH_S
        self.done_s = max(self.done_s, self.host_s) + self.work_s

    def now_s(self) -> float:
        return self.host_s

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.done_s)


class Launches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, device, x):
        ctx.device = device
        device.launch()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.device.launch()
        return None, gradient


class Block(nn.Module):
    def __init__(self, device: Behind) -> None:
        super().__init__()
        self.linear, self.device = nn.Linear(2, 2), device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Launches.apply(self.device, self.linear(x))


def told_and_taken(rank: int, work_s: float) -> tuple[float, float]:
    """Seconds that are measured, and that a step takes whose host never waits for its device."""
    device = Behind(work_s)
    module = nn.Sequential(*[Block(device) for _ in range(4)])
    groups = Groups.create(timedelta(seconds=100))
    model = ShardedModel(module, groups, device, fractions=[1.0])
    install(model.executor)

    def step(batch: torch.Tensor) -> torch.Tensor:
        return module(batch).mean()

    prober = Prober(model, device.clock, lambda size: torch.ones(size, 2), ProfiledStep(step))
    times = prober.timed(2)
    assert times is not None
    began_s = device.clock()
    call = MicrobatchCall(lambda: step(torch.ones(2, 2)), lambda loss: (loss, 2.0), samples=2)
    model.executor.forward([call])
    model.executor.backward()
    return sum(times), device.clock() - began_s


@pytest.mark.parametrize("work_s", [0.1 * LAUNCH_S, LAUNCH_S, 10 * LAUNCH_S])
def test_times_are_those_of_a_step_that_waits_nowhere(work_s):
    ((told_s, taken_s),) = run_ranks(1, told_and_taken, work_s)
    assert told_s == pytest.approx(taken_s)
    assert taken_s >= 8 * max(LAUNCH_S, work_s)  # four blocks, forward and backward
