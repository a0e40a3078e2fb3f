"""Links and host threads of an emulated device: in virtual time beside the device's own work."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from virtual_time import VirtualHost

from lightning_cephalo.accelerator.emulated.accelerator import Emulated
from lightning_cephalo.emulation import EmulatedDevice

ELEMENTS = 1000
COPY_S, UPDATE_S, COMPUTE_S = 4 * ELEMENTS / 1e4, ELEMENTS / 2e3, 0.25


def _emulated(host: VirtualHost, **rates: float) -> EmulatedDevice:
    given = {"link_bytes_per_s": 1e4, "host_updates_per_s": 2e3, **rates}
    # a product of two 10 x 10 matrices has 2000 FLOPs
    return EmulatedDevice(flops_per_s=2000 / COMPUTE_S, clock=host.clock, **given)


def _chain(times: int, is_awaited: bool) -> tuple[float, torch.Tensor]:
    """The seconds of some products beside gradients that leave, an update, and its result."""
    host = VirtualHost(tick_s=1e-9)
    matrix, gradient, rows = torch.ones(10, 10), torch.ones(ELEMENTS), torch.zeros(ELEMENTS)
    with _emulated(host) as device:
        accelerator = Emulated(torch.device("cpu"), device)
        copies, worker = accelerator.copies(), accelerator.host_worker()
        memory = accelerator.allocate_host(4 * ELEMENTS).view(torch.float32)
        left = copies.start(memory, gradient)
        future = worker.submit(
            partial(memory.mul_, -0.5),
            ELEMENTS,
            [left],
            lambda after: [copies.start(rows, memory, after=after)],
        )
        if is_awaited:
            copies.wait(future.result()[0])
        for _ in range(times):
            matrix @ matrix
        copies.wait(future.result()[0])
        device.synchronize()
    return host.now_s, rows


@pytest.mark.parametrize("times", [0, 2, 12])
def test_a_lane_works_beside_the_device_which_waits_where_it_is_told_to(times):
    chain_s, compute_s = 2 * COPY_S + UPDATE_S, times * COMPUTE_S
    for is_awaited, wanted_s in ((True, chain_s + compute_s), (False, max(chain_s, compute_s))):
        took_s, rows = _chain(times, is_awaited)
        assert took_s == pytest.approx(wanted_s, rel=1e-3)
        assert rows.eq(-0.5).all()


def test_directions_overlap_and_copies_of_one_direction_queue():
    host = VirtualHost()
    with _emulated(host) as device:
        accelerator = Emulated(torch.device("cpu"), device)
        one, other = accelerator.copies(), accelerator.copies()
        memory = accelerator.allocate_host(4 * ELEMENTS).view(torch.float32)
        rows = torch.zeros(ELEMENTS)
        out = [one.start(memory, rows), other.start(memory, rows)]
        back = one.start(rows, memory)
        assert [*out, back] == pytest.approx([COPY_S, 2 * COPY_S, COPY_S])
        behind = other.start(rows, memory, after=out)
        assert behind == pytest.approx(3 * COPY_S)
        one.finish(back)
        assert host.now_s == pytest.approx(COPY_S)
        one.finish(None)
        assert host.now_s == pytest.approx(COPY_S)


def test_an_error_of_the_work_is_raised_where_its_result_is_taken():
    with _emulated(VirtualHost()) as device:
        worker = Emulated(torch.device("cpu"), device).host_worker()
        future = worker.submit(lambda: [][0], 1, [], lambda after: [])
        with pytest.raises(IndexError):
            future.result()


def test_host_memory_never_counts_as_the_devices():
    with _emulated(VirtualHost()) as device:
        memory = Emulated(torch.device("cpu"), device).allocate_host(4096)
        device.track({"state": memory.view(torch.float32)[:10]})
        assert device.current_bytes == 0
        kept = torch.zeros(1024)
        assert device.current_bytes == kept.nbytes


@pytest.mark.parametrize("key", ["link_bytes_per_s", "host_updates_per_s"])
def test_rates_are_positive(key):
    with pytest.raises(ValueError, match=f"{key} of device 'emulated': expected a positive number"):
        EmulatedDevice(**{key: 0.0})
