"""What reads a clock is tried again, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from busy import TRIES, ClockError, by_the_clock, timed


def counted(check: Callable[[int], None]) -> tuple[Callable[[], None], list[int]]:
    tries: list[int] = []

    @timed
    def test() -> None:
        tries.append(len(tries))
        check(tries[-1])

    return test, tries


def test_a_clock_that_is_disturbed_is_read_again() -> None:
    def check(tried: int) -> None:
        with by_the_clock():
            assert tried == 2

    test, tries = counted(check)
    test()
    assert len(tries) == 3


def test_what_is_wrong_every_time_fails() -> None:
    def check(tried: int) -> None:
        with by_the_clock():
            assert tried < 0

    test, tries = counted(check)
    with pytest.raises(ClockError):
        test()
    assert len(tries) == TRIES


def test_what_no_clock_says_fails_at_once() -> None:
    def check(tried: int) -> None:
        assert tried < 0

    test, tries = counted(check)
    with pytest.raises(AssertionError):
        test()
    assert len(tries) == 1
