"""Which callbacks are served by name: Lightning's own classes, and no others."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.callbacks import WeightAveraging as Lightnings
from lightning.pytorch.plugins import XLACheckpointIO
from lightning.pytorch.profilers import XLAProfiler

from lightning_cephalo.adapters.averaged_weights import averaging_callbacks


class WeightAveraging(Callback):
    """A user's own, which only has the name."""


class _Subclass(Lightnings):
    pass


def test_only_lightnings_callbacks_hold_the_copies_that_are_sharded():
    its = [EMAWeightAveraging(), _Subclass()]
    assert averaging_callbacks([WeightAveraging(), *its]) == its


# Lightning's XLAProfiler has a __del__ that fails if its __init__ has
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("needs_xla", [XLAProfiler, XLACheckpointIO])
def test_lightning_itself_refuses_what_needs_other_devices(needs_xla):
    with pytest.raises(ModuleNotFoundError, match="torch_xla"):
        needs_xla()
