"""Buffers that training_step writes are those of one device, on all ranks, in every step."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from common import assert_same_tensors, loader, trainer, values_of
from lightning.pytorch import LightningModule
from plans import PLANS
from torch import Tensor, nn
from warm_ranks import in_ranks

TOLERANCE = 1e-5
CODES = 4


class Tracking(nn.Module):
    """A unit with statistics of its inputs, written in each of the ways that users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("center", torch.zeros(1, 5))
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("is_started", torch.tensor(False))
        self.register_buffer("table", torch.linspace(0.5, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = torch.tanh(self.linear(x - self.center)) * self.table
        # read before the write: behind it, a microbatch finds its own mean
        found = torch.sin(y + self.center) + self.mean.float()
        with torch.no_grad():
            self.center.mul_(0.9).add_(y.mean(0, keepdim=True), alpha=0.1)
            # assigned, and cumulative: its factor follows the counter
            self.mean = self.mean + (y.mean(0) - self.mean) / self.calls
            self.is_started.fill_(True)
        return found


class Shifted(nn.Module):
    """A unit that reads a buffer, and never writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("offset", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x + self.offset))


class Notes:
    """A list that the package does not look into: one of the module itself would be warned of."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Tensor]] = []


class Distilling(LightningModule):
    """A centre as in DINO and codes as in VQ-VAE, in the module itself and in units."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.late = late
        self.blocks = nn.ModuleList(Tracking() for _ in range(3))
        self.shifted = nn.ModuleList(Shifted() for _ in range(2))
        self.head = nn.Linear(5, 1)
        self.register_buffer("center", torch.zeros(1))
        self.register_buffer("codes", torch.linspace(-1, 1, CODES)[:, None])
        self.register_buffer("cluster_size", torch.ones(CODES))
        self.register_buffer("cluster_sum", torch.linspace(-1, 1, CODES)[:, None].clone())
        self.register_buffer("new_size", torch.zeros(CODES, dtype=torch.long))
        self.register_buffer("new_sum", torch.zeros(CODES, 1))
        self.register_buffer("cache", None, persistent=False)
        self.starts = Notes()

    def training_step(self, batch, batch_idx):
        self.starts.rows.append(values_of_buffers(self))
        x, y = batch
        for block in [*self.blocks, *self.shifted]:
            x = block(x)
        if batch_idx % 2:
            # a unit's buffer, written only by code behind it: its recompute finds the old values
            self.shifted[0].offset.add_(x.detach().mean(0))
        x = self.head(x)
        if self.cache is None or len(self.cache) != len(x):
            self.cache = torch.ones(len(x))  # as large as the microbatch
        nearest = (x.detach() - self.codes.T).abs().argmin(1)
        onehot = nn.functional.one_hot(nearest, CODES)
        self.new_size += onehot.sum(0)
        self.new_sum.index_add_(0, nearest, x.detach())
        loss = nn.functional.mse_loss(x - self.center + self.codes[nearest], y)
        if not self.late or batch_idx > 1:
            self.center = self.center * 0.8 + x.detach().mean(0) * 0.2
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        # sums are those of the global batch on every rank, so the codes are one device's
        self.cluster_size.mul_(0.9).add_(self.new_size, alpha=0.1)
        self.cluster_sum.mul_(0.9).add_(self.new_sum, alpha=0.1)
        self.codes.copy_(self.cluster_sum / self.cluster_size[:, None])
        self.new_size.zero_()
        self.new_sum.zero_()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def values_of_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {n: b.clone() for n, b in module.named_buffers() if n != "cache"}


def _fit(plan, late=False, **options):
    module = Distilling(late)
    objects = {name: id(buffer) for name, buffer in module.named_buffers()}
    given = {} if plan is None else {"summed_buffers": ["new_*"], **options}
    fitted = trainer(plan, given, max_epochs=2)
    fitted.fit(module, loader(32))
    if plan is not None:  # code that holds a buffer in a variable finds the same one
        assert {n: id(b) for n, b in module.named_buffers() if n in objects} == objects
    return values_of(module), module.starts.rows


@functools.cache
def _fit_alone(late):
    return _fit(None, late)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("3:1", {}),
        ("three", {"late": True}),
        ("idle first", {}),
        ("idle last", {"recompute": False}),
    ],
)
def test_buffers_are_those_of_one_device(plan, options):
    found = in_ranks(len(PLANS[plan].ranks), functools.partial(_fit, plan, **options))
    wanted, steps = _fit_alone(options.get("late", False))
    for values, starts in found:
        assert_same_tensors(values, wanted, TOLERANCE)
        # in the forward of every step of every microbatch
        count = len(starts) // len(steps)
        for index, buffers in enumerate(starts):
            assert_same_tensors(buffers, steps[index // count], TOLERANCE)
    for name in wanted:
        if "center" in name or "mean" in name or "calls" in name:
            assert all(torch.equal(values[name], found[0][0][name]) for values, _ in found), name


# the step in which a buffer counts samples instead of steps
FIRST_DIFFERENT = {"count": 0, "late count": 1, "count in the last step": 3}


class Misused(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("large", torch.zeros(2**18 + 1))
        self.register_buffer("grown", torch.zeros(0))
        self.reference = self.large
        self.steps = 0

    def training_step(self, batch, batch_idx):
        x, _ = batch
        for block in self.blocks:
            x = block(x)
        if self.kind in FIRST_DIFFERENT:
            self.seen += 1 if batch_idx < FIRST_DIFFERENT[self.kind] else len(x)
        if self.kind == "late and large" and batch_idx == 1:
            self.large += 1
        if self.kind == "reference":
            self.reference.add_(1)
        if self.kind == "grown":
            self.grown = torch.cat([self.grown, x.detach().mean(1)])
        return x.mean()

    def on_train_batch_end(self, *args):
        self.steps += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


REFUSED = {
    "count": ("integer buffer 'seen'", "summed_buffers", 0),
    # compared on the device: the error comes one step later
    "late count": ("integer buffer 'seen'", "summed_buffers", 2),
    "count in the last step": ("integer buffer 'seen'", "summed_buffers", 4),
    "late and large": ("buffer 'large' for the first time in a later step", "first step too", 1),
    "reference": ("buffer 'large' through a reference", "Read the buffer from the module", 0),
    "pattern": ("'seem', which is not the name of a buffer", "'seen'", 0),
}


def _refused():
    found = {}
    for kind in REFUSED:
        module = Misused(kind)
        options = {"summed_buffers": ["seem"]} if kind == "pattern" else {}
        with pytest.raises(Exception) as failure:
            trainer("three", options, max_epochs=1).fit(module, loader(32))
        found[kind] = str(failure.value), module.steps
    return found


def test_what_has_no_counterpart_on_one_device_is_refused_by_name_on_every_rank():
    for found in in_ranks(3, _refused):
        for kind, (name, remedy, steps) in REFUSED.items():
            message, done = found[kind]
            assert name in message and remedy in message, (kind, message)
            assert done == steps, kind


def _grown():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer("3:1").fit(Misused("grown"), loader(16))
    return [str(w.message) for w in said if "different values in" in str(w.message)]


def test_a_buffer_of_changing_shape_is_named_once():
    first, second = in_ranks(2, _grown)
    assert len(first) == 1 and "'grown'" in first[0]
    assert not second
