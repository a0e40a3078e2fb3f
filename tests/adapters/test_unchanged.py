"""What of an optimizer's options counts as changed."""

from __future__ import annotations

import numpy
import pytest
import torch

from lightning_cephalo.adapters.unchanged import changed_options, is_unchanged, kept, kept_options


class Strange:
    """Something that cannot be compared."""

    def __eq__(self, other):
        raise TypeError("compare something else")

    __hash__ = None


def changed(value, change) -> tuple[bool, bool]:
    """Whether an option is unchanged before a change in place, and behind it."""
    before = kept(value)
    found = is_unchanged(value, before)
    change(value)
    return found, is_unchanged(value, before)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([0.9, 0.999], lambda betas: betas.__setitem__(0, 0.8)),
        ([0.9], lambda betas: betas.append(0.9)),
        ({"deep": [{"er": 1}]}, lambda tree: tree["deep"][0].update(er=2)),
        ({"one": 1}, lambda tree: tree.update(two=2)),
        ({"one": 1, "two": 2}, lambda tree: tree.update(one=tree.pop("one"))),
        (torch.tensor(0.1), lambda rate: rate.mul_(0.5)),
        ((torch.tensor(0.9), 0.999), lambda betas: betas[0].fill_(0.8)),
        (torch.tensor(0.1), lambda rate: rate.mul_(2).div_(2)),  # another thread may have read it
    ],
)
def test_a_change_in_place_is_seen(value, change):
    assert changed(value, change) == (True, False)


@pytest.mark.parametrize(
    ("value", "other", "same"),
    [
        (1.0, 1.0, True),
        (1.0, 1, False),
        (0.0, False, False),
        ((0.9, 0.999), (0.9, 0.999), True),
        ((0.9, 0.999), [0.9, 0.999], False),
        (torch.tensor(1.0), torch.tensor(1.0), False),
        (torch.tensor(1.0), 1.0, False),
        (1.0, torch.tensor(1.0), False),
        ({"a": 1}, {"a": 1}, True),
        (float("nan"), float("nan"), False),
        (numpy.arange(2), numpy.arange(2), False),
        ([numpy.arange(2)], [numpy.arange(2)], False),
        (Strange(), Strange(), False),
    ],
)
def test_another_value_is_the_same_only_if_that_is_certain(value, other, same):
    assert is_unchanged(value, kept(value))
    assert is_unchanged(other, kept(value)) is same


def test_a_tensor_that_counts_no_writes_is_compared_by_itself():
    with torch.inference_mode():
        value = torch.ones(2)
    assert is_unchanged(value, kept(value)) and not is_unchanged(value.clone(), kept(value))


def test_the_option_that_has_changed_is_named():
    group = {"params": [], "lr": 0.1, "betas": [0.9, 0.999]}
    before = kept_options(group)
    assert not changed_options(group, before)
    assert not changed_options({**group, "params": [1]}, before)
    assert changed_options({**group, "lr": 0.2}, before) == ["lr"]
    assert changed_options({**group, "more": 1}, before) == ["more"]
    assert changed_options({"params": [], "lr": 0.1}, before) == ["betas"]
    group["betas"][1] = 0.99
    assert changed_options(group, before) == ["betas"]
