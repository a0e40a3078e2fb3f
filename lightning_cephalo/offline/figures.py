"""Figures of steps and of memory, for files and for pages; needs matplotlib.

Steps may be recorded or simulated. Colours are those of Okabe and Ito (and a dark yellow), which
colour-blind readers can distinguish. A page has its own colours in place of the first
four.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lightning_cephalo.common import files
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import byte_unit, format_bytes, format_seconds
from lightning_cephalo.observe.recording import MEASURED_KINDS, Event, Recording, Stream
from lightning_cephalo.plan.program import Operation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, PALE, PAPER, GREY = "#010203", "#555657", "#e8e8e8", "#fefefe", "#999999"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
# of kinds of bytes, from the bottom of a stack: of recorded steps, and of simulated ones
_MEASURED = (GREY, BLUE, GREEN, PURPLE, ORANGE, VERMILION, SKY, YELLOW)
COLOURS = {
    **dict(zip(MEASURED_KINDS, _MEASURED, strict=True)),
    "state": BLUE,
    "gathered buffers": ORANGE,
    "boundaries and kept activations": SKY,
    "peak of a microbatch": YELLOW,
}
MOST_ROWS = 16
MOST_MEMORIES = 8

Target = str | PathLike[str] | io.StringIO
"""The path of a file, or where the figure of a page is written as SVG."""

_SUFFIXES = (".png", ".svg")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}
# streams that share a track, from the top of a row
_TRACKS = (
    (Stream.COMPUTE,),
    (Stream.COMMUNICATION, Stream.REDUCTION),
    (Stream.COPY,),
    (Stream.TO_DEVICE,),
    (Stream.TO_HOST,),
    (Stream.HOST,),
)

# -- files and pages ----------------------------------------------------------------------------


@contextmanager
def drawing(target: Target, height: float, rows: int = 1, columns: int = 1) -> Iterator[list[Axes]]:
    """Let axes be drawn on, then write the file completely or not at all.

    Raises PlanError naming the file if it cannot be written.
    """
    if not isinstance(target, io.StringIO) and Path(target).suffix.lower() not in _SUFFIXES:
        raise PlanError(
            f"{target}: expected a file name that ends in {', '.join(_SUFFIXES)}, "
            f"but got the suffix {Path(target).suffix!r}. Rename the file."
        )
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib, which is not installed. "
            "Install it with: pip install 'lightning-cephalo[plot]'"
        ) from error
    with rc_context(_STYLE):
        figure = Figure(figsize=(12.0, height), layout="constrained")
        yield list(figure.subplots(rows, columns, squeeze=False).flatten())
        save(figure, target)


def save(figure: Figure, target: Target) -> None:
    if isinstance(target, io.StringIO):
        figure.savefig(target, format="svg", transparent=True)
        return
    with files.replacing(Path(target)) as beside:
        figure.savefig(beside, dpi=150, facecolor="white")


def svg(draw: Callable[..., None], *shown: object) -> Markup:
    """Return what a function draws as SVG inside a page, to be seen on light and dark."""
    file = io.StringIO()
    draw(*shown, file)
    whole = file.getvalue()
    inner = re.sub(r"<metadata>.*?</metadata>", "", whole[whole.index("<svg") :], flags=re.DOTALL)
    inner = re.sub(r' xmlns(:\w+)?="[^"]*"', "", inner)
    of_page = {SOFT: "var(--soft)", PALE: "var(--pale)", PAPER: "var(--page)", INK: "currentColor"}
    for colour, name in of_page.items():
        inner = inner.replace(colour, name)
    return Markup(inner)


def add_title(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=20)
    axes.text(0, 1, below, transform=axes.transAxes, va="bottom", color=SOFT)


def add_legend(figure: Any, entries: Mapping[str, str]) -> None:
    """Put labels and their colours below everything else, in as many rows as their width takes."""
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=label) for label, colour in entries.items()]
    for columns in range(min(len(handles), 9), 0, -1):
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        figure.draw_without_rendering()  # the fonts set the width of the legend
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def time_axis(axes: Axes, end_s: float) -> float:
    """Let the axes show a step's time; return their units per second."""
    scale, unit = _time_scale(end_s)
    axes.set(xlim=(0, end_s * scale or 1), xlabel=f"time in the step ({unit})")
    return scale


