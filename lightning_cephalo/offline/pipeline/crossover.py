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
from lightning_cephalo.offline.pipeline.search import Planned, advise, least_step_s

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
    """The points by bandwidth, and the fastest of those below which pipelines win; 0: none."""

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
    points: dict[float, Point] = {}
    deadline = time.perf_counter() + time_limit_s

    def wins(factor: float) -> bool:
        problem = problem_at(factor)
        links = (link for row in problem.network.between for link in row if link is not None)
        slowest = min(link.bandwidth_bytes_per_s for link in links)
        left_s = max(deadline - time.perf_counter(), _LEAST_S)
        today_s = least_step_s(problem.whole)
        best = advise(problem, today_s, planned=planned, time_limit_s=left_s / 2).best
        points[factor] = Point(slowest, today_s, best.step_s if best else math.inf)
        return points[factor].pipeline_wins

    def found(bandwidth_bytes_per_s: float) -> Crossover:
        return Crossover(bandwidth_bytes_per_s, tuple(points[at] for at in sorted(points)))

    won = wins(1.0)
    step = 2.0 if won else 0.5
    factors = [step**octave for octave in range(1, _OCTAVES + 1)]
    turn = next((factor for factor in factors if wins(factor) != won), None)
    if turn is None:
        return found(math.inf if won else 0.0)
    below, above = sorted((turn, turn / step))
    for _ in range(_HALVINGS):
        middle = math.sqrt(below * above)
        below, above = (middle, above) if wins(middle) else (below, middle)
    return found(points[below].bandwidth_bytes_per_s)
