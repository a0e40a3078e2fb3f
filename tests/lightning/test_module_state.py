"""Tensors that training_step stores on modules belong to the samples that they were stored for."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from cases import Cases, on_one_device
from common import assert_same_tensors, loader, trainer, values_of
from lightning.pytorch import LightningModule
from torch import nn

TOLERANCE = 1e-5


class _Cell(nn.Module):
    """A unit that carries a state of its own from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)
        self.carries = False
        self.memory = None

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        if self.carries and self.memory is not None:
            x = x + self.outer(self.memory)
        if self.carries:
            self.memory = x.detach()
        return x


class _Stateful(LightningModule):
    """Each test stores something else on the module, or on one of its units."""

    def __init__(self, kind) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.kind = kind
        self.recurrent = nn.LSTM(5, 5, num_layers=2)
        self.cells = nn.ModuleList([_Cell(), _Cell()])
        self.cells[1].carries = kind == "unit"
        self.head = nn.Linear(5, 1)
        self.hidden = None
        self.register_buffer("queue", torch.zeros(3, 11))
        self.register_buffer("used", torch.zeros(4, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.losses, self.seen = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.kind == "hidden":
            x = self._recurrent(x)
        self.features = self.cells[0](x)
        x = self.cells[1](self.features)
        for _ in range(batch_idx if self.kind == "features" else 0):
            x = self.cells[0](x)  # more visits than the steps before had
        # read behind a unit, where another microbatch has stored its own in between
        found = self.head(x + (self.features if self.kind == "features" else 0.0))
        self.used += 1.0
        if self.kind == "queue" or (self.kind == "late queue" and batch_idx > 1):
            self._enqueue(found.detach())
        self.last = {"found": found, "pair": [y, found.mean()]}
        return nn.functional.mse_loss(found, y)

    def _recurrent(self, x):
        hidden = self.hidden
        if hidden is not None and hidden[0].shape[1] != len(x):
            hidden = None  # another size of batch: begin anew
        out, hidden = self.recurrent(x[None], hidden)
        self.hidden = tuple(state.detach() for state in hidden)
        return out[0]

    def _enqueue(self, keys):
        places = (int(self.place) + torch.arange(len(keys))) % 11
        self.queue[:, places] = keys.T
        self.place.fill_((int(self.place) + len(keys)) % 11)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.seen.append((batch[1], self.last))
        if self.kind == "hidden" and batch_idx == 2 and self.hidden is not None:
            self.hidden = None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def _fit(plan, kind, samples=32):
    module = _Stateful(kind)
    trainer(plan, max_epochs=2).fit(module, loader(samples))
    return values_of(module), module.seen


class _Mode(nn.Module):
    def forward(self, x):
        return x * (2.0 if self.training else 1.0)


class _Switched(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        self.linear, self.norm, self.mode = nn.Linear(5, 5), norm, _Mode()

    def forward(self, x):
        return torch.tanh(self.mode(self.norm(self.linear(x))))


class _Switching(LightningModule):
    """Uses units in evaluation mode, and is in training mode again before their backward."""

    def __init__(self, automatic) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        torch.manual_seed(4)
        norms = nn.BatchNorm1d(5), nn.Identity(), nn.BatchNorm1d(5)
        self.units = nn.ModuleList([_Switched(norm) for norm in norms])
        self.mode, self.head = _Mode(), nn.Linear(5, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.eval()
        x = self.mode(self.units[0](x))
        self.train()
        x = self.mode(self.units[1](x))
        self.units[2].eval()
        x = self.mode(self.units[2](x))
        self.units[2].train()
        was = self.units[1].training
        self.units[1].eval()
        x = x + self.units[1](x)
        self.units[1].train(was)
        x = self.mode(self.units[1](x))
        loss = nn.functional.mse_loss(self.head(self.mode(x)), y)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def _fit_switching(plan, automatic):
    module = _Switching(automatic)
    with warnings.catch_warnings():
        # in evaluation they do not depend on the division
        warnings.filterwarnings("ignore", "The layers .* are batch normalisation")
        trainer(plan, precision="64-true").fit(module, loader(24))
    return values_of(module)


class _Numbers(LightningModule):
    """Stores numbers in steps, and in a unit, that later steps read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.cells = nn.ModuleList([_Counted(), _Counted()])
        self.head = nn.Linear(5, 1)
        self.steps, self.mean, self.average = 0, 1.0, None
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.average is None:
            self.average = torch.zeros((), dtype=torch.float64)
        for cell in self.cells:
            x = cell(x)
        loss = nn.functional.mse_loss(self.head(x), y)
        scaled = loss * (1 + self.average + 1 / (1 + self.mean))
        self.average = 0.5 * self.average + 0.5 * loss.detach()
        self.mean = 0.5 * self.mean + 0.5 * float(loss.detach())
        self.steps += 1
        return scaled / self.steps

    def on_train_batch_end(self, outputs, batch, batch_idx):
        calls = [cell.calls for cell in self.cells]
        self.seen.append((self.steps, self.mean, float(self.average), calls))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(5, 5), 0

    def forward(self, x):
        self.calls += 1  # also if it is computed again
        return torch.tanh(self.linear(x)) / self.calls


def _fit_numbers(plan):
    module = _Numbers()
    trainer(plan, max_epochs=2, precision="64-true").fit(module, loader(28))
    return values_of(module), module.seen


def _fit_counting_samples(plan):
    module = _Numbers()
    module.samples = 0

    def step(batch, batch_idx):
        module.samples += len(batch[0])
        return _Numbers.training_step(module, batch, batch_idx)

    module.training_step = step
    with warnings.catch_warnings(), pytest.raises(Exception, match="the integer 'samples'"):
        warnings.simplefilter("ignore")  # the comparison of losses names it, too
        trainer(plan, max_steps=2).fit(module, loader(16))
    return module.seen


class _Caching(_Numbers):
    """Reads from a dict what the step before has put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = {}

    def training_step(self, batch, batch_idx):
        found = self.head(batch[0])
        old = self.cache.get("found", found.detach())
        self.cache["found"] = found.detach()
        return nn.functional.mse_loss(found, batch[1]) + 0.1 * (found - old.mean()).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


def _fit_caching(plan):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(plan, max_steps=2).fit(_Caching(), loader(16))
    return [str(one.message) for one in caught if "'cache', a dict, in place" in str(one.message)]


class _Collecting(_Numbers):
    """Collects losses for a mean of its own, as Lightning's guide to version 2.0 shows."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs, self.seen = [], []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.head(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.outputs.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(self.trainer.callback_metrics["loss"]))


def _fit_collecting(plan):
    module = _Collecting()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(plan, max_steps=2).fit(module, loader(16))
    texts = [str(one.message) for one in caught if "a list, in place" in str(one.message)]
    return texts, module.seen


class _Adaptive(_Switching):
    """Weights a loss by the norm of a gradient of the last layer, as VQ-GAN does."""

    def training_step(self, batch, batch_idx):
        found = self.head(self.units[0](batch[0]))
        error, size = nn.functional.mse_loss(found, batch[1]), found.abs().mean()
        (slope,) = torch.autograd.grad(error, self.head.weight, retain_graph=True)
        loss = error + slope.norm().detach() * size
        self.manual_backward(loss)
        return loss


def _fit_adaptive(plan):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(plan, max_steps=1).fit(_Adaptive(automatic=False), loader(8))
    return [str(one.message) for one in caught if "adaptive weight" in str(one.message)]


KINDS = ("hidden", "unit", "features")
FITS = Cases(
    {
        "modes": ("3:1", _fit_switching, True),
        "modes by hand": ("whole", _fit_switching, False),
        **{(plan, kind): (plan, _fit, kind) for plan in ("3:1", "three") for kind in KINDS},
        "smaller last batch": ("3:1", _fit, "hidden", 14),
        **{f"numbers {plan}": (plan, _fit_numbers) for plan in ("3:1", "three", "no data")},
        "samples": ("3:1", _fit_counting_samples),
        "in place": ("3:1", _fit_caching),
        "collecting": ("3:1", _fit_collecting),
        "adaptive": ("whole", _fit_adaptive),
    }
)


@cache
def _one_device(kind, samples=32):
    return on_one_device(_fit, kind, samples)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["3:1", "three"])
def test_what_a_step_stores_is_that_of_one_device(plan, kind):
    found, _ = FITS[plan, kind][0]
    wanted, _ = _one_device(kind)
    assert_same_tensors(found, wanted, TOLERANCE)


@pytest.mark.parametrize("plan", ["3:1", "three", "no data"])
def test_numbers_that_steps_store_are_those_of_one_device_on_every_rank(plan):
    weights, wanted = on_one_device(_fit_numbers)
    assert [row[0] for row in wanted] == list(range(1, 9))
    for found, seen in FITS[f"numbers {plan}"]:
        assert_same_tensors(found, weights, 1e-10)
        assert [row[:1] + row[3:] for row in seen] == [row[:1] + row[3:] for row in wanted]
        numbers, expected = ([row[1:3] for row in rows] for rows in (seen, wanted))
        torch.testing.assert_close(numbers, expected, rtol=1e-10, atol=1e-12)


def test_a_count_of_samples_is_refused_by_name_on_every_rank():
    assert FITS["samples"] == [[], []]  # in the first step


def test_rows_in_a_container_that_microbatches_share_are_named():
    first, second = FITS["in place"]
    assert ["self.cache = {**self.cache" in message for message in first] == [True]
    assert not second  # one microbatch


def test_numbers_that_a_step_collects_are_named_and_those_of_the_remedy_are_right():
    said, wanted = on_one_device(_fit_collecting)
    assert not said
    for texts, seen in FITS["collecting"]:
        # one microbatch as well: it has a part of the batch
        assert ["'outputs', a list" in text for text in texts] == [True]
        assert seen == pytest.approx(wanted, rel=1e-5)


def test_a_gradient_of_a_parameter_that_the_step_computes_is_named():
    assert [len(said) for said in FITS["adaptive"]] == [1, 1]
