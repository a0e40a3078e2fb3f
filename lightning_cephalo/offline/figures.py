"""Figures of simulations and comparisons; needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import GIB, format_rate, format_seconds
from lightning_cephalo.offline.canvas import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    add_legend,
    add_title,
    colours_of,
    empty_figure,
    end_of_labels,
    save,
)
from lightning_cephalo.plan import Plan, Problem, cost
from lightning_cephalo.plan.program import OPERATIONS, Operation
from lightning_cephalo.plan.timeline import Event, Simulation, Stream, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 16
_LINES = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
_MEMORY_PARTS = (
    ("state", BLUE),
    ("gathered buffers", ORANGE),
    ("boundaries and kept activations", SKY),
    ("peak of a microbatch", PURPLE),
)
# Top and height of each stream's bar in a row of height 1, measured from the row's top.
_PLACES = {
    Stream.COMPUTE: (0.08, 0.44),
    Stream.COMMUNICATION: (0.54, 0.2),
    Stream.REDUCTION: (0.54, 0.2),
}
_COPY_PLACE = (0.76, 0.16)
_STATE_PLACES = {
    Stream.TO_DEVICE: (0.76, 0.05),
    Stream.TO_HOST: (0.82, 0.05),
    Stream.HOST: (0.88, 0.05),
}


@dataclass(frozen=True)
class ComparisonRow:
    name: str
    step_s: float | None = None
    samples_per_s: float | None = None
    memory: tuple[tuple[float, float], ...] | None = None
    reason: str = ""


def timeline_figure(simulation: Simulation, problem: Problem, path: str | PathLike[str]) -> None:
    """Draw the streams of every rank over one step; beyond 16 rows only the busiest are drawn."""
    _check_ranks(simulation, len(problem.ranks), "the problem")
    rows, left_out = _rows(simulation, problem)
    figure, (axes,) = empty_figure(path, 13, 1.6 + 0.62 * len(rows))
    scale, unit = time_scale(simulation.step_s)
    seen: set[Operation] = set()
    for row, (_, timeline) in enumerate(rows):
        seen |= draw_streams(axes, row, timeline.events, simulation.step_s, scale)
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
    add_title(
        axes,
        f"One step of {simulation.world_size} ranks, {format_seconds(simulation.step_s)}",
        f"upper bar: compute, below: communication{_copies(seen)}{left_out}",
    )
    add_legend(figure, colours_of(seen))
    save(figure, path)


def memory_figure(
    simulation: Simulation, problem: Problem, plan: Plan, path: str | PathLike[str]
) -> None:
    """Draw every rank's memory: bars are predicted by ``plan/cost.py``, lines are simulated."""
    _check_ranks(simulation, len(problem.ranks), "the problem")
    _check_ranks(simulation, len(plan.ranks), "the plan")
    rows, left_out = _rows(simulation, problem)
    figure, (bars, lines) = empty_figure(path, 13, 2.2 + 0.42 * len(rows), columns=2)
    scale, unit = _byte_scale(cost.predict(problem, plan))
    _draw_memory_bars(bars, rows, problem, plan, scale)
    bars.set_xlabel(f"predicted memory ({unit})")
    add_title(bars, "What fills the memory", f"black mark: capacity, red name: over it{left_out}")
    _draw_memory_lines(lines, rows, problem, simulation.step_s, scale)
    lines.set_ylabel(f"simulated memory ({unit})")
    add_title(lines, "Memory over one step", "kept in the forward, released in the backward")
    add_legend(figure, _MEMORY_PARTS)
    save(figure, path)


