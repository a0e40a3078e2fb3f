"""Finds one order of visits for microbatches that visit different units.

It contains the orders of all; a microbatch waits at the visits that it does not make::

    microbatch 0   1 2   4
    microbatch 1   1   3 4
    one order      1 2 3 4

This file is pure: every rank computes the same from the same messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_cephalo.plan.program import Visit

# An order with many more visits than each microbatch makes costs more than it saves.
LONGEST = 3


class Choice:
    """Chooses the visit to make next, where microbatches wait at different ones.

    The earliest one in the known order comes first. A visit that the order lacks comes before the
    first one of a later unit. Each chosen visit brings a microbatch ahead, so this always ends.
    """

    def __init__(self, known: Sequence[Visit]) -> None:
        self._known = tuple(known)
        self._passed = 0

    def first(self, wanted: Iterable[Visit | None]) -> Visit | None:
        """Return the visit that comes first; None if none is wanted."""
        return min((visit for visit in wanted if visit is not None), key=self._place, default=None)

    def next(self, wanted: Iterable[Visit | None]) -> Visit | None:
        """Like :meth:`first`; that visit is then made."""
        visit = self.first(wanted)
        if visit is not None and visit in self._known[self._passed :]:
            self._passed = self._known.index(visit, self._passed) + 1
        return visit

    def _place(self, visit: Visit) -> tuple[int, bool, int, bool, int]:
        """Return the key by which visits are sorted; equal on all ranks."""
        key = visit.unit, visit.differentiable, visit.meeting
        left = self._known[self._passed :]
        if visit in left:
            return self._passed + left.index(visit), True, *key
        later = (at for at, known in enumerate(left) if known.unit > visit.unit)
        return self._passed + next(later, len(left)), False, *key


def merged(orders: Iterable[Sequence[Visit]]) -> tuple[Visit, ...]:
    """Return one order that contains every given one, each with gaps: a common supersequence.

    Of two visits that may come in either order, the one of the earlier unit comes first.
    """
    result: tuple[Visit, ...] = ()
    for order in orders:
        if not is_within(order, result):
            result = _supersequence(result, order)
    return result


def is_within(order: Sequence[Visit], whole: Sequence[Visit]) -> bool:
    rest = iter(whole)
    return all(visit in rest for visit in order)


def is_too_long(order: Sequence[Visit], paths: Iterable[Sequence[Visit]]) -> bool:
    """Whether an order has so many visits that a step should find its own order instead."""
    return len(order) > LONGEST * max((len(path) for path in paths), default=0)


def _supersequence(first: Sequence[Visit], second: Sequence[Visit]) -> tuple[Visit, ...]:
    # common[i][j]: length of the longest common subsequence of first[i:] and second[j:]
    common = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i in reversed(range(len(first))):
        for j in reversed(range(len(second))):
            if first[i] == second[j]:
                common[i][j] = common[i + 1][j + 1] + 1
            else:
                common[i][j] = max(common[i + 1][j], common[i][j + 1])
    found: list[Visit] = []
    i = j = 0
    while i < len(first) and j < len(second):
        is_common = first[i] == second[j]
        after_first = common[i + 1][j], -first[i].unit
        takes_first = is_common or after_first >= (common[i][j + 1], -second[j].unit)
        found.append(first[i] if takes_first else second[j])
        i, j = i + takes_first, j + (is_common or not takes_first)
    return (*found, *first[i:], *second[j:])
