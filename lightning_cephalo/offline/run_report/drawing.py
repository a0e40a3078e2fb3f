"""Draws a run as inline SVG: the step of each rank, its memory, and the times of all steps.

Lines and letters take the colour of the page's text, so that they are seen on light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from lightning_cephalo.common.quantities import byte_unit, format_bytes, format_seconds
from lightning_cephalo.offline.canvas import (
    BLUE,
    GREEN,
    GREY,
    OLIVE,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    colours_of,
)
from lightning_cephalo.offline.run_report.lost_time import LostTime
from lightning_cephalo.offline.run_report.markup import Markup, element, joined
from lightning_cephalo.plan.memory_timeline import MemoryTimeline
from lightning_cephalo.plan.program import OPERATIONS, Operation
from lightning_cephalo.plan.timeline import Event, Kind

MOST_RANKS = 16
MOST_MEMORIES = 8
KIND_COLOURS = {
    Kind.OTHER: GREY,
    Kind.PARAMETER_ROWS: BLUE,
    Kind.OPTIMIZER_STATE: GREEN,
    Kind.GRADIENT_ROWS: OLIVE,
    Kind.GATHERED: ORANGE,
    Kind.FULL_GRADIENTS: VERMILION,
    Kind.ACTIVATIONS: SKY,
    Kind.INSIDE: PURPLE,
}
PARTS = (
    ("compute", "compute_s", BLUE),
    ("update", "update_s", GREEN),
    ("waiting for slower ranks", "others_s", VERMILION),
    ("waiting for the network", "network_s", ORANGE),
    ("rest", "rest_s", GREY),
)
_WIDTH, _LEFT, _RIGHT = 1000.0, 150.0, 20.0
_INNER = _WIDTH - _LEFT - _RIGHT
_LANE_HEIGHTS = (16.0, 8.0, 6.0, 6.0)
_GAP = 14.0


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return names beside their colours."""
    return element(
        "p",
        *(
            element("span", _swatch(colour), name, class_="entry")
            for name, colour in dict(entries).items()
        ),
        class_="legend",
    )


def _swatch(colour: str) -> Markup:
    return element(
        "svg",
        element("rect", width=10, height=10, **_fill(colour)),
        width=10,
        height=10,
        aria_hidden="true",
    )


def lost_bars(lost: Sequence[LostTime]) -> Markup:
    """Return a bar for each rank: where the recorded step went."""
    shown = sorted(sorted(lost, key=lambda one: one.others_s)[:MOST_RANKS], key=lambda o: o.rank)
    longest_s = max((one.step_s for one in shown), default=0.0) or 1.0
    rows = []
    for index, one in enumerate(shown):
        top, left = 26.0 * index, _LEFT
        rows.append(_label(_name(one.rank, one.name), top + 13))
        for what, field, colour in PARTS:
            seconds = getattr(one, field)
            width = _INNER * seconds / longest_s
            share = seconds / one.step_s if one.step_s else 0.0
            hint = element("title", f"{what}: {format_seconds(seconds)} ({share:.0%})")
            rows.append(_rectangle(left, top, width, 18, colour, hint))
            if width > 46:
                rows.append(_text(f"{share:.0%}", left + width / 2, top + 13, class_="inside"))
            left += width
    return _drawing("Where the recorded step of each rank went", 26.0 * len(shown), rows)


def step_timeline(timelines: Sequence[MemoryTimeline]) -> Markup:
    """Return what runs when on each rank: device, link, copies, and the host's updates."""
    shown = timelines[:MOST_RANKS]
    end_s = max((one.end_s for one in shown), default=0.0) or 1.0
    rows: list[Markup] = []
    top = 0.0
    for timeline in shown:
        rows.append(_label(_name(timeline.rank, timeline.name), top + 13))
        device, link, copies, host = timeline.lanes()
        device = [*device, *(e for e in timeline.events if e.operation is Operation.WAIT)]
        for events, height in zip((device, link, copies, host), _LANE_HEIGHTS, strict=True):
            if not events and height != _LANE_HEIGHTS[0]:
                continue
            rows.append(_rectangle(_LEFT, top, _INNER, height, "pale"))
            rows += _lane(events, top, height, end_s)
            top += height + 2
        top += _GAP
    return _drawing("One recorded step of each rank", top + 22, [*rows, *_time_axis(top, end_s)])


