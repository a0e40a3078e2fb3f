"""What units may be called with."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.call_tree import (
    flatten,
    refuse_changed_containers,
    without_empty_caches,
)


class Cache:
    """As much of Hugging Face's key-value cache as is looked at."""

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length

    def update(self) -> None:
        self.length += 1


@dataclasses.dataclass
class State:
    hidden: torch.Tensor


def test_an_empty_cache_is_left_out_and_all_else_is_passed_on():
    hidden = torch.ones(1)
    args, kwargs = without_empty_caches((hidden, Cache(0)), {"past": Cache(0), "flag": True})
    assert args[0] is hidden and args[1] is None
    assert kwargs == {"past": None, "flag": True}


def test_a_filled_cache_is_refused_with_the_way_out():
    with pytest.raises(UnitUseError, match=r"filled Cache .*recompute=False"):
        without_empty_caches((), {"past": Cache(3)})


def append(container):
    container.append(torch.ones(1))


def replace_item(container):
    container[0] = torch.ones(1)


def add_key(container):
    container["more"] = torch.ones(1)


def set_field(container):
    container.hidden = torch.ones(1)


@pytest.mark.parametrize(
    ("container", "change"),
    [
        ([torch.zeros(1)], append),
        ([torch.zeros(1)], replace_item),
        ({"x": torch.zeros(1)}, add_key),
        (State(torch.zeros(1)), set_field),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_changed_container_is_refused(container, change, named):
    args, kwargs = ((), {"state": container}) if named else ((container,), {})
    inputs, _ = flatten((args, kwargs))
    refuse_changed_containers(args, kwargs, inputs)
    change(container)
    with pytest.raises(UnitUseError, match="return the new values instead"):
        refuse_changed_containers(args, kwargs, inputs)


def test_a_tuple_is_not_looked_into():
    refuse_changed_containers((torch.ones(1), (1, 2)), {}, [])
