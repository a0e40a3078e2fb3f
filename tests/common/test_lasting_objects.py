"""The collector leaves alone what lives as long as training, and finds all else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from lightning_cephalo.common.lasting_objects import LastingObjects


class _Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def lasting() -> Iterator[LastingObjects]:
    is_frozen = gc.get_freeze_count() > 0  # by what starts ranks in other tests
    gc.unfreeze()
    lasting = LastingObjects()
    yield lasting
    lasting.end()
    if is_frozen:
        gc.freeze()


def test_objects_are_frozen_behind_the_first_full_collection_until_the_end(lasting):
    before = list(gc.callbacks)
    gc.collect()  # else one may be due
    lasting.begin()
    lasting.begin()
    gc.collect(1)
    lasting.between_steps()
    assert not gc.get_freeze_count()
    gc.collect()
    assert not gc.get_freeze_count()  # a step may be running
    lasting.between_steps()
    assert gc.get_freeze_count() > 1000
    assert gc.callbacks == before
    lasting.end()
    assert not gc.get_freeze_count()


def test_later_objects_are_collected_as_always_and_earlier_ones_behind_the_end(lasting):
    earlier = _Cycle()
    lasting.begin()
    gc.collect()
    lasting.between_steps()
    later = _Cycle()
    of_earlier, of_later = weakref.ref(earlier), weakref.ref(later)
    del earlier, later
    gc.collect()
    assert of_later() is None and of_earlier() is not None
    lasting.end()
    gc.collect()
    assert of_earlier() is None


def test_what_the_users_code_has_frozen_or_switched_off_stays_so(lasting):
    before = list(gc.callbacks)
    gc.freeze()
    lasting.begin()
    assert gc.callbacks == before
    gc.unfreeze()
    gc.disable()
    try:
        lasting.begin()
        assert gc.callbacks == before
    finally:
        gc.enable()


def test_an_end_without_a_collection_leaves_nothing(lasting):
    before = list(gc.callbacks)
    lasting.begin()
    lasting.end()
    assert gc.callbacks == before
