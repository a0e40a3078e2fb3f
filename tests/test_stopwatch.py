"""The stopwatch: work without waiting, read when the device has come so far."""

from __future__ import annotations

import pytest
import torch
from virtual_time import VirtualHost

from lightning_cephalo.emulation import EmulatedDevice
from lightning_cephalo.stopwatch import Share, Stopwatch, marks_of


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


class Work:
    def __init__(self, device: FakeDevice, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def wait(self) -> None:
        self.device.host_s += self.seconds


def step(device: FakeDevice, stopwatch: Stopwatch, busy_s: float, waiting_s: float) -> None:
    stopwatch.restart()
    for _ in range(2):
        stopwatch.wait(Work(device, 100.0))  # outside of a pass: does not count
        stopwatch.begin()
        device.host_s += busy_s / 2
        stopwatch.wait(Work(device, waiting_s / 2))
        stopwatch.end()


def test_waiting_counts_in_a_pass_and_is_no_work():
    device = FakeDevice()
    stopwatch = Stopwatch(device)
    step(device, stopwatch, busy_s=4.0, waiting_s=6.0)
    assert stopwatch.finish()
    device.device_s = device.host_s
    assert stopwatch.read() == [Share(busy_s=4.0, waiting_s=6.0)]
    assert stopwatch.read() == []


def test_steps_are_read_in_order_and_not_before_the_device_is_there():
    device = FakeDevice()
    stopwatch = Stopwatch(device)
    ends = []
    for busy_s in (2.0, 4.0, 8.0):
        step(device, stopwatch, busy_s, waiting_s=1.0)
        assert stopwatch.finish()
        ends.append(device.host_s)
        assert stopwatch.read() == []
    device.device_s = ends[1]
    assert [share.busy_s for share in stopwatch.read()] == pytest.approx([2.0, 4.0])
    device.device_s = ends[2]
    assert [share.busy_s for share in stopwatch.read()] == pytest.approx([8.0])


def test_a_step_that_failed_leaves_nothing_to_the_next():
    device = FakeDevice()
    device.device_s = float("inf")
    stopwatch = Stopwatch(device)
    stopwatch.begin()
    stopwatch.wait(Work(device, 50.0))  # and then the pass raises
    step(device, stopwatch, busy_s=4.0, waiting_s=6.0)
    assert stopwatch.finish()
    assert not stopwatch.finish()
    assert stopwatch.read() == [Share(busy_s=4.0, waiting_s=6.0)]


class Others:
    """Keep this rank waiting."""

    def __init__(self, host: VirtualHost, seconds: float) -> None:
        self.host, self.seconds = host, seconds

    def wait(self) -> None:
        self.host.block(self.seconds)


def test_an_emulated_device_that_works_while_its_host_waits_is_busy() -> None:
    matrix = torch.ones(64, 64)
    product_s = 0.1
    host = VirtualHost()
    stopwatch = Stopwatch(marks_of(torch.device("cpu"), "gloo"))
    with EmulatedDevice(flops_per_s=2 * 64**3 / product_s, clock=host.clock):
        stopwatch.begin()
        matrix @ matrix
        stopwatch.wait(Others(host, 0.06))  # the others are quicker than this rank's device
        stopwatch.wait(Others(host, 0.14))  # and then slower
        stopwatch.end()
        assert stopwatch.finish()
        (share,) = stopwatch.read()
    assert share.busy_s == pytest.approx(product_s)
    assert share.waiting_s == pytest.approx(0.2 - product_s)
