"""Where an optimizer's updates run, and the loss that it gets, without other ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_cephalo.adapters.scope import Scope, Trial, try_out
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
@pytest.mark.parametrize("claim", ["element", "parameter"])
def test_a_claim_that_no_trial_can_check_is_followed_with_a_warning(make, claim):
    optimizer = make(_parameters())
    assert not try_out(optimizer).ran
    updates = OptimizerUpdates(SimpleNamespace(), claim)
    with pytest.warns(UserWarning, match="is followed, but it could not be checked: "):
        assert updates._scope(optimizer) is Scope(claim)


def test_a_claim_that_a_trial_contradicts_is_refused():
    optimizer = _Normed(_parameters(), lr=0.1)
    trial = try_out(optimizer)
    assert trial == Trial(Scope.PARAMETER, is_element_wise=False)
    with pytest.raises(UnsupportedError, match="updates rows in another way"):
        OptimizerUpdates(SimpleNamespace(), "element")._scope(optimizer)


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
    found = OptimizerUpdates(model, "auto").whole_loss(_NoCopy(_parameters()), own, weight)
    assert len(sent) == 1
    assert found is None if wanted is None else float(found) == wanted
