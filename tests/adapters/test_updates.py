"""Where an optimizer's updates run, without other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cephalo.adapters.scope import try_out
from lightning_cephalo.adapters.updates import OptimizerUpdates
from lightning_cephalo.common.errors import UnsupportedError

MODEL: Any = SimpleNamespace(state_groups=None)


class _Own(torch.optim.Adagrad):
    """A subclass: what it does is not known, and it has state from the beginning."""


class _NoCopy(torch.optim.SGD):
    """What it holds cannot be copied."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.lines = (line for line in "ab")


class _Normed(torch.optim.SGD):
    """A row's update depends on the whole parameter."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 * float(p.norm()))
        return loss


def _parameters():
    return [nn.Parameter(torch.ones(4, 3))]


@pytest.mark.parametrize("make", [lambda p: _Own(p), _NoCopy], ids=["state", "no copy"])
def test_a_claim_that_no_trial_can_check_is_followed(make):
    optimizer = make(_parameters())
    assert try_out(optimizer, by_rows=False)
    updates = OptimizerUpdates(MODEL, [type(optimizer).__name__])
    assert updates._may_run(optimizer)


def test_a_claim_is_for_a_class_or_what_it_is_made_from_and_for_no_other():
    optimizer = _Own(_parameters())
    for named in ([_Own], ["_Own"], [torch.optim.Adagrad], ["_Normed", "Adagrad"]):
        assert OptimizerUpdates(MODEL, named)._may_run(optimizer)
    for named in ([], ["Own"], [_Normed, "_NoCopy"]):
        with pytest.raises(UnsupportedError, match="_Own does not update each parameter by itself"):
            OptimizerUpdates(MODEL, named)._may_run(optimizer)


def test_a_claim_that_a_trial_contradicts_is_refused():
    optimizer = _Normed(_parameters(), lr=0.1)
    assert not try_out(optimizer, by_rows=False) and try_out(optimizer, by_rows=True)
    assert not OptimizerUpdates(MODEL, [])._may_run(optimizer)
    with pytest.raises(UnsupportedError, match="updates of rows, in a trial, are not those of"):
        OptimizerUpdates(MODEL, [_Normed])._may_run(optimizer)


class _Twice(torch.optim.SGD):
    """It evaluates its closure again, as LBFGS does in a line search."""

    def step(self, closure):
        closure()
        return super().step(closure)


class _Everything(torch.optim.SGD):
    """One update depends on another parameter, or on the loss, or another way to call it."""

    def __init__(self, params, reads):
        super().__init__(params, lr=0.1)
        self.reads = reads

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"]]
        size = 1.0 + torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.sub_(p.grad, alpha=0.1 * {"norm": 1 / size, "loss": loss}[self.reads])
        return loss


@pytest.mark.parametrize("reads", ["norm", "loss"])
def test_an_update_that_depends_on_other_parameters_or_the_loss_is_refused_by_name(reads):
    parameters = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(2, 3))]
    updates = OptimizerUpdates(MODEL, [])
    with pytest.raises(UnsupportedError, match=r"one device only\. Use .*elementwise=") as refused:
        updates._may_run(_Everything(parameters, reads))
    assert "changes an update" in str(refused.value)
    with pytest.raises(UnsupportedError, match="evaluates its closure several times"):
        updates._may_run(_Twice(parameters, lr=0.1))
    with pytest.raises(UnsupportedError, match="has state already"):
        updates._may_run(_Own(parameters))
