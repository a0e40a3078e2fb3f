"""Rates of copies, of updates by the host, and of the memory that both read and write."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from virtual_time import VirtualHost

from lightning_cephalo.accelerator.emulated.accelerator import Emulated
from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.emulation import EmulatedDevice
from lightning_cephalo.plan import Problem, RankProfile
from lightning_cephalo.profiling.measure import merge_equal_ranks
from lightning_cephalo.profiling.state_rates import (
    RATES,
    StateRates,
    _beside,
    contention_text,
    knows_contention,
    measure_state_rates,
    with_state_rates,
)

LINK, UPDATES = 2e8, 2e7


def measured(with_host_updates: bool = True, **rates: float) -> StateRates:
    host = VirtualHost(tick_s=1e-9)
    control = SimpleNamespace(
        barrier=lambda: None, gather=lambda row: [row], together=lambda _, function: function()
    )
    given = {"link_bytes_per_s": LINK, "host_updates_per_s": UPDATES, **rates}
    with EmulatedDevice(clock=host.clock, **given) as device:
        accelerator = Emulated(torch.device("cpu"), device)
        model: Any = SimpleNamespace(
            accelerator=accelerator,
            control=control,
            device=accelerator.device,
            executor=SimpleNamespace(reshard=lambda: None),
            units=[],
        )
        (found,) = measure_state_rates(model, 2.0**28, with_host_updates=with_host_updates)
    return found


def test_the_memory_of_a_host_that_serves_all_at_once_is_endless():
    found = measured()
    assert found.to_device_bytes_per_s == pytest.approx(LINK, rel=0.01)
    assert found.to_host_bytes_per_s == pytest.approx(LINK, rel=0.01)
    assert found.host_updated_parameters_per_s == pytest.approx(UPDATES, rel=0.01)
    assert found.host_memory_bytes_per_s == math.inf
    # a link that has a lane for each direction, beside a device that does not use it
    assert found.to_device_alone_bytes_per_s == pytest.approx(LINK, rel=0.01)
    assert found.to_host_alone_bytes_per_s == pytest.approx(LINK, rel=0.01)
    assert found.copies_beside_compute == pytest.approx(1.0, rel=0.01)
    assert found.copies_beside_gathers == pytest.approx(1.0, rel=0.01)


class _Bus:
    """A link of 100 bytes per second, and work that needs it for a second or does without it."""

    nbytes = 50

    def __init__(self, shares: bool) -> None:
        self.host, self._shares = VirtualHost(), shares
        self._busy_until_s = self._device_until_s = 0.0
        self.model = SimpleNamespace(
            control=SimpleNamespace(barrier=lambda: None),
            accelerator=SimpleNamespace(now_s=self.host.now, synchronize=self._synchronize),
        )

    def _synchronize(self) -> None:
        self.host.block_until(self._device_until_s)

    def _taken(self, seconds: float) -> float:
        self._busy_until_s = max(self._busy_until_s, self.host.now_s) + seconds
        return self._busy_until_s

    def start(self) -> list[float]:
        done_s = self._taken(self.nbytes / 100)
        return [done_s, done_s]

    def finish(self, way: int, arrival: float) -> None:
        self.host.block_until(arrival)

    def work(self) -> None:
        self._device_until_s = self._taken(1.0) if self._shares else self.host.now_s + 1.0


@pytest.mark.parametrize(("shares", "factor"), [(True, 2.0), (False, 1.0)])
def test_copies_that_share_the_bus_with_other_work_take_twice_as_long(shares, factor):
    bus: Any = _Bus(shares)
    assert _beside(bus, 100.0, bus.work) == pytest.approx(factor)


def test_a_rank_whose_own_work_takes_no_time_meets_the_others_as_often():
    met = []
    for rate, work in ((100.0, True), (math.inf, False)):
        bus: Any = _Bus(True)
        own: list[int] = []
        bus.model.control.barrier = partial(own.append, 1)
        _beside(bus, rate, bus.work if work else lambda: None)
        met.append(len(own))
    assert met[0] == met[1]


def test_host_memory_that_cannot_be_had_for_measuring_is_named_on_all_ranks():
    def refuse(nbytes: int) -> Any:
        raise RuntimeError("CUDA error: out of memory.")

    together: list[str] = []

    def call(doing: str, function: Any) -> Any:
        together.append(doing)  # raises on all ranks
        return function()

    model: Any = SimpleNamespace(
        control=SimpleNamespace(together=call),
        accelerator=SimpleNamespace(allocate_host=refuse),
        device=torch.device("cpu"),
    )
    with pytest.raises(HostMemoryError, match=r"out of memory\. .* optimizer_offload=False"):
        measure_state_rates(model, math.inf, with_host_updates=True)
    assert together == ["allocating host memory to measure copies"]


def test_a_problem_of_an_earlier_version_does_not_know_how_copies_slow_other_work_down():
    rank = RankProfile("a", [1.0], [1.0], [1.0], [1.0], 1000.0)
    problem = Problem([rank] * 2, 1, state_bytes=1, global_batch_size=2, optimizer_offload="auto")
    figures = StateRates(10.0, 2e9, 2e9, math.inf, 4e9, 3e9, 1.25, 1.5)
    others = StateRates(10.0, 2e9, 1.5e9, math.inf, 4e9, 3e9, 1.0, 1.75)
    older = with_state_rates(problem, [StateRates(10.0, 2e9, 2e9)] * 2)
    assert not knows_contention(Problem.from_dict(older.to_dict())) and not contention_text(older)
    known = with_state_rates(problem, [figures, others])
    known = Problem.from_dict(known.to_dict())
    assert knows_contention(known) and known.ranks[0] == known.ranks[1]
    text = contention_text(known)
    assert "1.25 times as long" in text and "beside gathers 1.75 times" in text
    assert "together" in text and "alone" in text
    assert not contention_text(replace(known, optimizer_offload=False))


@pytest.mark.parametrize("part", [0.6, 0.7])
def test_memory_that_makes_copies_and_updates_wait_for_each_other_is_measured(part):
    # each alone has all that it asks for, both together have a part of it
    needed = 2 * LINK + 28 * UPDATES
    rate = max(part * needed, 2 * LINK, 28 * UPDATES)
    found = measured(host_memory_bytes_per_s=rate)
    assert found.host_memory_bytes_per_s == pytest.approx(rate, rel=0.12)
    assert found.to_device_bytes_per_s == pytest.approx(LINK, rel=0.01)
    assert found.host_updated_parameters_per_s == pytest.approx(UPDATES, rel=0.01)


def test_without_updates_by_the_host_copies_tell_all():
    found = measured(with_host_updates=False)
    assert found.host_updated_parameters_per_s == 0 and found.host_memory_bytes_per_s == math.inf


def test_a_rank_whose_host_is_slow_keeps_its_rates_beside_ranks_that_are_alike():
    rank = RankProfile("a", [1.0], [1.0], [1.0], [1.0], 1000.0)
    problem = Problem([rank] * 4, 1, state_bytes=1, global_batch_size=4)
    fast, slow = StateRates(10.0, 20.0, 20.0), StateRates(2.0, 4.0, 4.0)
    slower = StateRates(9.0, 18.0, 21.0, 50.0)
    one, two, three, four = with_state_rates(problem, [fast, slow, slower, slow]).ranks
    assert one == three and two == four
    assert [getattr(one, name) for name in RATES] == [9.0, 18.0, 20.0, 50.0, *[None] * 4]
    assert [getattr(two, name) for name in RATES] == [2.0, 4.0, 4.0, math.inf, *[None] * 4]
    # a later start finds the same
    assert merge_equal_ranks([one, two, three, four]) == [one, two, three, four]
