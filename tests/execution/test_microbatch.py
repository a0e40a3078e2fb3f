"""One microbatch in one process: its greenlet, its visits and its backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cephalo.accelerator.cpu import Cpu
from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.graph import run
from lightning_cephalo.execution.microbatch import BEHIND_THE_LAST, Microbatch, MicrobatchOptions
from lightning_cephalo.execution.recomputed import Places
from lightning_cephalo.execution.user_writes import explained
from lightning_cephalo.plan.program import NONE, Visit


class Model(nn.Module):
    """Two units with glue between them; each call of a unit passes the microbatch under way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 4)
        self.units = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, visit: Callable[..., Tensor]) -> Tensor:
        hidden = self.embed(x)
        for index, unit in enumerate(self.units):
            hidden = hidden + visit(index + 1, unit, hidden)
        return self.head(hidden).square().mean()


def directly(index: int, unit: nn.Module, *args: Any) -> Any:
    return unit(*args)


def microbatch_of(step: Callable[[Callable[..., Any]], Any], **options: Any) -> Microbatch:
    """A microbatch whose step gets a function that visits a unit."""

    def visit(index: int, unit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trainable = isinstance(unit, nn.Module) and any(p.requires_grad for p in unit.parameters())
        forward = SimpleNamespace(
            is_head=False,
            recomputes=True,
            name="inner",
            body=unit,
            with_buffers=(),
            renew_accumulators=list,
        )
        return microbatch.visit(index, trainable, forward, args, kwargs)

    overlay: Any = SimpleNamespace(now=lambda modules: None, replayed=lambda view: nullcontext())
    places = Places(Cpu(torch.device("cpu")), overlay, None)
    options = MicrobatchOptions(**{"recompute": True, **options})
    microbatch = Microbatch(0, lambda: step(visit), places, options, Passing())
    return microbatch


class Passing:
    """Notes where the backward is."""

    def __init__(self) -> None:
        self.passed: list[int] = []

    def arrive(self, index: int, position: int, record: Any = None, gradients: Any = None) -> None:
        self.passed.append(position)
        if record is not None:
            record.arrive()

    def leave(self, index: int, gradients: Any = None) -> None:
        pass


def backward(microbatch: Microbatch) -> None:
    rest = microbatch.backward_of_loss(microbatch.code.result, None)
    run([*rest, *microbatch.marks(None)])


def run_through(microbatch: Microbatch) -> list[Visit | None]:
    places = []
    while not microbatch.code.finished:
        microbatch.advance()
        places.append(microbatch.code.parked)
    return places


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_those_of_plain_autograd(recompute, interleaved):
    x, model, plain = torch.randn(5, 3).double(), Model().double(), Model().double()
    torch.manual_seed(7)
    plain(x, directly).backward()

    torch.manual_seed(7)
    microbatch = microbatch_of(lambda visit: model(x, visit), recompute=recompute)
    while not microbatch.code.finished:
        microbatch.advance()
        if interleaved:  # another one draws nothing here, but switches modes
            other = microbatch_of(lambda visit: visit(1, torch.relu, torch.ones(1)))
            with torch.no_grad():
                run_through(other)
    backward(microbatch)
    for (name, parameter), expected in zip(
        model.named_parameters(), plain.parameters(), strict=True
    ):
        assert torch.allclose(parameter.grad, expected.grad, rtol=1e-12, atol=0), name


def test_a_step_parks_before_each_unit_and_before_its_loss():
    model, x = Model(), torch.ones(2, 3)
    places = run_through(microbatch_of(lambda visit: model(x, visit), last=1))
    assert places == [Visit(1), Visit(2), BEHIND_THE_LAST, None]
    places = run_through(microbatch_of(lambda visit: model(x, visit), last=NONE))
    assert places == [Visit(1), Visit(2), None]
    with torch.no_grad():
        places = run_through(microbatch_of(lambda visit: model(x, visit)))
    assert places == [Visit(1, False), Visit(2, False), None]


def test_modes_belong_to_the_microbatch():
    seen = []

    def step(visit):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            visit(1, torch.relu, torch.ones(1))
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return torch.ones(1)

    microbatch = microbatch_of(step)
    microbatch.advance()
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    microbatch.advance()
    assert seen == [(False, True)]
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_a_unit_is_computed_again_in_the_modes_of_its_forward_and_leaves_those_of_the_backward():
    seen = []

    def unit(x):
        seen.append(modes())
        torch.set_default_dtype(torch.float64)  # which it does not undo
        return x.sin()

    def modes():
        return (torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), torch.rand(()).item())

    def step(visit):
        x = torch.ones(2, requires_grad=True) * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return visit(2, unit, visit(1, unit, x)).sum()

    microbatch = microbatch_of(step)
    run_through(microbatch)
    forward, torch_state = list(seen), torch.get_rng_state()
    backward(microbatch)
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert forward == [(True, torch.float32, forward[0][2]), (True, torch.float64, forward[1][2])]
    assert seen[2:] == [forward[1], forward[0]]


