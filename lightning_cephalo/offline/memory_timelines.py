"""``cephalo memory-timeline``: one step by phase, as tables and as a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import (
    ABSENT,
    byte_unit,
    format_bytes,
    format_seconds,
)
from lightning_cephalo.common.texts import printable
from lightning_cephalo.offline.canvas import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    OLIVE,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    add_legend,
    add_title,
    empty_figure,
    save,
)
from lightning_cephalo.plan import Plan, Problem, cost
from lightning_cephalo.plan.memory_timeline import MemoryTimeline, Way, busy, rate
from lightning_cephalo.plan.timeline import Held, Kind, Phase, Simulation, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIND_COLOURS = {
    Kind.OTHER: GREY,
    Kind.PARAMETER_ROWS: BLUE,
    Kind.OPTIMIZER_STATE: GREEN,
    Kind.GRADIENT_ROWS: OLIVE,
    Kind.STATE: BLUE,
    Kind.GATHERED: ORANGE,
    Kind.FULL_GRADIENTS: VERMILION,
    Kind.BUFFERS: ORANGE,
    Kind.ACTIVATIONS: SKY,
    Kind.INSIDE: PURPLE,
}
_WAY_COLOURS = {
    Way.GATHERED: ORANGE,
    Way.REDUCED: VERMILION,
    Way.TO_HOST: YELLOW,
    Way.TO_DEVICE: OLIVE,
}
_LANES = ("device", "link", "copies", "host")
_ROWS = 8
_BINS = 120
_LINK_NOTES = {
    True: "link in use: a transfer runs; a simulation knows no bytes of collectives",
    False: "link in use: a collective is under way, waiting for other ranks included",
}


def simulated(simulation: Simulation, problem: Problem, plan: Plan) -> tuple[MemoryTimeline, ...]:
    """Return a simulated step of each kind of rank, with the planner's own prediction of its peak.

    Raises:
        PlanError: The plan does not match the problem.
    """
    predicted = cost.predict(problem, plan).ranks
    return tuple(
        MemoryTimeline.of_simulation(
            timeline,
            problem.ranks[timeline.ranks[0]].name,
            predicted[timeline.ranks[0]].memory_bytes,
            problem.ranks[timeline.ranks[0]].capacity_bytes,
        )
        for timeline in simulation.timelines
    )


# -- tables ---------------------------------------------------------------------------------------


def tables(timelines: Sequence[MemoryTimeline]) -> list[Table]:
    """Return a table for each kind of rank: what it holds and moves, and what is busy, by phase.

    Of more than eight kinds of ranks, the eight with the highest peaks are shown.
    """
    return [_table(timeline) for timeline in _fullest(timelines, _ROWS)]


def _table(timeline: MemoryTimeline) -> Table:
    phases = timeline.summary()
    how = "simulated" if timeline.is_simulated else "recorded"
    table = Table(
        title=f"{_label(timeline)}: one {how} step",
        caption=f"{peak_text(timeline)}\n{_LINK_NOTES[timeline.is_simulated]}",
        caption_justify="left",
    )
    table.add_column("")
    for phase in phases:
        table.add_column(phase.phase.value, justify="right")
    table.add_row("time", *(format_seconds(phase.seconds) for phase in phases), end_section=True)
    if timeline.held:
        table.add_row("device, at its peak", *(format_bytes(one.device_bytes) for one in phases))
        for index, kind in enumerate(timeline.kinds):
            sizes = [phase.sizes[index] for phase in phases]
            if any(sizes):
                table.add_row(f"  {kind.value}", *map(_moved, sizes))
    else:
        table.add_row("device, at its peak", *(ABSENT for _ in phases))
    table.add_row("host", *(_moved(phase.host_bytes) for phase in phases), end_section=True)
    for heading, sizes in (
        ("gathered from other ranks", [phase.gathered_bytes for phase in phases]),
        ("reduced to other ranks", [phase.reduced_bytes for phase in phases]),
        ("copied to the host", [phase.to_host_bytes for phase in phases]),
        ("copied to the device", [phase.to_device_bytes for phase in phases]),
    ):
        table.add_row(heading, *map(_moved, sizes))
    table.add_section()
    device, link, copies, host = timeline.lanes()
    for heading, events, shares in (
        ("device computes", device, [phase.compute_busy for phase in phases]),
        ("link in use", link, [phase.link_busy for phase in phases]),
        ("copies to and from the host", copies, [phase.copy_busy for phase in phases]),
        ("host updates", host, [phase.host_busy for phase in phases]),
    ):
        # nothing of the kind was seen, which does not say that there was nothing
        table.add_row(heading, *(f"{share:.0%}" if events else ABSENT for share in shares))
    return table


def peak_text(timeline: MemoryTimeline) -> str:
    """Return the peak beside the plan's prediction and the capacity, as a sentence."""
    how = "simulated" if timeline.is_simulated else "measured"
    peak, planned = timeline.peak_bytes, timeline.planned_bytes
    parts = ["peak not measured" if peak is None else f"peak {format_bytes(peak)} {how}"]
    if planned is not None:
        difference = f" ({peak / planned - 1:+.1%})" if peak is not None and planned else ""
        parts.append(f"{format_bytes(planned)} predicted by the plan{difference}")
    if timeline.capacity_bytes is not None and math.isfinite(timeline.capacity_bytes):
        parts.append(f"of {format_bytes(timeline.capacity_bytes)} that it may use")
    return ", ".join(parts)


