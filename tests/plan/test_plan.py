"""Plans: validation, what only the run can check, and text and files without loss."""

from __future__ import annotations

import math
import os
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_cephalo.plan import Plan, PlanError, RankPlan

EARLIER = Path(__file__).parent / "earlier"
UNEVEN = Plan(ranks=(RankPlan((4, 4, 3), 0.75, name="A6000"), RankPlan((1,), 0.25)))


def test_batches_and_world_size():
    assert UNEVEN.world_size == 2
    assert [rank.batch_size for rank in UNEVEN.ranks] == [11, 1]
    assert UNEVEN.global_batch_size == 12


def test_lists_are_stored_as_tuples_and_numbers_as_python_numbers():
    plan = Plan(ranks=[RankPlan([np.int64(2), 2], np.float32(1.0))])
    assert plan.ranks[0].microbatch_sizes == (2, 2)
    assert {type(size) for size in plan.ranks[0].microbatch_sizes} == {int}
    assert type(plan.ranks[0].state_fraction) is float


def test_plans_are_immutable():
    with pytest.raises(FrozenInstanceError):
        UNEVEN.ranks[0].state_fraction = 0.5  # type: ignore[misc]


def test_rounding_of_fractions_is_tolerated_and_kept():
    third = 0.33333334
    plan = Plan(ranks=[RankPlan((1,), third)] * 3)
    assert [rank.state_fraction for rank in plan.ranks] == [third] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 0), 1.0), r"microbatch_sizes\[1\]: expected a whole number of at least 1, .* got 0"),
        (((2.0,), 1.0), r"microbatch_sizes\[0\]: .* got 2.0"),
        ((4, 1.0), r"microbatch_sizes: expected a list of positive whole numbers, but got 4"),
        (("44", 1.0), r"microbatch_sizes: expected a list"),
        (((1,), 75), r"state_fraction: .* from 0 to 1, but got 75. Write 0.75, not 75"),
        (((1,), -0.1), r"state_fraction: .* at least 0, but got -0.1"),
        (((1,), math.nan), r"state_fraction: .* got nan"),
        (((1,), 1.0, 7), r"RankPlan.name: expected text"),
        (((1,), 1.0, "gpu", -1.0), r"RankPlan 'gpu': forward_s: .* got -1.0"),
    ],
)
def test_rank_plans_say_what_came(arguments, message):
    with pytest.raises(PlanError, match=message):
        RankPlan(*arguments)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((), r"at least one RankPlan, but got none"),
        (None, r"Plan.ranks: expected a list of RankPlan, but got None"),
        (({"microbatch_sizes": [1]},), r"Plan.ranks\[0\]: expected a RankPlan"),
        ((RankPlan((), 0.5), RankPlan((), 0.5)), r"at least one sample in all, but all 2 ranks"),
        (
            (RankPlan((1,), 0.5), RankPlan((1,), 0.25)),
            r"sum to 1, but \[0.5, 0.25\] sum to 0.75. Divide each by their sum",
        ),
    ],
)
def test_plans_say_what_came(ranks, message):
    with pytest.raises(PlanError, match=message):
        Plan(ranks=ranks)


@pytest.mark.parametrize("value", ["auto", 0, 1.0])
def test_whether_units_are_given_back_is_said_by_true_or_false(value):
    with pytest.raises(PlanError, match=rf"reshard_after_forward: .* false, but got {value!r}"):
        Plan((RankPlan((1,), 1.0),), reshard_after_forward=value)


def test_check_knows_world_size_and_global_batch():
    UNEVEN.check(world_size=2, global_batch_size=12)
    UNEVEN.check()
    with pytest.raises(PlanError, match=r"for 2 ranks, but this run has 4. Start 2 processes"):
        UNEVEN.check(world_size=4)
    with pytest.raises(PlanError, match=r"of 16, but the plan's \[11, 1\] sum to 12. Set global_b"):
        UNEVEN.check(global_batch_size=16)


_seconds = st.none() | st.floats(0, 1e300)
_rank_plans = st.builds(
    RankPlan,
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.just(0.0),
    name=st.text(st.characters(exclude_categories=["Cc", "Cs"]) | st.just("\n"), max_size=5),
    forward_s=_seconds,
    backward_s=_seconds,
    tail_s=_seconds,
    memory_bytes=_seconds,
    capacity_bytes=st.none() | st.just(math.inf) | st.floats(1e-3, 1e300),
)


