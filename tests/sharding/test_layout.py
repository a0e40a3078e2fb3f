"""Cuts of flats: on row edges, in the wanted proportions, and nothing for a share of 0."""

from __future__ import annotations

import bisect
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cephalo.sharding.layout import Divider, FlatLayout, Slot, overlaps

# -- examples ---------------------------------------------------------------------------------


def test_the_worked_example_of_the_docstring():
    layout = Divider([0.75, 0.25]).divide([(4, 3), (5,)])
    assert layout.slots == (Slot((4, 3), 0), Slot((5,), 12))
    assert layout.cuts == (0, 13, 17)
    assert layout.sizes == (13, 4)
    assert layout.rows(0) == ((0, 4), (4, 4))
    assert layout.rows(1) == ((0, 1), (1, 5))


def test_a_cut_moves_to_the_nearest_row_edge():
    assert Divider([0.4, 0.6]).divide([(2, 100)]).cuts == (0, 100, 200)
    assert Divider([0.2, 0.8]).divide([(2, 100)]).cuts == (0, 0, 200)


def test_one_rank_holds_everything():
    layout = Divider([1.0]).divide([(4, 3), (5,)])
    assert layout.sizes == (17,)
    assert layout.rows(0) == ((0, 4),)


@pytest.mark.parametrize(
    "fractions", [(0.0, 1.0), (1.0, 0.0), (0.5, 0.0, 0.5), (0.0, 0.0, 1.0), (0.3, 0.7, 0.0, 0.0)]
)
def test_a_share_of_zero_gets_nothing(fractions):
    divider = Divider(fractions)
    for shapes in [[(7, 3)], [(1,), (11, 2)], [(5,)]]:
        for fraction, size in zip(fractions, divider.divide(shapes).sizes, strict=True):
            assert fraction > 0 or size == 0


def test_the_last_rank_without_a_share_gets_nothing_though_the_sum_is_rounded():
    divider = Divider([0.333333, 0.333333, 0.333333, 0.0])
    for _ in range(100):
        assert divider.divide([(100_000,)]).sizes[-1] == 0


def test_the_rounding_error_is_carried_to_the_next_flat():
    divider = Divider([0.5, 0.5])
    firsts = [divider.divide([(1, 10)]).sizes[0] for _ in range(6)]
    assert sum(firsts) == 30
    assert set(firsts) == {0, 10}


def test_a_flat_without_parameters_and_one_without_elements_can_be_cut():
    divider = Divider([0.5, 0.5])
    assert divider.divide([]).sizes == (0, 0)
    layout = divider.divide([(0, 3), (4, 0)])
    assert layout.sizes == (0, 0)
    assert layout.rows(1)[-1][1] == 4


# -- properties -------------------------------------------------------------------------------

shapes = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)
empty_shapes = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)
weights = st.lists(st.one_of(st.just(0.0), st.floats(0.001, 10.0)), min_size=1, max_size=6).filter(
    lambda values: sum(values) > 0
)
fractions = weights.map(lambda values: [value / math.fsum(values) for value in values])


def check_layout(layout: FlatLayout, wanted: list[tuple[int, ...]]) -> None:
    assert layout.cuts[0] == 0
    assert layout.cuts[-1] == sum(math.prod(shape) for shape in wanted)
    assert list(layout.cuts) == sorted(layout.cuts)
    assert sum(layout.sizes) == layout.cuts[-1]
    for index, shape in enumerate(wanted):
        rows = layout.rows(index)
        # every row is somewhere, once, in rank order
        assert rows[0][0] == 0
        assert rows[-1][1] == shape[0]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(rows))
        assert all(first <= end for first, end in rows)
    for rank, size in enumerate(layout.sizes):
        held = [layout.rows(index)[rank] for index in range(len(wanted))]
        assert size == sum(
            (end - first) * math.prod(shape[1:])
            for (first, end), shape in zip(held, wanted, strict=True)
        )


@given(fractions, st.lists(st.one_of(shapes, empty_shapes), min_size=1, max_size=5))
def test_ranks_hold_whole_rows_each_once(shares, flats):
    divider = Divider(shares)
    for wanted in flats:
        check_layout(divider.divide(wanted), wanted)


@given(fractions, st.lists(shapes, min_size=1, max_size=12))
def test_no_rank_with_a_share_of_zero_ever_holds_anything(shares, flats):
    divider = Divider(shares)
    for wanted in flats:
        for share, size in zip(shares, divider.divide(wanted).sizes, strict=True):
            assert share > 0 or size == 0


@given(fractions, st.lists(shapes, min_size=1, max_size=12))
def test_over_all_flats_every_rank_holds_its_share_within_one_row(shares, flats):
    divider = Divider(shares)
    layouts = [divider.divide(wanted) for wanted in flats]
    row = max(math.prod(shape[1:]) for wanted in flats for shape in wanted)
    total = sum(layout.cuts[-1] for layout in layouts)
    for rank, share in enumerate(shares):
        held = sum(layout.sizes[rank] for layout in layouts)
        assert abs(held - share * total) <= row + 1e-6


# -- other cuts -------------------------------------------------------------------------------


def test_the_worked_example_of_overlaps():
    assert overlaps([0, 6, 10], [0, 4, 10]) == ((4, 2), (0, 4))
    assert overlaps([0, 0, 10], [0, 10, 10]) == ((0, 0), (10, 0))
    with pytest.raises(ValueError, match="cuts of one flat"):
        overlaps([0, 5], [0, 6])


def _shares(count):
    positive = st.lists(st.integers(0, 5), min_size=count, max_size=count).filter(any)
    return positive.map(lambda parts: [part / sum(parts) for part in parts])


_SHAPES = st.lists(st.sampled_from([(4, 3), (5,), (1, 7), (2, 2, 2), (3, 0)]), min_size=1)


@given(st.integers(1, 5).flatmap(lambda n: st.tuples(_shares(n), _shares(n))), _SHAPES, st.data())
def test_what_ranks_send_are_the_elements_that_change_their_rank(shares, shapes, data):
    old, new = (Divider(each).divide(shapes) for each in shares)
    chosen = data.draw(st.lists(st.sampled_from(range(len(shapes))), unique=True))
    offsets = [range(old.slots[index].offset, old.slots[index].end) for index in chosen]
    elements = list(itertools.chain.from_iterable(offsets))

    def holders(layout):
        return [bisect.bisect_right(layout.cuts, element) - 1 for element in elements]

    found = overlaps(old.cuts_of(chosen), new.cuts_of(chosen))
    # cuts of parameters alone: the elements in the order of the chosen ones
    if chosen == sorted(chosen):
        pairs = list(zip(holders(old), holders(new), strict=True))
        for source, row in enumerate(found):
            for target, count in enumerate(row):
                assert count == pairs.count((source, target))
    for layout, sums in (
        (old, [sum(row) for row in found]),
        (new, [sum(column) for column in zip(*found, strict=True)]),
    ):
        held = [
            sum(
                (end - first) * layout.slots[index].row_numel
                for index in chosen
                for first, end in [layout.rows(index)[rank]]
            )
            for rank in range(len(layout.sizes))
        ]
        assert sums == held
