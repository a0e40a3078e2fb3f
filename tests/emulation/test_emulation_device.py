import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path

import greenlet
import pytest
import torch
import torch.distributed as dist
from busy import by_the_clock, timed
from torch.multiprocessing import start_processes
from torch.utils.data import DataLoader

from lightning_cephalo.emulation import EmulatedDevice, MemoryTracker, active_device
from lightning_cephalo.emulation.rate import measure_flops_per_s

WIDTH = 192
PRODUCT_FLOPS = 2 * WIDTH**3


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def core_flops_per_s():
    return measure_flops_per_s()


def products(count):
    # a mean of equal numbers stays what it is: smaller and smaller numbers become subnormal, with
    # which some processors take ten times as long
    left = right = torch.full((WIDTH, WIDTH), 1 / WIDTH)
    for _ in range(count):
        left = left @ right


def seconds_of_products(device, count):
    with device:
        products(1)
        device.synchronize()
        start_s = time.perf_counter()
        products(count)
        device.synchronize()
        return time.perf_counter() - start_s


@timed
def test_two_devices_hold_their_ratio_and_their_rate(core_flops_per_s):
    fast = EmulatedDevice(flops_per_s=core_flops_per_s / 5)
    slow = EmulatedDevice(flops_per_s=core_flops_per_s / 15)
    count = round(0.1 * fast.flops_per_s / PRODUCT_FLOPS)
    pairs = [[seconds_of_products(device, count) for device in (fast, slow)] for _ in range(5)]
    with by_the_clock():
        assert min(slow_s for _, slow_s in pairs) == pytest.approx(
            3 * min(fast_s for fast_s, _ in pairs), rel=0.1
        )
    assert min(fast_s for fast_s, _ in pairs) >= 0.09


def test_a_busy_host_before_does_not_shorten_a_measurement(core_flops_per_s):
    device = EmulatedDevice(flops_per_s=core_flops_per_s / 3)
    count = round(0.05 * device.flops_per_s / PRODUCT_FLOPS)
    with device:
        products(1)
        busy_until_s = time.perf_counter() + 0.2
        while time.perf_counter() < busy_until_s:
            pass
        device.synchronize()
        start_s, start_busy_s = time.perf_counter(), device.busy_s
        products(count)
        device.synchronize()
        assert time.perf_counter() - start_s >= device.busy_s - start_busy_s


@timed
def test_blocked_seconds_are_those_without_work_and_add_up_over_entries(core_flops_per_s):
    device = EmulatedDevice(flops_per_s=core_flops_per_s / 3)
    count = round(0.1 * device.flops_per_s / PRODUCT_FLOPS)
    for entries in (1, 2):
        with device:
            products(1)
            device.synchronize()
            time.sleep(0.2)
            products(count)
            device.synchronize()
        with by_the_clock():
            assert device.blocked_s == pytest.approx(0.2 * entries, rel=0.1)


def test_without_a_rate_nothing_waits():
    device = EmulatedDevice()
    start_s = time.perf_counter()
    with device:
        products(3)
    assert device.busy_s == 0.0
    assert time.perf_counter() - start_s < 5


def test_leaving_the_block_waits_for_the_device():
    start_s = time.perf_counter()
    with EmulatedDevice(flops_per_s=PRODUCT_FLOPS / 0.2):
        products(1)
    assert time.perf_counter() - start_s >= 0.2


def test_an_exception_does_not_wait():
    device = EmulatedDevice(flops_per_s=PRODUCT_FLOPS / 60)
    start_s = time.perf_counter()
    with pytest.raises(KeyError), device:
        products(1)
        raise KeyError
    assert time.perf_counter() - start_s < 30
    assert active_device() is None
    device.synchronize()


def test_active_device_is_the_innermost_of_this_thread():
    seen = []
    assert active_device() is None
    with EmulatedDevice(name="outer") as outer:
        assert active_device() is outer
        with MemoryTracker(), EmulatedDevice(name="inner") as inner, MemoryTracker():
            assert active_device() is inner
        thread = threading.Thread(target=lambda: seen.append(active_device()))
        thread.start()
        thread.join()
        assert active_device() is outer
    assert seen == [None]
    assert active_device() is None


def test_torch_still_shows_its_stack_of_modes():
    # If this fails, torch changed a private function that emulation/device.py builds on: mend
    # active_device there.
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    with EmulatedDevice() as first, MemoryTracker() as second:
        stack = _get_current_dispatch_mode_stack()
    assert [id(mode) for mode in stack] == [id(first), id(second)]


def test_a_device_is_active_in_every_greenlet():
    seen = []

    def microbatch():
        seen.append(active_device())
        torch.zeros(2, 2) @ torch.zeros(2, 2)

    with EmulatedDevice() as device:
        greenlet.greenlet(microbatch).switch()
    assert seen == [device]
    assert device.flops == 16


def child(queue, device):
    torch.zeros(1000, 1000)
    device.synchronize()
    queue.put((active_device() is None, device._current_bytes))


