"""Where microbatches and ranks are in the order of visits, and what they agree on."""

from __future__ import annotations

from itertools import permutations

import pytest

from lightning_cephalo.execution.visits import (
    FAILED,
    FINISHED,
    KEPT_FOR_STEPS,
    NO_DATA,
    Visits,
    agree,
    where,
    without_backward,
)
from lightning_cephalo.plan.orders import Choice
from lightning_cephalo.plan.program import Operation, Visit, visit_of

ORDER = (Visit(1), Visit(2))
ALL = (True, True, True)


@pytest.fixture
def visits() -> Visits:
    return Visits()


@pytest.mark.parametrize(
    ("failed", "parked", "expected"),
    [
        (True, [Visit(1)], (FAILED, 0.0, 0.0, 0.0)),
        (False, [], (NO_DATA, 0.0, 0.0, 0.0)),
        (False, [None, None], (FINISHED, 0.0, 0.0, 0.0)),
        (False, [Visit(2), Visit(2)], (2.0, 1.0, -1.0, 0.0)),
        (False, [Visit(2, False)], (2.0, 0.0, -1.0, 0.0)),
        (False, [Visit(2), Visit(1)], (1.0, 1.0, -1.0, 1.0)),
        (False, [None, Visit(2)], (2.0, 1.0, -1.0, 1.0)),
        (False, [Visit(0, meeting=3)], (0.0, 1.0, 3.0, 0.0)),
        (False, [Visit(2, meeting=1), Visit(2)], (2.0, 1.0, -1.0, 1.0)),
    ],
)
def test_where_a_rank_is_as_numbers(failed, parked, expected):
    assert where(failed=failed, parked=parked, choice=Choice(())) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([(1.0, 1.0, -1.0, 0.0), (1.0, 1.0, -1.0, 0.0)], (Visit(1), False)),
        ([(1.0, 1.0, -1.0, 0.0), (1.0, 1.0, -1.0, 1.0)], (Visit(1), True)),
        ([(1.0, 0.0, -1.0, 0.0), (NO_DATA, 0.0, 0.0, 0.0)], (Visit(1, False), False)),
        ([(FINISHED, 0.0, 0.0, 0.0), (NO_DATA, 0.0, 0.0, 0.0)], (None, False)),
        ([(NO_DATA, 0.0, 0.0, 0.0), (NO_DATA, 0.0, 0.0, 0.0)], (None, False)),
        ([(1.0, 1.0, -1.0, 0.0), (FAILED, 0.0, 0.0, 0.0)], (None, False)),
        ([(1.0, 1.0, -1.0, 0.0), (2.0, 1.0, -1.0, 0.0), (FAILED, 0.0, 0.0, 0.0)], (None, False)),
        ([(1.0, 1.0, -1.0, 0.0), (2.0, 1.0, -1.0, 0.0)], (Visit(1), True)),
        ([(1.0, 1.0, -1.0, 0.0), (FINISHED, 0.0, 0.0, 0.0)], (Visit(1), True)),
        ([(1.0, 1.0, -1.0, 0.0), (1.0, 0.0, -1.0, 0.0)], (Visit(1, False), True)),
        ([(2.0, 1.0, 4.0, 0.0), (2.0, 1.0, 3.0, 0.0)], (Visit(2, meeting=3), True)),
    ],
)
def test_ranks_agree_on_the_next_visit_whatever_their_order(said, expected):
    for rows in permutations(said):
        assert agree(rows, Choice(())) == expected


def test_an_order_holds_the_objects_at_which_microbatches_park(visits):
    agreed, _ = agree([(3.0, 1.0, -1.0, 0.0)], Choice(()))
    assert agreed is visit_of(3, True, -1)
    copies = [Visit(1), Visit(3)]  # as they come from another rank
    learn(visits, copies, paths=[copies])
    assert [at is visit_of(at.unit, True, -1) for at in visits.known(ALL)] == [True, True]


def learn(visits, order=ORDER, trainable=ALL, made=None, paths=None):
    made = [True] * len(order) if made is None else made
    visits.learn(trainable, order, made, paths)


def test_an_order_is_known_by_which_units_want_gradients(visits):
    frozen = (True, False, True)
    learn(visits)
    assert visits.known(ALL) == ORDER == visits.last and visits.known(frozen) is None
    learn(visits, ORDER[::-1], frozen)
    assert visits.known(ALL) == ORDER and visits.last == ORDER[::-1]


def test_an_order_takes_in_what_microbatches_visit(visits):
    learn(visits)
    rest = (*ORDER, Visit(1), Visit(2))
    paths = [(Visit(1), Visit(2)), (Visit(1), Visit(1), Visit(2))]
    learn(visits, rest, paths=paths, made=[True, False, True, True])
    assert visits.known(ALL) == (Visit(1), Visit(1), Visit(2))
    assert visits.last == (Visit(1), Visit(1), Visit(2))


def test_an_order_drops_visits_that_nobody_makes_for_some_steps(visits):
    learn(visits)
    for _ in range(KEPT_FOR_STEPS - 1):
        learn(visits, made=[True, False])
    learn(visits, made=[False, True])
    for _ in range(KEPT_FOR_STEPS - 1):
        learn(visits, made=[True, False])
    assert visits.known(ALL) == ORDER
    learn(visits, made=[True, False])
    assert visits.known(ALL) == (Visit(1),) == visits.last


def test_an_order_far_longer_than_what_a_microbatch_visits_is_forgotten(visits):
    learn(visits, (Visit(1), Visit(2)) * 2)
    learn(visits, paths=[(Visit(2), Visit(1))])  # contained
    assert visits.known(ALL) is not None
    learn(visits, paths=[(Visit(1),)])
    assert visits.known(ALL) is None


def test_visits_that_nobody_has_made_have_no_backward():
    assert without_backward(ORDER, [False, True]) == (Visit(1, False), Visit(2))
    assert without_backward(ORDER, [True, True]) == ORDER


def program(visits, order=ORDER, microbatches=2, *, reshard=True, offload=False):
    return visits.program(
        order, microbatches, ALL, reshard_after_forward=reshard, offload_boundaries=offload
    )


def test_a_program_is_compiled_once_for_each_mode(visits):
    first = program(visits)
    assert program(visits) is first
    assert program(visits, microbatches=1) != first
    frees = [i for i in first.forward if i.operation is Operation.FREE]
    resident = program(visits, reshard=False)
    assert frees and not [i for i in resident.forward if i.operation is Operation.FREE]
    offloaded = program(visits, (Visit(1), Visit(2), Visit(1)), offload=True)
    assert Operation.OFFLOAD in {i.operation for i in offloaded.forward}
    assert Operation.OFFLOAD not in {i.operation for i in first.forward}


def test_programs_do_not_pile_up(visits):
    for bits in range(300):
        order = tuple(Visit(1, bool(bits >> digit & 1)) for digit in range(9))
        program(visits, order, microbatches=1)
    assert len(visits._programs) < 200
