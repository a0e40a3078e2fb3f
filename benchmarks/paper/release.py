"""Reads entries of the paper's released profiles: lines and measured points, with checks."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import PlanError

# In the older form forward and backward are one line. On each device with both forms (GPT-1.3B fp16
# on A6000, L4 and P40), forward is 0.40 of that line.
_FORWARD_SHARE = 0.4


@dataclass(frozen=True)
class Line:
    """Milliseconds by microbatch size: measured points first, then a line."""

    slope: float
    intercept: float
    points: tuple[float, ...] = ()

    def seconds(self, largest: int) -> tuple[float, ...]:
        first = max(1, math.floor(-self.intercept / self.slope) + 1) if self.slope > 0 else 1
        longest = max(self.points, default=0.0)
        line = [
            max(longest, self.slope * max(size, first) + self.intercept)
            for size in range(len(self.points) + 1, largest + 1)
        ]
        return tuple(value / 1000 for value in [*self.points, *line][:largest])


def read_lines(where: str, value: Any) -> tuple[Line, Line, int]:
    """Return the forward, the backward without recompute, and the number of measured sizes."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [value, 0.0]
    parts = records.items(where, value, of="lines and points")
    if len(parts) == 2 and not any(isinstance(part, list) for part in parts):
        slope, intercept = _slope_and_intercept(where, parts)
        forward = Line(_FORWARD_SHARE * slope, _FORWARD_SHARE * intercept)
        rest = 1 - _FORWARD_SHARE
        return forward, Line(rest * slope, rest * intercept), 0
    if len(parts) not in (2, 4):
        raise PlanError(
            f"{where}: expected 2 entries (lines) or 4 (lines and measured points), "
            f"but got {len(parts)}: {records.shortened(value)}."
        )
    lines = [_slope_and_intercept(f"{where}[{index}]", parts[index]) for index in range(2)]
    points = [as_points(f"{where}[{index}]", parts[index]) for index in range(2, len(parts))]
    if not points:
        return Line(*lines[0]), Line(*lines[1]), 0
    if len(points[0]) != len(points[1]):
        raise PlanError(
            f"{where}: expected as many measured points of the forward as of the backward, "
            f"but got {len(points[0])} and {len(points[1])}."
        )
    return Line(*lines[0], points[0]), Line(*lines[1], points[1]), len(points[0])


def _slope_and_intercept(where: str, value: Any) -> tuple[float, float]:
    parts = records.items(where, value, of="a slope and an intercept")
    if len(parts) != 2:
        raise PlanError(
            f"{where}: expected a slope and an intercept, but got {records.shortened(value)}."
        )
    slope = records.real(f"{where}: slope", parts[0], above_minimum=True)
    # only the absolute value is checked, as intercepts may be negative
    intercept = parts[1]
    records.real(f"{where}: size of the intercept", _size(intercept))
    return slope, float(intercept)


def _size(value: Any) -> Any:
    return abs(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def as_points(where: str, value: Any) -> tuple[float, ...]:
    entries = records.items(where, value, of="numbers")
    return tuple(
        records.real(f"{where} at microbatch size {size}", entry, above_minimum=True)
        for size, entry in enumerate(entries, start=1)
    )


def as_mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(
            f"{where}: expected a mapping, but got {records.shortened(value)}. "
            f"Use the files as published."
        )
    return value


def expect_known(field: str, name: Any, known: Iterable[str]) -> None:
    names = [str(entry) for entry in known]
    if name in names:
        return
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise PlanError(f"{field}: expected one of {', '.join(names)}, but got {name!r}.{hint}")
