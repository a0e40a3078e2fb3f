"""A case that fails in a start that it shares is named, and fails no other case."""

from __future__ import annotations

import traceback

import pytest
from launch import RankFailure
from shared_start import SharedStart


def _start(world_size, function, *arguments):
    try:
        return [function(0, *arguments)] * world_size
    except Exception as error:
        raise RankFailure("".join(traceback.format_exception(error))) from None


def _fine(rank, name):
    return rank, name


def _wrong(rank):
    raise ValueError("planted")


def test_a_case_that_fails_is_named_and_others_are_run_by_themselves():
    cases = SharedStart(_start, 1)
    cases.each(("a",), ("b",))(_fine)
    assert cases.of(_fine, "b") == [(0, "b")]
    failing = SharedStart(_start, 1)
    failing.each(("a",))(_fine)
    failing(_wrong)
    failing.each(("b",))(_fine)
    for name in ("a", "b"):
        assert failing.of(_fine, name) == [(0, name)]
    with pytest.raises(RankFailure, match=r"planted(.|\n)*In the case _wrong\(\):"):
        failing.of(_wrong)


def test_ranks_that_die_in_no_case_fail_all_of_them():
    def dies(world_size, function, *arguments):
        raise RankFailure("rank 0:\ndied without a result")

    cases = SharedStart(dies, 1)
    cases(_wrong)
    with pytest.raises(RankFailure, match="died without"):
        cases.of(_wrong)
