"""Several microbatches per rank of steps that optimize manually train as on one device."""

from __future__ import annotations

import re
from collections import deque
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from cases import Cases, on_one_device
from common import assert_same_tensors, loader, trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from plans import PLANS
from test_manual_optimization import (
    TOLERANCE,
    ActorCritic,
    Gan,
    OwnBackward,
    WithClosures,
    _is,
    fit,
)
from torch import Tensor
from torch.nn.functional import mse_loss

from lightning_cephalo.common.errors import RemoteRankError, UnitUseError, UnsupportedError


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
            norm = torch.stack([each.grad.norm() for each in self.generator.parameters()]).norm()
            for parameter in self.generator.parameters():
                parameter.grad.mul_(0.5)
        self.log("norm", norm, on_step=True, on_epoch=False, sync_dist=True)
        generating.step()
        self.discriminator.requires_grad_(True)
        self.log("loss", loss + again, on_step=True, on_epoch=True, sync_dist=True)
        return loss + again

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses.append(float(self.trainer.callback_metrics["norm"]))


class ReadsState(SeveralGan):
    """Numbers on the module, which the losses read; a mode that changes in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.average = 0.0, torch.tensor(1.0)
        self.taken, self.is_late, self.phase = 0, False, "first"
        self.shadow = {"power": torch.ones(2)}
        self.dropout = torch.nn.Dropout(0.5)
        self.share, self.steps_taken = 0.0, []
        self.typed = np.float64(0.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps_taken.append(len(self.steps_taken))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        generating, discriminating = self.optimizers()
        self.dropout.eval()
        fake = self.generator(x.flip(1))
        scale = 1.0 + self.running + 0.1 * self.taken + float(self.average)
        self.taken += 1
        self.share = 0.17
        self.typed = np.float64(x.square().mean())
        self.shadow["power"].mul_(0.9)
        self.is_late = self.taken > 2
        self.phase = "later" if self.is_late else "soon"
        loss = _is(True, self.discriminator(x)) + scale * _is(False, self.dropout(fake.detach()))
        loss = loss + _is(False, self.discriminator(self.dropout(fake.detach())))
        self.dropout.train()
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
        self.losses += [float(self.shadow["power"].sum()), float(len(self.steps_taken))]
        self.losses.append(float(self.typed))
        assert self.share == 0.17 and isinstance(self.typed, np.float64)


class FillsContainers(SeveralGan):
    """A config filled in the first step, a history of losses, counters, numbers of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {"sizes": {}}
        self.history, self.long = [], [0.0] * 3000
        self.counter, self.histogram = Counter(), np.zeros(2)
        self.recent: deque[float] = deque(maxlen=2)
        self.shift = torch.nn.Parameter(torch.tensor([0.5]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if "scale" not in self.config:
            self.config["scale"], self.config["sizes"]["features"] = 0.5, x.shape[1]
        self.history.append(float(x.square().mean()))
        self.long.append(1.0)
        self.counter.count += 1
        self.histogram += 1
        self.recent.append(self.shift.detach().exp().item())
        norm = self.generator.first.weight.detach().clone().norm().item()
        self.log("norm", norm, on_step=True, on_epoch=False)
        scale = self.config["scale"] * len(self.long) / 3000
        return super().training_step((x * scale, y), batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses += [sum(self.history), float(len(self.long)), float(self.counter.count)]
        self.losses += [float(self.histogram.sum()), *self.recent, self.config["sizes"]["features"]]
        self.losses.append(float(self.trainer.callback_metrics["norm"]))

    def configure_optimizers(self) -> Any:
        optimizers, schedules = super().configure_optimizers()
        optimizers[0].add_param_group({"params": [self.shift]})
        return optimizers, schedules


class Counter:
    count = 0


class ChangesPlans(Gan):
    """Looks at whole gradients only while each rank has one microbatch."""

    changes = ("3:1", "whole", "even", "3:1")

    def look(self) -> None:
        plan = getattr(self.trainer.strategy, "plan", None)
        if plan is None or all(len(rank.microbatch_sizes) == 1 for rank in plan.ranks):
            super().look()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        at = self.trainer.global_step // 2 - 1
        if hasattr(self.trainer.strategy, "plan") and at < len(self.changes):
            self.trainer.strategy.change_plan(PLANS[self.changes[at]])


class NormsOfCopies(SeveralGan):
    """Communicates, also on a rank that has no rows of a parameter; writes with a keyword."""

    def look(self) -> None:
        torch.nn.init.constant_(self.generator.last.bias, 0.25)
        norms = [parameter.grad.clone().norm() for parameter in self.generator.parameters()]
        self.norm = sum(float(norm) for norm in norms)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses.append(self.norm)


KINDS = (
    *(SeveralGan, SeveralBackwards, WithClosures, TwoBackwards, ActorCritic, ReadsState),
    FillsContainers,
)
PLANS_OF = ("3:1", "three", "even")
RETAINS = {"recompute": False}
FITS = Cases(
    {
        **{(kind, plan): (plan, fit, kind, {}) for kind in KINDS for plan in PLANS_OF},
        (NormsOfCopies, "even"): ("even", fit, NormsOfCopies, {}),
        (ChangesPlans, "whole"): ("whole", fit, ChangesPlans, {}),
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


class WritesBySample(SeveralGan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            weight = self.discriminator.first.weight
            weight.data.mul_(batch[0].mean().abs())


class GrowsByItsSamples(SeveralGan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += [1.0] * len(batch[0])
        super().training_step(batch, batch_idx)


class Iterates(SeveralGan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        next(self.rates)
        super().training_step(batch, batch_idx)


class ReadsInAHook(SeveralGan):
    """A number that differs between microbatches: the hook finds that of the first one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.level = batch[0].square().mean()
        super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        float(self.level)


class AveragesInPlace(SeveralGan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.averages["x"].mul_(0.9).add_(batch[0].mean(0))
        super().training_step(batch, batch_idx)


class WritesOnOneRank(SeveralGan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.discriminator.first.weight.data.mul_(0.5)
        super().training_step(batch, batch_idx)


class WritesWithoutRows(WritesBySample):
    """On a rank with several microbatches and no rows."""


class ForgetsGradientsOnOneRank(SeveralGan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(mse_loss(self.generator(batch[0]), batch[0]))
        if self.global_rank == 0:
            self.generator.zero_grad()
        super().training_step(batch, batch_idx)


class SetsARateOnOneRank(SeveralGan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.optimizers()[0].param_groups[0]["lr"] = 0.5
        super().training_step(batch, batch_idx)


class KeepsSamples(SeveralGan):
    """In an object that is called."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.pool(batch[0])
        super().training_step(batch, batch_idx)


class Pool:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.kept.append(x)
        return x


class WritesInItsBackward(SeveralGan):
    def backward(self, loss: Tensor) -> None:
        loss.backward()
        gradient = self.generator.first.weight.grad
        if gradient is not None:
            gradient.mul_(0.5)


class StepsItself(SeveralGan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, _ = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(mse_loss(self.generator(batch[0]), batch[0]))
        generating.step()


class CountsByItself(SeveralGan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.positive = int((batch[0] * 1000).sum())
        super().training_step(batch, batch_idx)


class Communicates(SeveralGan):
    def look(self) -> None:
        self.generator.first.weight.grad.full_tensor()


class GathersByItself(SeveralGan):
    def look(self) -> None:
        torch.distributed.all_reduce(torch.zeros(()))


class BackwardBySample(SeveralGan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        first = self.trainer.train_dataloader.dataset[0][0]
        if bool((batch[0][0] == first).all()):
            self.manual_backward(mse_loss(self.generator(batch[0]), batch[0]))


class StepsTheScheduleByLoss(SeveralGan):
    def configure_optimizers(self) -> Any:
        optimizers, schedules = super().configure_optimizers()
        schedules[0] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0])
        return optimizers, schedules

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = mse_loss(self.generator(batch[0]), batch[0])
        self.manual_backward(loss)
        self.lr_schedulers()[0].step(float(loss.detach()))


class OnADevice(SeveralGan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.device("cpu"):
            super().training_step(batch, batch_idx)


class HooksTheLoss(SeveralGan):
    def on_before_backward(self, loss: Tensor) -> None:
        """Get the loss."""


class ReturnsWrapped(SeveralGan):
    def configure_optimizers(self) -> Any:
        return [LightningOptimizer(each) for each in super().configure_optimizers()[0]]


class FailsInOneMicrobatch(SeveralGan):
    """Leaves the values of before the step on the module."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.running = 5.0
        self.generator.eval()
        first = self.trainer.train_dataloader.dataset[0][0]
        self.generator(batch[0])
        if not bool((batch[0][0] == first).all()):
            raise KeyError("an error of one microbatch")


REFUSED = {
    WritesBySample: "Microbatches set other values in training_step .parameters or gradients",
    AveragesInPlace: "Microbatches set other values in training_step .parameters",
    WritesOnOneRank: "Ranks write to parameters or gradients in training_step in different ways",
    GrowsByItsSamples: r"leave different values in 'len\(seen\)'",
    Iterates: "changes 'rates' in place, a list_iterator",
    ReadsInAHook: "A hook that runs once .* reads 'level'",
    WritesWithoutRows: "parameters or gradients",
    ForgetsGradientsOnOneRank: "Ranks write to parameters or gradients .* in different ways",
    SetsARateOnOneRank: "in different ways, or set flags, schedules or learning rates",
    KeepsSamples: "leave different values in '(pool|len.pool)",
    WritesInItsBackward: r"backward\(\) of the module computes with parameters or gradients",
    StepsItself: r"calls AdamW.step\(\) of the optimizer itself",
    CountsByItself: "leave different values in 'positive'",
    Communicates: "training_step communicates .computing",
    GathersByItself: r"training_step communicates .allreduce\(\)",
    BackwardBySample: "Microbatches of this rank do different things|Ranks do different things",
    StepsTheScheduleByLoss: "ReduceLROnPlateau, a schedule",
    OnADevice: "within a block of a torch function mode",
    HooksTheLoss: "HooksTheLoss has on_before_backward",
    ReturnsWrapped: "LightningAdamW, which Lightning has wrapped already",
    FailsInOneMicrobatch: "an error of one microbatch",
}


def refused(plan: str, kind: type[Any]) -> tuple[str, bool]:
    model = kind()
    model.running, model.averages, model.pool = 1.0, {"x": torch.zeros(5)}, Pool()
    model.rates = iter([1.0, 2.0, 3.0])
    with pytest.raises((UnsupportedError, UnitUseError, RemoteRankError, KeyError)) as raised:
        trainer(plan).fit(model, loader(8))
    return str(raised.value), model.running == 1.0 and model.generator.training


PLANS_OF_REFUSED = {WritesWithoutRows: "several without state"}
REFUSALS = Cases({kind: (PLANS_OF_REFUSED.get(kind, "3:1"), refused, kind) for kind in REFUSED})


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_several_microbatches_cannot_do_is_refused_on_every_rank(kind):
    for message, is_as_before in REFUSALS[kind]:
        assert re.search(REFUSED[kind], message), message
        assert is_as_before
