"""Compares each rank's measured steps with the plan, and detects changes of a rank's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from rich.table import Table

from lightning_cephalo.common.quantities import format_seconds
from lightning_cephalo.plan import RankPlan
from lightning_cephalo.plan.replan import WARM_UP_STEPS, change_point

# With fewer steps, a change cannot be distinguished from noise.
_FEWEST_STEPS = 8
# A change by less than this factor, or by less than this share of the step, is not reported.
_FACTOR, _SHARE_OF_STEP = 1.5, 0.1
_RANKS_IN_FULL = 24
_AGAIN = "the plan was made for another speed. Start again to measure and plan anew."
_GIVEN = "the given plan was made for another speed. Leave plan= out, to measure and plan anew."


@dataclass(frozen=True)
class Drift:
    """A slowdown of one rank."""

    factor: float
    step: int


@dataclass(frozen=True)
class MeasuredRank:
    """One rank's steps, as medians without the first three if there are more.

    Attributes:
        name: Name of its device.
        steps: Number of counted steps.
        step_s: Seconds of a whole step, the optimizer's included.
        busy_s: Seconds of this rank's own work in the forward and the backward.
        waiting_s: Seconds in the forward and the backward of waiting for gathers, reduces, and the
            other ranks.
        predicted_busy_s: The plan's prediction of ``busy_s``; None for a plan without predictions.
        drift: Its slowdown during the run; None if it kept its speed.
        between_s: Seconds from the end of a step to the start of the next one: data, hooks,
            logging. None before two steps.
    """

    rank: int
    name: str
    steps: int
    step_s: float
    busy_s: float
    waiting_s: float
    predicted_busy_s: float | None = None
    drift: Drift | None = None
    between_s: float | None = None

    @property
    def waiting_share(self) -> float:
        """The fraction of a step in which the rank waits, 0 to 1."""
        return self.waiting_s / self.step_s if self.step_s else 0.0

    @property
    def over_prediction(self) -> float | None:
        """Measured work divided by predicted work; None without a prediction."""
        return self.busy_s / self.predicted_busy_s if self.predicted_busy_s else None


def predicted_busy_s(plan: RankPlan, units: int) -> float | None:
    """Return a rank's predicted seconds of work in a step of ``units`` units; None without one."""
    if plan.forward_s is None or plan.backward_s is None or plan.tail_s is None:
        return None
    return units * (plan.forward_s + plan.backward_s) + plan.tail_s


def counted(values: Sequence[float]) -> Sequence[float]:
    """Return the values without those of the warm-up steps, if there are others."""
    return values[WARM_UP_STEPS:] or values


def drift_of(busy_s: Sequence[float], step_s: float, steps_before: int = 0) -> Drift | None:
    """Return the slowdown if the last quarter of the steps took far longer than the first."""
    values = counted(busy_s)
    if len(busy_s) <= WARM_UP_STEPS or len(values) < _FEWEST_STEPS:
        return None
    quarter = len(values) // 4
    before_s, after_s = median(values[:quarter]), median(values[-quarter:])
    if after_s <= _FACTOR * before_s or after_s - before_s <= _SHARE_OF_STEP * step_s:
        return None
    between_s = sqrt(before_s * after_s)
    best = change_point([value > between_s for value in values])
    return Drift(after_s / max(before_s, 1e-9), steps_before + WARM_UP_STEPS + best + 1)


def busy_table(ranks: Sequence[MeasuredRank]) -> Table:
    """Return a table of every rank's work, predicted and measured, and of its waiting.

    Of more than 24 ranks, only the 24 that waited least are shown: the others waited for them.
    """
    shown, title = list(ranks), "Work of each rank in a step"
    if len(ranks) > _RANKS_IN_FULL:
        least = sorted(ranks, key=lambda rank: rank.waiting_share)[:_RANKS_IN_FULL]
        shown = sorted(least, key=lambda rank: rank.rank)
        title += f" (of {len(ranks)} ranks the {_RANKS_IN_FULL} that waited least)"
    table = Table(title=title)
    table.add_column("rank", justify="right")
    table.add_column("device")
    for heading in ("predicted", "measured", "difference", "waiting"):
        table.add_column(heading, justify="right")
    for rank in shown:
        over = rank.over_prediction
        table.add_row(
            str(rank.rank),
            rank.name or "–",
            format_seconds(rank.predicted_busy_s),
            format_seconds(rank.busy_s),
            "–" if over is None else f"{over - 1:+.1%}",
            f"{rank.waiting_share:.0%}",
        )
    return table


def remarks(ranks: Sequence[MeasuredRank], *, is_given: bool = False) -> list[str]:
    """Return sentences on ranks whose speed differs from the plan's; none if all is well."""
    advice = _GIVEN if is_given else _AGAIN
    # a slowdown of all ranks alike leaves the shares of the plan right
    working = [rank.drift for rank in ranks if rank.busy_s > _SHARE_OF_STEP * rank.step_s]
    drifted = min((drift.factor if drift else 1.0 for drift in working), default=1.0)
    known = [rank.over_prediction for rank in ranks if rank.over_prediction is not None]
    common = max(1.0, min(known, default=1.0))
    found = []
    for rank in ranks:
        drift, factor, planned_s = rank.drift, rank.over_prediction, rank.predicted_busy_s
        if drift is not None:
            if drift.factor > _FACTOR * drifted:
                found.append(
                    f"Rank {_named(rank)} became {drift.factor:.1f} times slower from about step"
                    f" {drift.step}: {advice}"
                )
        elif (
            factor is not None
            and planned_s is not None
            and rank.steps >= _FEWEST_STEPS
            and factor > _FACTOR * common
            and rank.busy_s - planned_s * common > _SHARE_OF_STEP * rank.step_s
        ):
            found.append(
                f"Rank {_named(rank)} was {factor:.1f} times slower than predicted: {advice}"
            )
    return found


def _named(rank: MeasuredRank) -> str:
    return f"{rank.rank} ({rank.name})" if rank.name else str(rank.rank)
