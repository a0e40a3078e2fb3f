"""Where an optimizer's updates run, and the loss that it gets, without other ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_cephalo.adapters.scope import Scope, Trial, is_named, try_out
from lightning_cephalo.adapters.updates import OptimizerUpdates
from lightning_cephalo.common.errors import UnsupportedError


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
def test_a_claim_that_no_trial_can_check_is_followed_with_a_warning(make):
    optimizer = make(_parameters())
    assert not try_out(optimizer).ran
    updates = OptimizerUpdates(SimpleNamespace(), [type(optimizer).__name__])
    with pytest.warns(UserWarning, match=r"is followed\. It could not be checked: "):
        assert updates._scope(optimizer) is Scope.ELEMENT


def test_a_claim_is_for_a_class_or_what_it_is_made_from_and_for_no_other():
    optimizer = _Own(_parameters())
    for named in ([_Own], ["_Own"], [torch.optim.Adagrad], ["_Normed", "Adagrad"]):
        assert is_named(optimizer, named)
    for named in ([], ["Own"], [_Normed, "_NoCopy"]):
        assert not is_named(optimizer, named)


def test_a_claim_that_a_trial_contradicts_is_refused():
    optimizer = _Normed(_parameters(), lr=0.1)
    trial = try_out(optimizer)
    assert trial == Trial(Scope.PARAMETER, is_element_wise=False)
    with pytest.raises(UnsupportedError, match="updates rows in another way"):
        OptimizerUpdates(SimpleNamespace(), [_Normed])._scope(optimizer)


@pytest.mark.parametrize(
    ("own", "weight", "wanted"),
    [
        (torch.tensor(1.0), 3.0, 2.0),
        (1.0, 3.0, 2.0),
        (torch.tensor(torch.nan), 0.0, 5.0),
        (None, 1.0, None),
    ],
    ids=["loss", "float", "no samples", "None"],
)
def test_every_rank_meets_for_the_loss_whatever_its_closure_returns(own, weight, wanted):
    sent = []

    def gather(numbers):
        sent.append(numbers)
        return [numbers, [5.0, 1.0]]

    model = SimpleNamespace(control=SimpleNamespace(world_size=2, gather=gather))
    found = OptimizerUpdates(model, []).whole_loss(_NoCopy(_parameters()), own, weight)
    assert len(sent) == 1
    assert found is None if wanted is None else float(found) == wanted
