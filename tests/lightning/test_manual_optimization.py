"""Steps that call their backwards and optimizers themselves train as on one device."""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Cases, on_one_device
from common import Block, assert_same_tensors, dataset, in_ranks, loader, trainer, values_of
from lightning.pytorch import LightningModule, Trainer
from plans import PLANS, QUIET
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import DataLoader

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.common.errors import RemoteRankError, UnitUseError, UnsupportedError
from lightning_cephalo.plan import PlanError

TOLERANCE = 1e-5


class Stack(nn.Module):
    def __init__(self, inputs: int, outputs: int, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(torch.tanh(x))


def _is(real: bool, logits: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


class Gan(LightningModule):
    """Generates once: the discriminator's loss detaches it, the generator's passes both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.generator, self.discriminator = Stack(5, 5), Stack(5, 1)
        self.register_buffer("center", torch.zeros(5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.losses: list[float] = []
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        generating, discriminating = self.optimizers()
        schedule, _ = self.lr_schedulers()
        self.center.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.steps += 1
        fake = self.generator(x.flip(1))

        self.toggle_optimizer(discriminating)
        loss = _is(True, self.discriminator(x)) + _is(False, self.discriminator(fake.detach()))
        discriminating.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(discriminating, 0.5, "norm")
        discriminating.step()
        self.untoggle_optimizer(discriminating)
        self.log("d_loss", loss, on_step=True, on_epoch=True, sync_dist=True)

        loss = _is(True, self.discriminator(fake)) + mse_loss(fake, x)
        generating.zero_grad()
        self.manual_backward(loss)
        self.look()
        generating.step()
        schedule.step()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss}

    def look(self) -> None:
        gradient = self.generator.first.weight.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        self.seen.append(float(whole.sum()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))
        self.losses.append(float(self.trainer.callback_metrics["d_loss_step"]))

    def configure_optimizers(self) -> Any:
        generating = torch.optim.AdamW(self.generator.parameters(), lr=1e-2)
        discriminating = torch.optim.SGD(self.discriminator.parameters(), lr=1e-2, momentum=0.9)
        schedules = [
            torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (generating, discriminating)
        ]
        return [generating, discriminating], schedules


class WithClosures(Gan):
    """Lightning's own example: closures, toggle_model, and gradients that add up."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        generating, discriminating = self.optimizers()
        is_last = batch_idx % 2 == 1

        def generate() -> Tensor:
            loss = _is(True, self.discriminator(self.generator(x.flip(1))))
            self.manual_backward(loss)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def discriminate() -> Tensor:
            with torch.no_grad():
                fake = self.generator(x.flip(1))
            loss = _is(True, self.discriminator(x)) + _is(False, self.discriminator(fake))
            loss.backward()
            self.log("d_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        with generating.toggle_model(sync_grad=is_last):
            if is_last:
                generating.step(closure=generate)
                generating.zero_grad()
            else:
                generate()
        with discriminating.toggle_model():
            discriminating.step(closure=discriminate)
            discriminating.zero_grad()


class LooksOnOneRank(Gan):
    """Visits units and the root in another order on one rank, without an effect."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            if self.global_rank == 1:
                self.discriminator(self.generator(batch[0]))
            elif self.global_rank == 2:
                self.generator.blocks[1](batch[0][:, :1].expand(-1, 6))
        return super().training_step(batch, batch_idx)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Look between a backward and an update, at units that all ranks visit after both."""
        if self.global_rank == 1:
            with torch.no_grad():
                self.discriminator(torch.zeros(1, 5))
        super().clip_gradients(*args, **kwargs)


class OwnBackward(Gan):
    """A backward() of its own, which doubles the loss."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


class ByFlags(Gan):
    """requires_grad and zero_grad of whole modules, as in the code of pix2pix."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        generating, discriminating = self.optimizers(use_pl_optimizer=False)
        fake = self.generator(x.flip(1))
        self.discriminator.requires_grad_(True)
        loss = _is(True, self.discriminator(x)) + _is(False, self.discriminator(fake.detach()))
        self.discriminator.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.discriminator.parameters(), 0.3)
        discriminating.step()
        self.log("d_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.discriminator.requires_grad_(False)
        loss = _is(True, self.discriminator(fake))
        self.generator.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        again = mse_loss(fake, x)
        self.manual_backward(again)
        generating.step()
        self.discriminator.requires_grad_(True)
        self.log("loss", loss + again, on_step=True, on_epoch=True, sync_dist=True)


class AddsUp(Gan):
    """Gradients of two batches add up, are clipped by value, and are halved by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        generating, discriminating = self.optimizers()
        fake = self.generator(x.flip(1))
        loss = _is(True, self.discriminator(x)) + _is(False, self.discriminator(fake.detach()))
        for parameter in self.discriminator.parameters():  # of the batch before
            if parameter.grad is not None:
                parameter.grad.mul_(1 / (1 + parameter.grad.norm()))
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(discriminating, 0.1, "value")
            discriminating.step()
            self.discriminator.zero_grad(set_to_none=False)
        self.log("d_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        loss = mse_loss(fake, x)
        generating.zero_grad()
        self.manual_backward(loss)
        with torch.no_grad():
            norm = torch.stack([each.grad.norm() for each in self.generator.parameters()]).norm()
            for parameter in self.generator.parameters():
                parameter.grad.mul_(0.5)
        self.log("norm", norm, on_step=True, on_epoch=False, sync_dist=True)
        generating.step()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses.append(float(self.trainer.callback_metrics["norm"]))


class KeepsNumbers(Gan):
    """Numbers on the module, which the losses of later steps read, and a mode that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.average, self.taken = 0.0, torch.tensor(1.0), 0
        self.dropout = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        generating, discriminating = self.optimizers()
        scale = 1.0 + self.running + 0.1 * self.taken + float(self.average)
        self.taken += 1
        fake = self.generator(x.flip(1))
        self.dropout.eval()
        loss = _is(True, self.discriminator(x)) + scale * _is(False, self.dropout(fake.detach()))
        self.dropout.train()
        self.running = 0.9 * self.running + 0.1 * float(x.square().mean())
        self.average = 0.8 * self.average + 0.2 * x.mean()
        discriminating.zero_grad()
        self.manual_backward(loss + _is(False, self.discriminator(fake.detach())))
        discriminating.step()
        loss_g = mse_loss(self.generator(x), x) * scale
        generating.zero_grad()
        self.manual_backward(loss_g)
        generating.step()
        values = {"d_loss": loss, "loss": loss_g}
        self.log_dict(values, on_step=True, on_epoch=True, sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses += [self.running, float(self.average), float(self.taken)]


class ChangesPlans(AddsUp):
    """While gradients add up; a plan with several microbatches is refused, and nothing changes."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        strategy = self.trainer.strategy
        if not isinstance(strategy, CephaloStrategy):
            return
        strategy.change_plan(PLANS["whole" if batch_idx else "whole even"])
        with pytest.raises(PlanError, match=r"gives ranks \[2, 1\] microbatches"):
            strategy.change_plan(PLANS["3:1"])


class ActorCritic(LightningModule):
    """A temperature that belongs to no layer, and a target that follows within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(2)
        self.actor, self.critic, self.target = Stack(5, 5), Stack(10, 1), Stack(10, 1)
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(0.1))
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, 5))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, reward = batch
        acting, valuing, tempering = self.optimizers()
        with torch.no_grad():
            following = self.target(torch.cat([x, self.actor(x)], 1))
            wanted = reward + 0.9 * (following - self.log_alpha.exp() * following.abs())
        value_loss = mse_loss(self.critic(torch.cat([x, x.flip(1)], 1)), wanted)
        valuing.zero_grad()
        self.manual_backward(value_loss)
        valuing.step()

        action = torch.add(self.actor(x), other=self.shift)
        actor_loss = (
            self.log_alpha.exp().detach() * action.square().sum(1, keepdim=True)
            - self.critic(torch.cat([x, action], 1))
        ).mean()
        acting.zero_grad()
        self.manual_backward(actor_loss)
        acting.step()

        alpha_loss = (self.log_alpha * action.detach().square()).mean()
        tempering.zero_grad()
        self.manual_backward(alpha_loss)
        tempering.step()
        with torch.no_grad():
            for mine, other in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                mine.data.mul_(0.9).add_(other.data, alpha=0.1)
        losses = {"value": value_loss, "actor": actor_loss, "alpha": alpha_loss}
        self.log_dict(losses, on_step=True, on_epoch=False, sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        names = ("value", "actor", "alpha")
        self.losses += [float(self.trainer.callback_metrics[name]) for name in names]

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam([*self.actor.parameters(), self.shift], lr=1e-2),
            torch.optim.Adam(self.critic.parameters(), lr=1e-2),
            torch.optim.SGD([self.log_alpha], lr=1e-1),
        ]


def fit(
    plan: str | None,
    kind: type[Any],
    options: dict[str, Any],
    strategy: dict[str, Any] | None = None,
) -> Any:
    model = kind()
    fitting = trainer(plan, strategy, max_epochs=2, **options)
    fitting.fit(model, loader(14))
    return model.losses, getattr(model, "seen", []), values_of(model), fitting.global_step


KINDS = (
    *(Gan, LooksOnOneRank, WithClosures, OwnBackward, ByFlags, AddsUp, ActorCritic),
    KeepsNumbers,
)
WAYS = ({"recompute": False}, {"units": ["Stack"]})
FITS = Cases(
    {
        **{kind: ("whole three", fit, kind, {}) for kind in KINDS},
        **{(kind, *way): ("whole", fit, kind, {}, way) for kind in (Gan, ByFlags) for way in WAYS},
        ChangesPlans: ("whole", fit, ChangesPlans, {}),
    }
)


@cache
def one_device(kind: type[Any]) -> Any:
    return on_one_device(fit, kind, {})


@pytest.mark.parametrize("kind", [*KINDS, ChangesPlans])
def test_it_trains_as_on_one_device(kind):
    wanted_losses, wanted_seen, wanted, steps = one_device(kind)
    for losses, seen, values, done in FITS[kind]:
        assert losses == pytest.approx(wanted_losses, rel=TOLERANCE)
        assert seen == pytest.approx(wanted_seen, rel=1e-4, abs=1e-6)
        assert_same_tensors(values, wanted, TOLERANCE)
        assert done == steps


@pytest.mark.parametrize("kind", [Gan, ByFlags])
@pytest.mark.parametrize("options", WAYS)
def test_so_do_retained_activations_and_whole_networks_as_units(kind, options):
    wanted_losses, _, wanted, _ = one_device(kind)
    for losses, _, values, _ in FITS[(kind, *options)]:
        assert losses == pytest.approx(wanted_losses, rel=TOLERANCE)
        assert_same_tensors(values, wanted, TOLERANCE)


class OldWeights(Gan):
    """Updates the discriminator between a forward through it and its backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        generating, discriminating = self.optimizers()
        through_both = _is(True, self.discriminator(self.generator(x)))
        self.manual_backward(_is(True, self.discriminator(x)))
        discriminating.step()
        self.manual_backward(through_both)
        generating.step()


class TwoBackwards(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = _is(True, self.discriminator(batch[0]))
        self.manual_backward(loss)
        self.manual_backward(loss)


class ByAutograd(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        torch.autograd.backward([_is(True, self.discriminator(batch[0]))])


class Penalised(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0].requires_grad_()
        logits = self.discriminator(x).sum()
        (slope,) = torch.autograd.grad(logits, x, create_graph=True)
        self.manual_backward(slope.square().mean())


class FailsOnOneRank(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(_is(True, self.discriminator(batch[0])))
        if self.global_rank == 1:
            raise KeyError("an error of the user's")
        self.manual_backward(_is(True, self.discriminator(batch[0])))


class OwnGradient(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = _is(True, self.discriminator(batch[0]))
        weight = self.discriminator.last.weight
        weight.grad = torch.ones_like(weight)
        self.manual_backward(loss)


class WritesWhileGathered(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = _is(True, self.discriminator(batch[0]))
        self.discriminator.last.bias.data.zero_()
        self.manual_backward(loss)


class WritesBeforeABackward(Gan):
    """To the rows of a unit."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        held = self.discriminator.blocks[0].up.weight
        loss = _is(True, self.discriminator(batch[0]))
        self.generator(batch[0])  # frees the unit before
        with torch.no_grad():
            held.mul_(0.5)
        self.manual_backward(loss)


class WritesBehindTheRoot(Gan):
    """To rows of the root unit, while it is gathered."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        held = self.discriminator.last.weight
        fake = self.generator(batch[0])
        with torch.no_grad():
            held.mul_(0.5)
        self.manual_backward(_is(True, self.discriminator(fake)))


class Regularised(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = _is(True, self.discriminator(batch[0]))
        self.manual_backward(loss + sum(p.square().sum() for p in self.generator.parameters()))


class OneMoreOnOneRank(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(_is(True, self.discriminator(batch[0])))
        if self.global_rank == 0:
            self.manual_backward(_is(True, self.discriminator(batch[0])))


class FailsBeforeTheUpdate(Gan):
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        if self.global_rank == 1:
            raise KeyError("an error before the norm")
        super().clip_gradients(*args, **kwargs)


class UpdatesOnOneRank(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(_is(True, self.discriminator(batch[0])))
        if self.global_rank == 0:
            self.optimizers()[1].step()
        self.manual_backward(_is(True, self.discriminator(batch[0])))


class OutsideOfAStep(Gan):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(torch.ones((), requires_grad=True))


REFUSED = {
    OldWeights: "updated between a forward and its backward|modified by an inplace operation",
    TwoBackwards: "A second backward through the same graph",
    ByAutograd: "computes a gradient through a unit itself",
    Penalised: "a gradient penalty",
    FailsOnOneRank: "an error of the user's",
    OwnGradient: "assigns a gradient between a forward and its backward",
    WritesWhileGathered: "writes to the parameter 'discriminator.last.bias'",
    WritesBeforeABackward: "'discriminator.blocks.0' were updated between a forward and its",
    WritesBehindTheRoot: "writes to the parameter 'discriminator.last.weight' between a forward",
    Regularised: r"computes \(square\) with the parameter 'generator.blocks.0",
    OneMoreOnOneRank: "some have returned, others call self.manual_backward()",
    FailsBeforeTheUpdate: "an error before the norm",
    UpdatesOnOneRank: "some call self.manual_backward.., others clip gradients or call optimizer",
    OutsideOfAStep: "manual_backward.. outside of training_step",
}


def failures(plan: str, kinds: list[type[Any]]) -> list[tuple[str, str]]:
    said = []
    for kind in kinds:
        with pytest.raises((UnsupportedError, UnitUseError, RemoteRankError, KeyError)) as raised:
            fit(plan, kind, {})
        said.append((type(raised.value).__name__, str(raised.value)))
    return said


def test_what_cannot_be_is_refused_by_name_on_every_rank():
    said = in_ranks(2, failures, "whole", list(REFUSED))
    for of_rank in said:
        for (name, message), (kind, wanted) in zip(of_rank, REFUSED.items(), strict=True):
            assert re.search(wanted, message), (kind, name, message)


def refused(plan: str) -> str:
    with pytest.raises(PlanError) as raised:
        fit(plan, Gan, {})
    return str(raised.value)


REFUSED_PLANS = {
    "no data": r"gives ranks \[2, 0\] microbatches, .* training_step runs once on every rank",
    "3:1": r"gives ranks \[2, 1\] microbatches, .* Give each rank one microbatch in the plan",
}
REFUSALS = Cases({plan: (plan, refused) for plan in REFUSED_PLANS})


@pytest.mark.parametrize("plan", REFUSED_PLANS)
def test_a_plan_that_does_not_give_each_rank_one_microbatch_is_refused(plan):
    for message in REFUSALS[plan]:
        assert re.search(REFUSED_PLANS[plan], message), message


class CountsSteps(Gan):
    """Asks for the number of steps where it makes its optimizers, and is asked to make them."""

    def configure_optimizers(self) -> Any:
        self.asked = getattr(self, "asked", 0) + 1
        self.expected_steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def fit_measured(devices: int) -> Any:
    model = CountsSteps()
    before = values_of(model)
    strategy: Any = "auto"
    if devices > 1:
        strategy = CephaloStrategy(planner=Planner(verbose=False, budget_s=1.0, remeasure=True))
    fitting = Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, **{**QUIET, "max_epochs": 2}
    )
    batches = DataLoader(dataset(20), batch_size=8 // devices)
    fitting.fit(model, batches)
    plan = getattr(fitting.strategy, "plan", None)
    sizes = [rank.microbatch_sizes for rank in plan.ranks] if plan else []
    moved = not torch.equal(before["generator.first.weight"], model.generator.first.weight)
    return model.losses, values_of(model), (model.asked, model.expected_steps, sizes, moved)


def test_a_measured_plan_gives_each_rank_one_microbatch_and_trains_as_on_one_device():
    wanted_losses, wanted, (_, steps, _, _) = fit_measured(1)
    for losses, values, (asked, own_steps, sizes, moved) in in_ranks(2, fit_measured, 2):
        assert losses == pytest.approx(wanted_losses, rel=TOLERANCE)
        assert_same_tensors(values, wanted, TOLERANCE)
        assert (asked, own_steps, moved) == (1, steps, True)
        assert [len(each) for each in sizes] == [1, 1]
        assert sum(size for (size,) in sizes) == 8


def fit_and_save(plan: str | None, path: Path) -> dict[str, Tensor]:
    model = Gan()
    fitting = trainer(plan, max_epochs=1)
    fitting.fit(model, loader(16))
    fitting.save_checkpoint(path)
    return values_of(model)


def go_on(plan: str | None, path: Path) -> dict[str, Tensor]:
    model = Gan()
    trainer(plan, max_epochs=2).fit(model, loader(16), ckpt_path=path)
    return values_of(model)


def test_checkpoints_go_on_elsewhere(tmp_path):
    in_ranks(2, fit_and_save, "whole", tmp_path / "own.ckpt")
    on_one_device(fit_and_save, tmp_path / "one.ckpt")
    wanted = on_one_device(go_on, tmp_path / "one.ckpt")
    assert_same_tensors(on_one_device(go_on, tmp_path / "own.ckpt"), wanted, TOLERANCE)
    for values in in_ranks(3, go_on, "whole three", tmp_path / "one.ckpt"):
        assert_same_tensors(values, wanted, TOLERANCE)


def fit_with_rest(plan: str | None) -> tuple[int, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting = trainer(plan)
        fitting.fit(Gan(), loader(18))
    return fitting.global_step, [str(each.message) for each in caught]


def test_samples_too_few_for_all_ranks_are_left_out_with_a_warning():
    for rank, (steps, said) in enumerate(in_ranks(3, fit_with_rest, "whole three")):
        assert steps == 4  # two optimizers
        warned = [text for text in said if "has 2 samples for 3 ranks" in text]
        assert len(warned) == (rank == 0)