def _time_scale(seconds: float) -> tuple[float, str]:
    """Return the units of an axis per second, and their name."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms")


# -- kinds of figures ---------------------------------------------------------------------------


def timeline(axes: Axes, rows: Sequence[tuple[str, Sequence[Event]]], end_s: float) -> None:
    """Draw what the streams of ranks or stages do, a row each."""
    used = {event.stream for _, events in rows for event in events}
    tracks = [track for track in _TRACKS if used & set(track)]
    scale = time_axis(axes, end_s)
    seen: set[Operation] = set()
    for row, (_, events) in enumerate(rows):
        top, each = row - 0.44, 0.88 / (len(tracks) + 1)
        for track in tracks:
            height = each * 2 if Stream.COMPUTE in track else each
            spans: dict[Operation, list[tuple[float, float]]] = {}
            axes.broken_barh([(0, end_s * scale)], (top, 0.9 * height), facecolors=PALE)
            for event in events:
                if event.stream in track:
                    span = (event.start_s * scale, (event.end_s - event.start_s) * scale)
                    spans.setdefault(event.operation, []).append(span)
            for operation, found in spans.items():
                colour = operation.colour
                # a seam between neighbours, where bars are wider than that; narrow ones stay seen
                wide = sum(width for _, width in found) / len(found) > 0.004 * end_s * scale
                look: Any = {"edgecolors": PAPER if wide else colour, "linewidth": 0.4}
                axes.broken_barh(found, (top, 0.9 * height), facecolors=colour, **look)
            seen |= spans.keys()
            top += height
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    colours = {each.value: each.colour for each in Operation if each in seen}
    add_legend(axes.figure, colours)


def timeline_figure(steps: Sequence[Recording], target: Target) -> None:
    """Draw what the streams of ranks do in a step; of more than 16, those of the busiest."""
    shown, left_out = _most(steps, MOST_ROWS, lambda step: step.busy_s(Stream.COMPUTE), "busiest")
    end_s, rows = max(step.end_s or 0.0 for step in shown), []
    for step in shown:
        busy = f"\n{step.busy_s(Stream.COMPUTE) / end_s:.0%} busy" if end_s else ""
        rows.append((f"{step.name}{busy}", step.events))
    with drawing(target, 1.6 + 0.62 * len(rows)) as (axes,):
        timeline(axes, rows, end_s)
        below = f"upper bar: compute, below: communication and copies{left_out}"
        add_title(axes, f"One step, {format_seconds(end_s)}", below)


def memory_figure(steps: Sequence[Recording], target: Target) -> None:
    """Draw what ranks hold over a step; of more than 8, the fullest ones."""
    shown, left_out = _most(steps, MOST_MEMORIES, lambda step: step.peak_bytes or 0.0, "fullest")
    unit, bytes_each = byte_unit(max(step.peak_bytes or 1.0 for step in shown))
    end_s, order, used = max(step.end_s or 0.0 for step in shown), list(COLOURS), set()
    with drawing(target, 0.8 + 1.7 * len(shown), rows=len(shown)) as panels:
        for axes, step in zip(panels, shown, strict=True):
            peak_bytes, scale = step.peak_bytes or 0.0, time_axis(axes, end_s)
            sizes = zip(*(held.sizes for held in (*step.held, step.held[-1])), strict=True)
            by_kind = dict(zip(step.kinds, sizes, strict=True))
            layers = sorted((kind for kind in by_kind if any(by_kind[kind])), key=order.index)
            used |= {*layers}
            axes.stackplot(
                [*(held.time_s * scale for held in step.held), end_s * scale],
                *([size / bytes_each for size in by_kind[kind]] for kind in layers),
                step="post",
                colors=[COLOURS[kind] for kind in layers],
                linewidth=0,
            )
            title = f"{step.name}: {format_bytes(peak_bytes)} at its peak"
            if step.planned_bytes is not None:
                title += f", {format_bytes(step.planned_bytes)} predicted"
            is_over = step.capacity_bytes is not None and peak_bytes > step.capacity_bytes
            axes.set_title(title, loc="left", color=VERMILION if is_over else INK)
            # the two lines may be as high as each other
            for text, limit, style, at, side in (
                ("predicted peak", step.planned_bytes, "dashed", 1, "right"),
                ("may use", step.capacity_bytes, "solid", 0.005, "left"),
            ):
                if limit is not None and limit < 3 * max(peak_bytes, 1.0):
                    height, place = limit / bytes_each, ("axes fraction", "data")
                    axes.axhline(height, color=INK, linewidth=1, linestyle=style)
                    said = f"{text} {format_bytes(limit)}"
                    axes.annotate(said, (at, height), xycoords=place, ha=side, va="bottom")
            axes.set(ylim=(0, 1.1 * axes.get_ylim()[1]), ylabel=unit)
            axes.label_outer()
        panels[-1].set_xlabel(f"{panels[-1].get_xlabel()}{left_out}")
        add_legend(panels[0].figure, {kind: COLOURS[kind] for kind in order if kind in used})


def all_steps_figure(steps_s: Sequence[float], predicted_s: float | None, target: Target) -> None:
    """Draw the time of every step, with the plan's prediction."""
    # a single slow step must not flatten all others
    most_s = 1.15 * max(min(max(steps_s), 4 * median(steps_s)), predicted_s or 0.0) or 1.0
    scale, unit = _time_scale(most_s)
    with drawing(target, 1.8) as (axes,):
        axes.plot(range(1, len(steps_s) + 1), [each * scale for each in steps_s], color=SKY)
        if predicted_s:
            height, text = predicted_s * scale, f"predicted {format_seconds(predicted_s)}"
            axes.axhline(height, color=INK, linewidth=1, linestyle="dashed")
            axes.text(len(steps_s), height, text, ha="right", va="bottom")
        axes.set(ylim=(0, most_s * scale), xlabel="step", ylabel=unit)


def _most(
    steps: Sequence[Recording], most: int, key: Callable[[Recording], float], which: str
) -> tuple[list[Recording], str]:
    """Return the steps with the most of something, and a note on those that are left out."""
    shown = sorted(sorted(steps, key=key, reverse=True)[:most], key=lambda step: step.rank)
    return shown, f"; the {which} {most} of {len(steps)}" if len(steps) > most else ""
