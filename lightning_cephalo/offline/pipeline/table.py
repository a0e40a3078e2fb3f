"""Seconds of stages that no plan beats, and the cuts of one order of stages that they allow.

A rank's least seconds for n samples are those of its best mixture of microbatches, whatever its
memory holds. The slowest rank of a stage takes at least the w-th smallest of these over all ranks,
for a wave of w samples: all ranks together place no more within less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.offline.pipeline.stages import (
    Stage,
    planned_times,
    stage_bytes,
    stage_times,
    with_shared_root,
)
from lightning_cephalo.offline.pipeline.times import Crossing, StageTimes, pipeline_s
from lightning_cephalo.plan import Plan, RankProfile

# Rounding must not reject a stage that fits to the byte.
_ROUNDING = 1e-9

Choice = tuple[int, int]
"""Whether a stage regathers, and its units."""


class LeastTimes:
    """The least seconds of the slowest rank of some blocks, whatever memory holds."""

    def __init__(self, problem: PipelineProblem) -> None:
        self._batch, self._smallest = problem.batch, problem.whole.minimum_microbatch_size
        profiles = {rank for block in problem.blocks for rank in block.ranks}
        least_s = {rank: self._least(rank) for rank in profiles}
        self._of_block = [
            np.concatenate([least_s[rank] for rank in block.ranks], axis=1)
            for block in problem.blocks
        ]

    def slowest_s(self, blocks: Sequence[int], samples: Any) -> np.ndarray:
        """Return the seconds of forward, backward and tail, (..., 3); infinite if not possible."""
        in_order = np.sort(np.concatenate([self._of_block[one] for one in blocks], axis=1))
        return in_order[:, np.asarray(samples) - 1].T

    def _least(self, profile: RankProfile) -> np.ndarray:
        """Return a rank's least seconds of each for 1, 2, ... samples, (3, batch)."""
        backward_s = profile.backward_s
        if profile.kept is not None:
            backward_s = tuple(map(min, backward_s, profile.kept.backward_s))
        curves_s = np.array([profile.forward_s, backward_s, profile.tail_s])
        least_s = np.full((3, self._batch + 1), np.inf)
        least_s[:, 0] = 0.0
        for samples in range(self._smallest, self._batch + 1):
            sizes = np.arange(self._smallest, min(samples, curves_s.shape[1]) + 1)
            mixed_s = least_s[:, samples - sizes] + curves_s[:, sizes - 1]
            least_s[:, samples] = mixed_s.min(axis=1, initial=np.inf)
        # A rank may take fewer samples than fit.
        return np.minimum.accumulate(least_s[:, :0:-1], axis=1)[:, ::-1]


class StageTable:
    """Seconds of a stage by choice: bounds until a plan replaces them.

    ``seconds`` of shape (2, units + 1, 3) has those of a lone wave, and by how much waves follow
    each other in forward and backward. They are infinite where nothing fits.
    """

    def __init__(self, problem: PipelineProblem, stage: Stage, slowest_s: Sequence[float]) -> None:
        self._problem, self._stage = problem, stage
        self.seconds = np.full((2, problem.units + 1, 3), np.inf)
        self.times: dict[Choice, StageTimes] = {}
        self.plans: dict[Choice, Plan | None] = {}
        one = stage_times(problem, stage, *slowest_s)
        self.ends_s = one.ready_s + one.reduce_s + one.after_s + one.update_s
        update_s = problem.update_s(stage.blocks, problem.unit.update)
        if not all(map(math.isfinite, slowest_s)):
            return
        # two units are always held whole: up to two there is nothing to gain from regathering
        choices = [(0, units) for units in range(1, problem.units + 1)]
        choices += [(1, units) for units in range(3, problem.units + 1)]
        for choice in filter(self._fits, choices):
            regathers, units = bool(choice[0]), choice[1]
            all_s = one.update_s + (units - 1) * update_s
            times = dataclasses.replace(one, units=units, regathers=regathers, update_s=all_s)
            self._set(choice, times)

    @property
    def blocks(self) -> tuple[int, ...]:
        return self._stage.blocks

    def stage(self, choice: Choice) -> Stage:
        return dataclasses.replace(self._stage, regathers=bool(choice[0]), units=choice[1])

    def replace(self, choice: Choice, plan: Plan | None) -> None:
        """Replace a bound by the seconds of a plan; None: there is no plan."""
        self.plans[choice] = plan
        self.seconds[choice] = np.inf
        if plan is not None:
            self._set(choice, planned_times(self._problem, self.stage(choice), plan))

    def _set(self, choice: Choice, times: StageTimes) -> None:
        self.times[choice] = times
        lone_s = times.lone_forward_s + times.lone_backward_s
        self.seconds[choice] = lone_s, times.wave_forward_s, times.wave_backward_s

    def _fits(self, choice: Choice) -> bool:
        """Return whether the ranks have room for what they hold in any plan."""
        held = stage_bytes(self._problem, self.stage(choice))
        ranks = [rank for block in self.blocks for rank in self._problem.blocks[block].ranks]
        capacities = [rank.capacity_bytes * (1 + _ROUNDING) for rank in ranks]
        shared = held.state + self._stage.wave_samples * held.sample
        return min(capacities) >= held.buffers and (
            math.fsum(capacities) >= len(ranks) * held.buffers + shared
        )