@given(
    others=st.lists(_rank_plans, max_size=3),
    fraction=st.floats(1 - 1e-7, 1),
    numbers=st.tuples(_seconds, _seconds, _seconds, _seconds),
    reshard=st.sampled_from([None, True, False]),
)
def test_text_round_trips_are_exact(others, fraction, numbers, reshard):
    plan = Plan(
        (RankPlan((2, 1), fraction), *others),
        *numbers,
        backend="cvxpy/HiGHS",
        reshard_after_forward=reshard,
    )
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json", ".YAML"])
def test_files_round_trip_and_leave_nothing_beside(tmp_path, suffix):
    path = tmp_path / f"plan{suffix}"
    path.write_text("old")
    UNEVEN.save(path)
    assert Plan.load(str(path)) == UNEVEN
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.yaml"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        UNEVEN.save(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_plan_written_by_hand():
    plan = Plan.from_yaml("""
        ranks:
          - {microbatch_sizes: [2, 2], state_fraction: 0.75}
          - microbatch_sizes: []
            state_fraction: 2.5e-1
            memory_bytes: 1e9
    """)
    assert plan.ranks[0] == RankPlan((2, 2), 0.75)
    # YAML 1.1 reads 1e9 as text
    assert plan.ranks[1].memory_bytes == 1e9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ranks: [1, 2", r"plan.yaml: expected a plan in YAML, but the text is not YAML: .*line"),
        ("- 1", r"plan.yaml: plan: expected a mapping with the keys ranks, .*list: \[1\]"),
        ("", r"plan.yaml: plan: expected a mapping .* NoneType"),
        ("just words", r"plan.yaml: plan: expected a mapping .* 'just words'"),
        ("rank: []", r"plan.yaml: plan: unknown key 'rank'.*Did you mean 'ranks'\?"),
        ("step_s: 1.0", r"plan.yaml: plan: missing 'ranks'"),
        ("ranks: 3", r"plan.yaml: plan: ranks: expected a list of rank plans, but got 3"),
        (
            "ranks: [{microbatch_size: [1], state_fraction: 1.0}]",
            r"plan.yaml: plan: ranks\[0\]: unknown key 'microbatch_size'.*'microbatch_sizes'",
        ),
        ("ranks: [{microbatch_sizes: [1]}]", r"plan.yaml: plan: ranks\[0\]: missing 'state_frac"),
        (
            "ranks: [{microbatch_sizes: [-1], state_fraction: 1.0}]",
            r"plan.yaml: plan: ranks\[0\]: .*microbatch_sizes\[0\].*-1",
        ),
        (
            "ranks: [{microbatch_sizes: [1], state_fraction: 0.4}]",
            r"plan.yaml: Plan: expected state fractions that sum to 1",
        ),
        (
            "{vocabulary_sharding: true, ranks: [{microbatch_sizes: [1], state_fraction: 1.0}]}",
            r"plan.yaml: plan: vocabulary_sharding: True asks for what only .*Make the plan again",
        ),
        (
            "ranks: [{microbatch_sizes: [1], state_fraction: 1.0, speculated_fraction: 0.5}]",
            r"ranks\[0\]: speculated_fraction: 0.5 asks for what only .*Leave it out",
        ),
    ],
)
def test_files_that_are_no_plan_are_named_with_the_reason(tmp_path, content, message):
    path = tmp_path / "plan.yaml"
    path.write_text(content)
    with pytest.raises(PlanError, match=message):
        Plan.load(path)


def test_a_plan_of_an_earlier_version_that_asks_for_nothing_more_is_read():
    earlier = {"vocabulary_sharding": False, **Plan([RankPlan((1,), 1.0)]).to_dict()}
    assert Plan.from_dict(earlier) == Plan([RankPlan((1,), 1.0)])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(PlanError, match=r"missing.yaml: expected a plan, but there is no such"):
        Plan.load(tmp_path / "missing.yaml")
    with pytest.raises(PlanError, match=r"plan.toml: expected a file name that ends in .yaml"):
        Plan.load(tmp_path / "plan.toml")
    with pytest.raises(PlanError, match=r"plan.txt: .* suffix '.txt'"):
        UNEVEN.save(tmp_path / "plan.txt")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(PlanError, match=r"folder.yaml: expected a plan, but it cannot be read"):
        Plan.load(tmp_path / "folder.yaml")
    (tmp_path / "plan.json").write_text("{'ranks': []}")
    with pytest.raises(PlanError, match=r"plan.json: expected a plan in JSON, .* not JSON"):
        Plan.load(tmp_path / "plan.json")


def test_plans_of_earlier_versions_load():
    full = Plan.load(EARLIER / "plan.yaml")
    assert full.to_dict() == yaml.safe_load((EARLIER / "plan.yaml").read_text())
    assert full.ranks[0].resident_fraction == 0.5 and full.backend == "HiGHS"
    assert Plan.load(EARLIER / "hybrid_plan.yaml").groups == (0, 0, 1)


def test_the_units_of_a_group_are_a_stage():
    """Only files and checks know them so far."""
    ranks = [
        RankPlan((2,), 0.5, units=(1, 2)),
        RankPlan((2,), 0.5, units=[1, 2]),
        RankPlan((4,), 1.0, units=(3, 8)),
    ]
    plan = Plan(ranks, groups=(0, 0, 1))
    assert plan.has_stages and not UNEVEN.has_stages
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert "units: [3, 8]" in plan.to_yaml() and "units" not in UNEVEN.to_yaml()
    with pytest.raises(PlanError, match=r"same units on all ranks of a group.*\[1, 2\] hold"):
        Plan(ranks, groups=(0, 1, 1))
    with pytest.raises(PlanError, match=r"same units .*\[0, 1\] hold \[\(1, 4\), None\]"):
        Plan([RankPlan((1,), 0.5, units=(1, 4)), RankPlan((1,), 0.5)])


@pytest.mark.parametrize("units", [(2, 1), (0, 1), (1,), (1, 2, 3), 4, "12", (1.5, 2)])
def test_units_that_are_no_first_and_last_one_are_refused(units):
    with pytest.raises(PlanError, match=r"RankPlan\.units"):
        RankPlan((1,), 1.0, units=units)
