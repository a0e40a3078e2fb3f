"""From the ranks' records to a result: ideal, measured, and where the difference goes. Pure.

[Note: where a step goes]
The ideal step has every rank busy all the time: the global batch over the sum of the ranks' own
speeds. The rank with the most work for its speed is busy for longer than that unless work is dealt
out in proportion (``waiting_s``: what the others wait for it), stands idle in collectives
(``communication_s``), and the rest (``overhead_s``) is time in which its host had given its device
nothing to do. The four add up to the step.
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
        step_s: From the common start until the rank's device has done all of it.
        busy_s: Of that, the device's own work.
        blocked_s: Of that, idle while the host was blocked: in a collective, that is.
    """

    step_s: float
    busy_s: float
    blocked_s: float


@dataclass(frozen=True)
class RankRecord:
    """What one rank saw of one case.

    Attributes:
        samples: This rank's samples of a step by each contender.
        times: Each contender's steps, one for each round.
        reasons: Why other contenders cannot run.
        plan: Of cephalo.
    """

    samples: dict[str, int]
    times: dict[str, list[StepTimes]]
    reasons: dict[str, str]
    plan: Plan


@dataclass(frozen=True)
class Split:
    """Where one step goes, in seconds."""

    ideal_s: float
    waiting_s: float
    communication_s: float
    overhead_s: float

    @property
    def step_s(self) -> float:
        return self.ideal_s + self.waiting_s + self.communication_s + self.overhead_s

    def shares(self) -> tuple[float, float, float, float]:
        """As parts of the step: reached of the ideal speed, and the three losses; they sum to 1."""
        parts = (self.ideal_s, self.waiting_s, self.communication_s, self.overhead_s)
        step_s = self.step_s
        ideal, *losses = (part / step_s for part in parts)
        return (ideal, *losses)


@dataclass(frozen=True)
class Ratio:
    """A contender's steps over cephalo's, round by round; above 1 cephalo is ahead."""

    lower: float
    median: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lower:.2f} to {self.upper:.2f})"


@dataclass(frozen=True)
class Result:
    """One case.

    Attributes:
        case: Which.
        rounds: How many were measured.
        ideal_samples_per_s: The sum of the ranks' own speeds.
        splits: Of the median round of every contender.
        ratios: Of every contender but cephalo.
        reasons: Why the others could not run.
        batches: Of every rank, by cephalo's plan.
        stay_gathered: Whether units do, by that plan, from the forward to the backward.
        state_fractions: Likewise.
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
        """The fastest of these by its median step."""
        found = [name for name in names if name in self.splits]
        return min(found, key=lambda name: self.splits[name].step_s)

    def ratio_to_best(self, names: Sequence[str]) -> Ratio:
        """Against the fastest of these."""
        return self.ratios[self.best(names)]


def combine(case: Case, records: Sequence[RankRecord]) -> Result:
    """Put the ranks' records of one case together."""
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
    """Where one step of all ranks goes; see the note of this module."""
    step_s = max(rank.step_s for rank in ranks)
    # of those with as good as the most work, whoever stands idle least keeps the others waiting
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
    """Steps over steps of the same rounds."""
    ratios = [a / b for a, b in zip(theirs_s, ours_s, strict=True)]
    if len(ratios) == 1:
        return Ratio(ratios[0], ratios[0], ratios[0])
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(lower, statistics.median(ratios), upper)


def _median_round(rounds: Sequence[Sequence[StepTimes]]) -> Sequence[StepTimes]:
    """A round that was, so that its parts add up."""
    ordered = sorted(rounds, key=lambda ranks: max(rank.step_s for rank in ranks))
    return ordered[(len(ordered) - 1) // 2]
