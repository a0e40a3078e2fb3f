"""Dealing is exact, proportional, and the same on every rank."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_cephalo.data.shares import deal, split_sizes

shares_of_ranks = st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any)


@given(st.integers(0, 500), shares_of_ranks)
def test_deal_gives_every_sample_once_within_one_of_the_exact_share(total, shares):
    dealt = deal(total, shares)

    assert sum(dealt) == total
    exact = [total * share / sum(shares) for share in shares]
    for count, share, own in zip(dealt, shares, exact, strict=True):
        assert count - own < 1
        # what a rank lacks, ranks have that would else have none
        assert own - count < 1 + sum(0 < each < 1 for each in exact)
        if share == 0:
            assert count == 0


@given(st.integers(0, 500), shares_of_ranks)
def test_every_rank_with_a_share_has_a_sample_if_there_are_enough(total, shares):
    ranks = sum(share > 0 for share in shares)
    assert sum(count > 0 for count in deal(total, shares)) == ranks or total < ranks


@given(shares_of_ranks)
def test_deal_of_the_planned_total_is_the_plan(shares):
    assert deal(sum(shares), shares) == tuple(shares)


def test_deal_breaks_ties_by_the_larger_share_then_the_lower_rank():
    assert deal(1, (1, 1)) == (1, 0)
    assert deal(10, (6, 2, 0)) == (8, 2, 0)
    assert deal(2, (1, 3)) == (1, 1)
    assert deal(3, (9, 1, 1)) == (1, 1, 1)
    assert deal(2, (9, 1, 1)) == (2, 0, 0)
    assert deal(3, (2, 2, 2, 2)) == (1, 1, 1, 0)


@given(st.integers(0, 200), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_split_sizes_sum_to_the_count_and_never_exceed_the_planned_memory(count, sizes):
    split = split_sizes(count, sizes)

    assert sum(split) == count
    assert max(split, default=0) <= max(sizes)
    assert 0 not in split
    if count == sum(sizes):
        assert split == tuple(sizes)


def test_split_sizes_of_fewer_samples_keeps_the_order_of_the_plan():
    assert split_sizes(7, (4, 4, 3)) == (4, 3)
    assert split_sizes(4, (4, 4, 3)) == (4,)
    assert split_sizes(0, (4, 4, 3)) == ()


def test_split_sizes_of_more_samples_goes_on_with_the_largest_size():
    assert split_sizes(17, (2, 4, 3)) == (2, 4, 3, 4, 4)
