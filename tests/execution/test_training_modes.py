"""Modes of modules, read and shown for each microbatch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_cephalo.execution.replay import TrainingModes


def plain() -> nn.Module:
    return nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))


def scripted() -> nn.Module:
    """A scripted module keeps its mode elsewhere than among its attributes."""
    return nn.Sequential(nn.Dropout(), torch.jit.script(nn.Sequential(nn.Dropout())))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("make", [plain, scripted])
def test_modes_are_read_and_shown_whatever_the_user_sets(make):
    model = make()
    modes = TrainingModes(model.modules())
    assert modes.now() == (True,) * 4
    model[1].eval()
    assert modes.now() == (True, True, False, False)
    with modes.shown((False, True, False, True)):
        assert [module.training for module in model.modules()] == [False, True, False, True]
    assert modes.now() == (True, True, False, False)
    model.training = False
    assert modes.now() == (False, True, False, False)
