"""What is refused or served by name: Lightning's own classes, and no others."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.callbacks import WeightAveraging as Lightnings

from lightning_cephalo.adapters.averaged_weights import averaging_callbacks


class WeightAveraging(Callback):
    """A user's own, which only has the name."""


class _Subclass(Lightnings):
    pass


def test_only_lightnings_callbacks_hold_the_copies_that_are_sharded():
    its = [EMAWeightAveraging(), _Subclass()]
    assert averaging_callbacks([WeightAveraging(), *its]) == its
