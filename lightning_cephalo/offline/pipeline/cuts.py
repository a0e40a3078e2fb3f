"""How many units each stage has: the exact best cut of one order of stages.

A depth-first search over the stages. Sums and maxima of smaller problems (dynamic programs over
units) bound what is left, and ``closed_form.py`` prices the leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_cephalo.offline.pipeline.bounds import StageTable
from lightning_cephalo.offline.pipeline.closed_form import pipeline_s
from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.offline.pipeline.stages import with_shared_root
from lightning_cephalo.offline.pipeline.times import Crossing, StageTimes

# Rounding of sums in another order must not hide a cut that is as fast.
_SAME = 1e-12


@dataclass(frozen=True)
class Cut:
    """A way to gather and a number of units for each stage, with the seconds of a step."""

    step_s: float
    choices: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Order:
    """Stages in one order, with what crosses between them."""

    problem: PipelineProblem
    tables: tuple[StageTable, ...]
    crossings: tuple[Crossing, ...]
    waves: int

    def times(self, choices: Sequence[tuple[int, int]]) -> tuple[StageTimes, ...]:
        pairs = zip(self.tables, choices, strict=True)
        *times, last_s = (table.times(*choice) for table, choice in pairs)
        first, last = self.tables[0].stage, self.tables[-1].stage
        return *times, with_shared_root(self.problem, first, last, last_s)

    def cut(self, choices: tuple[tuple[int, int], ...]) -> Cut:
        """Return a cut with its seconds."""
        return Cut(pipeline_s(self.times(choices), self.crossings, self.waves), choices)

    def least_s(self) -> float:
        """Return seconds that no cut beats."""
        search = _Search(self, math.inf)
        sums, forward, backward = (float(rest[0][self.problem.units]) for rest in search.rest)
        return search.added_s + sums + search.repeated_s(forward, backward)

    def best(self, below_s: float = math.inf) -> Cut | None:
        """Return the fastest cut, or None if none is faster than ``below_s``."""
        search = _Search(self, below_s)
        search.descend(0, self.problem.units, (0.0, 0.0, 0.0), ())
        return search.found


class _Search:
    """A depth-first search; ``found`` is the best cut so far."""

    def __init__(self, order: Order, below_s: float) -> None:
        self.order, self.below_s = order, below_s
        self.found: Cut | None = None
        crossings = order.crossings
        links_s = 2 * math.fsum(one.wave_s + one.latency_s for one in crossings)
        self.added_s = links_s + order.tables[0].ends_s
        self._slowest_link_s = max((one.wave_s for one in crossings), default=0.0)
        units = np.arange(order.problem.units + 1)
        self.own = [table.seconds for table in order.tables]
        left = units[:, None] - units[None, :]
        none_left = np.where(units == 0, 0.0, np.inf)
        self.rest: list[list[np.ndarray]] = [[none_left], [none_left], [none_left]]
        for own in reversed(self.own):
            for rest, array, join in zip(
                self.rest, own, (np.add, np.maximum, np.maximum), strict=True
            ):
                later = np.where(left >= 0, rest[0][left], np.inf)
                rest.insert(0, join(array.min(axis=0), later).min(axis=1))

    def repeated_s(self, forward_s: Any, backward_s: Any) -> Any:
        """Return what all waves but the first add; numbers or arrays of one shape."""
        if self.order.waves == 1:
            return 0.0
        link_s = self._slowest_link_s
        slowest_s = np.maximum(forward_s, link_s) + np.maximum(backward_s, link_s)
        return (self.order.waves - 1) * slowest_s

    def descend(
        self,
        index: int,
        units: int,
        known: tuple[float, float, float],
        choices: tuple[tuple[int, int], ...],
    ) -> None:
        """Choose the units of a stage and of all later ones."""
        if index == len(self.own):
            self._price(choices)
            return
        sums, forward, backward = (rest[index + 1][units::-1] for rest in self.rest)
        own = self.own[index][:, :, : units + 1]
        least = self.added_s + known[0] + own[0] + sums
        least = least + self.repeated_s(
            np.maximum(np.maximum(own[1], forward), known[1]),
            np.maximum(np.maximum(own[2], backward), known[2]),
        )
        ways, counts = np.nonzero(least < self.below_s)
        for at in np.argsort(least[ways, counts], kind="stable").tolist():
            way, count = int(ways[at]), int(counts[at])
            if least[way, count] >= self.below_s:
                return
            sum_s, forward_s, backward_s = own[:, way, count].tolist()
            so_far = known[0] + sum_s, max(known[1], forward_s), max(known[2], backward_s)
            self.descend(index + 1, units - count, so_far, (*choices, (way, count)))

    def _price(self, choices: tuple[tuple[int, int], ...]) -> None:
        cut = self.order.cut(choices)
        if cut.step_s < self.below_s * (1 - _SAME):
            self.found, self.below_s = cut, cut.step_s
