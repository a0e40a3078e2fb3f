"""The bandwidth between nodes below which a pipeline certainly wins, by the predicted times.

At each factor on the bandwidths, the fastest pipelines are searched again, and compared with
seconds that no plan of one stage beats. So a little above, a pipeline may still win.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.offline.pipeline.search import Planned, fastest, least_step_s

# Factors tried: up to 256 times as fast or as slow, then to within a few per cent.
_OCTAVES = 8
_HALVINGS = 4
# Seconds of a search, even if time is up.
_LEAST_S = 0.01


@dataclass(frozen=True)
class Point:
    """Seconds of a step where the slowest link between nodes has some bandwidth."""

    bandwidth_bytes_per_s: float
    today_s: float
    pipeline_s: float

    @property
    def pipeline_wins(self) -> bool:
        """Whether pipelines are certainly faster."""
        return self.pipeline_s < self.today_s


@dataclass(frozen=True)
class Crossover:
    bandwidth_bytes_per_s: float
    points: tuple[Point, ...]


def find_crossover(
    problem_at: Callable[[float], PipelineProblem],
    *,
    planned: Planned | None = None,
    time_limit_s: float = 60.0,
) -> Crossover:
    """Return the bandwidth below which pipelines win."""
    planned = planned or Planned()
    points: list[Point] = []
    deadline = time.perf_counter() + time_limit_s

    def wins(factor: float) -> bool:
        left_s = max(deadline - time.perf_counter(), _LEAST_S)
        point = _point(problem_at(factor), planned, left_s / 2)
        points.append(point)
        return point.pipeline_wins

    won = wins(1.0)
    step = 2.0 if won else 0.5
    factor = 1.0
    for _ in range(_OCTAVES):
        factor *= step
        if wins(factor) != won:
            break
    else:
        return Crossover(math.inf if won else 0.0, _sorted(points))
    below, above = (factor / 2, factor) if won else (factor, factor * 2)
    for _ in range(_HALVINGS):
        middle = math.sqrt(below * above)
        below, above = (middle, above) if wins(middle) else (below, middle)
    slowest = _slowest(problem_at(1.0))
    return Crossover(below * slowest, _sorted(points))


def _point(problem: PipelineProblem, planned: Planned, time_limit_s: float) -> Point:
    best, _, _ = fastest(problem, planned=planned, time_limit_s=time_limit_s)
    step_s = best.step_s if best else math.inf
    return Point(_slowest(problem), least_step_s(problem.whole), step_s)


def _slowest(problem: PipelineProblem) -> float:
    between = problem.network.between
    return min(link.bandwidth_bytes_per_s for row in between for link in row if link is not None)


def _sorted(points: list[Point]) -> tuple[Point, ...]:
    return tuple(sorted(points, key=lambda point: point.bandwidth_bytes_per_s))
