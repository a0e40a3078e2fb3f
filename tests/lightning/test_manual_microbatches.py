"""Several microbatches per rank of steps that optimize manually train as on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from cases import Cases, on_one_device
from common import assert_same_tensors
from test_manual_optimization import (
    TOLERANCE,
    ActorCritic,
    Gan,
    OwnBackward,
    WithClosures,
    _is,
    fit,
)
from torch.nn.functional import mse_loss


class SeveralGan(Gan):
    def look(self) -> None:
        """Communicate nothing in a step that ranks run unequally often."""


class SeveralBackwards(OwnBackward, SeveralGan):
    pass


class TwoBackwards(SeveralGan):
    """Flags of whole modules, two losses with one graph, gradients of two batches added up."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        generating, discriminating = self.optimizers()
        fake = self.generator(x.flip(1))
        self.discriminator.requires_grad_(True)
        loss = _is(True, self.discriminator(x)) + _is(False, self.discriminator(fake.detach()))
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(discriminating, 0.1, "value")
            discriminating.step()
            self.discriminator.zero_grad(set_to_none=False)
        self.log("d_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.discriminator.requires_grad_(False)
        loss = _is(True, self.discriminator(fake))
        generating.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        again = mse_loss(fake, x)
        self.manual_backward(again)
        with torch.no_grad():
            for parameter in self.generator.parameters():
                parameter.grad.mul_(0.5)
        generating.step()
        self.discriminator.requires_grad_(True)
        self.log("loss", loss + again, on_step=True, on_epoch=True, sync_dist=True)
        return loss + again


class ReadsState(SeveralGan):
    """Numbers on the module, which the losses read; a mode that changes in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.average = 0.0, torch.tensor(1.0)
        self.taken, self.is_late, self.phase = 0, False, "first"
        self.dropout = torch.nn.Dropout(0.5)
        self.dropout.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        generating, discriminating = self.optimizers()
        self.dropout.train()
        fake = self.generator(x.flip(1))
        self.dropout.eval()
        scale = 1.0 + self.running + 0.1 * self.taken + float(self.average)
        self.taken += 1
        self.is_late = self.taken > 2
        self.phase = "later" if self.is_late else "soon"
        loss = _is(True, self.discriminator(x)) + scale * _is(False, self.dropout(fake.detach()))
        loss = loss + _is(False, self.discriminator(fake.detach()))
        self.running = 0.9 * self.running + 0.1 * float(x.square().mean())
        self.average = 0.8 * self.average + 0.2 * x.mean()
        discriminating.zero_grad()
        self.manual_backward(loss)
        discriminating.step()
        for group in generating.optimizer.param_groups:
            group["lr"] *= 0.99
        loss_g = mse_loss(self.generator(x), x) * scale
        generating.zero_grad()
        self.manual_backward(loss_g)
        generating.step()
        values = {"d_loss": loss, "loss": loss_g}
        self.log_dict(values, on_step=True, on_epoch=True, sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses += [self.running, float(self.average), float(self.taken)]


KINDS = (SeveralGan, SeveralBackwards, WithClosures, TwoBackwards, ActorCritic, ReadsState)
PLANS_OF = ("3:1", "three", "even")
RETAINS = {"recompute": False}
FITS = Cases(
    {
        **{(kind, plan): (plan, fit, kind, {}) for kind in KINDS for plan in PLANS_OF},
        **{(kind, "retains"): ("3:1", fit, kind, {}, RETAINS) for kind in (SeveralGan, ReadsState)},
    }
)


@cache
def one_device(kind: type[Any]) -> Any:
    return on_one_device(fit, kind, {})


@pytest.mark.parametrize(("kind", "plan"), list(FITS.cases))
def test_several_microbatches_train_as_on_one_device(kind, plan):
    wanted_losses, _, wanted, steps = one_device(kind)
    for losses, _, values, done in FITS[kind, plan]:
        assert losses == pytest.approx(wanted_losses, rel=TOLERANCE)
        assert_same_tensors(values, wanted, TOLERANCE)
        assert done == steps
