"""Rates of copies and of updates by the host."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from virtual_time import VirtualHost

from lightning_cephalo.accelerator.emulated.accelerator import Emulated
from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.emulation import EmulatedDevice
from lightning_cephalo.plan import Problem, RankProfile, StateBytes
from lightning_cephalo.profiling.rank_curves import merge_equal_ranks
from lightning_cephalo.profiling.state_rates import has_state_rates, with_state_rates

LINK, UPDATES = 2e8, 2e7
RANK = RankProfile("a", [1.0], [1.0], [1.0], [1.0], 1000.0)


def problem_of(*ranks: RankProfile) -> Problem:
    return Problem(ranks, 1, state=StateBytes(1), global_batch_size=1)


def measured(with_host_updates: bool = True, **rates: float) -> RankProfile:
    host = VirtualHost(tick_s=1e-9)
    control = SimpleNamespace(
        barrier=lambda: None, gather=lambda row: [row], together=lambda _, function: function()
    )
    given = {"link_bytes_per_s": LINK, "host_updates_per_s": UPDATES, **rates}
    with EmulatedDevice(clock=host.clock, **given) as device:
        accelerator = Emulated(torch.device("cpu"), device)
        model: Any = SimpleNamespace(
            accelerator=accelerator, control=control, device=accelerator.device
        )
        problem = with_state_rates(
            problem_of(RANK), model, 2.0**28, with_host_updates=with_host_updates
        )
    assert has_state_rates(problem) and not has_state_rates(problem_of(RANK))
    return problem.ranks[0]


def test_copies_and_updates_are_as_fast_as_links_and_hosts():
    found = measured()
    assert found.to_device_bytes_per_s == pytest.approx(LINK, rel=0.01)
    assert found.to_host_bytes_per_s == found.to_device_bytes_per_s
    assert found.host_updated_parameters_per_s == pytest.approx(UPDATES, rel=0.01)
    assert measured(with_host_updates=False).host_updated_parameters_per_s == 0


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
        with_state_rates(problem_of(RANK), model, math.inf, with_host_updates=True)
    assert together == ["allocating host memory to measure copies"]


def test_ranks_that_are_alike_get_the_slowest_rates():
    rates = {"to_device_bytes_per_s": 8.0, "to_host_bytes_per_s": 9.0}
    slow = replace(RANK, host_updated_parameters_per_s=2.0, **rates)
    other = replace(RANK, name="b")
    fast = replace(slow, host_updated_parameters_per_s=3.0, to_host_bytes_per_s=8.0)
    one, two, three = merge_equal_ranks([fast, slow, other])
    assert one == two == replace(slow, to_host_bytes_per_s=8.0) and three == other
