"""Steps stay exact if microbatches visit other units than before, or than one another."""

from __future__ import annotations

import copy
import gc
import re
import warnings
import weakref

import pytest
import torch
from harness import (
    Allocation,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
)
from launch import run_ranks
from toys import UNEVEN, Base, assert_idle, make_batch, mean_loss

from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.execution.offload import HostArena
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.plan.program import Operation

TWO_EACH = Allocation(((1, 1), (1, 1)), (0.5, 0.5))
ORDERS = [
    (0, 1, 2),
    (0, 2, 1),  # another unit in the middle
    (0, 2, 1),
    (0, 1),  # another unit, and fewer
    (0, 1),
    (0, 1, 2, 0),  # more, behind the last
    (0, 1, 2, 0),
    (),  # none at all
    (),
    (2, 1, 0),  # from the beginning
    (2, 1, 0),
]


class Ordered(Base):
    """Counts how often its forward has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.order, self.calls = ORDERS[0], []

    def through(self, x):
        self.calls.append(1)
        for index in self.order:
            x = self.blocks[index](x)
        return x


class Prefetches(Observer):
    """Notes whether a unit was gathered before the one before it was computed."""

    def __init__(self) -> None:
        self.seen: list[Operation] = []

    def before(self, instruction):
        self.seen.append(instruction.operation)

    @property
    def found(self) -> bool:
        return self.seen[:2] == [Operation.GATHER, Operation.GATHER]


def _train(rank: int, recompute: bool, reshard: bool) -> list[tuple[float, bool]]:
    model = Ordered()
    single = copy.deepcopy(model)
    executor = make_executor(model, UNEVEN.fractions, recompute, reshard=reshard)
    batch, found = make_batch(4), []
    parts = microbatches_of(batch, UNEVEN, rank)
    for order in ORDERS:
        model.order = single.order = order
        model.zero_grad()
        single.zero_grad()
        model.calls.clear()
        watch = Prefetches()
        with executor.link.observed_by(watch):
            loss = sharded_step(executor, model, mean_loss, parts)
        assert len(model.calls) == len(parts), "a microbatch ran twice"
        expected = mean_loss(single, batch)
        expected.backward()
        wanted = {name: parameter.grad for name, parameter in single.named_parameters()}
        found.append((relative_error(full_gradients(model), wanted), watch.found))
        assert executor.visits == () or len(executor.visits) == len(order)
        assert_idle(executor)
        assert loss >= 0
    return found


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept gathered"])
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "kept"])
def test_an_order_that_changes_everywhere_stays_exact_and_is_prefetched(recompute, reshard):
    for of_rank in run_ranks(3, _train, recompute, reshard):
        assert max(error for error, _ in of_rank) <= 1e-5
        # only the first step is traced from its beginning
        assert [is_prefetched for _, is_prefetched in of_rank] == [False] + [True] * 10


EACH_ITS_OWN = Allocation(((2, 1), (1, 2), ()), (0.6, 0.0, 0.4))
OF_MICROBATCHES = [
    # rank 0                 rank 1
    ((0, 1, 2), (0, 2), (0, 1), (2,)),  # layers are dropped
    ((0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)),
    ((0,), (0,), (0, 2), (0, 2)),  # one that nobody visits
    ((), (), (), ()),
    ((0, 1), (0,), (), (0, 1, 2)),  # some leave early
    ((2, 1, 0), (0, 1, 2), (1, 0), (0, 1, 2)),  # in another order
    ((0, 0, 1), (0, 1, 1, 1), (0, 1), (0, 1, 2, 0)),  # more than once
    ((0, 1, 2), (0, 2), (0, 1), (2,)),
    ((0, 1, 2), (-2, 2), (-1, 0), (0, -2, 1, 2)),  # below 0: without gradient, and not used
]


class EachItsOwn(Base):
    """Takes the order of its microbatch from the data, where one device finds it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: dict[float, tuple[int, ...]] = {}

    def forward(self, x):
        order, x = self.orders[float(x[0, 0])], self.embed(x)
        for index in order:
            if index >= 0:
                x = self.blocks[index](x)
            else:
                with torch.no_grad():
                    self.blocks[-index](x)
        return self.head(x)


def _train_apart(rank: int) -> list[tuple[str, float, float, int, bool]]:
    """Each step against one device that runs the same microbatches one by one."""
    found = []
    batch = make_batch(6)
    parts_of = [microbatches_of(batch, EACH_ITS_OWN, other) for other in range(3)]
    everyone = [part for parts in parts_of for part in parts]
    for mode in ("recompute", "kept", "gathered", "offload"):
        torch.manual_seed(5)
        model = EachItsOwn()
        single = copy.deepcopy(model)
        executor = make_executor(
            model, EACH_ITS_OWN.fractions, mode != "kept", reshard=mode != "gathered"
        )
        if mode == "offload":
            executor.arena = HostArena(executor.accelerator, 2**20)
        for orders in OF_MICROBATCHES:
            pairs = zip(everyone, orders, strict=True)
            model.orders = single.orders = {float(part["x"][0, 0]): o for part, o in pairs}
            model.zero_grad()
            single.zero_grad()
            watch = Prefetches()
            with executor.link.observed_by(watch):
                loss = sharded_step(executor, model, mean_loss, parts_of[rank])
            wanted = sum(mean_loss(single, part) * len(part["x"]) / 6 for part in everyone)
            wanted.backward()
            gradients = {name: parameter.grad for name, parameter in single.named_parameters()}
            error = relative_error(full_gradients(model), gradients)
            share = sum(
                float(mean_loss(single, part).detach()) * len(part["x"]) / 6
                for part in parts_of[rank]
            )
            reduces = watch.seen.count(Operation.REDUCE)
            found.append((mode, error, abs(loss - share), reduces, watch.found))
            assert_idle(executor)
    return found


