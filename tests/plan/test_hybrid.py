"""Hybrid sharding: its price in the closed form, and the plans that it leads to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_cephalo.common.errors import InfeasibleError
from lightning_cephalo.observe.report import plan_table
from lightning_cephalo.offline.simulate import simulate
from lightning_cephalo.plan import (
    Links,
    Plan,
    PlanError,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
    solve,
)
from lightning_cephalo.plan.cost import predict
from lightning_cephalo.plan.even import even_batches, even_state_plan
from lightning_cephalo.plan.state_groups import even_shares, members_of

RANK = RankProfile("card", [1, 2], [2, 4], [1, 2], [10, 20], 300)
# gathers of 8 cross between nodes; inside of a node they take 1
TOGETHER = Problem(
    [RANK] * 3,
    2,
    state=StateBytes(240),
    global_batch_size=6,
    links=Links(8, 8),
    root_links=Links(4, 4),
    fill_s=16,
)
GROUPED = replace(
    TOGETHER,
    links=Links(1, 10),
    root_links=Links(0.5, 5),
    fill_s=11,
    groups=(0, 0, 1),
)


def ranks_of(*shares: float) -> list[RankPlan]:
    return [RankPlan((2,), share) for share in shares]


def test_time_and_memory_by_hand():
    found = predict(GROUPED, ranks_of(0.25, 0.75, 1.0))
    # a gather hides behind each forward and the first backward, a reduce is longer than the last
    assert found.step_s == 2 * 2 + 4 + 10 + 2 + 0.5 + 5 + 11
    assert [rank.memory_bytes for rank in found.ranks] == [60 + 20, 180 + 20, 240 + 20]
    together = predict(TOGETHER, ranks_of(0.25, 0.25, 0.5))
    assert together.step_s == 8 + 2 + 8 + 8 + 2 + 4 + 4 + 16
    even = even_state_plan(GROUPED, even_batches(GROUPED))
    assert even is not None and even.step_s == found.step_s


def test_the_plan_shares_the_state_in_each_group():
    plan = solve(GROUPED)
    assert plan.groups == (0, 0, 1) and plan.gap == 0
    assert plan.step_s == predict(GROUPED, plan).step_s
    assert [sum(shares) for shares in plan.fractions_of_groups] == pytest.approx([1, 1])
    assert "each of 2 groups of ranks holds the whole state" in str(plan_table(plan).caption)
    assert simulate(GROUPED, plan).step_s <= plan.step_s


def test_what_does_not_fit_says_what_would():
    small = replace(GROUPED, ranks=[replace(RANK, capacity_bytes=200)] * 3)
    with pytest.raises(InfeasibleError, match="each of 2 groups holds the whole state") as refused:
        solve(small)
    assert "hybrid_sharding=False" in str(refused.value)
    assert "add 1 more 'card'" in str(refused.value)
    # state that might move to host memory elsewhere
    movable = replace(small, unit_parameters=(1, 4, 4), moment_bytes=8)
    with pytest.raises(InfeasibleError, match="each of 2 groups holds the whole state"):
        solve(movable)


def test_other_plans_keep_the_groups():
    plan = solve(GROUPED)
    other = solve(GROUPED, batches=[4, 1, 1])
    assert other is not None and other.groups == plan.groups


def test_files_say_nothing_of_groups_where_there_are_none(tmp_path):
    assert not [name for name in TOGETHER.to_dict() if "hybrid" in name or "group" in name]
    assert "groups" not in solve(TOGETHER).to_yaml()
    GROUPED.save(tmp_path / "problem.yaml")
    assert Problem.load(tmp_path / "problem.yaml") == GROUPED
    plan = solve(GROUPED)
    assert Plan.from_json(plan.to_json()) == plan


def test_groups_by_hand():
    assert members_of((1, 0, 1), 3) == ((0, 2), (1,)) and members_of((), 2) == ((0, 1),)
    assert even_shares((1, 0, 1), 3) == (0.5, 1.0, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Plan(ranks_of(0.5, 0.5), groups=(0, 0)), "two or more groups"),
        (lambda: Plan(ranks_of(0.5, 0.5), groups=(0, 1, 1)), "each of 2 ranks"),
        (lambda: Plan(ranks_of(0.5, 0.5), groups=(0, 1)), "sum to 1 in each of groups"),
        (lambda: Plan(ranks_of(1, 1), groups="01"), "groups: expected a list"),
        (
            lambda: Problem.from_dict({**TOGETHER.to_dict(), "hybrid_sharding": True}),
            "hybrid_sharding: True needs groups",
        ),
        (
            lambda: Problem.from_dict({**GROUPED.to_dict(), "hybrid_gather_s": 1.0}),
            "hybrid_gather_s: 1.0 asks for .* Measure the job again",
        ),
        (lambda: replace(GROUPED, even_links=Links(1)), "expected none with .* even_links"),
        (lambda: replace(GROUPED, optimizer_offload="auto"), "none with optimizer_offload: auto"),
        (lambda: predict(TOGETHER, solve(GROUPED)), "measured with none"),
        (
            lambda: predict(TOGETHER, Plan([RankPlan((1,), 1 / 3, units=(1, 2))] * 3)),
            "stages have no prices yet",
        ),
        (lambda: predict(GROUPED, solve(TOGETHER)), r"measured with \[0, 0, 1\]"),
    ],
)
def test_what_does_not_go_together_is_named(change, message):
    with pytest.raises(PlanError, match=message):
        change()
