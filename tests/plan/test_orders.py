"""One order of visits for microbatches that visit different units."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cephalo.plan.orders import Choice, is_too_long, is_within, merged
from lightning_cephalo.plan.program import Visit


def order(text: str) -> tuple[Visit, ...]:
    """ "1 2" is units 1 and 2; "-2" is unit 2 without gradient."""
    return tuple(Visit(abs(int(word)), int(word) > 0) for word in text.split())


def found(known: str, *paths: str) -> str:
    """Return the order in which microbatches with these paths are led through units."""
    choice, rest = Choice(order(known)), [list(order(path)) for path in paths]
    made = []
    while True:
        wanted = [path[0] if path else None for path in rest]
        answers = {Choice.next(copied(choice), each) for each in permutations(wanted)}
        assert len(answers) == 1, "depends on the order of ranks"
        visit = choice.next(wanted)
        assert visit in answers
        if visit is None:
            return " ".join(str(v.unit if v.differentiable else -v.unit) for v in made)
        made.append(visit)
        for path in rest:
            if path and path[0] == visit:
                path.pop(0)


def copied(choice: Choice) -> Choice:
    copy = Choice(choice._known)
    copy._passed = choice._passed
    return copy


@pytest.mark.parametrize(
    ("known", "paths", "expected"),
    [
        ("", ["1 2 3", "1 2 3"], "1 2 3"),
        ("", ["1 2 4", "1 3 4"], "1 2 3 4"),  # as in the module's docstring
        ("", ["", "1 3", "2"], "1 2 3"),
        ("3 4 1 2", ["3 1 2", "4 2", "3 4 1"], "3 4 1 2"),  # a decoder is defined first
        ("", ["3 1 2", "4 2"], "3 1 2 4 2"),
        ("1 2 4", ["1 3 4", "1 4"], "1 3 4"),  # 3 is not known, and has its place before 4
        ("1 2 1 2", ["1 2 1 2", "2 2", "1"], "1 2 1 2"),
        ("", ["1 1 2", "-1 2"], "-1 1 1 2"),
        ("1 2", ["2 1", "1 2"], "1 2 1"),
    ],
)
def test_the_visit_that_comes_first_is_chosen(known, paths, expected):
    assert found(known, *paths) == expected


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([], ""),
        (["1 2 3"], "1 2 3"),
        (["1 2 4", "1 3 4"], "1 2 3 4"),
        (["1 2 4 5", "3 4", "1 2 3 4 5"], "1 2 3 4 5"),
        (["3 4 1", "4 2"], "3 4 1 2"),
        (["1", "-1"], "1 -1"),
    ],
)
def test_orders_are_merged(orders, expected):
    assert merged(map(order, orders)) == order(expected)


paths = st.lists(
    st.lists(st.builds(Visit, st.integers(1, 5), st.booleans()), max_size=7), max_size=4
)


@settings(deadline=None)
@given(paths)
def test_a_merged_order_contains_every_one_and_is_no_longer_than_all(orders):
    whole = merged(orders)
    assert all(is_within(each, whole) for each in orders)
    assert max(map(len, orders), default=0) <= len(whole) <= sum(map(len, orders))
    assert merged([whole, *orders]) == whole


@settings(deadline=None)
@given(paths, st.lists(st.builds(Visit, st.integers(1, 5)), max_size=6))
def test_every_microbatch_reaches_its_end(orders, known):
    choice, rest, steps = Choice(known), [list(each) for each in orders], 0
    while (visit := choice.next(path[0] if path else None for path in rest)) is not None:
        assert any(path and path[0] == visit for path in rest)
        rest = [path[1:] if path and path[0] == visit else path for path in rest]
        steps += 1
    assert not any(rest) and steps <= sum(map(len, orders))


def test_an_order_is_too_long_if_it_is_several_times_the_longest_path():
    assert not is_too_long(order("1 2 3"), [order("1"), ()])
    assert is_too_long(order("1 2 3 1"), [order("1"), ()])
    assert not is_too_long((), [()])
