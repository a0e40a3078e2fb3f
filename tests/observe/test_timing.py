"""Timing of steps: work without waiting, read when the device has come so far."""

from __future__ import annotations

import pytest
import torch
from virtual_time import VirtualHost

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.accelerator.backends import backend_named
from lightning_cephalo.emulation import EmulatedDevice
from lightning_cephalo.observe.timing import Share, Timing
from lightning_cephalo.plan.program import Instruction, Operation


class FakeDevice:
    """Marks like CUDA's: made at once, read only when the device has passed them."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.device_s = -1.0

    def now(self) -> float:
        return self.host_s

    def passed(self, mark: float) -> bool:
        return mark <= self.device_s

    def between_s(self, start: float, end: float) -> float:
        assert self.passed(end), "read before the device has come to the mark"
        return end - start


GATHER = Instruction(Operation.GATHER, 1)
AGREE = Instruction(Operation.AGREE)


def wait(device: FakeDevice, timing: Timing, seconds: float) -> None:
    timing.before_wait(GATHER)
    device.host_s += seconds
    timing.after_wait(GATHER)


def step(device: FakeDevice, timing: Timing, busy_s: float, waiting_s: float) -> None:
    """Two passes, each of a gather and the agreement that ends it, and an update."""
    timing.restart()
    for _ in range(2):
        device.host_s += 100.0  # outside of a pass: does not count
        timing.before(GATHER)
        timing.after(GATHER)
        timing.before(AGREE)
        device.host_s += busy_s / 2
        wait(device, timing, waiting_s / 2)
        timing.after(AGREE)
    update = Instruction(Operation.UPDATE)
    timing.before(update)
    device.host_s += 50.0  # nor does the optimizer
    timing.after(update)


def test_waiting_counts_in_a_pass_and_is_no_work():
    device = FakeDevice()
    timing = Timing(device)
    step(device, timing, busy_s=4.0, waiting_s=6.0)
    assert timing.finish()
    device.device_s = device.host_s
    assert timing.read() == [Share(busy_s=4.0, waiting_s=6.0)]
    assert timing.read() == []


def test_steps_are_read_in_order_and_not_before_the_device_is_there():
    device = FakeDevice()
    timing = Timing(device)
    ends = []
    for busy_s in (2.0, 4.0, 8.0):
        step(device, timing, busy_s, waiting_s=1.0)
        assert timing.finish()
        ends.append(device.host_s)
        assert timing.read() == []
    device.device_s = ends[1]
    assert [share.busy_s for share in timing.read()] == pytest.approx([2.0, 4.0])
    device.device_s = ends[2]
    assert [share.busy_s for share in timing.read()] == pytest.approx([8.0])


def test_a_step_that_failed_leaves_nothing_to_the_next():
    device = FakeDevice()
    device.device_s = float("inf")
    timing = Timing(device)
    timing.before(GATHER)
    wait(device, timing, 50.0)  # and then the pass raises
    step(device, timing, busy_s=4.0, waiting_s=6.0)
    assert timing.finish()
    assert not timing.finish()
    assert timing.read() == [Share(busy_s=4.0, waiting_s=6.0)]


def test_an_emulated_device_that_works_while_its_host_waits_is_busy() -> None:
    matrix = torch.ones(64, 64)
    product_s = 0.1
    host = VirtualHost()
    with EmulatedDevice(flops_per_s=2 * 64**3 / product_s, clock=host.clock):
        timing = Timing(accelerator_of(torch.device("cpu")).marks(backend_named("gloo")))
        timing.before(GATHER)
        matrix @ matrix
        for seconds in (0.06, 0.14):  # the others are quicker than this rank's device, then slower
            timing.before_wait(GATHER)
            host.block(seconds)
            timing.after_wait(GATHER)
        timing.after(AGREE)
        assert timing.finish()
        (share,) = timing.read()
    assert share.busy_s == pytest.approx(product_s)
    assert share.waiting_s == pytest.approx(0.2 - product_s)