def operations_in(timelines: Sequence[MemoryTimeline]) -> list[tuple[str, str]]:
    """Return the operations that :func:`step_timeline` draws, with their colours."""
    seen = {event.operation for one in timelines[:MOST_RANKS] for event in one.events}
    return colours_of(seen)


def memory(timeline: MemoryTimeline) -> Markup:
    """Return the memory of a rank by kind over the step, with the plan's peak and the capacity."""
    height, end_s = 150.0, timeline.end_s or 1.0
    lines = [
        (what, size)
        for what, size in (
            ("predicted peak", timeline.planned_bytes),
            ("may use", timeline.capacity_bytes),
        )
        if size is not None and math.isfinite(size)
    ]
    peak = timeline.peak_bytes or 1.0
    lines = [(what, size) for what, size in lines if size < 3 * peak]
    most = 1.08 * max([peak, *(size for _, size in lines)])
    edges = [one.time_s for one in timeline.held] + [end_s]
    xs = [_LEFT + _INNER * min(max(edge, 0.0), end_s) / end_s for edge in edges]
    below = [0.0] * len(timeline.held)
    rows: list[Markup] = []
    for index, kind in enumerate(timeline.kinds):
        above = [low + held.sizes[index] for low, held in zip(below, timeline.held, strict=True)]
        if above != below:
            ys = [[height * (1 - size / most) for size in edge] for edge in (above, below)]
            path = f"M{_steps(xs, ys[0])}L{_steps(xs[::-1], ys[1][::-1])}Z"
            hint = element("title", kind.value)
            rows.append(element("path", hint, d=path, **_fill(KIND_COLOURS[kind])))
        below = above
    for what, size in lines:
        y = height * (1 - size / most)
        dashes = {"stroke_dasharray": "5 4"} if what == "predicted peak" else {}
        rows.append(_line(_LEFT, y, _WIDTH - _RIGHT, y, **dashes))
        rows.append(_text(f"{what} {format_bytes(size)}", _WIDTH - _RIGHT - 4, y - 4, "end"))
    rows += _byte_axis(most, height)
    rows += _time_axis(height, end_s)
    title = f"Memory of rank {timeline.rank} over the recorded step"
    return _drawing(title, height + 24, rows)


def kinds_in(timelines: Sequence[MemoryTimeline]) -> list[tuple[str, str]]:
    """Return the kinds of bytes that are drawn, with their colours."""
    used: list[Kind] = []
    for timeline in timelines[:MOST_MEMORIES]:
        for index, kind in enumerate(timeline.kinds):
            if kind not in used and any(held.sizes[index] for held in timeline.held):
                used.append(kind)
    return [(kind.value, KIND_COLOURS[kind]) for kind in used]


def steps_over_time(steps_s: Sequence[float], predicted_s: float | None) -> Markup:
    """Return the time of every step, with the plan's prediction."""
    height = 90.0
    # a single slow step must not flatten all others
    most = 1.15 * max(min(max(steps_s), 4 * median(steps_s)), predicted_s or 0.0) or 1.0
    width = _INNER / len(steps_s)
    points = " ".join(
        f"{_LEFT + (index + 0.5) * width:.1f},{height * (1 - min(step_s / most, 1)):.1f}"
        for index, step_s in enumerate(steps_s)
    )
    rows = [element("polyline", points=points, class_="trend")]
    if predicted_s:
        y = height * (1 - predicted_s / most)
        rows.append(_line(_LEFT, y, _WIDTH - _RIGHT, y, stroke_dasharray="5 4"))
        rows.append(
            _text(f"predicted {format_seconds(predicted_s)}", _WIDTH - _RIGHT - 4, y - 4, "end")
        )
    for part in (0.5, 1.0):
        size = most / 1.15 * part
        rows.append(_text(format_seconds(size), _LEFT - 8, height * (1 - size / most) + 4, "end"))
    rows.append(_line(_LEFT, height, _WIDTH - _RIGHT, height))
    rows.append(_text("first step", _LEFT, height + 16))
    rows.append(_text("last step", _WIDTH - _RIGHT, height + 16, "end"))
    return _drawing("Seconds of each step", height + 22, rows)