def as_dict(timeline: MemoryTimeline) -> dict[str, Any]:
    """Return the phases of a timeline, for JSON."""
    return {
        "ranks": list(timeline.ranks),
        "name": timeline.name,
        "simulated": timeline.is_simulated,
        "peak_bytes": timeline.peak_bytes,
        "planned_bytes": timeline.planned_bytes,
        "phases": [
            {
                "phase": one.phase.value,
                "seconds": one.seconds,
                "device_bytes": one.device_bytes,
                "kinds": {
                    kind.value: size for kind, size in zip(timeline.kinds, one.sizes, strict=False)
                },
                "host_bytes": one.host_bytes,
                "gathered_bytes": one.gathered_bytes,
                "reduced_bytes": one.reduced_bytes,
                "to_host_bytes": one.to_host_bytes,
                "to_device_bytes": one.to_device_bytes,
                "compute_busy": one.compute_busy,
                "link_busy": one.link_busy,
                "copy_busy": one.copy_busy,
                "host_busy": one.host_busy,
            }
            for one in timeline.summary()
        ],
    }


def _label(timeline: MemoryTimeline) -> str:
    if len(timeline.ranks) > 1:
        return printable(f"{len(timeline.ranks)} × {timeline.name}")
    name = f" ({timeline.name})" if timeline.name else ""
    return printable(f"rank {timeline.ranks[0]}{name}")


def _moved(size: float) -> str:
    return format_bytes(size) if size else ABSENT


def _fullest(timelines: Sequence[MemoryTimeline], most: int) -> list[MemoryTimeline]:
    fullest = sorted(timelines, key=lambda one: -(one.peak_bytes or 0.0))[:most]
    return sorted(fullest, key=lambda one: one.ranks)


# -- the figure -----------------------------------------------------------------------------------


def memory_timeline_figure(timelines: Sequence[MemoryTimeline], path: str | PathLike[str]) -> None:
    """Draw the bytes by kind over the phases of a step, traffic each way, and busy shares.

    Of more than eight kinds of ranks, the eight with the highest peaks are drawn.

    Args:
        timelines: Simulated or recorded ones.
        path: Of the file, ending in ``.png`` or ``.svg``.

    Raises:
        ImportError: matplotlib is not installed.
        PlanError: There is no timeline, the suffix is another one, or the file cannot be written.
    """
    if not timelines:
        raise PlanError("Expected the timeline of at least one rank to draw, but got none.")
    shown = _fullest(timelines, _ROWS)
    ways = [way for way in Way if any(rate(one.events, way) for one in shown)]
    parts = (3.0, 1.0, 0.8) if ways else (3.0, 0.8)
    height = 1.2 + 0.8 * sum(parts) * len(shown)
    figure, axes = empty_figure(path, 12, height, rows=parts * len(shown))
    end_s = max(timeline.end_s for timeline in shown)
    scale, time_unit = (1.0, "s") if end_s >= 1 else (1e3, "ms")
    unit, unit_bytes = byte_unit(max((one.peak_bytes or 0.0 for one in shown), default=0.0))
    rate_unit, per_unit = _rate_unit(shown)
    for index, timeline in enumerate(shown):
        memory, *traffic, lanes = axes[len(parts) * index : len(parts) * (index + 1)]
        for one in (memory, *traffic, lanes):
            _shade(one, timeline.phases, scale)
        _draw_memory(memory, timeline, scale, unit_bytes)
        memory.set_ylabel(unit)
        add_title(memory, _label(timeline), peak_text(timeline))
        for one in traffic:
            _draw_traffic(one, timeline, scale, per_unit)
            one.set_ylabel(rate_unit)
        _draw_lanes(lanes, timeline, scale)
    axes[0].set_xlim(0, end_s * scale or 1)
    axes[-1].set_xlabel(f"time in the step ({time_unit})")
    used = dict.fromkeys(kind for timeline in shown for kind in _used_kinds(timeline))
    add_legend(
        figure,
        [(kind.value, KIND_COLOURS[kind]) for kind in used]
        + [(f"traffic {way.value}", _WAY_COLOURS[way]) for way in ways],
    )
    save(figure, path)


