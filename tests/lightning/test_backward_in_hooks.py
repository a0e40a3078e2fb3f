"""A backward that a hook runs adds to the gradients of the step, as on one device."""

from __future__ import annotations

import pytest
import torch
from cases import Cases, on_one_device
from common import Net, assert_same_tensors, loader, trainer, values_of

TOLERANCE = 1e-5


class Regularized(Net):
    """Runs a backward in a hook, which gives unused parameters their only gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.extra = torch.nn.Parameter(torch.randn(5, 3))
        self.unseen = torch.nn.Parameter(torch.tensor(2.0))
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        held = self.extra.square().sum() + self.blocks[1].down.weight.square().mean()
        (held + self.unseen.square() + self.extra[1:3].sum()).backward()
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        self.blocks[0].down.weight.grad.mul_(2.0)


def fit(plan: str | None, options: dict[str, float]):
    model = Regularized()
    trainer(plan, max_epochs=2, **options).fit(model, loader(14), loader(8))
    return model.losses, model.norms, values_of(model)


OPTIONS = {"clipped": {"gradient_clip_val": 2.0}, "added up": {"accumulate_grad_batches": 2}}
FITS = Cases({name: ("three", fit, options) for name, options in OPTIONS.items()})


@pytest.mark.parametrize("name", OPTIONS)
def test_a_backward_in_a_hook_gives_the_gradients_of_one_device(name):
    wanted_losses, wanted_norms, wanted = on_one_device(fit, OPTIONS[name])
    for losses, norms, values in FITS[name]:
        assert losses == pytest.approx(wanted_losses, rel=TOLERANCE)
        assert norms == pytest.approx(wanted_norms, rel=1e-4)
        assert_same_tensors(values, wanted, TOLERANCE)