# -- parts ----------------------------------------------------------------------------------------


def _lane(events: Iterable[Event], top: float, height: float, end_s: float) -> list[Markup]:
    """Return one path for each operation; neighbours that no eye can tell apart become one."""
    spans: dict[Operation, list[tuple[float, float]]] = {}
    for event in sorted(events, key=lambda event: event.start_s):
        left, right = (
            _LEFT + _INNER * min(max(time_s, 0.0), end_s) / end_s
            for time_s in (event.start_s, event.end_s)
        )
        found = spans.setdefault(event.operation, [])
        if found and left - found[-1][1] < 0.2:
            found[-1] = found[-1][0], max(found[-1][1], right)
        else:
            found.append((left, right))
    return [
        element(
            "path",
            element("title", operation.value),
            d="".join(
                f"M{left:.2f} {top:.1f}h{max(right - left, 0.15):.2f}v{height:.1f}H{left:.2f}Z"
                for left, right in found
            ),
            **_fill(OPERATIONS[operation].colour),
        )
        for operation, found in spans.items()
    ]


def _steps(xs: Sequence[float], ys: Sequence[float]) -> str:
    """Return the points of steps between ``xs``, of which there is one more than of ``ys``."""
    return "L".join(
        f"{left:.2f} {y:.2f}L{right:.2f} {y:.2f}"
        for left, right, y in zip(xs, xs[1:], ys, strict=False)
    )


def _time_axis(top: float, end_s: float) -> list[Markup]:
    rows = [_line(_LEFT, top, _WIDTH - _RIGHT, top)]
    for part in range(5):
        x, anchor = _LEFT + _INNER * part / 4, "end" if part == 4 else "middle" if part else "start"
        rows.append(_text(format_seconds(end_s * part / 4), x, top + 16, anchor))
    return rows


def _byte_axis(most: float, height: float) -> list[Markup]:
    unit, unit_bytes = byte_unit(most)
    rows = []
    for part in (0.0, 0.5, 0.9):
        label = f"{most * part / unit_bytes:.3g} {unit}" if part else "0"
        rows.append(_text(label, _LEFT - 8, height * (1 - part) + 4, "end"))
    return rows


def _name(rank: int, name: str) -> str:
    whole = f"rank {rank} {name}".strip()
    return whole if len(whole) <= 22 else f"{whole[:21]}…"


def _label(text: str, y: float) -> Markup:
    return _text(text, 0, y)


def _text(text: str, x: float, y: float, anchor: str = "start", **more: str) -> Markup:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, **more)


def _rectangle(
    left: float, top: float, width: float, height: float, colour: str, *content: Markup
) -> Markup:
    return element(
        "rect",
        *content,
        x=f"{left:.2f}",
        y=f"{top:.1f}",
        width=f"{max(width, 0.0):.2f}",
        height=f"{height:.1f}",
        **_fill(colour),
    )


def _line(left: float, top: float, right: float, bottom: float, **more: str) -> Markup:
    ends = {"x1": left, "y1": top, "x2": right, "y2": bottom}
    return element("line", **{key: f"{value:.1f}" for key, value in ends.items()}, **more)


def _fill(colour: str) -> dict[str, str]:
    """Return the attribute for a colour; names are those of the page's style."""
    return {"fill": colour} if colour.startswith("#") else {"class_": colour}


def _drawing(title: str, height: float, content: Iterable[Markup]) -> Markup:
    return element(
        "svg",
        element("title", title),
        joined(content),
        viewBox=f"0 -14 {_WIDTH:.0f} {height + 14:.0f}",
        role="img",
        class_="drawing",
    )
