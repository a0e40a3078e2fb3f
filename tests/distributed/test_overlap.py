"""Where the time of a step goes: communication runs under compute, and waiting is no work."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import make_executor
from launch import run_ranks
from torch import Tensor, nn
from virtual_time import SharedTime, VirtualHost

from lightning_cephalo.accelerator.marks import HostMarks, Mark
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.observe.recorder import Recorder
from lightning_cephalo.observe.recording import Event, Stream
from lightning_cephalo.observe.timing import Share, Timing
from lightning_cephalo.plan.program import NONE, Operation

UNITS, WIDTH = 4, 128
# for what must happen sooner or later, on any machine
LIMIT_S = 100.0

Passed = Callable[[Operation, int], None]
"""Called in the midst of every pass of a block, with its index."""


class Backward(torch.autograd.Function):
    """Calls ``passed`` in the backward."""

    @staticmethod
    def forward(ctx, x, passed):
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.passed()
        return gradient, None


class Block(nn.Module):
    def __init__(self, index: int, passed: Passed) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.index, self.passed = index, passed

    def forward(self, x: Tensor) -> Tensor:
        self.passed(Operation.FORWARD, self.index)
        hidden = torch.tanh(self.linear(x))
        return x + Backward.apply(hidden, lambda: self.passed(Operation.BACKWARD, self.index))


class Model(nn.Module):
    def __init__(self, passed: Passed) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(index, passed) for index in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Ticks(HostMarks):
    """A clock that shows nothing but what came before what, and what is under way."""

    def __init__(self) -> None:
        ticks = itertools.count()
        super().__init__(lambda: float(next(ticks)))
        self._changed = threading.Condition()
        self._under_way = 0

    def when_done(self, work: Any, note: Callable[[Mark], None]) -> None:
        def done(mark: Mark) -> None:
            note(mark)
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

        with self._changed:
            self._under_way += 1
        super().when_done(work, done)

    def wait_until_nothing_is_under_way(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._under_way, LIMIT_S)


class Gates:
    """Keeps the slow rank in every block until the fast one has begun the next one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        passes = itertools.product((Operation.FORWARD, Operation.BACKWARD), range(UNITS))
        self._begun = {(activity, unit): context.Event() for activity, unit in passes}

    def pass_fast(self, activity: Operation, unit: int) -> None:
        self._begun[activity, unit].set()

    def pass_slowly(self, activity: Operation, unit: int) -> None:
        begun = self._begun.get((activity, unit + (1 if activity is Operation.FORWARD else -1)))
        assert begun is None or begun.wait(LIMIT_S)


def step(executor: Executor, model: nn.Module, microbatches: int) -> None:
    x = torch.ones(2, WIDTH)
    call = MicrobatchCall(lambda: model(x), lambda loss: (loss, 2.0))
    executor.forward([call] * microbatches)
    executor.backward()


def recorded(
    rank: int, steps: int, microbatches: int, gates: Gates | None = None
) -> tuple[tuple[Event, ...], bool]:
    """The last step: in every block its computing ends after all that was issued before it.

    Unless there are gates, of which the slow rank 1 is kept back in the last step.
    """
    ticks = Ticks()

    def passed(activity: Operation, unit: int) -> None:
        if gates is None:
            ticks.wait_until_nothing_is_under_way()
        elif is_last:
            (gates.pass_slowly if rank else gates.pass_fast)(activity, unit)

    model = Model(passed)
    executor = make_executor(model, (0.75, 0.25), recompute=False)
    recorder = Recorder(ticks)
    executor.link.attach(recorder)
    for index in range(steps):
        is_last = index == steps - 1
        recorder.restart()
        step(executor, model, microbatches)
        recorder.finish()
    ticks.wait_until_nothing_is_under_way()
    groups = {
        (flat.context.gather_group.group_name, flat.context.reduce_group.group_name)
        for unit in executor.units
        for flat in unit.flats
    }
    (names,) = groups
    return recorder.events(), names[0] != names[1]


def passes(events: tuple[Event, ...], name: Operation) -> list[tuple[float, float]]:
    """When every unit was passed: from the first microbatch's start to the last one's end."""
    found = []
    for unit in range(1, UNITS + 1):
        own = [event for event in events if event.operation is name and event.unit == unit]
        found.append((min(event.start_s for event in own), max(event.end_s for event in own)))
    return found


def collectives(events: tuple[Event, ...], name: Operation, block: int) -> list[Event]:
    """Of the unit that is this block; -1: of the root unit."""
    return [event for event in events if event.operation is name and event.unit == block + 1]


