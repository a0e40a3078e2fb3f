"""Gradients of inputs in evaluation and in hooks are one device's, or are refused by name."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from common import Net, RankFailure, in_ranks, loader, trainer


class _Saliency(Net):
    """Computes how its output depends on its inputs, in a step or in a hook."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.slopes = place, []

    def look(self) -> None:
        x = torch.ones(4, 5, requires_grad=True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self(x).sum(), x)
        self.slopes.append(slope.norm().item())

    def validation_step(self, batch, batch_idx) -> None:
        if self.place == "step":
            self.look()

    def on_validation_epoch_end(self) -> None:
        strategy = self.trainer.strategy
        whole = getattr(strategy, "full_parameters", nullcontext)  # one device needs none
        if self.place == "hook":
            with whole():
                self.look()
        if self.place == "bare hook":
            self.look()
        if self.place == "last layer":
            with torch.enable_grad():
                x = torch.ones(4, 6, requires_grad=True)
                torch.autograd.grad(self.head(x).square().sum(), x)


def _fit(plan, place, options=None):
    module = _Saliency(place)
    ready = trainer(plan, options, limit_train_batches=2, limit_val_batches=1, inference_mode=False)
    ready.fit(module, loader(), loader(16))
    return module.slopes


@pytest.mark.parametrize("place", ["step", "hook"])
def test_gradients_of_inputs_are_right_in_a_model_of_one_unit_and_refused_through_units(place):
    (wanted,) = in_ranks(1, _fit, None, place)
    for slopes in in_ranks(2, _fit, "3:1", place, {"units": []}):
        assert slopes == pytest.approx(wanted, rel=1e-5) and wanted
    with pytest.raises(RankFailure) as failure:
        in_ranks(2, _fit, "3:1", place)
    assert str(failure.value).count("UnitUseError: Your code computes a gradient through") == 2


@pytest.mark.parametrize(
    ("place", "options"),
    [("bare hook", {"units": []}), ("last layer", None)],
    ids=["whole model", "layer of the root unit"],
)
def test_gradients_behind_a_call_in_a_hook_name_the_block_that_they_need(place, options):
    """Parameters are freed by then: a rank that held the whole model ended in a fault of memory."""
    with pytest.raises(RankFailure) as failure:
        in_ranks(2, _fit, "3:1", place, options)
    assert (
        str(failure.value).count("UnitUseError: Your code computes a gradient behind a call") == 2
    )
