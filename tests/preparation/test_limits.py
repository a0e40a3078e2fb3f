"""What may be written as ``memory_cap``, and what is said to anything else."""

import math
from types import SimpleNamespace

import pytest
import torch

from lightning_cephalo import CephaloStrategy
from lightning_cephalo.accelerator import Device, accelerator_of
from lightning_cephalo.common.errors import HostMemoryError, TooLittleMemoryError
from lightning_cephalo.plan import PlanError, RankPlan
from lightning_cephalo.preparation.limits import (
    HostMemory,
    Limits,
    limit_note,
    named_where_nothing_fits,
    read_limits,
    reserve_host_memory,
)
from lightning_cephalo.preparation.options import Options


@pytest.mark.parametrize(
    ("given", "rank_0_bytes", "rank_1_bytes"),
    [
        (0.5, 5000.0, 5000.0),
        (1.0, 10000.0, 10000.0),
        (40, 40.0, 40.0),
        ("2 KiB", 2048.0, 2048.0),
        ({1: 40}, math.inf, 40.0),
        ({0: 0.25, 1: "1 KiB"}, 2500.0, 1024.0),
    ],
)
def test_fractions_bytes_and_sizes_for_all_ranks_or_by_rank(given, rank_0_bytes, rank_1_bytes):
    assert _cap_bytes(given, 0) == rank_0_bytes
    assert _cap_bytes(given, 1) == rank_1_bytes


def _cap_bytes(cap, rank, total_bytes=10000.0):
    """What a rank may use of a device."""
    device = SimpleNamespace(
        describe=lambda processes: Device("card", 9000.0, total_bytes),
        host_is_apart=False,
        pins_host_memory=False,
    )
    return read_limits(device, 1, rank, Options(memory_cap=cap)).device.cap_bytes


@pytest.mark.parametrize("given", [0, 1, -5, 0.0, 1.5, 8e9, True, "8", "8 Gb", [0.5], math.nan])
def test_anything_else_is_refused_when_the_strategy_is_made(given):
    for cap in (given, {1: given}):
        with pytest.raises(PlanError, match="memory_cap") as caught:
            CephaloStrategy(memory_cap=cap)
        assert repr(given) in str(caught.value)


@pytest.mark.parametrize("rank", [-1, "0", True, 0.0])
def test_keys_are_ranks(rank):
    with pytest.raises(PlanError, match="expected ranks"):
        CephaloStrategy(memory_cap={rank: 0.5})


def test_a_fraction_of_an_unknown_memory_is_refused():
    with pytest.raises(PlanError, match="Give bytes"):
        _cap_bytes(0.5, 0, math.inf)
    assert _cap_bytes(40, 0, math.inf) == 40.0


GROUP = "its control group (/sys/fs/cgroup/memory.max: 4.0 GiB)"


def limited(cap_bytes: float = math.inf, *, device: str = "", host: str = "") -> Limits:
    return Limits(
        Device("cpu", 10.0, 20.0, cap_bytes, limited_by=device), HostMemory(8.0, limited_by=host)
    )


def test_ranks_whose_memory_a_control_group_limits_are_named():
    on_cpu = [limited(device=GROUP), limited(device=GROUP)]
    assert limit_note(on_cpu, uses_host=False) == (
        f"The memory of rank 0, 1 is limited by {GROUP}."
    )
    apart = [limited(), limited(host=GROUP)]
    assert limit_note(apart, uses_host=False) == ""  # the plan takes nothing of the host
    assert limit_note(apart) == f"The memory of rank 1 is limited by {GROUP}."
    capped = limit_note([limited(5 * 2.0**20, device=GROUP)])
    assert capped == "The memory of rank 0 is limited by memory_cap (5.0 MiB)."


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ([limited(device=GROUP)], f"limited by {GROUP}. A larger limit may do."),
        ([limited(2.0**20)], "rank 0 is limited by memory_cap (1.0 MiB). A larger limit may do."),
    ],
)
def test_an_error_about_memory_names_the_limit_that_binds(limits, said):
    with (
        pytest.raises(TooLittleMemoryError) as raised,
        named_where_nothing_fits(limits),
    ):
        raise TooLittleMemoryError("Too little.")
    assert str(raised.value).startswith("Too little. ") and str(raised.value).endswith(said)
    with (
        pytest.raises(TooLittleMemoryError, match=r"^Too little\.$"),
        named_where_nothing_fits([limited()]),
    ):
        raise TooLittleMemoryError("Too little.")


def test_a_plan_that_offloads_more_than_the_control_group_allows_names_it():
    host = HostMemory(2.0**20, limited_by=GROUP)
    plan = RankPlan((1,), 1.0, offload=True, host_bytes=2.0**21)
    with pytest.raises(HostMemoryError, match=r"1\.0 MiB of its host's memory, by its control"):
        reserve_host_memory(accelerator_of(torch.device("cpu")), host, plan)
