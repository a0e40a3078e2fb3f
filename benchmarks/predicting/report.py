"""Tables of predicted and measured figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from .measuring import Outcome

# Largest median and largest single difference on a quiet machine.
MEDIAN_BOUND, WORST_BOUND = 0.05, 0.15


@dataclass(frozen=True)
class Differences:
    """Measured over predicted, minus one. Ranks without a prediction are left out."""

    step: float
    busy: tuple[float, ...]
    memory: tuple[float, ...]

    @classmethod
    def of(cls, outcome: Outcome) -> Differences:
        """Return the differences of one plan."""
        predicted, measured = outcome.predicted, outcome.measured
        return cls(
            measured.step_s / predicted.step_s - 1,
            _over(predicted.busy_s, measured.busy_s),
            _over(predicted.memory_bytes, measured.memory_bytes),
        )


def _over(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, ...]:
    pairs = zip(predicted, measured, strict=True)
    return tuple(found / said - 1 for said, found in pairs if said)


def worst(differences: Sequence[float]) -> float:
    """Return the difference farthest from 0."""
    return max(differences, key=abs)


def model_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one row for each plan."""
    table = Table(title=title)
    table.add_column("plan")
    for heading in ("batches", "state %", "predicted", "measured", "step", "busy", "memory"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        found, ranks = Differences.of(outcome), outcome.plan.ranks
        table.add_row(
            outcome.plan_name,
            ":".join(str(rank.batch_size) for rank in ranks),
            ":".join(f"{rank.state_fraction:.0%}".rstrip("%") for rank in ranks),
            f"{outcome.predicted.step_s:.3f} s",
            f"{outcome.measured.step_s:.3f} s",
            f"{found.step:+.1%}",
            f"{worst(found.busy):+.1%}",
            f"{worst(found.memory):+.1%}",
        )
    return table


@dataclass(frozen=True)
class Summary:
    """One quantity over all models and plans.

    Attributes:
        quantity: Its name.
        differences: Each difference with its model and plan.
    """

    quantity: str
    differences: tuple[tuple[float, str], ...]

    @property
    def median(self) -> float:
        """Median of the differences' absolute values."""
        return median(abs(difference) for difference, _ in self.differences)

    @property
    def worst(self) -> tuple[float, str]:
        """The difference farthest from 0, with its model and plan."""
        return max(self.differences, key=lambda found: abs(found[0]))

    @property
    def holds(self) -> bool:
        """Whether median and worst difference are within the bounds."""
        return self.median <= MEDIAN_BOUND and abs(self.worst[0]) <= WORST_BOUND


def summaries(outcomes: dict[str, Sequence[Outcome]]) -> list[Summary]:
    """Summarise the step, and every rank's work and memory; ``outcomes`` is by model."""
    found: dict[str, list[tuple[float, str]]] = {"step": [], "busy": [], "memory": []}
    for model, of_model in outcomes.items():
        for outcome in of_model:
            differences, where = Differences.of(outcome), f"{model}: {outcome.plan_name}"
            found["step"].append((differences.step, where))
            found["busy"] += [(each, where) for each in differences.busy]
            found["memory"] += [(each, where) for each in differences.memory]
    return [Summary(quantity, tuple(values)) for quantity, values in found.items()]


def summary_table(found: Sequence[Summary]) -> Table:
    """Return a table with one row for each quantity."""
    table = Table(title="All models and plans")
    table.add_column("measured over predicted")
    for heading in ("figures", "median", "worst"):
        table.add_column(heading, justify="right")
    table.add_column("worst in")
    for heading in (f"≤ {MEDIAN_BOUND:.0%}, {WORST_BOUND:.0%}",):
        table.add_column(heading)
    names = {"step": "step", "busy": "work of every rank", "memory": "peak memory of every rank"}
    for summary in found:
        difference, where = summary.worst
        table.add_row(
            names[summary.quantity],
            str(len(summary.differences)),
            f"{summary.median:.1%}",
            f"{difference:+.1%}",
            where,
            "kept" if summary.holds else "MISSED",
        )
    return table
