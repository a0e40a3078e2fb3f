"""Where microbatches and ranks are in the order of visits, and what they agree on."""

from __future__ import annotations

from itertools import permutations

import pytest

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.step import Divergence
from lightning_cephalo.execution.visits import FAILED, FINISHED, NO_DATA, Visits, where
from lightning_cephalo.plan.program import Operation, Visit

NAMES = ["root", "encoder", "decoder"]
ORDER = (Visit(1), Visit(2))
ALL = (True, True, True)


@pytest.fixture
def visits() -> Visits:
    return Visits(NAMES)


@pytest.mark.parametrize(
    ("failed", "parked", "expected"),
    [
        (True, [Visit(1)], (FAILED, 0.0)),
        (False, [], (NO_DATA, 0.0)),
        (False, [None, None], (FINISHED, 0.0)),
        (False, [Visit(2), Visit(2)], (2.0, 1.0)),
        (False, [Visit(2, False)], (2.0, 0.0)),
    ],
)
def test_where_a_rank_is_as_numbers(failed, parked, expected):
    assert where(failed=failed, parked=parked) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([(1.0, 1.0), (1.0, 1.0)], Visit(1)),
        ([(1.0, 0.0), (NO_DATA, 0.0)], Visit(1, False)),
        ([(FINISHED, 0.0), (NO_DATA, 0.0)], None),
        ([(NO_DATA, 0.0), (NO_DATA, 0.0)], None),
        ([(1.0, 1.0), (FAILED, 0.0)], None),
        ([(1.0, 1.0), (2.0, 1.0), (FAILED, 0.0)], None),
    ],
)
def test_ranks_agree_on_the_next_visit_whatever_their_order(visits, said, expected):
    for rows in permutations(said):
        assert visits.agree(rows) == expected


@pytest.mark.parametrize(
    "said",
    [
        [(1.0, 1.0), (2.0, 1.0)],
        [(1.0, 1.0), (FINISHED, 0.0)],
        [(NO_DATA, 0.0), (1.0, 1.0), (1.0, 0.0)],
    ],
)
def test_ranks_at_different_places_are_named(visits, said):
    with pytest.raises(UnitUseError, match="same units in the same order") as raised:
        visits.agree(said)
    message = str(raised.value)
    assert "rank 2" in message if len(said) == 3 else "rank 1" in message
    assert ("reentrant torch.utils.checkpoint" in message) == (len(said) == 3)


def test_microbatches_at_different_places_are_named(visits):
    visits.check_parked([])
    visits.check_parked([Visit(1), Visit(1)])
    with pytest.raises(UnitUseError, match=r"expected microbatch 0: unit 'encoder'.*'decoder'"):
        visits.check_parked([Visit(1), Visit(2)])
    with pytest.raises(UnitUseError, match="the end of the step"):
        visits.check_parked([Visit(1), None])


def test_an_order_is_known_by_which_units_want_gradients(visits):
    frozen = (True, False, True)
    visits.learn(ALL, ORDER)
    assert visits.known(ALL) == ORDER == visits.last and visits.known(frozen) is None
    visits.learn(frozen, ORDER[::-1])
    assert visits.known(ALL) == ORDER and visits.last == ORDER[::-1]
    visits.forget()
    assert visits.known(ALL) is None and visits.known(frozen) is None


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


class Control:
    """What all ranks say, as if they had exchanged it."""

    def __init__(self, *rows: list[float]) -> None:
        self.rows = rows

    def gather(self, row: list[float]) -> list[list[float]]:
        assert row == self.rows[0], "not what this rank says"
        return [list(row) for row in self.rows]


NEW = Visit(1)
LEFT = [1.0, 1.0, 1.0]
"""In front of visit 1 of the order, at unit 1."""
DIVERGENCE = Divergence(1, NEW)


def agreed(visits, *rows, own=DIVERGENCE, parked=(NEW,)):
    return visits.agree_on_divergence(Control(*rows), own, parked, ORDER)


def test_ranks_that_leave_the_order_at_one_place_trace_from_there(visits):
    assert agreed(visits, LEFT, LEFT) == 1
    assert agreed(visits, LEFT, [NO_DATA, NO_DATA, 0.0]) == 1
    # at the end, where the order would go on
    assert agreed(visits, [1.0, FINISHED, 0.0], own=Divergence(1, None), parked=(None,)) == 1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([2.0, FINISHED, 0.0], "rank 1: unit 'decoder'"),  # has kept to the order
        ([1.0, FINISHED, 0.0], "rank 1: the end of the step"),
        ([0.0, 2.0, 1.0], "rank 1: unit 'decoder'"),  # has left it before
    ],
)
def test_ranks_that_leave_the_order_at_different_places_raise(visits, other, words):
    with pytest.raises(UnitUseError, match=words):
        agreed(visits, LEFT, other)


def test_a_rank_that_keeps_to_the_order_says_so(visits):
    with pytest.raises(UnitUseError, match=r"expected unit 'decoder'.*rank 1: unit 'encoder'"):
        agreed(visits, [2.0, FINISHED, 0.0], LEFT, own=None, parked=(None,))
