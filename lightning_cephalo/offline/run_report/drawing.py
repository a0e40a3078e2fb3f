"""Draws a run as inline SVG, in the colour of the page's text, to be seen on light and dark."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lightning_cephalo.common.quantities import byte_unit, format_bytes, format_seconds
from lightning_cephalo.common.texts import printable
from lightning_cephalo.offline.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    add_legend,
    colours_of,
    empty_figure,
)
from lightning_cephalo.offline.figures import draw_streams, time_scale
from lightning_cephalo.offline.run_report.lost_time import LostTime
from lightning_cephalo.plan.memory_timeline import MemoryTimeline
from lightning_cephalo.plan.program import Operation
from lightning_cephalo.plan.timeline import MEASURED_KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 16
MOST_MEMORIES = 8
PARTS = (
    ("compute", "compute_s", BLUE),
    ("update", "update_s", GREEN),
    ("waiting for slower ranks", "others_s", VERMILION),
    ("waiting for the network", "network_s", ORANGE),
    ("rest", "rest_s", GREY),
)
# stands for the colour of the page's text
_INK = "#010203"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), _INK),
}
_WIDTH_INCHES = 10.0


@dataclass
class _Drawing:
    """A figure that is drawn, and its SVG behind that."""

    figure: Figure
    axes: Sequence[Axes]
    svg: str = ""


@contextmanager
def _drawing(title: str, height_inches: float, rows: int = 1) -> Iterator[_Drawing]:
    """Let axes be drawn on, then make the SVG that a page takes in."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        figure, axes = empty_figure("page.svg", _WIDTH_INCHES, height_inches, rows=(1.0,) * rows)
        drawing = _Drawing(figure, axes)
        yield drawing
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Title": title})
    whole = file.getvalue()
    inner = re.sub(r"<metadata>.*?</metadata>", "", whole[whole.index("<svg") :], flags=re.DOTALL)
    inner = re.sub(r' xmlns(:\w+)?="[^"]*"', "", inner)
    drawing.svg = Markup(inner.replace(_INK, "currentColor").replace(PALE, "var(--pale)"))


def lost_bars(lost: Sequence[LostTime]) -> str:
    """Return a bar for each rank: where the recorded step went."""
    shown = sorted(sorted(lost, key=lambda one: one.others_s)[:MOST_RANKS], key=lambda o: o.rank)
    scale, unit = time_scale(max(one.step_s for one in shown))
    title = "Where the recorded step of each rank went"
    with _drawing(title, 0.9 + 0.3 * len(shown)) as drawing:
        (axes,) = drawing.axes
        longest_s = max(one.step_s for one in shown) or 1.0
        for row, one in enumerate(shown):
            left_s = 0.0
            for _, field, colour in PARTS:
                seconds = getattr(one, field)
                axes.barh(row, seconds * scale, left=left_s * scale, height=0.7, color=colour)
                if seconds > 0.05 * longest_s:
                    share, at = f"{seconds / one.step_s:.0%}", (left_s + seconds / 2) * scale
                    axes.text(at, row, share, ha="center", va="center", color="white")
                left_s += seconds
        _name_rows(axes, [(row, name_of(one.rank, one.name)) for row, one in enumerate(shown)])
        axes.set_xlabel(f"time in the step ({unit})")
        add_legend(drawing.figure, [(what, colour) for what, _, colour in PARTS])
    return drawing.svg


def step_timeline(timelines: Sequence[MemoryTimeline]) -> str:
    """Return what runs when on each rank: device, link, copies, and the host's updates."""
    shown = timelines[:MOST_RANKS]
    end_s = max(one.end_s for one in shown)
    scale, unit = time_scale(end_s)
    with _drawing("One recorded step of each rank", 1.0 + 0.5 * len(shown)) as drawing:
        (axes,) = drawing.axes
        seen: set[Operation] = set()
        for row, one in enumerate(shown):
            seen |= draw_streams(axes, row, one.events, end_s, scale)
        axes.set_xlim(0, end_s * scale or 1)
        names = [(row + 0.5, name_of(one.rank, one.name)) for row, one in enumerate(shown)]
        _name_rows(axes, names, top=len(shown), bottom=0.0)
        axes.set_xlabel(f"time in the step ({unit})")
        add_legend(drawing.figure, colours_of(seen))
    return drawing.svg


