"""Many cases in one start of ranks: to start them takes longer than most of what is tested."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from launch import SOON_S, RankFailure

Case = tuple[Callable[..., Any], tuple[Any, ...]]


class SharedStart:
    """Cases that ranks run one after the other; the test of each looks at what came of its own.

    A case that fails ends the ranks. The others then have a start of their own, each. A case leaves
    its process as it was, and knows that others may have run before.

    Example::

        IN_THREE = SharedStart(run_ranks, 3)

        @IN_THREE
        def _one(rank): ...

        @IN_THREE.each((True,), (False,))
        def _two(rank, recompute): ...

        def test_one():
            IN_THREE.of(_one)

    Args:
        start: ``run_ranks`` or ``in_ranks``.
        world_size: How many ranks.
    """

    def __init__(self, start: Callable[..., list[Any]], world_size: int) -> None:
        self._start, self._world_size = start, world_size
        self._meeting = multiprocessing.get_context("fork").Barrier(world_size)
        self._cases: list[Case] = []
        self._found: list[list[Any]] | RankFailure | None = None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a case of what each rank calls."""
        return self.each(())(function)

    def each(self, *arguments: tuple[Any, ...]) -> Callable[..., Callable[..., Any]]:
        """Make several cases of it, with these arguments behind those that ``start`` gives."""

        def made(function: Callable[..., Any]) -> Callable[..., Any]:
            self._cases += [(function, own) for own in arguments]
            return function

        return made

    def of(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a case gave on every rank; raises if some rank has failed in it."""
        case = function, arguments
        place = self._cases.index(case)
        if self._found is None:
            try:
                self._found = self._start(self._world_size, self._all)
            except RankFailure as failure:
                self._found = failure
        if not isinstance(self._found, RankFailure):
            return [of_rank[place] for of_rank in self._found]
        said = str(self._found)
        if _told(case) in said or "In the case " not in said:  # a rank that dies names no case
            raise self._found
        return self._start(self._world_size, function, *arguments)

    def _all(self, *rank: int) -> list[Any]:
        found = []
        for function, arguments in self._cases:
            # else a rank may still end what another one wants to begin anew
            self._meeting.wait(SOON_S)
            try:
                found.append(function(*rank, *arguments))
            except BaseException as error:
                self._meeting.abort()
                raise AssertionError(_told((function, arguments))) from error
        return found


def _told(case: Case) -> str:
    function, arguments = case
    return f"In the case {function.__name__}{arguments!r}:"
