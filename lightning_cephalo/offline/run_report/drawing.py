"""Draws a run for its page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from markupsafe import Markup

from lightning_cephalo.common.quantities import format_seconds
from lightning_cephalo.common.texts import printable
from lightning_cephalo.offline import figures
from lightning_cephalo.offline.figures import INK, MOST_MEMORIES, MOST_ROWS, SKY
from lightning_cephalo.plan.memory_timeline import MemoryTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def step_timeline(timelines: Sequence[MemoryTimeline]) -> Markup:
    """Return what runs when on each rank: device, link, copies, and the host's updates."""
    rows = [(_name(one), one.events) for one in timelines[:MOST_ROWS]]
    end_s = max(one.end_s for one in timelines)
    return figures.svg(
        "One recorded step of each rank",
        1.0 + 0.5 * len(rows),
        lambda panels: figures.timeline(panels[0], rows, end_s),
    )


def memories(timelines: Sequence[MemoryTimeline]) -> Markup:
    """Return the memory of the fullest ranks by kind over the step."""
    fullest = sorted(timelines, key=lambda one: -(one.peak_bytes or 0.0))[:MOST_MEMORIES]
    shown = [(_name(one), one) for one in sorted(fullest, key=lambda one: one.rank)]
    end_s = max(one.end_s for one in fullest)
    return figures.svg(
        "Memory of ranks over the recorded step",
        0.8 + 1.7 * len(shown),
        lambda panels: figures.memory(panels, shown, figures.MEASURED, end_s),
        rows=len(shown),
    )


def steps_over_time(steps_s: Sequence[float], predicted_s: float | None) -> Markup:
    """Return the time of every step, with the plan's prediction."""

    def draw(panels: list[Axes]) -> None:
        # a single slow step must not flatten all others
        most_s = 1.15 * max(min(max(steps_s), 4 * median(steps_s)), predicted_s or 0.0) or 1.0
        (axes,), (scale, unit) = panels, figures.time_scale(most_s)
        axes.plot(range(1, len(steps_s) + 1), [each * scale for each in steps_s], color=SKY)
        if predicted_s:
            height, text = predicted_s * scale, f"predicted {format_seconds(predicted_s)}"
            axes.axhline(height, color=INK, linewidth=1, linestyle="dashed")
            axes.text(len(steps_s), height, text, ha="right", va="bottom")
        axes.set(ylim=(0, most_s * scale), xlabel="step", ylabel=unit)

    return figures.svg("Seconds of each step", 1.8, draw)


def _name(one: MemoryTimeline) -> str:
    """Return the rank and its device, in as many letters as the drawings have room for."""
    whole = printable(f"rank {one.rank} {one.name}".strip())
    return whole if len(whole) <= 22 else f"{whole[:21]}…"