def memories(timelines: Sequence[MemoryTimeline]) -> str:
    """Return the memory of ranks by kind over the step, with the plan's peak and the capacity."""
    end_s = max(one.end_s for one in timelines)
    scale, unit = time_scale(end_s)
    unit_of_bytes, bytes_each = byte_unit(max(one.peak_bytes or 1.0 for one in timelines))
    kinds = MEASURED_KINDS
    colours = dict(
        zip(kinds, (GREY, BLUE, GREEN, PURPLE, ORANGE, VERMILION, SKY, YELLOW), strict=True)
    )
    title = "Memory of ranks over the recorded step"
    with _drawing(title, 0.8 + 1.7 * len(timelines), rows=len(timelines)) as drawing:
        used = set()
        for one, axes in zip(timelines, drawing.axes, strict=True):
            times = [*(held.time_s * scale for held in one.held), end_s * scale]
            below = [0.0] * len(times)
            for index, kind in enumerate(kinds):
                sizes = [held.sizes[index] / bytes_each for held in one.held]
                if any(sizes):
                    used.add(kind)
                    above = [
                        low + size for low, size in zip(below, [*sizes, sizes[-1]], strict=True)
                    ]
                    axes.fill_between(
                        times, below, above, step="post", color=colours[kind], linewidth=0
                    )
                    below = above
            _mark(axes, one, bytes_each)
            axes.set_xlim(0, end_s * scale or 1)
            axes.set_ylim(bottom=0)
            axes.set_ylabel(unit_of_bytes)
            axes.set_title(f"{name_of(one.rank, one.name)}: {_peak(one)}", loc="left", fontsize=9)
        drawing.axes[-1].set_xlabel(f"time in the step ({unit})")
        add_legend(drawing.figure, [(each.value, colours[each]) for each in kinds if each in used])
    return drawing.svg


def steps_over_time(steps_s: Sequence[float], predicted_s: float | None) -> str:
    """Return the time of every step, with the plan's prediction."""
    # a single slow step must not flatten all others
    most_s = 1.15 * max(min(max(steps_s), 4 * median(steps_s)), predicted_s or 0.0) or 1.0
    scale, unit = time_scale(most_s)
    with _drawing("Seconds of each step", 1.8) as drawing:
        (axes,) = drawing.axes
        axes.plot(range(1, len(steps_s) + 1), [each * scale for each in steps_s], color=SKY)
        if predicted_s:
            axes.axhline(predicted_s * scale, color=_INK, linewidth=1, linestyle="dashed")
            said = f"predicted {format_seconds(predicted_s)}"
            axes.text(len(steps_s), predicted_s * scale, said, ha="right", va="bottom")
        axes.set_ylim(0, most_s * scale)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
    return drawing.svg


def name_of(rank: int, name: str) -> str:
    """Return the rank and its device, in as many letters as the drawings have room for."""
    whole = printable(f"rank {rank} {name}".strip())
    return whole if len(whole) <= 22 else f"{whole[:21]}…"


def _name_rows(
    axes: Axes,
    names: Sequence[tuple[float, str]],
    top: float | None = None,
    bottom: float = -0.6,
) -> None:
    axes.set_yticks([at for at, _ in names], [name for _, name in names])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4 if top is None else top, bottom)


def _mark(axes: Axes, timeline: MemoryTimeline, bytes_each: float) -> None:
    """Draw the plan's peak and the capacity, if they are not far above what is held."""
    peak_bytes = timeline.peak_bytes or 1.0
    for what, size, style in (
        ("predicted peak", timeline.planned_bytes, "dashed"),
        ("may use", timeline.capacity_bytes, "solid"),
    ):
        if size is not None and math.isfinite(size) and size < 3 * peak_bytes:
            at = size / bytes_each
            axes.axhline(at, color=_INK, linewidth=1, linestyle=style)
            said = f"{what} {format_bytes(size)}"
            # the two may be as high as each other
            end, side = (1, "right") if style == "dashed" else (0.005, "left")
            axes.annotate(said, (end, at), xycoords=("axes fraction", "data"), ha=side, va="bottom")


def _peak(timeline: MemoryTimeline) -> str:
    text = f"{format_bytes(timeline.peak_bytes)} at its peak"
    if timeline.planned_bytes is not None:
        text += f", {format_bytes(timeline.planned_bytes)} predicted"
    return text