def test_a_process_forked_inside_the_block_is_not_on_the_device():
    context = multiprocessing.get_context("fork")
    with EmulatedDevice(capacity_bytes=1000) as device:
        queue = context.Queue()
        process = context.Process(target=child, args=(queue, device))
        process.start()
        assert queue.get(timeout=100) == (True, 0)
        process.join(20)


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(1000)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_data_loader_workers_do_not_fill_the_device():
    with EmulatedDevice(capacity_bytes=100) as device:
        assert len(list(DataLoader(Images(), num_workers=1, batch_size=2))) == 2
        assert device.peak_bytes <= 100


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("flops_per_s", 0),
        ("flops_per_s", float("nan")),
        ("bytes_per_s", float("inf")),
        ("capacity_bytes", -1),
    ],
)
def test_bad_arguments_are_named(argument, value):
    with pytest.raises(ValueError, match=f"{argument} of device 'small'.*got {value}"):
        EmulatedDevice(**{argument: value}, name="small")


def rank_main(rank, folder, flops_per_s, counts, steps, body):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(counts)
    )
    try:
        seconds = body(EmulatedDevice(flops_per_s=flops_per_s[rank]), counts[rank], steps)
    finally:
        dist.destroy_process_group()
    with open(os.path.join(folder, f"{rank}.txt"), "w") as file:
        file.write(repr(seconds))


def lock_step(device, count, steps):
    """Seconds of every step up to the broadcast, and up to the end of the step."""
    seconds = []
    message = torch.zeros(16)
    with device:
        for _ in range(steps):
            dist.broadcast(message, src=0)
            start_s = time.perf_counter()
            products(count)
            device.synchronize()
            computed_s = time.perf_counter() - start_s
            dist.all_reduce(message)
            seconds.append((computed_s, time.perf_counter() - start_s))
    return seconds


def prefetched(device, count, steps):
    """Seconds until the host has issued work, and of every step, with a broadcast in flight."""
    seconds = []
    message = torch.zeros(16)
    with device:
        for _ in range(steps):
            dist.barrier()
            start_s = time.perf_counter()
            work = dist.broadcast(message, src=0, async_op=True)
            products(count)
            work_s = time.perf_counter() - start_s
            work.wait()
            products(count)
            dist.all_reduce(message)
            seconds.append((work_s, time.perf_counter() - start_s))
            device.synchronize()
    return seconds


def run_ranks(parent, flops_per_s, counts, body=lock_step, steps=6):
    folder = Path(tempfile.mkdtemp(dir=parent))
    start_processes(
        rank_main,
        args=(str(folder), flops_per_s, counts, steps, body),
        nprocs=len(counts),
        start_method="fork",
    )
    ranks = [eval((folder / f"{rank}.txt").read_text()) for rank in range(len(counts))]
    # noise of the machine only ever lengthens a step
    return [tuple(min(step[part] for step in rank[1:]) for part in (0, 1)) for rank in ranks]


def work_for(seconds, flops_per_s):
    return max(1, round(seconds * flops_per_s / PRODUCT_FLOPS))


@pytest.fixture
def rates(core_flops_per_s):
    return (core_flops_per_s / 5, core_flops_per_s / 10)


@timed
def test_equal_work_in_lock_step_runs_at_the_pace_of_the_slow_rank(tmp_path, rates):
    count = work_for(0.1, rates[0])
    (fast_s, fast_step_s), (slow_s, slow_step_s) = run_ranks(tmp_path, rates, (count, count))
    # a fast rank that gained time by waiting would need less and less for its own part
    with by_the_clock():
        assert slow_s == pytest.approx(2 * fast_s, rel=0.1)
        assert fast_step_s == pytest.approx(slow_s, rel=0.1)
        assert slow_step_s == pytest.approx(slow_s, rel=0.1)


@timed
def test_work_in_the_ratio_of_speeds_ends_together(tmp_path, rates):
    count = work_for(0.15, rates[1])
    (fast_s, fast_step_s), (slow_s, slow_step_s) = run_ranks(tmp_path, rates, (2 * count, count))
    with by_the_clock():
        assert fast_s == pytest.approx(slow_s, rel=0.1)
        assert fast_step_s == pytest.approx(slow_s, rel=0.1)
        assert slow_step_s == pytest.approx(slow_s, rel=0.1)


@timed
def test_collectives_in_flight_hide_under_compute_and_earn_nothing(tmp_path, rates):
    count = work_for(0.1, rates[0])
    (_, fast_step_s), (issued_s, slow_step_s) = run_ranks(
        tmp_path, rates, (count, count), prefetched
    )
    expected_s = 2 * count * PRODUCT_FLOPS / rates[1]
    with by_the_clock():
        assert fast_step_s == pytest.approx(expected_s, rel=0.1)
        assert slow_step_s == pytest.approx(expected_s, rel=0.1)
        assert issued_s < expected_s / 4
