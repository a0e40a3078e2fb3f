import math
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest
from launch import run_ranks
from virtual_time import VirtualHost

from lightning_cephalo.accelerator.emulated.clock import CREDIT_LIMIT_S, ThreadActivity
from lightning_cephalo.accelerator.emulated.rate import emulated_flops_per_s


class Machine(VirtualHost):
    """A host with one device's clock."""

    def __init__(self):
        super().__init__()
        self.device_clock = self.clock()


def test_host_waits_until_the_device_is_done():
    machine = Machine()
    for _ in range(3):
        machine.run(0.1)
        machine.device_clock.advance(1.0)
    machine.device_clock.wait()
    # the first piece was handed over at 0.1 s; the host's time for it counts as the device's
    assert machine.now_s == pytest.approx(3.0)


def test_a_starved_rank_catches_up():
    machine = Machine()
    machine.device_clock.advance(0.1)
    machine.run(0.3)  # longer than the device would have taken, because others had the processor
    machine.device_clock.advance(0.5)
    machine.device_clock.wait()
    assert machine.now_s == pytest.approx(0.6)


def test_catching_up_is_limited():
    machine = Machine()
    machine.run(10.0)
    machine.device_clock.advance(1.0)
    machine.device_clock.wait()
    assert machine.now_s == pytest.approx(10.0 + 1.0 - CREDIT_LIMIT_S)


def test_a_blocked_rank_gains_nothing():
    machine = Machine()
    machine.device_clock.advance(0.1)
    machine.block(2.0)
    machine.device_clock.advance(1.0)
    machine.device_clock.wait()
    assert machine.now_s == pytest.approx(3.0)


def test_the_device_works_on_while_its_rank_is_blocked():
    machine = Machine()
    machine.device_clock.advance(1.0)
    machine.block(0.4)
    machine.device_clock.advance(0.0)
    assert machine.device_clock.ahead_s == pytest.approx(0.6)


def test_only_what_the_device_does_not_hide_counts_as_blocked():
    machine = Machine()
    machine.device_clock.advance(1.0)
    machine.block(0.4)  # the device works on
    machine.device_clock.advance(0.0)
    assert machine.device_clock.blocked_s == 0.0
    machine.block(0.9)  # 0.6 s of work are left
    machine.device_clock.advance(0.0)
    assert machine.device_clock.blocked_s == pytest.approx(0.3)


def test_neither_work_of_the_host_nor_its_waits_for_the_device_count_as_blocked():
    machine = Machine()
    machine.run(0.2)
    machine.device_clock.advance(1.0)
    machine.device_clock.wait()
    machine.run(0.3)
    machine.device_clock.advance(0.0)
    assert machine.device_clock.blocked_s == pytest.approx(0.0)


def test_blocking_keeps_the_credit_earned_before():
    machine = Machine()
    machine.run(0.1)
    machine.device_clock.advance(0.0)
    machine.block(5.0)
    machine.device_clock.advance(0.0)
    assert machine.device_clock.ahead_s == pytest.approx(-0.1)


def test_credit_can_be_forfeited():
    machine = Machine()
    machine.run(0.2)
    machine.device_clock.wait()
    machine.device_clock.forfeit()
    machine.device_clock.advance(1.0)
    machine.device_clock.wait()
    assert machine.now_s == pytest.approx(1.2)


def test_many_short_blocks_after_a_collective_gain_nothing():
    machine = Machine()
    for _ in range(100):
        machine.device_clock.suspect()
        machine.block(0.0009)
        machine.device_clock.advance(0.0)
    assert machine.device_clock.ahead_s == pytest.approx(0.0, abs=1e-9)


def test_waiting_with_nothing_to_do_returns_at_once():
    machine = Machine()
    machine.run(0.1)
    machine.device_clock.wait()
    assert machine.slept_s == 0.0


def test_activity_is_running_and_waiting_for_a_processor(tmp_path):
    statistics = tmp_path / "schedstat"
    statistics.write_text("1000000000 250000000 3\n")  # nanoseconds run and queued, time slices
    activity = ThreadActivity(lambda: 2.0, statistics)
    assert activity() == pytest.approx(2.25)
    statistics.write_text("1000000000 750000000 4\n")
    assert activity() == pytest.approx(2.75)
    activity.close()
    assert activity() == pytest.approx(2.0)


def test_activity_without_statistics_is_running(tmp_path):
    activity = ThreadActivity(lambda: 2.0, tmp_path / "absent")
    assert activity() == 2.0
    activity.close()


class Inactive:
    """Counts the time in which the calling thread neither ran nor waited for a processor."""

    def __init__(self):
        self.activity = ThreadActivity()
        self.start_s, self.before_s = time.perf_counter(), self.activity()

    def seconds(self):
        active_s = self.activity() - self.before_s
        return time.perf_counter() - self.start_s - active_s


def test_sleep_is_no_activity():
    inactive = Inactive()
    time.sleep(0.1)
    # however late other work on the machine lets the thread wake up: that is a wait
    assert inactive.seconds() > 0.095


def test_running_is_activity():
    activity = ThreadActivity()
    before_s = activity()
    while activity() - before_s < 0.05:  # would never end if it were none
        math.sqrt(2.0)


def test_activity_of_other_threads_does_not_count():
    def spin():
        before_s = time.thread_time()
        while time.thread_time() - before_s < 0.1:
            math.sqrt(2.0)

    other = threading.Thread(target=spin)
    inactive = Inactive()
    other.start()
    other.join()  # blocks for as long as the other one runs, which is 0.1 s or more
    assert inactive.seconds() > 0.095


def waits_are_counted():
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[2]) > 0
    except OSError:
        return False


@pytest.mark.processes
@pytest.mark.skipif(not waits_are_counted(), reason="this system does not count these waits")
def test_a_thread_that_another_keeps_from_running_is_active():
    def share_a_processor(rank, processor, is_done):
        os.sched_setaffinity(0, {processor})
        activity = ThreadActivity()
        queued_s = activity() - time.thread_time()
        while activity() - time.thread_time() - queued_s < 0.02:
            math.sqrt(2.0)
        is_done[rank].set()  # the other one needs somebody to wait for
        while not is_done[1 - rank].is_set():
            math.sqrt(2.0)

    processor = min(os.sched_getaffinity(0))
    is_done = [multiprocessing.get_context("fork").Event() for _ in range(2)]
    run_ranks(2, share_a_processor, processor, is_done, process_group=False)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ((1,), (40.0,)),  # one rank: 0.8 of a core
        ((1, 1), (25.0, 25.0)),  # together: half of the machine
        ((3, 1), (37.5, 12.5)),
        ((9, 1), (40.0, 40.0 / 9)),
    ],
)
def test_rates_stay_under_half_of_the_machine_and_under_a_core(speeds, expected):
    assert emulated_flops_per_s(speeds, 50.0, 2) == pytest.approx(expected)
