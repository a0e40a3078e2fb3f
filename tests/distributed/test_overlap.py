"""Where the time of a step goes: communication runs under compute, and waiting is no work."""

from __future__ import annotations

import itertools
import time
from statistics import median

import pytest
import torch
from busy import by_the_clock, timed
from harness import make_executor
from launch import run_ranks
from torch import Tensor, nn

from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.observe.recorder import Recorder
from lightning_cephalo.plan.timeline import Activity, Event, Stream

UNITS, WIDTH = 4, 128
# long against what gloo takes for 64 KB on a machine that others use as well
PAUSE_S = 0.1


class Pause(torch.autograd.Function):
    """Takes its time in the backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """Takes ``pause_s`` in the forward and as long in the backward."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pause_s = pause_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        return x + Pause.apply(torch.tanh(self.linear(x)), self.pause_s)


class Model(nn.Module):
    def __init__(self, pause_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(pause_s) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def step(executor: Executor, model: nn.Module, microbatches: int) -> None:
    x = torch.ones(2, WIDTH)
    call = MicrobatchCall(lambda: model(x), lambda loss: (loss, 2.0))
    executor.forward([call] * microbatches)
    executor.backward()
    assert executor.stopwatch.finish()


def recorded(
    rank: int, steps: int, microbatches: int, pauses_s: tuple[float, ...] = (PAUSE_S, PAUSE_S)
) -> tuple[tuple[Event, ...], bool]:
    model = Model(pauses_s[rank] / microbatches)
    executor = make_executor(model, (0.75, 0.25), recompute=False)
    executor.recorder = Recorder(executor.stopwatch)
    for _ in range(steps):
        executor.recorder.restart()
        step(executor, model, microbatches)
        executor.recorder.finish()
    groups = {
        (flat.context.gather_group.group_name, flat.context.reduce_group.group_name)
        for unit in executor.units
        for flat in unit.flats
    }
    (names,) = groups
    return executor.recorder.events(rank), names[0] != names[1]


def passes(events: tuple[Event, ...], name: Activity) -> list[tuple[float, float]]:
    """When every unit was passed: from the first microbatch's start to the last one's end."""
    found = []
    for unit in range(UNITS):
        own = [event for event in events if event.name is name and event.unit == unit]
        found.append((min(event.start_s for event in own), max(event.end_s for event in own)))
    return found


def collectives(events: tuple[Event, ...], name: Activity, unit: int) -> list[Event]:
    return [event for event in events if event.name is name and event.unit == unit]


@pytest.mark.parametrize("microbatches", [1, 2])
@timed
def test_gathers_and_reduces_run_under_the_compute_of_the_neighbouring_unit(microbatches):
    for events, own_group in run_ranks(2, recorded, 2, microbatches):
        assert own_group
        forward, backward = passes(events, Activity.FORWARD), passes(events, Activity.BACKWARD)
        for unit in range(UNITS - 1):
            following = collectives(events, Activity.GATHER, unit + 1)[0]
            assert following.start_s <= forward[unit][0], unit
            with by_the_clock():
                assert following.end_s <= forward[unit][1], unit
        for unit in range(1, UNITS):
            following = collectives(events, Activity.GATHER, unit - 1)[-1]
            assert forward[-1][1] < following.start_s <= backward[unit][0], unit
            with by_the_clock():
                assert following.end_s <= backward[unit][1], unit
            (reduce,) = collectives(events, Activity.REDUCE, unit)
            assert backward[unit][1] <= reduce.start_s <= backward[unit - 1][0], unit
            with by_the_clock():
                assert reduce.end_s <= backward[unit - 1][1], unit
        # what comes before the first unit hides the first gather
        first, root = (collectives(events, Activity.GATHER, unit)[0] for unit in (0, -1))
        tail = min(event.start_s for event in events if event.name is Activity.TAIL)
        assert root.start_s <= first.start_s <= tail
        # no rank waits for its neighbour's data: only here and there for its neighbour
        waiting_s = sum(e.end_s - e.start_s for e in events if e.name is Activity.WAITING)
        with by_the_clock():
            assert waiting_s < PAUSE_S * UNITS / 2
        streams = {event.stream for event in events if event.name is Activity.REDUCE}
        assert streams == {Stream.REDUCTION}


@timed
def test_compute_begins_while_collectives_are_under_way():
    """A collective ends when the slow rank has issued it: the fast one computes meanwhile."""
    (events, _), _ = run_ranks(2, recorded, 2, 1, (PAUSE_S, 1.6 * PAUSE_S))
    forward, backward = passes(events, Activity.FORWARD), passes(events, Activity.BACKWARD)
    for unit in range(1, UNITS - 1):  # at the first unit of a pass both ranks issue at once
        following = collectives(events, Activity.GATHER, unit + 1)[0]
        assert following.start_s <= forward[unit][0], unit
        before = collectives(events, Activity.GATHER, unit - 1)[-1]
        assert before.start_s <= backward[unit][0], unit
        with by_the_clock():
            assert forward[unit][0] < following.end_s, unit
            assert backward[unit][0] < before.end_s, unit
    for unit in range(1, UNITS):
        (reduce,) = collectives(events, Activity.REDUCE, unit)
        assert reduce.start_s <= backward[unit - 1][0], unit
        with by_the_clock():
            assert backward[unit - 1][0] < reduce.end_s, unit


def test_a_step_that_still_finds_its_order_does_not_overlap():
    """Which shows that the recorder can tell."""
    for events, _ in run_ranks(2, recorded, 1, 1):
        forward = passes(events, Activity.FORWARD)
        for unit in range(UNITS - 1):
            following = collectives(events, Activity.GATHER, unit + 1)[0]
            assert following.start_s >= forward[unit][1], unit


def test_every_gather_and_reduce_is_recorded_once():
    for events, _ in run_ranks(2, recorded, 2, 2):
        gathers = [len(collectives(events, Activity.GATHER, unit)) for unit in range(-1, UNITS)]
        reduces = [len(collectives(events, Activity.REDUCE, unit)) for unit in range(-1, UNITS)]
        assert gathers == [1] + [2] * (UNITS - 1) + [1]  # the last unit stays between the passes
        assert reduces == [1] * (UNITS + 1)
        work = [event for event in events if event.stream is Stream.COMPUTE]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(work))
        tails = [event for event in work if event.name is Activity.TAIL]
        assert [event.microbatch for event in tails] == [0, 1, 0, 1]  # embedding, then the loss


