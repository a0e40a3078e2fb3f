"""Figures of steps and of memory, for files and for pages; needs matplotlib.

Each kind of figure has one function that draws it on axes. Colours are those of Okabe and Ito (and
a dark yellow), which colour-blind readers can distinguish. A page has its own colours in place of
``INK``, ``PALE`` and ``PAPER``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lightning_cephalo.common import files
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import byte_unit, format_bytes, format_seconds
from lightning_cephalo.plan import Plan, Problem, cost
from lightning_cephalo.plan.memory_timeline import MemoryTimeline
from lightning_cephalo.plan.program import Operation
from lightning_cephalo.plan.timeline import (
    MEASURED_KINDS,
    Event,
    Held,
    Simulation,
    Stream,
    Timeline,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, PALE, PAPER = "#010203", "#999999", "#e8e8e8", "#fefefe"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
# colours of what a recorded step tells apart, in the order of ``Held.sizes``
MEASURED = dict(
    zip(
        (kind.value for kind in MEASURED_KINDS),
        (GREY, BLUE, GREEN, PURPLE, ORANGE, VERMILION, SKY, YELLOW),
        strict=True,
    )
)
MOST_ROWS = 16
MOST_MEMORIES = 8

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
def drawing(
    path: str | PathLike[str], height: float, rows: int = 1, columns: int = 1
) -> Iterator[list[Axes]]:
    """Let axes be drawn on, then write the file completely or not at all.

    Raises PlanError naming the file if it cannot be written.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise PlanError(
            f"{path}: expected a file name that ends in {', '.join(_SUFFIXES)}, "
            f"but got the suffix {Path(path).suffix!r}. Rename the file."
        )
    with _canvas(13.0, height, rows, columns) as (figure, axes):
        yield axes
        save(figure, path)


def save(figure: Figure, path: str | PathLike[str]) -> None:
    with files.replacing(Path(path)) as beside:
        figure.savefig(beside, dpi=150, facecolor="white")


def svg(title: str, height: float, draw: Callable[[list[Axes]], None], rows: int = 1) -> Markup:
    """Return a figure as SVG inside a page, to be seen on light and dark."""
    file = io.StringIO()
    with _canvas(10.0, height, rows) as (figure, axes):
        draw(axes)
        figure.savefig(file, format="svg", transparent=True, metadata={"Title": title})
    whole = file.getvalue()
    inner = re.sub(r"<metadata>.*?</metadata>", "", whole[whole.index("<svg") :], flags=re.DOTALL)
    inner = re.sub(r' xmlns(:\w+)?="[^"]*"', "", inner)
    for colour, of_page in ((INK, "currentColor"), (PALE, "var(--pale)"), (PAPER, "var(--page)")):
        inner = inner.replace(colour, of_page)
    return Markup(inner)


@contextmanager
def _canvas(
    width: float, height: float, rows: int, columns: int = 1
) -> Iterator[tuple[Figure, list[Axes]]]:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib, which is not installed. "
            "Install it with: pip install 'lightning-cephalo[plot]'"
        ) from error
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False).flatten())


def add_title(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=20)
    axes.text(0, 1, below, transform=axes.transAxes, va="bottom", color="#555555")


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


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name rows of height 1, whose middles are 0, 1, …, from the top."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)


def time_axis(axes: Axes, end_s: float) -> float:
    """Let the axes show a step's time; return their units per second."""
    scale, unit = time_scale(end_s)
    axes.set(xlim=(0, end_s * scale or 1), xlabel=f"time in the step ({unit})")
    return scale


def time_scale(seconds: float) -> tuple[float, str]:
    """Return the units of a time axis per second, and their name."""
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
    name_rows(axes, [name for name, _ in rows])
    colours = {each.value: each.colour for each in Operation if each in seen}
    add_legend(axes.figure, colours)


