"""Turns the ranks' records into results: ideal, measured, and the parts of the difference. Pure.

[Note: where a step goes]
In the ideal step every rank is busy all the time. It takes the global batch over the sum of the
ranks' own speeds. The rank with the most work for its speed is busy for longer than that, unless
the work is in proportion to speed. This difference is ``waiting_s``: the others wait for that rank.
``communication_s`` is its idle time in collectives. ``overhead_s`` is the rest: the rank's host had
not given its device any work. The four add up to the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_cephalo.plan import Plan

from .cases import CEPHALO, DDP, Case

_AS_GOOD_AS = 0.99


@dataclass(frozen=True)
class StepTimes:
    """One step on one rank, in seconds.

    Attributes:
        step_s: From the common start until the rank's device has finished the step.
        busy_s: The device's own work in that time.
        blocked_s: The device's idle time while its host was blocked, which means in a collective.
    """

    step_s: float
    busy_s: float
    blocked_s: float


@dataclass(frozen=True)
class RankRecord:
    """The measurements of one case on one rank.

    Attributes:
        samples: This rank's samples in a step of each contender.
        times: Each contender's steps, one for each round.
        reasons: Why other contenders cannot run.
        plan: cephalo's plan.
    """

    samples: dict[str, int]
    times: dict[str, list[StepTimes]]
    reasons: dict[str, str]
    plan: Plan


@dataclass(frozen=True)
class Split:
    """The parts of one step, in seconds."""

    ideal_s: float
    waiting_s: float
    communication_s: float
    overhead_s: float

    @property
    def step_s(self) -> float:
        return self.ideal_s + self.waiting_s + self.communication_s + self.overhead_s

    def shares(self) -> tuple[float, float, float, float]:
        """Return the reached part of the ideal speed and the three losses, which sum to 1."""
        parts = (self.ideal_s, self.waiting_s, self.communication_s, self.overhead_s)
        step_s = self.step_s
        ideal, *losses = (part / step_s for part in parts)
        return (ideal, *losses)


@dataclass(frozen=True)
class Ratio:
    """The ratio of a contender's steps to cephalo's, round by round; above 1 cephalo is ahead."""

    lower: float
    median: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lower:.2f} to {self.upper:.2f})"


@dataclass(frozen=True)
class Result:
    """The result of one case.

    Attributes:
        case: The case.
        rounds: Number of measured rounds.
        ideal_samples_per_s: The sum of the ranks' own speeds.
        splits: The parts of every contender's median round.
        ratios: The ratio of every contender except cephalo.
        reasons: Why the others could not run.
        batches: Samples of every rank in cephalo's plan.
        stay_gathered: Whether units stay gathered from the forward to the backward in that plan.
        state_fractions: Every rank's share of the state in that plan.
    """

    case: Case
    rounds: int
    ideal_samples_per_s: float
    splits: Mapping[str, Split]
    ratios: Mapping[str, Ratio]
    reasons: Mapping[str, str]
    batches: tuple[int, ...]
    stay_gathered: bool
    state_fractions: tuple[float, ...]

    def best(self, names: Sequence[str]) -> str:
        """Return the fastest of these contenders by its median step."""
        found = [name for name in names if name in self.splits]
        return min(found, key=lambda name: self.splits[name].step_s)

    def ratio_to_best(self, names: Sequence[str]) -> Ratio:
        """Return the ratio of the fastest of these contenders."""
        return self.ratios[self.best(names)]


def combine(case: Case, records: Sequence[RankRecord]) -> Result:
    """Combine the ranks' records of one case."""
    # every contender computes the same for a sample; DDP runs the model as it is
    rates = [record.samples[DDP] / record.times[DDP][0].busy_s for record in records]
    ideal_s = case.global_batch_size / sum(rates)
    steps = {
        name: [[record.times[name][index] for record in records] for index in range(len(times))]
        for name, times in records[0].times.items()
    }
    lengths = {
        name: [max(one.step_s for one in ranks) for ranks in rounds]
        for name, rounds in steps.items()
    }
    return Result(
        case=case,
        rounds=len(lengths[CEPHALO]),
        ideal_samples_per_s=sum(rates),
        splits={name: split(_median_round(rounds), ideal_s) for name, rounds in steps.items()},
        ratios={
            name: compare(theirs, lengths[CEPHALO])
            for name, theirs in lengths.items()
            if name != CEPHALO
        },
        reasons=records[0].reasons,
        batches=tuple(part.batch_size for part in records[0].plan.ranks),
        stay_gathered=records[0].plan.reshard_after_forward is False,
        state_fractions=tuple(part.state_fraction for part in records[0].plan.ranks),
    )


def split(ranks: Sequence[StepTimes], ideal_s: float) -> Split:
    """Split one step of all ranks into its parts; see the note of this module."""
    step_s = max(rank.step_s for rank in ranks)
    # of the ranks with nearly the most work, the one with the least idle time delays the others
    most_s = max(rank.busy_s for rank in ranks)
    busiest = [rank for rank in ranks if rank.busy_s >= _AS_GOOD_AS * most_s]
    last = min(busiest, key=lambda rank: rank.blocked_s)
    return Split(
        ideal_s,
        last.busy_s - ideal_s,
        last.blocked_s,
        step_s - last.busy_s - last.blocked_s,
    )


def compare(theirs_s: Sequence[float], ours_s: Sequence[float]) -> Ratio:
    """Return the ratio of two contenders' steps in the same rounds."""
    ratios = [a / b for a, b in zip(theirs_s, ours_s, strict=True)]
    if len(ratios) == 1:
        return Ratio(ratios[0], ratios[0], ratios[0])
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(lower, statistics.median(ratios), upper)


def _median_round(rounds: Sequence[Sequence[StepTimes]]) -> Sequence[StepTimes]:
    """Return a real round, not a mean, so that its parts add up."""
    ordered = sorted(rounds, key=lambda ranks: max(rank.step_s for rank in ranks))
    return ordered[(len(ordered) - 1) // 2]
