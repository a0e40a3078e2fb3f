"""Options that users leave to the plan, and what stands in for them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.plan import PlanError
from lightning_cephalo.preparation.options import Options, chosen


def test_an_option_that_does_not_exist_is_an_error():
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'never'"):
        CephaloStrategy(never=True)


def test_an_option_holds_where_a_plan_does_not_say():
    assert chosen(True, None) and chosen("auto", None) and not chosen(False, None)
    assert chosen(False, True) and not chosen(True, False) and not chosen("auto", False)


@pytest.mark.parametrize("name", ["recompute", "reshard_after_forward"])
@pytest.mark.parametrize("given", [None, 1, "Auto", [True]])
def test_anything_else_is_refused_when_the_strategy_is_made(name, given):
    with pytest.raises(ValueError, match=f"{name}: expected True, False or 'auto'") as caught:
        CephaloStrategy(**{name: given})
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("given", ["Block", 3, [3], [int], {"Block": 1}])
def test_units_that_are_no_list_of_classes_and_names_are_refused(given):
    with pytest.raises(ValueError, match="units: expected a list of classes") as caught:
        CephaloStrategy(units=given)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("given", ["auto", None, 1])
def test_whether_nodes_hold_the_whole_state_is_not_chosen_by_a_plan(given):
    with pytest.raises(ValueError, match="hybrid_sharding: expected True or False") as caught:
        Planner(hybrid_sharding=given)
    assert repr(given) in str(caught.value) and "cephalo compare" in str(caught.value)


def test_gradients_travel_in_dtypes_of_as_many_exponents_by_name_too():
    for given in (torch.bfloat16, "bfloat16", "torch.bfloat16"):
        assert Options(reduce_dtype=given).gradient_dtype is torch.bfloat16
    assert Options().gradient_dtype is None
    assert Options(reduce_dtype="float32").gradient_dtype is torch.float32
    for given in (torch.float16, "None", 16, True):
        with pytest.raises(ValueError, match="reduce_dtype: expected None") as caught:
            CephaloStrategy(reduce_dtype=given)
        assert repr(given) in str(caught.value)
    measured = Options(reduce_dtype=torch.bfloat16).of_measuring()
    assert measured == {**Options().of_measuring(), "reduce_dtype": "torch.bfloat16"}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("budget_s", 0, "seconds above 0"),
        ("budget_s", "20", "seconds above 0"),
        ("budget_s", float("nan"), "seconds above 0"),
        ("remeasure", 1, "True or False"),
        ("verbose", 3, "True, False, or 0, 1 or 2"),
        ("verbose", "yes", "True, False, or 0, 1 or 2"),
        ("early_update", True, "'auto' or False"),
        ("single_microbatch", None, "True or False"),
        ("elementwise", "Lion", "a list of classes of optimizers and names of classes"),
        ("elementwise", [torch.nn.Linear], "a list of classes of optimizers and names of classes"),
    ],
)
def test_a_planner_refuses_other_values_when_it_is_made(name, given, expected):
    with pytest.raises(ValueError, match=f"{name}: expected {expected}, but got") as caught:
        Planner(**{name: given})
    assert repr(given) in str(caught.value)


def test_a_planner_refuses_what_is_no_amount_of_memory():
    with pytest.raises(PlanError, match="host_memory_cap: "):
        Planner(host_memory_cap="much")


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("global_batch_size", 0, "None, or 1 or more samples"),
        ("global_batch_size", "8", "None, or 1 or more samples"),
        ("split_batch", 3, "None, or a function"),
        ("summed_buffers", "counts", "a list of names"),
        ("summed_buffers", [3], "a list of names"),
        ("plan", 3, "a lightning_cephalo.Plan, or the path of one"),
        ("record", 3, "None, or the path of a folder"),
        ("planner", {"verbose": False}, "a lightning_cephalo.Planner"),
        ("process_group_backend", 3, "None, or a name"),
        ("timeout", None, "a datetime.timedelta above 0"),
        ("timeout", timedelta(0), "a datetime.timedelta above 0"),
        ("start_method", "thread", "one of"),
    ],
)
def test_a_strategy_refuses_other_values_when_it_is_made(name, given, expected):
    with pytest.raises(ValueError, match=f"{name}: expected {expected}") as caught:
        CephaloStrategy(**{name: given})
    assert f"but got {given!r}" in str(caught.value)
