"""What is refused or served by name: Lightning's own classes, and no others."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.callbacks import WeightAveraging as Lightnings
from lightning.pytorch.plugins import (
    DeepSpeedPrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    XLACheckpointIO,
)
from lightning.pytorch.profilers import XLAProfiler
from torch import nn

from lightning_cephalo.adapters.averaged_weights import averaging_callbacks
from lightning_cephalo.adapters.supported import refuse_lazy, refuse_precision
from lightning_cephalo.common.errors import UnsupportedError


class WeightAveraging(Callback):
    """A user's own, which only has the name."""


class _Subclass(Lightnings):
    pass


def test_only_lightnings_callbacks_hold_the_copies_that_are_sharded():
    its = [EMAWeightAveraging(), _Subclass()]
    assert averaging_callbacks([WeightAveraging(), *its]) == its


class BitsandbytesPrecision(MixedPrecision):
    """A user's own, which only has the name."""


def test_plugins_of_other_strategies_are_refused_by_name():
    for plugin in (DeepSpeedPrecision("32-true"), FSDPPrecision("bf16-true")):
        with pytest.raises(UnsupportedError, match=rf"{type(plugin).__name__} .*bf16-true"):
            refuse_precision(plugin)
    refuse_precision(HalfPrecision("bf16-true"))
    refuse_precision(BitsandbytesPrecision("bf16-mixed", "cpu"))


# Lightning's XLAProfiler has a __del__ that fails if its __init__ has
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("needs_xla", [XLAProfiler, XLACheckpointIO])
def test_lightning_itself_refuses_what_needs_other_devices(needs_xla):
    with pytest.raises(ModuleNotFoundError, match="torch_xla"):
        needs_xla()


# that they are new, torch says
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("layer", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)])
def test_layers_without_sizes_are_refused_by_name(layer):
    with pytest.raises(UnsupportedError, match=r"'1\.(weight|running_mean)'.*configure_model"):
        refuse_lazy(nn.Sequential(nn.Linear(1, 1), layer))
    refuse_lazy(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
