"""Leaves of nested arguments, and the same structure built again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cephalo.execution.call_tree import (
    CallStructure,
    flatten,
    flatten_call,
    flatten_result,
)


@dataclasses.dataclass(frozen=True)
class Output:
    hidden: object
    name: str = "x"


@dataclasses.dataclass
class NoTensors:
    rate: float


Pair = namedtuple("Pair", ["first", "second"])


def same(left: object, right: object) -> bool:
    """Whether two trees have the same types and, by identity, the same tensors."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left is right
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Output):
        return same((left.hidden, left.name), (right.hidden, right.name))
    return left == right


leaves = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.builds(lambda: torch.zeros(1)))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Output, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@given(trees)
def test_what_is_flattened_is_built_again(tree):
    values, structure = flatten(tree)
    assert len(values) == structure.num_leaves
    assert same(structure.unflatten(values), tree)


@given(st.lists(trees, max_size=3), st.dictionaries(st.text(max_size=2), trees, max_size=3))
def test_the_short_way_for_calls_gives_the_same_leaves(args, kwargs):
    values, structure = flatten_call(tuple(args), kwargs)
    expected, _ = flatten((tuple(args), kwargs))
    assert len(values) == len(expected) == structure.num_leaves
    assert all(map(same, values, expected))
    assert same(structure.unflatten(values), (tuple(args), kwargs))


@given(trees)
def test_the_short_way_for_results_gives_the_same_leaves(tree):
    values, structure = flatten_result(tree)
    assert all(map(same, values, flatten(tree)[0]))
    assert same(structure.unflatten(values), tree)


def test_a_call_with_tuples_takes_the_short_way_and_another_container_the_long_one():
    """Models of Hugging Face give blocks the tuple of cosines and sines."""
    hidden, cosine, sine = torch.ones(3).split(1)
    values, structure = flatten_call((hidden, ()), {"mask": None, "angles": (cosine, sine)})
    assert isinstance(structure, CallStructure) and structure.num_leaves == 4
    assert values[0] is hidden and values[2] is cosine and values[3] is sine
    assert structure.unflatten([1, 2, 3, 4]) == ((1, ()), {"mask": 2, "angles": (3, 4)})
    assert not isinstance(flatten_call((hidden, [cosine]), {})[1], CallStructure)
    assert not isinstance(flatten_call((hidden, (cosine, [sine])), {})[1], CallStructure)


def test_a_dataclass_object_is_opened_only_where_it_holds_a_tensor():
    plain, holding = NoTensors(0.5), Output([torch.ones(2)])
    values, structure = flatten({"plain": plain, "holding": holding})
    assert values[0] is plain and values[1] is holding.hidden[0]
    replaced = torch.zeros(2)
    again = structure.unflatten([plain, replaced, "y"])
    assert again["plain"] is plain
    assert again["holding"].hidden[0] is replaced and again["holding"].name == "y"
    assert holding.hidden[0] is not replaced, "the user's object has been changed"


@pytest.mark.parametrize("tree", [OrderedDict(b=torch.ones(1), a=[None]), Pair(1, torch.ones(1))])
def test_containers_keep_their_type_and_order(tree):
    values, structure = flatten(tree)
    assert same(structure.unflatten(values), tree)
