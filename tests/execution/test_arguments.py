"""What units may be called with."""

from __future__ import annotations

import pytest
import torch

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.call_tree import without_empty_caches


class Cache:
    """As much of Hugging Face's key-value cache as is looked at."""

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length

    def update(self) -> None:
        self.length += 1


def test_an_empty_cache_is_left_out_and_all_else_is_passed_on():
    hidden = torch.ones(1)
    args, kwargs = without_empty_caches((hidden, Cache(0)), {"past": Cache(0), "flag": True})
    assert args[0] is hidden and args[1] is None
    assert kwargs == {"past": None, "flag": True}


def test_a_filled_cache_is_refused_with_the_way_out():
    with pytest.raises(UnitUseError, match=r"filled Cache .*recompute=False"):
        without_empty_caches((), {"past": Cache(3)})