def _rate_unit(timelines: Sequence[MemoryTimeline]) -> tuple[str, float]:
    points = [point for one in timelines for way in Way for point in rate(one.events, way)]
    most = max((per_s for _, per_s in points), default=0.0)
    units = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))
    return next((pair for pair in units if most >= pair[1]), ("B/s", 1.0))


def _used_kinds(timeline: MemoryTimeline) -> Iterator[Kind]:
    for index, kind in enumerate(timeline.kinds):
        if any(held.sizes[index] for held in timeline.held):
            yield kind


def _shade(axes: Axes, phases: Sequence[Span], scale: float) -> None:
    for span in phases:
        if span.phase is Phase.BACKWARD:
            axes.axvspan(span.start_s * scale, span.end_s * scale, color=PALE, linewidth=0)
        elif span.phase is Phase.UPDATE:
            axes.axvspan(span.start_s * scale, span.end_s * scale, color="#d4ead9", linewidth=0)


def _draw_memory(axes: Axes, timeline: MemoryTimeline, scale: float, unit_bytes: float) -> None:
    held = [*timeline.held]
    if held:
        held.append(Held(timeline.end_s, held[-1].sizes))
    times = [one.time_s * scale for one in held]
    below = [0.0] * len(held)
    for index, kind in enumerate(timeline.kinds):
        above = [low + one.sizes[index] / unit_bytes for low, one in zip(below, held, strict=True)]
        if above != below:
            axes.fill_between(
                times, below, above, step="post", color=KIND_COLOURS[kind], linewidth=0
            )
        below = above
    for size, style in ((timeline.planned_bytes, "--"), (timeline.capacity_bytes, "-")):
        if size is not None and math.isfinite(size) and size < 4 * max(timeline.peak_bytes or 0, 1):
            axes.axhline(size / unit_bytes, color=BLACK, linestyle=style, linewidth=1)
    axes.set_ylim(bottom=0)


def _draw_traffic(axes: Axes, timeline: MemoryTimeline, scale: float, per_unit: float) -> None:
    most = 0.0
    for way in Way:
        points = rate(timeline.events, way)
        if not points:
            continue
        times = [0.0, *(time_s * scale for time_s, _ in points), timeline.end_s * scale]
        rates = [0.0, *(per_s / per_unit for _, per_s in points), 0.0]
        axes.step(times, rates, where="post", color=_WAY_COLOURS[way], linewidth=1)
        most = max(most, *rates)
    axes.set_ylim(0, 1.1 * most or 1)


def _draw_lanes(axes: Axes, timeline: MemoryTimeline, scale: float) -> None:
    """Draw the busy share of each lane in short pieces of the step, the darker the busier."""
    width_s = timeline.end_s / _BINS if timeline.end_s else 1.0
    for row, events in enumerate(timeline.lanes()):
        for index in range(_BINS):
            span = Span(Phase.FORWARD, index * width_s, (index + 1) * width_s)
            share = busy(events, span)
            if share:
                axes.broken_barh(
                    [(span.start_s * scale, width_s * scale)],
                    (row + 0.1, 0.8),
                    facecolors=BLACK,
                    alpha=share,
                    linewidth=0,
                )
    axes.set_ylim(len(_LANES), 0)
    axes.set_yticks([row + 0.5 for row in range(len(_LANES))], _LANES, fontsize=8)
    axes.tick_params(axis="y", length=0)