def shares(rank: int, pauses_s: tuple[float, ...]) -> list[Share]:
    model = Model(pauses_s[rank])
    executor = make_executor(model, (0.5, 0.5), recompute=False)
    for _ in range(8):
        step(executor, model, microbatches=1)
    return executor.stopwatch.read()[1:]


@timed
def test_a_fast_rank_waits_for_a_slow_one_and_its_work_stays_what_it_is():
    fast, slow = run_ranks(2, shares, (0.01, 0.06))
    difference_s = 2 * UNITS * 0.05
    pairs = list(zip(fast, slow, strict=True))
    busy_s = median(lame.busy_s - quick.busy_s for quick, lame in pairs)
    waiting_s = median(quick.waiting_s - lame.waiting_s for quick, lame in pairs)
    with by_the_clock():
        assert busy_s == pytest.approx(difference_s, rel=0.4)
        assert waiting_s == pytest.approx(difference_s, rel=0.4)


@timed
def test_an_exchange_is_waiting_too():
    """A rank without data has nothing but exchanges and collectives to do."""

    def without_data(rank: int) -> Share:
        model = Model(0.05)
        executor = make_executor(model, (0.5, 0.5), recompute=False)
        for _ in range(2):
            step(executor, model, microbatches=1 - rank)
        return executor.stopwatch.read()[-1]

    working, idle = run_ranks(2, without_data)
    assert working.busy_s > 2 * UNITS * 0.05
    with by_the_clock():
        assert idle.waiting_s > 0.8 * 2 * UNITS * 0.05
        assert idle.busy_s < 0.3 * working.busy_s
