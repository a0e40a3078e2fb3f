"""For tests that read a clock on a machine that may be doing something else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

TRIES = 6


def timed(test: Callable[..., None]) -> Callable[..., None]:
    """Try a test again that fails: what is wrong fails every time, a disturbance passes."""

    @functools.wraps(test)
    def tried(*args: Any, **options: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                return test(*args, **options)
            except AssertionError:
                continue
        return test(*args, **options)

    return tried
