"""Whatever goes wrong on one rank is raised on all of them, soon, and the next step is right."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from harness import full_gradients, make_executor, microbatches_of, relative_error, sharded_step
from launch import SOON_S, run_ranks
from shared_start import SharedStart
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from toys import UNEVEN, Base, Block, assert_idle, make_batch, mean_loss

from lightning_cephalo.common.errors import CephaloError, RemoteRankError, UnitUseError
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.execution.guards import Finding, Guard, Guards
from lightning_cephalo.execution.step import MicrobatchCall

IN_RANKS = SharedStart(run_ranks, 3)


class Broken(RuntimeError):
    """What the user's code raises here."""


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Broken("in a backward")


Fault = Callable[[str, Tensor], Tensor]


class FaultyBlock(Block):
    fault: Fault = staticmethod(lambda place, x: x)

    def forward(self, x):
        return super().forward(self.fault("unit", x))


class Faulty(Base):
    """Calls ``fault`` in its glue, in its second unit and in its tail."""

    blocks_of = staticmethod(lambda: [FaultyBlock() for _ in range(3)])
    fault: Fault = staticmethod(lambda place, x: x)
    call = staticmethod(lambda block, x: block(x))

    def through(self, x):
        for index, block in enumerate(self.blocks):
            x = self.call(block, x)
            if index == 1:
                x = self.fault("glue", x)
        return self.fault("tail", x)

    def break_with(self, fault: Fault) -> None:
        self.fault = self.blocks[1].fault = fault

    def mend(self) -> None:
        for module in (self, self.blocks[1]):
            for name in ("fault", "call"):
                module.__dict__.pop(name, None)


def raising(where: str, *, when: Callable[[], bool] = lambda: True) -> Fault:
    def fault(place: str, x: Tensor) -> Tensor:
        if place == where and when():
            raise Broken(f"in the {where}")
        return x

    return fault


def raising_in_backward(where: str) -> Fault:
    return lambda place, x: RaisesInBackward.apply(x) if place == where else x


def out_of_memory(place: str, x: Tensor) -> Tensor:
    if place == "unit":
        raise torch.OutOfMemoryError("no memory left")
    return x


@dataclass(frozen=True)
class Scenario:
    """One thing to go wrong.

    Attributes:
        breaks: Changes the model so that it fails.
        message: Of the error on the ranks that fail.
        ranks: Which ranks the change is made on.
        error: Class of the error on these ranks.
        fails: Ranks that see ``error``; the others see RemoteRankError. None: those of ``ranks``.
        recompute: Whether it can only happen with recompute (None: with and without).
    """

    breaks: Callable[[Faulty], None]
    message: str
    ranks: tuple[int, ...] = (0,)
    error: type[Exception] = Broken
    fails: tuple[int, ...] | None = None
    recompute: bool | None = None


def checkpointed(**kwargs: Any) -> Callable[[Faulty], None]:
    def breaks(model: Faulty) -> None:
        model.call = lambda block, x: checkpoint(block, x, **kwargs)

    return breaks


SCENARIOS = {
    "raises in the glue": Scenario(lambda m: m.break_with(raising("glue")), "in the glue"),
    "raises in a unit": Scenario(lambda m: m.break_with(raising("unit")), "in the unit", (1,)),
    "raises in the tail": Scenario(lambda m: m.break_with(raising("tail")), "in the tail"),
    "raises on several ranks": Scenario(
        lambda m: m.break_with(raising("unit")), "in the unit", (0, 1)
    ),
    "raises in the recompute": Scenario(
        lambda m: m.break_with(raising("unit", when=torch.is_grad_enabled)),
        "in the unit",
        (1,),
        recompute=True,
    ),
    "raises in the backward of a unit": Scenario(
        lambda m: m.break_with(raising_in_backward("unit")), "in a backward"
    ),
    "raises in the backward of the glue": Scenario(
        lambda m: m.break_with(raising_in_backward("glue")), "in a backward", (1,)
    ),
    "raises in the backward of the tail": Scenario(
        lambda m: m.break_with(raising_in_backward("tail")), "in a backward"
    ),
    "runs out of memory": Scenario(
        lambda m: m.break_with(out_of_memory),
        r"ran out of memory in the forward of unit 'blocks\.1', microbatch 1 of 1: no memory left\."
        r" What would help: a lower CephaloStrategy\(memory_cap",
        (1,),
        torch.OutOfMemoryError,
    ),
    "runs out of memory in the backward": Scenario(
        lambda m: m.break_with(
            lambda place, x: out_of_memory(place, x) if torch.is_grad_enabled() else x
        ),
        # in the first step the forward looks for leaks with gradients on
        r"ran out of memory in the (forward|backward) of unit 'blocks\.1', microbatch 1 of 2: no",
        error=torch.OutOfMemoryError,
        recompute=True,
    ),
    "a loss without gradient": Scenario(
        lambda m: m.break_with(lambda place, x: x),  # see LOSSES
        "does not require a gradient",
        error=UnitUseError,
    ),
    "recomputation around a unit": Scenario(
        checkpointed(use_reentrant=False), "torch.utils.checkpoint", (0, 1), UnitUseError
    ),
    "reentrant recomputation around a unit": Scenario(
        checkpointed(use_reentrant=True), "torch.utils.checkpoint", (0, 1), UnitUseError
    ),
}


