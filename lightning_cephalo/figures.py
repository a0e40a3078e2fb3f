"""Figures of simulations and comparisons; needs matplotlib (the extra ``plot``).

Written as PNG or SVG by the suffix, whole or not at all, without a display and without pyplot's
global state. Colours are those of Okabe and Ito (and a dark yellow), which colour-blind readers can
tell apart.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_cephalo.plan import Plan, PlanError, Problem, _files, cost
from lightning_cephalo.report import format_rate, format_seconds
from lightning_cephalo.timeline import Activity, Simulation, Stream, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

_SUFFIXES = (".png", ".svg")
_DPI = 150
_ROWS = 16
_GIB = 2**30
_BLACK, _GREY, _PALE, _OLIVE = "#000000", "#999999", "#e8e8e8", "#8A7A00"
_ORANGE, _SKY, _GREEN, _YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
_BLUE, _VERMILION, _PURPLE = "#0072B2", "#D55E00", "#CC79A7"
_COLOURS = {
    Activity.FORWARD: _SKY,
    Activity.TAIL: _PURPLE,
    Activity.BACKWARD: _BLUE,
    Activity.OPTIMIZER: _GREEN,
    Activity.GATHER: _ORANGE,
    Activity.REDUCE: _VERMILION,
    Activity.OVERHEAD: _GREY,
    Activity.OFFLOAD: _YELLOW,
    Activity.FETCH: _OLIVE,
}
_LINES = (_BLUE, _VERMILION, _GREEN, _ORANGE, _PURPLE, _SKY, _BLACK, _GREY)
_MEMORY_PARTS = (
    ("state", _BLUE),
    ("gathered buffers", _ORANGE),
    ("boundaries and kept activations", _SKY),
    ("peak of a microbatch", _PURPLE),
)
# Of a row's height 1, from its top: where a stream is drawn.
_PLACES = {Stream.COMPUTE: (0.08, 0.44), Stream.COMMUNICATION: (0.54, 0.2)}
_COPY_PLACE = (0.76, 0.16)


@dataclass(frozen=True)
class ComparisonRow:
    """One allocation in a comparison.

    Attributes:
        name: Such as ``"even"`` or ``"cephalo"``; the last row is drawn as ours.
        step_s: Predicted time of a step; None where it cannot run.
        samples_per_s: Predicted throughput; likewise.
        memory: Per rank the bytes it needs and its capacity; None where that is not known.
        reason: Why it cannot run, in a few words; empty where it can.
    """

    name: str
    step_s: float | None = None
    samples_per_s: float | None = None
    memory: tuple[tuple[float, float], ...] | None = None
    reason: str = ""


def timeline_figure(simulation: Simulation, problem: Problem, path: str | PathLike[str]) -> None:
    """Draw the streams of every rank over one step.

    Beyond 16 ranks, one row for all that do the same, such as "16 × V100"; beyond 16 of those, the
    busiest.

    Args:
        simulation: what to draw.
        problem: what was simulated; its ranks' names are shown.
        path: of the file, ending in ``.png`` or ``.svg``.

    Raises:
        ImportError: matplotlib is not installed.
        PlanError: another suffix, the problem has another number of ranks, or the file cannot be
            written.
    """
    _check_ranks(simulation, len(problem.ranks), "the problem")
    rows, left_out = _rows(simulation, problem)
    figure, (axes,) = _figure(path, 13, 1.6 + 0.62 * len(rows))
    scale, unit = _time_scale(simulation.step_s)
    seen: set[Activity] = set()
    for row, (_, timeline) in enumerate(rows):
        seen |= _draw_streams(axes, row, timeline, simulation.step_s, scale)
    axes.set_ylim(len(rows), 0)
    axes.set_xlim(0, simulation.step_s * scale)
    axes.set_yticks(
        [row + 0.5 for row in range(len(rows))],
        [
            f"{label}\n{timeline.compute_s / simulation.step_s:.0%} busy"
            if simulation.step_s
            else label
            for label, timeline in rows
        ],
    )
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time in the step ({unit})")
    _title(
        axes,
        f"One step of {simulation.world_size} ranks, {format_seconds(simulation.step_s)}",
        f"upper bar: compute, below: communication{_copies(seen)}{left_out}",
    )
    _legend(figure, [(name.value, _COLOURS[name]) for name in _COLOURS if name in seen])
    _save(figure, path)


def memory_figure(
    simulation: Simulation, problem: Problem, plan: Plan, path: str | PathLike[str]
) -> None:
    """Draw what fills every rank's memory, and its memory over one step.

    Ranks share rows and lines as in :func:`timeline_figure`. Bars are the prediction of
    ``plan/cost.py``, lines are simulated.

    Args:
        simulation: of the plan.
        problem: what was simulated.
        plan: what was simulated.
        path: of the file, ending in ``.png`` or ``.svg``.

    Raises:
        ImportError: matplotlib is not installed.
        PlanError: another suffix, problem or plan have another number of ranks, or the file cannot
            be written.
    """
    _check_ranks(simulation, len(problem.ranks), "the problem")
    _check_ranks(simulation, len(plan.ranks), "the plan")
    rows, left_out = _rows(simulation, problem)
    figure, (bars, lines) = _figure(path, 13, 2.2 + 0.42 * len(rows), columns=2)
    scale, unit = _byte_scale(cost.predict(problem, plan))
    _draw_memory_bars(bars, rows, problem, plan, scale)
    bars.set_xlabel(f"predicted memory ({unit})")
    _title(bars, "What fills the memory", f"black mark: capacity, red name: over it{left_out}")
    _draw_memory_lines(lines, rows, problem, simulation.step_s, scale)
    lines.set_ylabel(f"simulated memory ({unit})")
    _title(lines, "Memory over one step", "kept in the forward, released in the backward")
    _legend(figure, _MEMORY_PARTS)
    _save(figure, path)


def comparison_figure(rows: Sequence[ComparisonRow], path: str | PathLike[str]) -> None:
    """Draw the throughput of allocations beside each other; what cannot run is marked.

    Args:
        rows: the allocations, from top to bottom; ours last.
        path: of the file, ending in ``.png`` or ``.svg``.

    Raises:
        ImportError: matplotlib is not installed.
        PlanError: another suffix, no rows, or the file cannot be written.
    """
    if not rows:
        raise PlanError("comparison_figure: expected at least one row to compare, but got none.")
    figure, (axes,) = _figure(path, 9, 1.4 + 0.6 * len(rows))
    most = max(row.samples_per_s or 0.0 for row in rows) or 1.0
    labels = []
    for index, row in enumerate(rows):
        colour = _BLUE if index == len(rows) - 1 else _SKY
        if row.samples_per_s is None:
            axes.barh(index, most, height=0.62, color="none", edgecolor=_PALE, hatch="////")
            # more lines would run into the next row; the whole reason is in the table
            text = textwrap.fill(
                f"cannot run: {row.reason}".rstrip(": "), 70, max_lines=3, placeholder=" …"
            )
            colour, at = _VERMILION, 0.0
        else:
            axes.barh(index, row.samples_per_s, height=0.62, color=colour, linewidth=0)
            text, colour, at = _throughput(row), _BLACK, row.samples_per_s
        label = axes.annotate(
            text,
            (at, index),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
        labels.append((at, label))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("predicted throughput (samples/s)")
    _title(axes, "Allocations compared", "longer is better")
    axes.set_xlim(0, 3 * most)  # wide, as the layout narrows axes that labels stick out of
    axes.set_xlim(0, max(1.05 * most, _end_of_labels(figure, axes, labels)))
    _save(figure, path)


def _end_of_labels(figure: Figure, axes: Axes, labels: Sequence[tuple[float, Annotation]]) -> float:
    """Where the axis must end for the labels beside bars of these lengths to be inside of it."""
    figure.draw_without_rendering()  # the layout sets the width of the axes
    width_px = axes.get_window_extent().width
    gap_px = 15.0
    return max(
        # no label takes more than four fifths, however narrow the axes
        at / max(0.2, 1 - (label.get_window_extent().width + gap_px) / width_px)
        for at, label in labels
    )


def _rows(simulation: Simulation, problem: Problem) -> tuple[list[tuple[str, Timeline]], str]:
    """Labels and timelines to draw, and what to say of those that are left out."""
    if simulation.world_size <= _ROWS:
        ranks = range(simulation.world_size)
        return [
            (f"rank {rank}  {problem.ranks[rank].name}", simulation.timeline(rank))
            for rank in ranks
        ], ""
    kinds = list(simulation.timelines)
    left_out = ""
    if len(kinds) > _ROWS:
        left_out = f"; the busiest {_ROWS} of {len(kinds)} kinds of ranks"
        kinds = sorted(kinds, key=lambda timeline: -timeline.compute_s)[:_ROWS]
        kinds.sort(key=lambda timeline: timeline.ranks)
    return [(_kind_label(timeline, problem), timeline) for timeline in kinds], left_out


def _kind_label(timeline: Timeline, problem: Problem) -> str:
    return f"{len(timeline.ranks)} × {problem.ranks[timeline.ranks[0]].name}"


def _draw_streams(
    axes: Axes, row: int, timeline: Timeline, step_s: float, scale: float
) -> set[Activity]:
    """Draw one row and return what is in it."""
    places = dict(_PLACES)
    if timeline.copy_s:
        places[Stream.COPY] = _COPY_PLACE
    spans: dict[tuple[Stream, Activity], list[tuple[float, float]]] = {}
    for event in timeline.events:
        span = (event.start_s * scale, (event.end_s - event.start_s) * scale)
        spans.setdefault((event.stream, event.name), []).append(span)
    for top, height in places.values():
        axes.broken_barh([(0, step_s * scale)], (row + top, height), facecolors=_PALE)
    for (stream, name), found in spans.items():
        top, height = places[stream]
        # a seam between neighbours, where they are wide enough to leave something beside it
        wide = sum(width for _, width in found) / len(found) > 0.004 * step_s * scale
        axes.broken_barh(
            found,
            (row + top, height),
            facecolors=_COLOURS[name],
            edgecolors="white" if wide else "none",
            linewidth=0.4 if wide else 0,
        )
    return {name for _, name in spans}


def _draw_memory_bars(
    axes: Axes, rows: Sequence[tuple[str, Timeline]], problem: Problem, plan: Plan, scale: float
) -> None:
    longest = 0.0
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.tick_params(axis="y", length=0)
    for row, (_, timeline) in enumerate(rows):
        rank, left = timeline.ranks[0], 0.0
        for size, (_, colour) in zip(
            _memory_parts(problem, plan, rank), _MEMORY_PARTS, strict=True
        ):
            axes.barh(row, size * scale, left=left, height=0.62, color=colour, linewidth=0)
            left += size * scale
        longest = max(longest, left)
        limit = problem.ranks[rank].capacity_bytes * scale
        if math.isfinite(limit):
            axes.plot([limit, limit], [row - 0.42, row + 0.42], color=_BLACK, linewidth=2)
            longest = max(longest, limit)
        if left > limit * (1 + 1e-9):
            axes.get_yticklabels()[row].set_color(_VERMILION)
    axes.set_xlim(0, 1.06 * longest or 1)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _draw_memory_lines(
    axes: Axes,
    rows: Sequence[tuple[str, Timeline]],
    problem: Problem,
    step_s: float,
    scale: float,
) -> None:
    """One line for all ranks that do the same: theirs would hide each other."""
    seconds, unit = _time_scale(step_s)
    kinds = {timeline.ranks: timeline for _, timeline in rows}
    styles = ((colour, style) for style in ("solid", "dashed") for colour in _LINES)
    for timeline, (colour, style) in zip(kinds.values(), styles, strict=False):
        points = [*timeline.memory, (step_s, timeline.memory[-1][1])]
        axes.step(
            [time_s * seconds for time_s, _ in points],
            [size * scale for _, size in points],
            where="post",
            color=colour,
            linestyle=style,
            linewidth=1,
            label=_kind_label(timeline, problem),
        )
    axes.set_xlim(0, step_s * seconds or 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"time in the step ({unit})")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)


def _memory_parts(problem: Problem, plan: Plan, rank: int) -> tuple[float, float, float, float]:
    """Bytes of state, gathered buffers, boundaries and the peak, as ``plan/cost.py`` adds them."""
    problem = cost.as_planned(problem, plan)
    part, profile = plan.ranks[rank], problem.ranks[rank]
    mode = cost.Mode(part.recompute, part.offload)
    held = cost.kept_bytes(problem, part.microbatch_sizes, mode)
    working = cost.working_bytes(problem, profile, part.microbatch_sizes, mode)
    state = part.state_fraction * problem.state_bytes
    return state, problem.fixed_bytes, held, working - problem.fixed_bytes - held


def _throughput(row: ComparisonRow) -> str:
    assert row.samples_per_s is not None
    text = f"{format_rate(row.samples_per_s)} samples/s"
    if row.step_s is not None:
        text += f"\nstep {format_seconds(row.step_s)}"
    fill = [size / capacity for size, capacity in row.memory or () if math.isfinite(capacity)]
    return f"{text}, fullest rank {max(fill):.0%}" if fill else text


def _check_ranks(simulation: Simulation, ranks: int, what: str) -> None:
    if ranks != simulation.world_size:
        raise PlanError(
            f"Expected {what} that was simulated, with {simulation.world_size} ranks, but got one "
            f"with {ranks}. Give the same as to simulate()."
        )


def _time_scale(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 1 else (1e3, "ms")


def _byte_scale(prediction: cost.StepPrediction) -> tuple[float, str]:
    most = max(rank.memory_bytes for rank in prediction.ranks)
    return (1 / _GIB, "GiB") if most >= _GIB / 8 else (1.0, "bytes")


def _copies(seen: set[Activity]) -> str:
    return ", copies" if Activity.OFFLOAD in seen else ""


def _figure(
    path: str | PathLike[str], width: float, height: float, *, columns: int = 1
) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure; sizes in inches."""
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise PlanError(
            f"{path}: expected a file name that ends in {', '.join(_SUFFIXES)}, "
            f"but got the suffix {suffix!r}. Rename the file."
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib, which is not installed. "
            "Install it with: pip install 'lightning-cephalo[plot]'"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for one in axes:
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, axes


def _title(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=20)
    axes.text(0, 1, below, transform=axes.transAxes, va="bottom", fontsize=9, color="#555555")


def _legend(figure: Figure, entries: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=label) for label, colour in entries]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9
    )


def _save(figure: Figure, path: str | PathLike[str]) -> None:
    """Write the file whole or not at all, or raise PlanError naming it."""
    with _files.replacing(Path(path)) as beside:
        figure.savefig(beside, dpi=_DPI, facecolor="white")