def memory(
    panels: Sequence[Axes],
    shown: Sequence[tuple[str, MemoryTimeline]],
    colours: Mapping[str, str],
    end_s: float,
) -> None:
    """Draw what ranks hold over a step, a panel each, with the plan's peak and the capacity."""
    unit, bytes_each = byte_unit(max(one.peak_bytes or 1.0 for _, one in shown))
    used: dict[str, str] = {}
    for axes, (label, one) in zip(panels, shown, strict=True):
        peak_bytes, scale = one.peak_bytes or 0.0, time_axis(axes, end_s)
        sizes = zip(*(held.sizes for held in (*one.held, one.held[-1])), strict=True)
        layers = {name: each for name, each in zip(colours, sizes, strict=True) if any(each)}
        used |= {name: colours[name] for name in layers}
        axes.stackplot(
            [*(held.time_s * scale for held in one.held), end_s * scale],
            *([size / bytes_each for size in each] for each in layers.values()),
            step="post",
            colors=[colours[name] for name in layers],
            linewidth=0,
        )
        title = f"{label}: {format_bytes(peak_bytes)} at its peak"
        if one.planned_bytes is not None:
            title += f", {format_bytes(one.planned_bytes)} predicted"
        is_over = one.capacity_bytes is not None and peak_bytes > one.capacity_bytes
        axes.set_title(title, loc="left", color=VERMILION if is_over else INK)
        # the two lines may be as high as each other
        for text, limit, style, at, side in (
            ("predicted peak", one.planned_bytes, "dashed", 1, "right"),
            ("may use", one.capacity_bytes, "solid", 0.005, "left"),
        ):
            if limit is not None and limit < 3 * max(peak_bytes, 1.0):
                height, place = limit / bytes_each, ("axes fraction", "data")
                axes.axhline(height, color=INK, linewidth=1, linestyle=style)
                said = f"{text} {format_bytes(limit)}"
                axes.annotate(said, (at, height), xycoords=place, ha=side, va="bottom")
        axes.set(ylim=(0, 1.1 * axes.get_ylim()[1]), ylabel=unit)
        axes.label_outer()
    add_legend(panels[0].figure, used)


# -- files of the command line ------------------------------------------------------------------


def timeline_figure(simulation: Simulation, problem: Problem, path: str | PathLike[str]) -> None:
    """Draw the streams of each kind of ranks over one step; beyond 16 kinds, of the busiest."""
    kinds, left_out = _most(simulation, problem, MOST_ROWS, lambda kind: kind.compute_s, "busiest")
    step_s, rows = simulation.step_s, []
    for label, kind in kinds:
        busy = f"\n{kind.compute_s / step_s:.0%} busy" if step_s else ""
        rows.append((f"{label}{busy}", kind.events))
    with drawing(path, 1.6 + 0.62 * len(rows)) as (axes,):
        timeline(axes, rows, step_s)
        title = f"One step of {simulation.world_size} ranks, {format_seconds(step_s)}"
        add_title(axes, title, f"upper bar: compute, below: communication and copies{left_out}")


def memory_figure(
    simulation: Simulation, problem: Problem, plan: Plan, path: str | PathLike[str]
) -> None:
    """Draw the simulated memory of each kind of ranks, and what ``plan/cost.py`` predicts."""
    kinds, left_out = _most(simulation, problem, MOST_MEMORIES, _peak_bytes, "fullest")
    predicted = cost.predict(problem, plan).ranks
    shown = []
    for label, kind in kinds:
        rank, held = kind.ranks[0], tuple(Held(time_s, (size,)) for time_s, size in kind.memory)
        limits = predicted[rank].memory_bytes, problem.ranks[rank].capacity_bytes
        shown.append((label, MemoryTimeline(rank, label, (), held, (), *limits)))
    with drawing(path, 0.8 + 1.7 * len(shown), rows=len(shown)) as panels:
        memory(panels, shown, {"simulated": SKY}, simulation.step_s)
        for axes, (_, one) in zip(panels, shown, strict=True):
            title = axes.get_title(loc="left")
            axes.set_title(f"{title}: {_parts(problem, plan, one.rank)}", loc="left")
        panels[-1].set_xlabel(f"{panels[-1].get_xlabel()}{left_out}")


def _most(
    simulation: Simulation,
    problem: Problem,
    most: int,
    key: Callable[[Timeline], float],
    which: str,
) -> tuple[list[tuple[str, Timeline]], str]:
    """Return kinds of equal ranks with their labels, and a note on those that are left out."""
    kinds = sorted(simulation.timelines, key=key, reverse=True)[:most]
    kinds.sort(key=lambda kind: kind.ranks)
    count = len(simulation.timelines)
    left_out = f"; the {which} {most} of {count} kinds of ranks" if count > most else ""
    labels = [f"{len(kind.ranks)} × {problem.ranks[kind.ranks[0]].name}" for kind in kinds]
    return list(zip(labels, kinds, strict=True)), left_out


def _peak_bytes(kind: Timeline) -> float:
    return max(size for _, size in kind.memory)


def _parts(problem: Problem, plan: Plan, rank: int) -> str:
    """Return what fills a rank at the moment of the step at which it holds the most."""
    problem = cost.as_planned(problem, plan)
    part, profile = plan.ranks[rank], problem.ranks[rank]
    mode, sizes = cost.Mode.of(part), part.microbatch_sizes
    need = max(
        (needed(problem, profile, mode) for needed in cost.DEVICE_NEEDS),
        key=lambda need: part.state_fraction * need.state + need.of(sizes),
    )
    held = need.kept(part.batch_size, len(sizes))
    peak = need.of(sizes) - need.fixed - held
    return (
        f"state {format_bytes(part.state_fraction * need.state)}, gathered buffers"
        f" {format_bytes(need.fixed)}, boundaries and kept activations {format_bytes(held)},"
        f" peak of a microbatch {format_bytes(peak)}"
    )
