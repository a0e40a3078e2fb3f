"""What tables say about a plan: why the work is divided so, what it gains, what looks wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_cephalo.plan import (
    Links,
    Plan,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
    predict,
    solve,
)
from lightning_cephalo.plan.even import even_batches, even_state_plan
from lightning_cephalo.plan.reasons import reasons

LARGEST = 16


def profile(name: str, sample_s: float, capacity_bytes: float = math.inf) -> RankProfile:
    sizes = range(1, LARGEST + 1)
    return RankProfile(
        name,
        forward_s=[sample_s * size for size in sizes],
        backward_s=[2 * sample_s * size for size in sizes],
        tail_s=[0.0 for _ in sizes],
        compute_bytes=[100.0 * size for size in sizes],
        capacity_bytes=capacity_bytes,
    )


def problem(*ranks: RankProfile, batch: int = 16, **more: float) -> Problem:
    known = {"links": Links(1e-6, 1e-6), "state": StateBytes(1000.0), **more}
    return Problem(ranks=ranks, units=10, global_batch_size=batch, **known)


def told(asked: Problem) -> list[str]:
    return reasons(asked, solve(asked))


def test_samples_go_by_speed_and_the_gain_over_an_even_split_is_predicted() -> None:
    asked = problem(profile("fast", 1e-3), profile("slow", 3e-3))
    plan = solve(asked)
    even = even_state_plan(asked, even_batches(asked))
    assert even is not None and even.step_s is not None and plan.step_s is not None
    gain, why = reasons(asked, plan)
    assert gain.startswith(f"{even.step_s / plan.step_s:.2f} times as fast as even batches")
    assert gain.startswith("2.00 times")
    assert why == (
        "Samples go by speed: every rank is busy for 100% or more of the slowest one's time."
    )


def test_an_even_split_is_priced_as_the_cost_function_prices_it() -> None:
    asked = problem(profile("fast", 1e-3), profile("slow", 3e-3))
    even = [RankPlan((8,), 0.5), RankPlan((8,), 0.5)]
    plan = even_state_plan(asked, even_batches(asked))
    assert plan is not None and plan.step_s == pytest.approx(predict(asked, even).step_s)


def test_equal_ranks_hear_that_nothing_is_gained() -> None:
    gain, why = told(problem(profile("one", 1e-3), profile("other", 1e-3)))
    assert gain.startswith("As fast as even batches") and "gain nothing" in gain
    assert why.startswith("Samples go by speed")


def test_a_full_memory_is_the_reason_for_few_samples_and_for_no_even_split() -> None:
    fast = profile("fast", 1e-3, capacity_bytes=240.0)
    asked = problem(fast, profile("slow", 3e-3), batch=15, boundary_bytes=2.0)
    gain, why = told(asked)
    assert gain == "Even batches and even state, as under FSDP, do not fit every rank."
    assert why == "Rank 0: memory is full, though more samples would be faster."
    tiny = replace(asked, ranks=(replace(fast, capacity_bytes=90.0), asked.ranks[1]))
    share = solve(tiny).ranks[0].state_fraction
    assert told(tiny)[1] == f"Rank 0: no room for samples; {share:.0%} of the state is here."


def test_what_leaving_a_rank_without_samples_would_gain_is_told() -> None:
    asked = problem(profile("fast", 1e-3), profile("slow", 1.0), no_idle_ranks=True)
    plan = solve(asked)
    assert [rank.batch_size for rank in plan.ranks] == [15, 1]
    without = solve(replace(asked, no_idle_ranks=False))
    assert plan.step_s is not None and without.step_s is not None
    (said,) = (one for one in reasons(asked, plan) if "shorter" in one)
    assert said.startswith(
        f"Without samples on rank 1 a step would be {1 - without.step_s / plan.step_s:.0%} shorter"
        " (batches [16, 0])."
    )
    near = problem(profile("fast", 1e-3), profile("slow", 2e-3), no_idle_ranks=True)
    assert not any("shorter" in one for one in told(near))
    assert not any("shorter" in one for one in reasons(asked, without))  # it already is


def test_a_rank_without_room_for_a_sample_holds_state_only_in_measured_plans_too() -> None:
    full = profile("full", 1e-3, capacity_bytes=90.0)
    asked = problem(full, profile("slow", 3e-3), state=StateBytes(10.0), no_idle_ranks=True)
    assert [rank.batch_size for rank in solve(asked).ranks] == [0, 16]


def test_slow_communication_is_the_reason_that_the_split_matters_little() -> None:
    asked = problem(profile("fast", 1e-3), profile("slow", 3e-3), links=Links(9.0, 9.0))
    assert any(one.startswith("Communication takes longer than computing") for one in told(asked))


def test_one_rank_needs_no_reason() -> None:
    assert told(problem(profile("one", 1e-3))) == []


def test_ranks_whose_operations_take_as_long_to_start_as_to_compute_are_named() -> None:
    flat = replace(profile("fast", 1e-3), forward_s=(1e-3,) * LARGEST, backward_s=(2e-3,) * LARGEST)
    asked = problem(flat, profile("slow", 3e-3))
    said = [one for one in told(asked) if "starting operations" in one]
    assert said and said[0].startswith("Rank 0: half of a microbatch takes as long")
    assert said[0].endswith("Steps may be shorter than predicted.")
    alone = [one for one in told(problem(flat)) if "starting operations" in one]
    assert alone and alone[0].endswith("than computing them.")
    one = Plan((RankPlan((1,) * 8, 0.5), RankPlan((8,), 0.5)))
    assert not any("starting operations" in text for text in reasons(asked, one))


# -- measurements that look wrong -----------------------------------------------------------------


def test_devices_of_one_name_and_two_speeds_look_wrong() -> None:
    asked = problem(profile("L4", 1e-3), profile("A6000", 5e-3), profile("L4", 1.8e-3))
    (said,) = (one for one in told(asked) if "remeasure" in one)
    assert said.startswith("Ranks 0 and 2 are both 'L4', but rank 2 took 1.8 times as long")
    near = replace(asked, ranks=(*asked.ranks[:2], profile("L4", 1.1e-3)))
    assert not any("remeasure" in one for one in told(near))