def calls_of(model: Faulty, parts: list[dict[str, Tensor]], scenario: str | None) -> list[Any]:
    def loss(part: dict[str, Tensor]) -> Tensor:
        value = mean_loss(model, part)
        return value.detach() if scenario == "a loss without gradient" else value

    return [
        MicrobatchCall(partial(loss, part), lambda loss, part=part: (loss, float(len(part["x"]))))
        for part in parts
    ]


def good_step(executor: Executor, model: Faulty, single: Faulty, rank: int) -> None:
    batch = make_batch(4)
    model.zero_grad()
    single.zero_grad()
    executor.forward(calls_of(model, microbatches_of(batch, UNEVEN, rank), None))
    executor.backward()
    mean_loss(single, batch).backward()
    wanted = {key: parameter.grad for key, parameter in single.named_parameters()}
    assert relative_error(full_gradients(model), wanted) <= 1e-5
    assert_idle(executor)


def expect(
    executor: Executor,
    step: Callable[[], None],
    rank: int,
    fails: tuple[int, ...],
    error,
    message: str,
) -> None:
    start = time.monotonic()
    if rank in fails:
        with pytest.raises(error, match=message):
            step()
    else:
        with pytest.raises(RemoteRankError, match=rf"(?s)Rank {min(fails)} .*{message}"):
            step()
    assert time.monotonic() - start < SOON_S
    assert_idle(executor)


@IN_RANKS.each(*((name,) for name in SCENARIOS))
def _fails(rank: int, name: str) -> None:
    scenario = SCENARIOS[name]
    for recompute, good_steps_before in itertools.product((True, False), (0, 1)):
        if scenario.recompute not in (None, recompute):
            continue
        torch.manual_seed(3)
        model = Faulty()
        single = copy.deepcopy(model)
        executor = make_executor(model, UNEVEN.fractions, recompute)
        for _ in range(good_steps_before):
            good_step(executor, model, single, rank)
        parts = microbatches_of(make_batch(4), UNEVEN, rank)
        broken = rank in scenario.ranks
        if broken:
            scenario.breaks(model)

        def bad_step(model=model, executor=executor, parts=parts, broken=broken) -> None:
            executor.forward(calls_of(model, parts, name if broken else None))
            executor.backward()

        fails = scenario.ranks if scenario.fails is None else scenario.fails
        for _ in range(2):  # the second time from what the first has left
            if broken:
                model.mend()
                scenario.breaks(model)
            expect(executor, bad_step, rank, fails, scenario.error, scenario.message)
        model.mend()
        good_step(executor, model, single, rank)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_failure_is_raised_on_all_ranks_and_the_next_step_is_right(name):
    """In the first step, which discovers the order of visits, and in a later one."""
    IN_RANKS.of(_fails, name)


# -- ranks that have nothing to run, though they should -----------------------------------------


CANNOT_CUT = {
    "raises": (Broken("no such column"), "no such column"),
    "runs out of memory": (
        torch.OutOfMemoryError("no memory left"),
        "ran out of memory in the beginning of",
    ),
}


@IN_RANKS.each(*itertools.product(CANNOT_CUT, (0, 1)))
def _cannot_cut(rank: int, kind: str, good_steps_before: int) -> None:
    failure, message = CANNOT_CUT[kind]
    model = Faulty()
    single = copy.deepcopy(model)
    executor = make_executor(model, UNEVEN.fractions, True)
    for _ in range(good_steps_before):
        good_step(executor, model, single, rank)
    parts = microbatches_of(make_batch(4), UNEVEN, rank)

    def bad_step() -> None:
        calls = [] if rank == 1 else calls_of(model, parts, None)
        executor.forward(calls, failure=failure if rank == 1 else None)

    expect(executor, bad_step, rank, (1,), type(failure), message)
    good_step(executor, model, single, rank)


