"""Which ranks did not keep the plan's speed, from the times of their steps alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from lightning_cephalo.observe.pace import (
    Drift,
    MeasuredRank,
    busy_table,
    drift_of,
    predicted_busy_s,
    remarks,
)
from lightning_cephalo.plan import RankPlan

STEP_S = 1.0
WARM_UP = [9.0, 9.0, 9.0]  # what the first steps take says nothing
RANK = MeasuredRank(
    1, "cpu x1", steps=20, step_s=1.0, busy_s=0.5, waiting_s=0.25, predicted_busy_s=0.5
)


def noisy(seconds: float, count: int) -> list[float]:
    return [seconds * (1.0 + 0.1 * (index % 3)) for index in range(count)]


def test_a_change_in_mid_run_is_found_with_its_factor_and_its_step():
    found = drift_of(WARM_UP + noisy(0.2, 20) + noisy(1.0, 30), STEP_S)
    assert found == Drift(pytest.approx(5.0, rel=0.1), step=24)


def test_one_disturbed_step_does_not_move_the_change():
    busy_s = WARM_UP + noisy(0.2, 20) + noisy(1.0, 30)
    busy_s[7], busy_s[40] = 5.0, 0.1
    assert drift_of(busy_s, STEP_S) == Drift(pytest.approx(5.0, rel=0.1), step=24)


@pytest.mark.parametrize(
    "busy_s",
    [
        WARM_UP + noisy(0.2, 50),
        WARM_UP + noisy(1.0, 25) + noisy(0.2, 25),  # faster
        WARM_UP + noisy(0.2, 25) + noisy(0.28, 25),  # by less than half
        WARM_UP + noisy(0.02, 25) + noisy(0.1, 25),  # of a step that takes ten times as long
        WARM_UP + noisy(0.2, 20) + noisy(1.0, 5) + noisy(0.2, 20),  # over again
        WARM_UP + noisy(0.2, 4) + noisy(1.0, 3),  # too few
        [0.2, 0.2, 1.0],
        [],
    ],
)
def test_nothing_is_said_of_what_is_no_lasting_change(busy_s):
    assert drift_of(busy_s, STEP_S) is None


def test_predicted_work_is_that_of_all_units_and_the_root():
    plan = RankPlan((4,), 1.0, forward_s=0.1, backward_s=0.3, tail_s=0.05)
    assert predicted_busy_s(plan, units=3) == pytest.approx(1.25)
    assert predicted_busy_s(RankPlan((4,), 1.0), units=3) is None


def test_a_rank_that_became_slower_is_named_and_so_is_the_way_out():
    slow = replace(RANK, drift=Drift(5.04, 60))
    assert remarks([replace(RANK, rank=0), slow]) == [
        "Rank 1 (cpu x1) became 5.0 times slower from about step 60: the plan was made for another"
        " speed. Start again to measure and plan anew."
    ]


def test_a_rank_that_was_slower_from_the_beginning_is_named():
    said = remarks([replace(RANK, rank=0), replace(RANK, busy_s=0.9)])
    assert said == [
        "Rank 1 (cpu x1) was 1.8 times slower than predicted: the plan was made for another speed."
        " Start again to measure and plan anew."
    ]


def test_who_gave_the_plan_is_not_told_to_start_again():
    slow = [replace(RANK, rank=0), replace(RANK, busy_s=0.9)]
    (measured,), (given,) = remarks(slow), remarks(slow, is_given=True)
    assert measured.endswith("Start again to measure and plan anew.")
    assert given.endswith("Leave plan= out, to measure and plan anew.")


@pytest.mark.parametrize(
    "ranks",
    [
        [RANK, replace(RANK, busy_s=0.7)],
        [replace(RANK, busy_s=0.9), replace(RANK, busy_s=0.95)],  # both alike: shares still fit
        [RANK, replace(RANK, busy_s=0.9, steps=7)],
        [RANK, replace(RANK, busy_s=0.9, predicted_busy_s=None)],
        [RANK, replace(RANK, busy_s=0.05, predicted_busy_s=0.01)],  # a tenth of the step at most
    ],
)
def test_nothing_is_said_where_the_plan_fits(ranks):
    assert remarks(ranks) == []


def test_ranks_that_slowed_down_together_keep_their_shares():
    idle = replace(RANK, rank=2, busy_s=0.01, predicted_busy_s=0.0)
    slow = [replace(RANK, rank=0, drift=Drift(2.0, 31)), replace(RANK, drift=Drift(2.2, 30))]
    assert remarks([*slow, idle]) == []
    assert len(remarks([*slow, replace(RANK, rank=2)])) == 2


def printed(ranks: list[MeasuredRank]) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(busy_table(ranks))
    return capture.get()


def test_the_table_shows_work_predicted_and_measured_and_the_waiting():
    text = printed([RANK, replace(RANK, rank=7, busy_s=0.6, predicted_busy_s=None)])
    first, second = (line for line in text.splitlines() if "cpu x1" in line)
    assert [cell.strip() for cell in first.strip("│").split("│")] == [
        *("1", "cpu x1", "500 ms", "500 ms", "+0.0%", "25%")
    ]
    assert [cell.strip() for cell in second.strip("│").split("│")] == [
        *("7", "cpu x1", "–", "600 ms", "–", "25%")
    ]


def test_of_many_ranks_those_are_shown_for_which_the_others_waited():
    ranks = [replace(RANK, rank=i, name=f"r{i}", waiting_s=0.5) for i in range(100)]
    ranks[77] = replace(ranks[77], waiting_s=0.0)
    text = printed(ranks)
    assert "r77" in text and text.count("│ r") == 24
