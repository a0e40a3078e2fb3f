"""Shares of optimizer state become whole units: never more on the device than planned."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_cephalo.plan import Plan, PlanError, RankPlan, state_homes
from lightning_cephalo.plan.state_homes import StateHome


def test_the_example_of_the_documentation_holds():
    assert doctest.testmod(state_homes).failed == 0


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=40),
    st.floats(0, 1),
    st.floats(0, 1),
)
@example([1, 999_999_999], 0.0, 0.0)
def test_shares_are_kept_to_a_unit_and_the_device_is_never_overfilled(sizes, resident, part):
    host = (1 - resident) * part
    homes = state_homes.state_homes(sizes, resident, host)
    held = {
        home: sum(size for size, own in zip(sizes, homes, strict=True) if own is home)
        for home in StateHome
    }
    total, largest = sum(sizes), max(sizes)
    assert held[StateHome.RESIDENT] <= total * resident * (1 + 1e-6) + 1e-6
    away = total - held[StateHome.RESIDENT]
    assert abs(held[StateHome.HOST] - away * (part if resident < 1 else 0)) <= largest + 1e-3
    # whatever still has room is there
    free = total * resident - held[StateHome.RESIDENT]
    assert all(
        size >= free * (1 - 1e-6) - 1
        for size, home in zip(sizes, homes, strict=True)
        if home is not StateHome.RESIDENT
    )


def test_plans_say_where_state_lives_and_old_ones_stay_as_they_are():
    rank = RankPlan((1,), 1.0)
    assert not rank.moves_state and "resident_fraction" not in rank.to_dict()
    moved = RankPlan((1,), 1.0, resident_fraction=0.25, host_update_fraction=0.5)
    plan = Plan((moved,))
    assert plan.moves_state and Plan.from_dict(plan.to_dict()) == plan
    with pytest.raises(PlanError, match=r"resident_fraction 0.75 and host_update_fraction 0.5 sum"):
        RankPlan((1,), 1.0, resident_fraction=0.75, host_update_fraction=0.5)