def test_gradients_are_those_of_one_device_whatever_each_microbatch_visits():
    steps = len(OF_MICROBATCHES)
    for of_rank in run_ranks(3, _train_apart):
        assert max(error for _, error, _, _, _ in of_rank) <= 1e-5
        assert max(difference for _, _, difference, _, _ in of_rank) <= 1e-5
        for start in range(0, len(of_rank), steps):
            one_mode = of_rank[start : start + steps]
            # each unit is reduced once, and not at all if nobody visits it
            assert [reduces for _, _, _, reduces, _ in one_mode] == [4, 4, 3, 1, 4, 4, 4, 4, 4]
            assert [is_prefetched for *_, is_prefetched in one_mode] == [False] + [True] * 8


def _random_orders(rank: int) -> tuple[list[str], float]:
    """Every step has another order of many visits: it is found anew each time."""
    model = EachItsOwn()
    single = copy.deepcopy(model)
    executor = make_executor(model, EACH_ITS_OWN.fractions, True)
    batch = make_batch(6)
    parts_of = [microbatches_of(batch, EACH_ITS_OWN, other) for other in range(3)]
    everyone = [part for parts in parts_of for part in parts]
    generator = torch.Generator().manual_seed(2)
    worst = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            orders = torch.randint(0, 3, (len(everyone), 6), generator=generator).tolist()
            pairs = zip(everyone, orders, strict=True)
            model.orders = single.orders = {float(part["x"][0, 0]): o for part, o in pairs}
            model.zero_grad()
            single.zero_grad()
            sharded_step(executor, model, mean_loss, parts_of[rank])
            sum(mean_loss(single, part) * len(part["x"]) / 6 for part in everyone).backward()
            gradients = {name: parameter.grad for name, parameter in single.named_parameters()}
            worst = max(worst, relative_error(full_gradients(model), gradients))
            assert_idle(executor)
    return [str(each.message) for each in caught], worst


def test_orders_that_change_in_every_step_stay_exact_and_are_warned_of_once_on_every_rank():
    for messages, worst in run_ranks(3, _random_orders):
        assert worst <= 1e-5
        assert len(messages) == 1
        assert re.match(r"In 8 of the last \d+ steps, .*exchange a message.*units=", messages[0])


class Breaks(EachItsOwn):
    breaks = False

    def forward(self, x):
        x = super().forward(x)
        if self.breaks:
            raise ValueError("in a branch")
        return x


def _fails_apart(rank: int) -> None:
    """One rank fails where microbatches are at different units, known or not."""
    parts = microbatches_of(make_batch(6), EACH_ITS_OWN, rank)
    model = Breaks()
    executor = make_executor(model, EACH_ITS_OWN.fractions, True)
    wanted = [[(0, 1, 2), (0, 2)], [(2,), (0, 1, 2, 1, 0)], [()]][rank]
    for breaks in (True, False, True, True, False):
        pairs = zip(parts, wanted, strict=False)
        model.orders = {float(part["x"][0, 0]): order for part, order in pairs}
        model.breaks = breaks and rank == 1
        if breaks:
            error = ValueError if rank == 1 else RemoteRankError
            with pytest.raises(error, match="in a branch"):
                sharded_step(executor, model, mean_loss, parts)
        else:
            sharded_step(executor, model, mean_loss, parts)
        assert_idle(executor)


def test_a_failure_of_a_rank_whose_microbatches_are_apart_reaches_all():
    run_ranks(3, _fails_apart)


def _references(rank: int) -> None:
    model = Ordered()
    executor = make_executor(model, (0.5, 0.5), True)
    parts = microbatches_of(make_batch(4), TWO_EACH, rank)
    calls = [
        MicrobatchCall(lambda part=part: mean_loss(model, part), lambda loss: (loss, 1.0))
        for part in parts
    ]
    for _ in range(2):
        results = [weakref.ref(result) for result in executor.forward(calls).results]
        assert [result() for result in results] == [None, None], "the executor keeps results"
        executor.backward()
    executor.hooks.uninstall()
    gc.disable()
    known = weakref.ref(executor)
    del executor
    assert known() is None, "a cycle keeps the executor, and with it the process groups"


def test_an_executor_keeps_no_results_and_ends_with_its_last_reference():
    run_ranks(2, _references)