def is_for(wait: Event, collective: Event) -> bool:
    """Whether a rank waits there for that collective, or for one of the same unit later on."""
    if wait.start_s < collective.start_s:
        return False
    if collective.operation is Operation.GATHER:
        return wait.unit == collective.unit and wait.microbatch != NONE
    # the next reduce waits for the one before
    return wait.unit == collective.unit - 1 and wait.microbatch == NONE


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gathers_and_reduces_run_under_the_compute_of_the_neighbouring_unit(microbatches):
    """Compute that waits for what is under way would never end if nothing ran under it."""
    for events, own_group in run_ranks(2, recorded, 2, microbatches):
        assert own_group
        forward, backward = passes(events, Operation.FORWARD), passes(events, Operation.BACKWARD)
        hidden = []
        for unit in range(UNITS - 1):
            following = collectives(events, Operation.GATHER, unit + 1)[0]
            assert following.start_s <= forward[unit][0], unit
            assert following.end_s <= forward[unit][1], unit
            hidden.append(following)
        for unit in range(1, UNITS):
            following = collectives(events, Operation.GATHER, unit - 1)[-1]
            assert forward[-1][1] < following.start_s <= backward[unit][0], unit
            assert following.end_s <= backward[unit][1], unit
            (reduce,) = collectives(events, Operation.REDUCE, unit)
            assert backward[unit][1] <= reduce.start_s <= backward[unit - 1][0], unit
            assert reduce.end_s <= backward[unit - 1][1], unit
            hidden += [following, reduce]
        # what comes before the first unit hides the first gather
        first, root = (collectives(events, Operation.GATHER, unit)[0] for unit in (0, -1))
        computed = min(e.start_s for e in events if e.operation is Operation.FORWARD)
        assert root.start_s <= first.start_s <= computed
        # a rank waits for what nothing can hide, and for its neighbour
        waits = [event for event in events if event.operation is Operation.WAIT]
        for collective in hidden:
            needed = [wait for wait in waits if is_for(wait, collective)]
            assert needed
            assert all(wait.start_s > collective.end_s for wait in needed), collective
        streams = {event.stream for event in events if event.operation is Operation.REDUCE}
        assert streams == {Stream.REDUCTION}


def test_compute_begins_while_collectives_are_under_way():
    """A collective ends when the slow rank has issued it: the fast one computes meanwhile."""
    (events, _), _ = run_ranks(2, recorded, 2, 1, Gates())
    forward, backward = passes(events, Operation.FORWARD), passes(events, Operation.BACKWARD)
    for unit in range(1, UNITS - 1):  # at the first unit of a pass both ranks issue at once
        following = collectives(events, Operation.GATHER, unit + 1)[0]
        assert following.start_s <= forward[unit][0] < following.end_s, unit
        before = collectives(events, Operation.GATHER, unit - 1)[-1]
        assert before.start_s <= backward[unit][0] < before.end_s, unit
    for unit in range(1, UNITS):
        (reduce,) = collectives(events, Operation.REDUCE, unit)
        assert reduce.start_s <= backward[unit - 1][0] < reduce.end_s, unit


def test_a_step_that_still_finds_its_order_does_not_overlap():
    """Which shows that the recorder can tell."""
    for events, _ in run_ranks(2, recorded, 1, 1):
        forward = passes(events, Operation.FORWARD)
        for unit in range(UNITS - 1):
            following = collectives(events, Operation.GATHER, unit + 1)[0]
            assert following.start_s >= forward[unit][1], unit


def test_every_gather_and_reduce_is_recorded_once():
    for events, _ in run_ranks(2, recorded, 2, 2):
        gathers = [len(collectives(events, Operation.GATHER, unit)) for unit in range(-1, UNITS)]
        reduces = [len(collectives(events, Operation.REDUCE, unit)) for unit in range(-1, UNITS)]
        assert gathers == [1] + [2] * (UNITS - 1) + [1]  # the last unit stays between the passes
        assert reduces == [1] * (UNITS + 1)
        work = [event for event in events if event.stream is Stream.COMPUTE]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(work))
        root = [
            event for event in work if event.unit == 0 and event.operation is not Operation.WAIT
        ]
        assert [(event.operation, event.microbatch) for event in root] == [
            (Operation.FORWARD, 0),  # the embedding
            (Operation.FORWARD, 1),
            (Operation.LOSS, 0),
            (Operation.LOSS, 1),
        ]


def shares(rank: int, folder: str, pauses_s: tuple[float, ...], idle: int | None) -> list[Share]:
    """Steps in which every pass of a block takes so many seconds of virtual time."""
    host = VirtualHost()
    model = Model(lambda activity, unit: host.run(pauses_s[rank]))
    timing = Timing(HostMarks(host.now))
    executor = make_executor(model, (0.5, 0.5), recompute=False)
    executor.link.attach(timing)
    with SharedTime(host, folder):
        for _ in range(4):
            step(executor, model, microbatches=0 if rank == idle else 1)
            assert timing.finish()
    return timing.read()[1:]  # the first step finds the order of the units


def test_a_fast_rank_waits_for_a_slow_one_and_its_work_stays_what_it_is(tmp_path: Path) -> None:
    fast, slow = run_ranks(2, shares, str(tmp_path), (0.01, 0.06), None)
    passes = 2 * UNITS
    assert fast == [Share(pytest.approx(passes * 0.01), pytest.approx(passes * 0.05))] * 3
    assert slow == [Share(pytest.approx(passes * 0.06), 0.0)] * 3


def test_an_exchange_is_waiting_too(tmp_path: Path) -> None:
    """A rank without data has nothing but exchanges and collectives to do."""
    working, idle = run_ranks(2, shares, str(tmp_path), (0.05, 0.05), 1)
    total_s = 2 * UNITS * 0.05
    assert working == [Share(pytest.approx(total_s), 0.0)] * 3
    assert idle == [Share(pytest.approx(0.0, abs=1e-9), pytest.approx(total_s))] * 3
