import math
import threading
import time

import pytest
from busy import by_the_clock, timed

from lightning_cephalo.accelerator.emulated.clock import (
    CREDIT_LIMIT_S,
    ThreadActivity,
    VirtualClock,
)
from lightning_cephalo.accelerator.emulated.rate import emulated_flops_per_s


class Machine:
    """Real time and the activity of one thread, by hand."""

    def __init__(self):
        self.now_s = self.active_s = self.slept_s = 0.0
        self.clock = VirtualClock(lambda: self.now_s, lambda: self.active_s, self.sleep)

    def run(self, seconds):
        self.now_s += seconds
        self.active_s += seconds

    def block(self, seconds):
        self.now_s += seconds

    def sleep(self, seconds):
        self.slept_s += seconds
        self.block(seconds)


def test_host_waits_until_the_device_is_done():
    machine = Machine()
    for _ in range(3):
        machine.run(0.1)
        machine.clock.advance(1.0)
    machine.clock.wait()
    # the first piece was handed over at 0.1 s; the host's time for it counts as the device's
    assert machine.now_s == pytest.approx(3.0)


def test_a_starved_rank_catches_up():
    machine = Machine()
    machine.clock.advance(0.1)
    machine.run(0.3)  # longer than the device would have taken, because others had the processor
    machine.clock.advance(0.5)
    machine.clock.wait()
    assert machine.now_s == pytest.approx(0.6)


def test_catching_up_is_limited():
    machine = Machine()
    machine.run(10.0)
    machine.clock.advance(1.0)
    machine.clock.wait()
    assert machine.now_s == pytest.approx(10.0 + 1.0 - CREDIT_LIMIT_S)


def test_a_blocked_rank_gains_nothing():
    machine = Machine()
    machine.clock.advance(0.1)
    machine.block(2.0)
    machine.clock.advance(1.0)
    machine.clock.wait()
    assert machine.now_s == pytest.approx(3.0)


def test_the_device_works_on_while_its_rank_is_blocked():
    machine = Machine()
    machine.clock.advance(1.0)
    machine.block(0.4)
    machine.clock.advance(0.0)
    assert machine.clock.ahead_s == pytest.approx(0.6)


def test_only_what_the_device_does_not_hide_counts_as_blocked():
    machine = Machine()
    machine.clock.advance(1.0)
    machine.block(0.4)  # the device works on
    machine.clock.advance(0.0)
    assert machine.clock.blocked_s == 0.0
    machine.block(0.9)  # 0.6 s of work are left
    machine.clock.advance(0.0)
    assert machine.clock.blocked_s == pytest.approx(0.3)


def test_neither_work_of_the_host_nor_its_waits_for_the_device_count_as_blocked():
    machine = Machine()
    machine.run(0.2)
    machine.clock.advance(1.0)
    machine.clock.wait()
    machine.run(0.3)
    machine.clock.advance(0.0)
    assert machine.clock.blocked_s == pytest.approx(0.0)


def test_blocking_keeps_the_credit_earned_before():
    machine = Machine()
    machine.run(0.1)
    machine.clock.advance(0.0)
    machine.block(5.0)
    machine.clock.advance(0.0)
    assert machine.clock.ahead_s == pytest.approx(-0.1)


def test_credit_can_be_forfeited():
    machine = Machine()
    machine.run(0.2)
    machine.clock.wait()
    machine.clock.forfeit()
    machine.clock.advance(1.0)
    machine.clock.wait()
    assert machine.now_s == pytest.approx(1.2)


def test_many_short_blocks_after_a_collective_gain_nothing():
    machine = Machine()
    for _ in range(100):
        machine.clock.suspect()
        machine.block(0.0009)
        machine.clock.advance(0.0)
    assert machine.clock.ahead_s == pytest.approx(0.0, abs=1e-9)


def test_waiting_with_nothing_to_do_returns_at_once():
    machine = Machine()
    machine.run(0.1)
    machine.clock.wait()
    assert machine.slept_s == 0.0


@timed
def test_activity_tells_sleeping_from_running():
    activity = ThreadActivity()
    before_s = activity()
    time.sleep(0.05)
    slept_s = activity() - before_s
    before_s, start_s = activity(), time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < 0.05:
        math.sqrt(2.0)
    ran_s = activity() - before_s
    activity.close()
    with by_the_clock():
        assert slept_s < 0.02
        assert ran_s > 0.8 * elapsed_s
    assert activity() > 0


@timed
def test_activity_counts_the_calling_thread_only():
    activity = ThreadActivity()
    stop = threading.Event()
    other = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
    other.start()
    before_s = activity()
    time.sleep(0.05)
    ran_s = activity() - before_s
    stop.set()
    other.join()
    activity.close()
    with by_the_clock():
        assert ran_s < 0.03


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
