"""An order of visits that changes on all ranks together is traced again, and stays exact."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
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

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.observer import Observer
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
        self.order, self.calls = ORDERS[0], 0

    def through(self, x):
        self.calls += 1
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
        model.calls = 0
        watch = Prefetches()
        with executor.observed_by(watch):
            loss = sharded_step(executor, model, mean_loss, parts)
        assert model.calls == len(parts), "a microbatch ran twice"
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
def test_an_order_that_changes_everywhere_is_traced_again(recompute, reshard):
    for of_rank in run_ranks(3, _train, recompute, reshard):
        assert max(error for error, _ in of_rank) <= 1e-5
        # traced, replayed until it is left, traced again, ...; of no visits none is prefetched
        prefetched = [is_prefetched for _, is_prefetched in of_rank]
        assert prefetched == [False, True] * 4 + [False] * 3


def _skip(rank: int) -> None:
    """The known order is 0 1; then one microbatch makes a visit more, the other skips the last."""
    model = Ordered()
    executor = make_executor(model, (0.5, 0.5), True)
    parts = microbatches_of(make_batch(4), TWO_EACH, rank)
    model.order = (0, 1)
    sharded_step(executor, model, mean_loss, parts)
    orders = iter([(0, 1, 2), (0, 2)])

    def calls():
        for part in parts:
            order = next(orders)

            def step(order=order, part=part):
                model.order = order
                return mean_loss(model, part)

            yield MicrobatchCall(step, lambda loss: (loss, 1.0))

    with pytest.raises(UnitUseError, match=r"same order.* expected unit 'blocks.1', but"):
        executor.forward(list(calls()))
    assert_idle(executor)


def test_a_microbatch_that_skips_where_another_goes_further_is_refused_in_the_forward():
    run_ranks(2, _skip)


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
