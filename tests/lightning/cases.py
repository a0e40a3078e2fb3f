"""Many cases in one start of ranks: forking two of them takes as long as two fits in them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any

from common import in_ranks
from plans import PLANS


def on_one_device(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(None, *args)`` of this very process: one device needs no fork."""
    return function(None, *args)


class Cases:
    """What each case gives on every rank of its plan.

    All cases of one number of ranks run in one start of ranks, when the first is asked for, and
    under the warning filters of the test that asks. One that ends or stops its process, or has
    filters of its own, needs a start of its own.

    Example:
        >>> fits = Cases({"by norm": ("3:1", fit, {"gradient_clip_val": 0.3})})
        >>> first, second = fits["by norm"]  # fit("3:1", {"gradient_clip_val": 0.3}) of two ranks

    Args:
        cases: Of each case, the name of its plan, a function, and what it is given after the plan.
    """

    def __init__(self, cases: Mapping[Any, tuple[Any, ...]]) -> None:
        self.cases = cases
        self._of_ranks = cache(self._start)

    def __getitem__(self, case: Hashable) -> list[Any]:
        """What each rank returned; an AssertionError with tracebacks where some rank raised."""
        own = [of_rank[case] for of_rank in self._of_ranks(self._world_size(case))]
        raised = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(own) if not ok]
        assert not raised, "\n".join(raised)
        return [value for _, value in own]

    def _world_size(self, case: Hashable) -> int:
        return len(PLANS[self.cases[case][0]].ranks)

    def _start(self, world_size: int) -> list[dict[Any, tuple[bool, Any]]]:
        return in_ranks(world_size, self._run_each, world_size)

    def _run_each(self, world_size: int) -> dict[Any, tuple[bool, Any]]:
        found = {}
        for case, (plan, function, *args) in self.cases.items():
            if self._world_size(case) != world_size:
                continue
            try:
                found[case] = True, function(plan, *args)
            except Exception:
                # shown at once too: ranks that hang in a later case bring no outcome
                traceback.print_exc()
                found[case] = False, traceback.format_exc()
        return found
