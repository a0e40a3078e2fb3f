"""For tests that read a clock on a machine that may be doing something else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

TRIES = 6


class ClockError(AssertionError):
    """What a clock says is wrong; nothing else is ever tried again."""


@contextmanager
def by_the_clock() -> Iterator[None]:
    """Around assertions that other work on the machine can make fail."""
    try:
        yield
    except AssertionError as error:
        raise ClockError(str(error)) from error


def timed(test: Callable[..., None]) -> Callable[..., None]:
    """Try a test again that fails ``by_the_clock``: what is wrong fails every time."""

    @functools.wraps(test)
    def tried(*args: Any, **options: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                return test(*args, **options)
            except ClockError:
                continue
        return test(*args, **options)

    return tried
