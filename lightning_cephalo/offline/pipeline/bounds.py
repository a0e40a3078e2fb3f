"""Seconds of stages and of whole pipelines that no plan beats, without a solver.

A rank's least seconds for n samples are those of its best mixture of microbatches, as far as its
memory holds them. The slowest rank of a stage takes at least the w-th smallest of these over all
ranks, for a wave of w samples: all ranks together place no more within less.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.offline.pipeline.stages import Stage, stage_bytes, stage_times
from lightning_cephalo.offline.pipeline.times import Gathering, StageTimes
from lightning_cephalo.plan import RankProfile

# Rounding must not reject a stage that fits to the byte.
_ROUNDING = 1e-9
GATHERINGS = (Gathering.HOLD, Gathering.REGATHER)


@dataclass(frozen=True)
class _Kind:
    """Equal ranks: how many, their least seconds by samples, and their memory."""

    profile: RankProfile
    count: int
    least_s: np.ndarray  # (3, batch): forward, backward, tail of 1, 2, ... samples
    least_peak_bytes: float


class LeastTimes:
    """Least seconds of groups of blocks, for waves of every size up to the batch."""

    def __init__(self, problem: PipelineProblem) -> None:
        self.problem = problem
        self._of_profile: dict[RankProfile, tuple[np.ndarray, float]] = {}
        self._kinds: dict[tuple[int, ...], list[_Kind]] = {}
        self._rates: dict[tuple[int, ...], np.ndarray] = {}

    def kinds(self, blocks: tuple[int, ...]) -> list[_Kind]:
        if blocks not in self._kinds:
            ranks = Counter(
                dataclasses.replace(rank, name="")
                for block in blocks
                for rank in self.problem.blocks[block].ranks
            )
            self._kinds[blocks] = [
                _Kind(profile, count, *self._profile(profile)) for profile, count in ranks.items()
            ]
        return self._kinds[blocks]

    def wave_s(self, blocks: tuple[int, ...]) -> np.ndarray:
        """Return least seconds by samples, (2, batch): a unit's forward and backward; the tail."""
        if blocks not in self._rates:
            batch = np.arange(1, self.problem.batch + 1)
            kinds = self.kinds(blocks)
            passes = [_placed(*_sorted(kinds, curve, len(batch)), batch) for curve in range(3)]
            self._rates[blocks] = np.array([passes[0] + passes[1], passes[2]])
        return self._rates[blocks]

    def _profile(self, profile: RankProfile) -> tuple[np.ndarray, float]:
        if profile not in self._of_profile:
            backward = profile.backward_s
            peaks = profile.compute_bytes
            if profile.kept is not None:
                backward = tuple(map(min, backward, profile.kept.backward_s))
                peaks = tuple(map(min, peaks, profile.kept.compute_bytes))
            curves = (profile.forward_s, backward, profile.tail_s)
            smallest = self.problem.whole.minimum_microbatch_size
            least = np.array([_knapsack(c, self.problem.batch, smallest) for c in curves])
            # A rank may take fewer samples than fit.
            least = np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]
            self._of_profile[profile] = (least, min(peaks, default=0.0))
        return self._of_profile[profile]


def _knapsack(curve: Sequence[float], batch: int, smallest: int) -> np.ndarray:
    """Return the least sum of a curve over all mixtures of sizes, for 1 to ``batch`` samples."""
    least = np.full(batch + 1, np.inf)
    least[0] = 0.0
    if len(curve) >= smallest:
        sizes = np.arange(smallest, len(curve) + 1)
        seconds = np.array(curve)[sizes - 1]
        for samples in range(smallest, batch + 1):
            reach = sizes[sizes <= samples]
            least[samples] = (least[samples - reach] + seconds[: len(reach)]).min()
    return least[1:]


