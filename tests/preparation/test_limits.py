"""What may be written as ``memory_cap``, and what is said to anything else."""

import math

import pytest

from lightning_cephalo import CephaloStrategy
from lightning_cephalo.plan import PlanError
from lightning_cephalo.preparation.limits import Cap


@pytest.mark.parametrize(
    ("given", "rank_0_bytes", "rank_1_bytes"),
    [
        (0.5, 50.0, 50.0),
        (1.0, 100.0, 100.0),
        (40, 40.0, 40.0),
        ("2 KiB", 2048.0, 2048.0),
        ({1: 40}, math.inf, 40.0),
        ({0: 0.25, 1: "1 KiB"}, 25.0, 1024.0),
    ],
)
def test_fractions_bytes_and_sizes_for_all_ranks_or_by_rank(given, rank_0_bytes, rank_1_bytes):
    cap = Cap.parse("memory_cap", given, by_rank=True)
    assert cap.bytes_of(0, 100.0) == rank_0_bytes
    assert cap.bytes_of(1, 100.0) == rank_1_bytes


@pytest.mark.parametrize("given", [0, 1, -5, 0.0, 1.5, 8e9, True, "8", "8 Gb", [0.5], math.nan])
def test_anything_else_is_refused_when_the_strategy_is_made(given):
    for cap in (given, {1: given}):
        with pytest.raises(PlanError, match="memory_cap") as caught:
            CephaloStrategy(memory_cap=cap)
        assert repr(given) in str(caught.value)


@pytest.mark.parametrize("rank", [-1, "0", True, 0.0])
def test_keys_are_ranks(rank):
    with pytest.raises(PlanError, match="expected ranks"):
        Cap.parse("memory_cap", {rank: 0.5}, by_rank=True)


def test_a_fraction_of_an_unknown_memory_is_refused():
    with pytest.raises(PlanError, match="Give bytes"):
        Cap.parse("memory_cap", 0.5).bytes_of(0, math.inf)
    assert Cap.parse("memory_cap", 40).bytes_of(0, math.inf) == 40.0