def comparison_figure(rows: Sequence[ComparisonRow], path: str | PathLike[str]) -> None:
    """Draw the throughput of allocations as bars; allocations that cannot run are marked."""
    if not rows:
        raise PlanError("comparison_figure: expected at least one row to compare, but got none.")
    figure, (axes,) = empty_figure(path, 9, 1.4 + 0.6 * len(rows))
    most = max(row.samples_per_s or 0.0 for row in rows) or 1.0
    labels = []
    for index, row in enumerate(rows):
        colour = BLUE if index == len(rows) - 1 else SKY
        if row.samples_per_s is None:
            axes.barh(index, most, height=0.62, color="none", edgecolor=PALE, hatch="////")
            # more lines would run into the next row; the table has the whole reason
            text = textwrap.fill(
                f"cannot run: {row.reason}".rstrip(": "), 70, max_lines=3, placeholder=" …"
            )
            colour, at = VERMILION, 0.0
        else:
            axes.barh(index, row.samples_per_s, height=0.62, color=colour, linewidth=0)
            text, colour, at = _throughput(row), BLACK, row.samples_per_s
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
    add_title(axes, "Allocations compared", "longer is better")
    # wide at first, as the layout narrows axes if labels extend beyond them
    axes.set_xlim(0, 3 * most)
    axes.set_xlim(0, max(1.05 * most, end_of_labels(figure, axes, labels)))
    save(figure, path)


def _rows(simulation: Simulation, problem: Problem) -> tuple[list[tuple[str, Timeline]], str]:
    """Return labels and timelines to draw, and a note on the rows that are left out."""
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


def draw_streams(
    axes: Axes, row: int, events: Sequence[Event], step_s: float, scale: float
) -> set[Operation]:
    """Draw the streams of a rank in one row, and return the operations in it."""
    places, used = dict(_PLACES), {event.stream for event in events}
    if Stream.COPY in used:
        places[Stream.COPY] = _COPY_PLACE
    if used & _STATE_PLACES.keys():
        places |= _STATE_PLACES
    spans: dict[tuple[Stream, Operation], list[tuple[float, float]]] = {}
    for event in events:
        span = (event.start_s * scale, (event.end_s - event.start_s) * scale)
        spans.setdefault((event.stream, event.operation), []).append(span)
    for top, height in dict.fromkeys(places.values()):
        axes.broken_barh([(0, step_s * scale)], (row + top, height), facecolors=PALE)
    for (stream, name), found in spans.items():
        top, height = places[stream]
        # a white seam between neighbours, but only where the bars are wider than the seam
        wide = sum(width for _, width in found) / len(found) > 0.004 * step_s * scale
        axes.broken_barh(
            found,
            (row + top, height),
            facecolors=OPERATIONS[name].colour,
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
            axes.plot([limit, limit], [row - 0.42, row + 0.42], color=BLACK, linewidth=2)
            longest = max(longest, limit)
        if left > limit * (1 + 1e-9):
            axes.get_yticklabels()[row].set_color(VERMILION)
    axes.set_xlim(0, 1.06 * longest or 1)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _draw_memory_lines(
    axes: Axes,
    rows: Sequence[tuple[str, Timeline]],
    problem: Problem,
    step_s: float,
    scale: float,
) -> None:
    """Draw one line for all equal ranks, as their lines would hide each other."""
    seconds, unit = time_scale(step_s)
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
    """Return the bytes of each part at the moment of the step at which the rank holds the most."""
    problem = cost.as_planned(problem, plan)
    part, profile = plan.ranks[rank], problem.ranks[rank]
    mode, sizes = cost.Mode.of(part), part.microbatch_sizes
    need = max(
        (needed(problem, profile, mode) for needed in cost.DEVICE_NEEDS),
        key=lambda need: part.state_fraction * need.state + need.of(sizes),
    )
    held = need.kept(part.batch_size, len(part.microbatch_sizes))
    working = need.of(part.microbatch_sizes)
    return part.state_fraction * need.state, need.fixed, held, working - need.fixed - held


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


def time_scale(seconds: float) -> tuple[float, str]:
    """Return the units of a time axis per second, and their name."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms")


def _byte_scale(prediction: cost.StepPrediction) -> tuple[float, str]:
    most = max(rank.memory_bytes for rank in prediction.ranks)
    return (1 / GIB, "GiB") if most >= GIB / 8 else (1.0, "bytes")


def _copies(seen: set[Operation]) -> str:
    return ", copies" if Operation.OFFLOAD in seen else ""