@pytest.mark.parametrize("good_steps_before", [0, 1], ids=["first step", "later step"])
@pytest.mark.parametrize("kind", CANNOT_CUT)
def test_a_failure_before_the_step_is_raised_on_all_ranks(kind, good_steps_before):
    IN_RANKS.of(_cannot_cut, kind, good_steps_before)


# -- weights ----------------------------------------------------------------------------------


@IN_RANKS
def _zero_weights(rank: int) -> None:
    model = Faulty()
    single = copy.deepcopy(model)
    executor = make_executor(model, UNEVEN.fractions, True)
    parts = microbatches_of(make_batch(4), UNEVEN, rank)
    wrong = "returned the weight nan"
    for weight, error, message in (
        (0.0, ValueError, "weights of all microbatches of this step sum to"),
        (math.nan, TypeError if rank < 2 else RemoteRankError, wrong),  # rank 2 has no samples
    ):
        calls = [
            MicrobatchCall(
                lambda part=part: mean_loss(model, part), lambda loss, w=weight: (loss, w)
            )
            for part in parts
        ]
        with pytest.raises(error, match=message):
            executor.forward(calls)
        assert_idle(executor)
        good_step(executor, model, single, rank)
    with pytest.raises(ValueError, match="did no rank get a sample"):
        executor.forward([])
    good_step(executor, model, single, rank)


def test_weights_that_sum_to_zero_or_are_not_numbers_are_refused_on_all_ranks():
    IN_RANKS.of(_zero_weights)


@IN_RANKS
def _bad_weight_of(rank: int) -> None:
    model = Faulty()
    single = copy.deepcopy(model)
    executor = make_executor(model, UNEVEN.fractions, True)
    parts = microbatches_of(make_batch(4), UNEVEN, rank)

    def weight_of(loss: Tensor) -> tuple[Tensor, float]:
        raise Broken("no weight")

    calls = [MicrobatchCall(lambda part=part: mean_loss(model, part), weight_of) for part in parts]
    expect(executor, lambda: executor.forward(calls), rank, (0, 1), Broken, "no weight")
    good_step(executor, model, single, rank)


def test_a_failing_weight_is_raised_on_all_ranks():
    IN_RANKS.of(_bad_weight_of)


# -- steps that are stopped where they are ------------------------------------------------------


class CleansUp(Faulty):
    """Opens modes and, when stopped, calls a unit once more."""

    cleaned: ClassVar[list[str]] = []

    def through(self, x):
        try:
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                y = self.blocks[0](x)
            return super().through(x) + y.float()
        finally:
            self.cleaned.append("once")
            if self.fault.__name__ == "fault":
                self.blocks[2](x)


@IN_RANKS
def _stopped(rank: int) -> None:
    torch.manual_seed(3)
    model = CleansUp()
    single = copy.deepcopy(model)
    executor = make_executor(model, UNEVEN.fractions, True)
    good_step(executor, model, single, rank)
    calls = calls_of(model, microbatches_of(make_batch(4), UNEVEN, rank), None)
    if rank == 0:  # its second microbatch is parked when the first one fails
        model.break_with(raising("glue"))
    before = len(model.cleaned)

    def step() -> None:
        executor.forward(calls)

    expect(executor, step, rank, (0,), Broken, "in the glue")
    assert len(model.cleaned) - before == len(calls)
    model.mend()
    good_step(executor, model, single, rank)


def test_a_step_that_is_stopped_may_clean_up_and_leaves_no_mode_behind():
    IN_RANKS.of(_stopped)


class RefusesOnRank0(Guard):
    """Finds something wrong on one rank before any code has run."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def step_begins(self, step):
        return [Finding("this rank may not begin")] if self._rank == 0 else []


def _refused_at_the_beginning(rank: int) -> str:
    model = Base()
    executor = make_executor(model, (0.5, 0.5), recompute=True)
    executor.guards = Guards([RefusesOnRank0(rank)])
    parts = [make_batch(2)]
    with pytest.raises(CephaloError) as raised:
        sharded_step(executor, model, mean_loss, parts)
    assert_idle(executor)
    executor.guards = Guards([])
    sharded_step(executor, model, mean_loss, parts)
    return str(raised.value)


def test_a_finding_before_the_step_on_one_rank_ends_it_on_all():
    own, other = run_ranks(2, _refused_at_the_beginning)
    assert own == "this rank may not begin"
    assert "Rank 0" in other and own in other
