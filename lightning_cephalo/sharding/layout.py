"""Computes the cuts of a flat: pure arithmetic, no tensors and no communication.

A *flat* is several parameters laid end to end. ``W`` ranks hold it in ``W`` consecutive slices
whose sizes follow the plan's state fractions. Every cut is moved to the nearest *row* edge of the
parameter that it falls into (a row is ``parameter[i]``). Each rank's part of a parameter is thus a
whole number of rows, which an optimizer sees as a tensor sharded along dimension 0.

Example: two parameters, ``(4, 3)`` and ``(5,)``, sharded 3:1 between two ranks. The flat has 17
elements, the exact cut is 12.75, and the nearest row edge is 13::

    elements   0  1  2 | 3  4  5 | 6  7  8 | 9 10 11 | 12 | 13 | 14 | 15 | 16
    rows       0         1         2         3          0    1    2    3    4
    rank       0         0         0         0          0  # 1    1    1    1

The rounding error of a cut is carried to the next flat. Over a whole model the shares therefore
match the plan to about one row (docs/design/flats.md).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Slot:
    """One parameter inside a flat, and never a 0-d one, which has no rows."""

    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Number of elements in one row, ``parameter[i]``."""
        return math.prod(self.shape[1:])

    @property
    def end(self) -> int:
        """One past its last element in the flat."""
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """The slots of one flat and the cuts between ranks."""

    slots: tuple[Slot, ...]
    cuts: tuple[int, ...]
    cuts_of_groups: tuple[tuple[int, ...], ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements that each rank holds."""
        return tuple(b - a for a, b in zip(self.cuts, self.cuts[1:], strict=False))

    def rows(self, slot_index: int) -> tuple[tuple[int, int], ...]:
        """Return each rank's rows of one parameter as ``(first, one past the last)``."""
        slot = self.slots[slot_index]
        edges = [min(max(cut, slot.offset), slot.end) - slot.offset for cut in self.cuts]
        if slot.row_numel == 0:
            row_edges = [0] * len(edges)
            row_edges[-1] = slot.shape[0]
        else:
            row_edges = [edge // slot.row_numel for edge in edges]
        return tuple(itertools.pairwise(row_edges))

    def cuts_of(self, slot_indices: Sequence[int]) -> tuple[int, ...]:
        """Return the cuts of some parameters alone, laid end to end in this order."""
        chosen = [self.slots[index] for index in slot_indices]
        return tuple(
            sum(min(max(cut, slot.offset), slot.end) - slot.offset for slot in chosen)
            for cut in self.cuts
        )


def overlaps(old_cuts: Sequence[int], new_cuts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return how many elements each rank sends to each rank when the cuts of a flat change.

    ::

        overlaps([0, 6, 10], [0, 4, 10])     # ((4, 2), (0, 4)): rank 0 keeps 4 and sends 2
    """
    if len(old_cuts) != len(new_cuts) or old_cuts[-1] != new_cuts[-1]:
        raise ValueError(
            f"Expects cuts of one flat for equally many ranks, but got {tuple(old_cuts)} and"
            f" {tuple(new_cuts)}."
        )
    return tuple(
        tuple(
            max(0, min(end, new_end) - max(start, new_start))
            for new_start, new_end in itertools.pairwise(new_cuts)
        )
        for start, end in itertools.pairwise(old_cuts)
    )


class Divider:
    """Cuts flats one after another and carries each cut's rounding error to the next.

    Args:
        fractions: Each rank's share, from 0 to 1; the sum is 1.
    """

    def __init__(self, fractions: Sequence[float]) -> None:
        self._cumulative = _cumulative(fractions)
        self._errors = [0.0] * len(self._cumulative)

    def divide(self, shapes: Sequence[tuple[int, ...]]) -> FlatLayout:
        """Lay parameters of these shapes end to end and cut them."""
        slots: list[Slot] = []
        offset = 0
        for shape in shapes:
            slots.append(Slot(tuple(shape), offset))
            offset = slots[-1].end
        numel = offset
        cuts = [0]
        for index, share in enumerate(self._cumulative):
            wanted = share * numel + self._errors[index]
            cut = numel if share >= 1.0 else _nearest_row_edge(slots, wanted, numel)
            cut = max(cut, cuts[-1])
            self._errors[index] = 0.0 if share >= 1.0 else wanted - cut
            cuts.append(cut)
        return FlatLayout(tuple(slots), tuple(cuts))


class GroupDivider(Divider):
    """Cuts flats that each of several groups of ranks holds whole, by the group's own shares.

    Args:
        own: Number of the group whose cuts count here.
    """

    def __init__(self, fractions_of_groups: Sequence[Sequence[float]], own: int) -> None:
        super().__init__(fractions_of_groups[own])
        self._own = own
        self._dividers = [Divider(fractions) for fractions in fractions_of_groups]

    def divide(self, shapes: Sequence[tuple[int, ...]]) -> FlatLayout:
        """See :meth:`Divider.divide`."""
        layouts = [each.divide(shapes) for each in self._dividers]
        return replace(layouts[self._own], cuts_of_groups=tuple(each.cuts for each in layouts))


def _cumulative(fractions: Sequence[float]) -> list[float]:
    """Return running sums, exactly 1 from the last rank with a share on: later ranks hold none."""
    last = max(index for index, fraction in enumerate(fractions) if fraction > 0.0)
    sums = list(itertools.accumulate(fractions))
    return [1.0 if index >= last else min(total, 1.0) for index, total in enumerate(sums)]


def _nearest_row_edge(slots: Sequence[Slot], wanted: float, numel: int) -> int:
    if wanted <= 0 or numel == 0:
        return 0
    if wanted >= numel:
        return numel
    slot = slots[bisect.bisect_right([slot.offset for slot in slots], int(wanted)) - 1]
    if slot.row_numel == 0:
        return slot.offset
    return slot.offset + round((wanted - slot.offset) / slot.row_numel) * slot.row_numel