def test_an_abandoned_microbatch_ends_even_where_its_cleaning_up_visits_units():
    cleaned = []

    def step(visit):
        try:
            visit(1, torch.relu, torch.ones(1))
        finally:
            visit(2, torch.relu, torch.ones(1))
            cleaned.append(True)

    microbatch = microbatch_of(step)
    microbatch.advance()
    microbatch.abandon()
    assert not cleaned, "stopping stops the cleaning up too where it visits a unit"
    microbatch.abandon()  # nothing left to stop


def test_an_error_of_the_step_reaches_who_advances_it():
    def step(visit):
        visit(1, torch.relu, torch.ones(1))
        raise ValueError("mine")

    microbatch = microbatch_of(step)
    microbatch.advance()
    with pytest.raises(ValueError, match="mine"):
        microbatch.advance()
    microbatch.abandon()


def in_place_by_the_unit(visit):
    hidden = torch.ones(2, requires_grad=True) * 2
    return visit(1, lambda x: x.mul_(2), hidden).sum()


def in_place_behind_the_unit(visit):
    hidden = torch.ones(2, requires_grad=True) * 2
    out = visit(1, lambda x: x * x, hidden)
    hidden.data.add_(0)
    with torch.no_grad():
        hidden += 1
    return out.sum()


def test_an_input_that_the_unit_changes_is_refused_where_it_is_computed_again():
    with pytest.raises(UnitUseError, match="changed in place"):
        run_through(microbatch_of(in_place_by_the_unit))
    kept = microbatch_of(in_place_by_the_unit, recompute=False)
    run_through(kept)
    backward(kept)


def test_an_input_that_is_changed_behind_the_unit_is_refused_in_the_backward():
    microbatch = microbatch_of(in_place_behind_the_unit)
    run_through(microbatch)
    with pytest.raises(UnitUseError, match="changed in place"):
        backward(microbatch)


def test_checkpointing_around_a_unit_is_refused():
    def step(visit):
        x = torch.ones(2, requires_grad=True) * 2
        return checkpoint(lambda v: visit(1, torch.exp, v), x, use_reentrant=False).sum()

    with pytest.raises(UnitUseError, match="switch gradient checkpointing off"):
        run_through(microbatch_of(step))


def test_a_loss_without_gradient_is_refused():
    microbatch = microbatch_of(lambda visit: torch.ones(()))
    run_through(microbatch)
    with pytest.raises(UnitUseError, match="does not require a gradient"):
        backward(microbatch)


def test_a_unit_that_the_loss_does_not_depend_on_is_passed_without_computing_it_again():
    calls = []

    def unit(x):
        calls.append(torch.is_grad_enabled())
        return x.sin()

    def step(visit):
        x = torch.ones(2, requires_grad=True) * 3
        visit(1, unit, x)
        return visit(2, unit, x).sum()

    microbatch = microbatch_of(step)
    run_through(microbatch)
    backward(microbatch)
    assert calls == [True, True, True]
    assert microbatch._backwards.passed == [1, 0]


def test_a_unit_stops_where_all_is_saved_again_and_may_be_read_twice():
    calls = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,), (again,) = ctx.saved_tensors, ctx.saved_tensors
            assert torch.equal(x, again)
            return 2 * x * gradient

    def unit(x):
        x = Twice.apply(x)
        calls.append("saved")
        return x + 1.0  # which saves nothing

    x = torch.full((2,), 3.0, requires_grad=True)
    microbatch = microbatch_of(lambda visit: visit(1, unit, x * 1.0).sum())
    run_through(microbatch)
    backward(microbatch)
    assert torch.equal(x.grad, torch.full((2,), 6.0))
    assert calls == ["saved"]  # of the forward


def test_functional_gradients_in_a_unit_are_refused_by_name_where_it_is_computed_again():
    x = torch.ones(3, 2, requires_grad=True) * 1.0

    def unit(x):
        return torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)

    with pytest.raises(RuntimeError) as error:
        run_through(microbatch_of(lambda visit: visit(1, unit, x).sum()))
    assert "CephaloStrategy(recompute=False)" in str(explained(error.value))
    kept = microbatch_of(lambda visit: visit(1, unit, x).sum(), recompute=False)
    run_through(kept)
    backward(kept)


def test_a_unit_that_computes_otherwise_is_refused():
    runs = []

    def unit(x):
        runs.append(1)
        return x.sin() if len(runs) == 1 else x + 1

    x = torch.ones(2, requires_grad=True)
    microbatch = microbatch_of(lambda visit: visit(1, unit, x * 1.0).sum())
    run_through(microbatch)
    with pytest.raises(UnitUseError, match="has saved 1 tensors for its backward, and 0 when"):
        backward(microbatch)
