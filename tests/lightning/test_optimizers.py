"""Optimizers on shards: equal to one device, or refused by name before training."""

from __future__ import annotations

import pytest
import torch
from common import (
    Net,
    assert_same_optimizer_state,
    assert_same_tensors,
    by_plan,
    in_ranks,
    loader,
    trainer,
    values_of,
)

# In double precision: several of these divide by differences of tiny moments, which in single
# precision would magnify that sums are taken in another order than on one device.
TOLERANCE = 1e-9


class Lion(torch.optim.Optimizer):
    """A user's own element-wise optimizer: the sign of a moving average."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"]
                update = average * 0.9 + parameter.grad * 0.1
                parameter.add_(torch.tanh(1e3 * update), alpha=-group["lr"])
                average.lerp_(parameter.grad, 0.01)
        return loss


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1),
    "SGD nesterov": lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "Adam maximize": lambda p: torch.optim.Adam(p, lr=1e-4, weight_decay=0.1, maximize=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Lion": lambda p: Lion(p, lr=1e-3),
}


class _Fitted(Net):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make([p for p in self.parameters() if p.requires_grad])


def _fit(plan, make):
    model = _Fitted(make)
    runs = trainer(plan, limit_train_batches=3, limit_val_batches=0, precision="64-true")
    runs.fit(model, loader(), loader(8))
    return model.losses, values_of(model), runs.strategy.optimizer_state(runs.optimizers[0])


# one for each way to update: over DTensors, and over local rows in a loop, together, in a kernel
WITH_EMPTY_RANKS = ("RMSprop", "AdamW loop", "AdamW foreach", "AdamW fused", "Lion")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_equal_one_device(name):
    # in "three" a rank holds none of the state
    plan = "three" if name in WITH_EMPTY_RANKS else "3:1"
    losses, values, state = by_plan(plan, _fit, OPTIMIZERS[name])
    wanted_losses, wanted, wanted_state = by_plan(None, _fit, OPTIMIZERS[name])
    torch.testing.assert_close(losses, wanted_losses, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_tensors(values, wanted, TOLERANCE)
    assert_same_optimizer_state(state, wanted_state, TOLERANCE)


class _FusedSGD(torch.optim.SGD):
    """A subclass: what it does is not known, so that it would run over DTensors."""


REFUSED = {
    "LBFGS": lambda p: torch.optim.LBFGS(p),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Muon": lambda p: torch.optim.Muon([parameter for parameter in p if parameter.ndim == 2]),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "_FusedSGD(fused=True)": lambda p: _FusedSGD(p, fused=True),
}


def _fit_refused(plan, make):
    try:
        _fit(plan, make)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "it trained"


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_work_on_rows_is_refused_by_name_on_every_rank(name):
    for kind, message in in_ranks(2, _fit_refused, "3:1", REFUSED[name]):
        assert kind == "UnsupportedError"
        assert f"{name} cannot work on shards" in message
        assert "Use an element-wise one" in message or "Leave fused=True out" in message


class _ByItsMean(torch.optim.SGD):
    """A user's own optimizer, of which no name is known: it divides gradients by their mean."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            size = parameter.grad.abs().mean() + parameter.grad.norm()
            parameter.sub_(parameter.grad / size * 1e-2)
        return loss


class _ByItsRows(torch.optim.SGD):
    """Another one, which multiplies matrices."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim == 2:
                parameter.sub_(parameter.grad @ parameter.grad.T @ parameter.grad)
        return loss


def test_an_unknown_optimizer_that_takes_means_of_gradients_equals_one_device():
    _, values, _ = by_plan("three", _fit, _ByItsMean)
    _, wanted, _ = by_plan(None, _fit, _ByItsMean)
    assert_same_tensors(values, wanted, TOLERANCE)


def test_an_unknown_optimizer_that_mixes_rows_is_stopped_in_its_first_step_on_every_rank():
    for kind, message in in_ranks(2, _fit_refused, "3:1", _ByItsRows):
        assert kind == "UnsupportedError"
        assert message.startswith("matmul() of whole gradients") and "AdamW" in message


class _MakesItsOptimizerEarly(Net):
    """In ``__init__``, with state that exists from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        groups = [{"params": [p], "lr": 1e-2 / (1 + p.ndim)} for p in self.parameters()]
        self.early = torch.optim.Adagrad(groups, initial_accumulator_value=0.1)

    def configure_optimizers(self):
        return self.early


def _fit_with_early_optimizer(plan):
    model = _MakesItsOptimizerEarly()
    trainer(plan, max_steps=3).fit(model, loader(), loader(8))
    return model.losses, values_of(model)


def test_an_optimizer_made_in_init_holds_the_sharded_parameters():
    wanted_losses, wanted = by_plan(None, _fit_with_early_optimizer)
    losses, values = by_plan("three", _fit_with_early_optimizer)
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    assert_same_tensors(values, wanted, 1e-5)