@dataclass(frozen=True)
class Order:
    """Stages in one order, with what crosses between them.

    A cut is a choice for each stage. Some choices are bounded by sums and maxima of ``seconds``,
    and for later stages by the least of each (dynamic programs over units).
    """

    problem: PipelineProblem
    tables: tuple[StageTable, ...]
    crossings: tuple[Crossing, ...]
    waves: int

    def refined(
        self, choices: tuple[Choice, ...], below_s: float
    ) -> Iterator[tuple[float, tuple[Choice, ...]]]:
        """Yield one choice more, with seconds below ``below_s`` that no cut with these beats.

        If that is a cut, these are its own seconds.
        """
        at, units = len(choices), self.problem.units - sum(units for _, units in choices)
        own, later = self.tables[at].seconds[:, : units + 1], self._later[at][units::-1]
        pairs = zip(self.tables, choices, strict=False)
        known = np.array([self._links, *(table.seconds[choice] for table, choice in pairs)])
        least_s = self.tables[0].ends_s + known[:, 0].sum() + (own + later)[..., 0]
        if self.waves > 1:
            passes_s = np.maximum(np.maximum(own, later), known.max(axis=0))[..., 1:]
            least_s = least_s + (self.waves - 1) * passes_s.sum(axis=-1)
        for regathers, count in np.argwhere(least_s < below_s).tolist():
            chosen = (*choices, (regathers, count))
            is_cut = len(chosen) == len(self.tables)
            yield self.step_s(chosen) if is_cut else float(least_s[regathers, count]), chosen

    def step_s(self, cut: tuple[Choice, ...]) -> float:
        """Return the seconds of a cut; infinite if a stage has no plan."""
        pairs = zip(self.tables, cut, strict=True)
        if any(math.isinf(table.seconds[choice][0]) for table, choice in pairs):
            return math.inf
        return pipeline_s(self.times(cut), self.crossings, self.waves)

    def times(self, cut: tuple[Choice, ...]) -> tuple[StageTimes, ...]:
        pairs = zip(self.tables, cut, strict=True)
        *others, last = (table.times[choice] for table, choice in pairs)
        one, other = self.tables[0].blocks, self.tables[-1].blocks
        return *others, with_shared_root(self.problem, one, other, last)

    @cached_property
    def _links(self) -> tuple[float, float, float]:
        """The seconds of links in the form of a stage's."""
        slowest_s = max(one.wave_s for one in self.crossings)
        return 2 * math.fsum(one.arrival_s for one in self.crossings), slowest_s, slowest_s

    @cached_property
    def _later(self) -> list[np.ndarray]:
        """The least ``seconds`` of all stages behind each one, by their units, (units + 1, 3)."""
        units = np.arange(self.problem.units + 1)
        left = units[:, None] - units
        found = [np.where(units == 0, 0.0, np.inf)[:, None].repeat(3, axis=1)]
        for table in reversed(self.tables[1:]):
            own = table.seconds.min(axis=0)
            later = np.where((left >= 0)[..., None], found[0][left], np.inf)
            joined = np.maximum(own, later)
            joined[..., 0] = own[:, 0] + later[..., 0]
            found.insert(0, joined.min(axis=1))
        return found