def _sorted(
    kinds: Sequence[_Kind], curve: int, samples: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return seconds in increasing order, with the kind, samples and number of ranks of each."""
    seconds = np.concatenate([kind.least_s[curve, :samples] for kind in kinds])
    each = len(seconds) // len(kinds)
    of_kind = np.repeat(np.arange(len(kinds)), each)
    own = np.tile(np.arange(1, each + 1), len(kinds))
    counts = np.repeat([kind.count for kind in kinds], each)
    order = np.argsort(seconds, kind="stable")
    return seconds[order], of_kind[order], own[order], counts[order]


def _placed(
    seconds: np.ndarray, of_kind: np.ndarray, own: np.ndarray, counts: np.ndarray, wave: np.ndarray
) -> np.ndarray:
    """Return the least seconds within which the ranks place each number of samples."""
    placed = np.cumsum(np.where(np.isfinite(seconds), counts, 0))
    at = np.searchsorted(placed, wave)
    return np.where(at < len(seconds), seconds[np.minimum(at, len(seconds) - 1)], np.inf)


class StageTable:
    """Seconds of a stage by ways to gather and units, of shape (3, 2, units + 1).

    Bounds until a plan replaces them; infinite where nothing fits.
    """

    def __init__(self, least: LeastTimes, stage: Stage) -> None:
        self.stage = stage
        self._least = least
        problem = least.problem
        units = problem.units
        self._slowest_s = np.full((2, units + 1, 3), np.inf)
        self._times: dict[tuple[int, int], StageTimes] = {}
        self.planned: set[tuple[int, int]] = set()
        # sums of forward and backward, and by how much waves follow each other in each
        self.seconds = np.full((3, 2, units + 1), np.inf)
        self._bound()
        one = stage_times(problem, self.stage_of(0, 1), 0.0, 0.0, 0.0)
        self.ends_s = one.ready_s + one.reduce_s + one.after_s + one.update_s

    def stage_of(self, way: int, units: int) -> Stage:
        return dataclasses.replace(self.stage, units=units, gathering=GATHERINGS[way])

    def times(self, way: int, units: int) -> StageTimes:
        """Return the seconds of the stage: its plan's, or else the bound's."""
        if (way, units) not in self._times:
            stage = self.stage_of(way, units)
            slowest = self._slowest_s[way, units].tolist()
            self._times[way, units] = stage_times(self._least.problem, stage, *slowest)
        return self._times[way, units]

    def plan(self, way: int, units: int, times: StageTimes | None) -> None:
        """Replace a bound by the seconds of a plan; None: there is no plan."""
        self.planned.add((way, units))
        self.seconds[:, way, units] = np.inf
        if times is not None:
            self._times[way, units] = times
            self.seconds[:, way, units] = times.for_search

    def _bound(self) -> None:
        problem, stage = self._least.problem, self.stage
        kinds = self._least.kinds(stage.blocks)
        samples = stage.wave_samples
        units = np.arange(1, problem.units + 1)
        most = np.array([self._most_samples(kinds, way, units) for way in (0, 1)])
        for curve in range(3):
            seconds, of_kind, own, counts = _sorted(kinds, curve, samples)
            if curve == 2 and not stage.is_last:
                seconds = np.zeros_like(seconds)
            # (ways, units, entries): what each rank's memory holds
            held = np.isfinite(seconds) & (own <= most[:, of_kind].transpose(0, 2, 1))
            placed = np.cumsum(np.where(held, counts, 0), axis=2)
            enough = placed[:, :, -1] >= samples
            at = (placed < samples).sum(axis=2)
            found = seconds[np.minimum(at, len(seconds) - 1)]
            self._slowest_s[:, 1:, curve] = np.where(enough, found, np.inf)
        self._derive(units)

    def _most_samples(self, kinds: Sequence[_Kind], way: int, units: np.ndarray) -> np.ndarray:
        """Return the most samples of a wave that a rank of each kind can hold, by units."""
        one, two = (stage_bytes(self._least.problem, self.stage_of(way, count)) for count in (2, 3))
        # Bytes are linear in units, from two on where units are gathered again.
        buffers = _line(units, one.buffers, two.buffers)
        sample = _line(units, one.sample, two.sample)
        state = _line(units, one.state, two.state)
        capacity = sum(kind.count * kind.profile.capacity_bytes for kind in kinds)
        ranks = sum(kind.count for kind in kinds)
        needed = state + ranks * buffers + self.stage.wave_samples * sample
        needed += min(kind.least_peak_bytes for kind in kinds)
        fits = needed <= capacity * (1 + _ROUNDING)
        rows = []
        for kind in kinds:
            room = kind.profile.capacity_bytes * (1 + _ROUNDING) - buffers
            fits &= room >= 0
            with np.errstate(divide="ignore", invalid="ignore"):
                most = np.floor((room - kind.least_peak_bytes) / sample + _ROUNDING)
            rows.append(np.where(sample > 0, most, np.where(room >= 0, np.inf, -1)))
        return np.where(fits, np.array(rows), -1)

    def _derive(self, units: np.ndarray) -> None:
        """Fill the arrays from the slowest ranks' seconds."""
        for way, gathering in enumerate(GATHERINGS):
            # Nothing times infinity is no number: what does not fit is marked below.
            fits = np.isfinite(self._slowest_s[way, 1:]).all(axis=1)
            slowest_s = np.where(fits[:, None], self._slowest_s[way, 1:], 0.0)
            forward_s, backward_s, tail_s = slowest_s.T
            times = dataclasses.replace(
                self.times(way, 1),
                units=units,
                forward_s=forward_s,
                backward_s=backward_s,
                tail_s=tail_s,
            )
            if gathering is Gathering.REGATHER:
                fits &= units > 2
            self.seconds[:, way, 1:] = np.where(fits, times.for_search, np.inf)


def _line(units: np.ndarray, at_two: float, at_three: float) -> np.ndarray:
    return at_two + (units - 2) * (at_three - at_two)


def least_pipelines_s(unit_s: np.ndarray, tail_s: np.ndarray, units: int, waves: int) -> np.ndarray:
    """Return seconds that no cut of these pipelines beats, links and memory aside.

    Suppose that units could be cut anywhere, and that a wave takes ``r_s`` seconds for one unit in
    stage s. Within t seconds it passes ``t x sum of 1 / r_s`` units of the k fastest stages. So no
    cut of U units beats the least over k of ``(k + waves - 1) x U / (sum of 1 / r_s)``. The tail
    counts as the fewest units that any stage could run in the meantime.
    """
    there = np.isfinite(unit_s)
    in_units = np.divide(tail_s, unit_s, out=np.full_like(unit_s, np.inf), where=there)
    work = units + np.where(there.any(axis=1), in_units.min(axis=1), 0.0)
    speeds = np.cumsum(1 / np.sort(unit_s, axis=1), axis=1)
    used = np.arange(1, unit_s.shape[1] + 1)
    # A stage that is not there adds no speed, so counting it cannot make the bound smaller.
    with np.errstate(divide="ignore"):
        return ((used + waves - 1) * work[:, None] / speeds).min(axis=1)
