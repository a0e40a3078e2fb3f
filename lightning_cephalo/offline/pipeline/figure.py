"""Draws what stages do in a step, and the seconds of a step over the bandwidth between nodes."""

from __future__ import annotations

import math
from os import PathLike

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.figures import INK, VERMILION, add_title, drawing, timeline
from lightning_cephalo.offline.pipeline.crossover import Crossover
from lightning_cephalo.offline.pipeline.plan import Advice
from lightning_cephalo.offline.pipeline.text import crossover_text


def pipeline_figure(advice: Advice, crossover: Crossover, path: str | PathLike[str]) -> None:
    """Draw the stages of the fastest pipeline, and where pipelines win."""
    if advice.best is None:
        raise PlanError("pipeline_figure: expected a pipeline to draw, but none fits.")
    events = advice.best.simulate()
    rows = []
    for at, planned in enumerate(advice.best.stages):
        names = [advice.problem.blocks[block].name for block in planned.stage.blocks]
        rows.append((f"{planned.stage.units} units on\n" + "\n".join(names), events[at]))
    end_s = max(event.end_s for own in events for event in own)
    height = max(3.6, 1.6 + 0.62 * len(rows))
    with drawing(path, height, columns=2) as (stages, curves):
        timeline(stages, rows, end_s)
        add_title(stages, "What stages do", "simulated; advice only: training has no pipelines")
        rates = [point.bandwidth_bytes_per_s / 1e9 for point in crossover.points]
        for label, colour, seconds in (
            ("one stage of all ranks (at least)", INK, [p.today_s for p in crossover.points]),
            ("fastest pipeline", VERMILION, [p.pipeline_s for p in crossover.points]),
        ):
            drawn = [one if math.isfinite(one) else math.nan for one in seconds]
            curves.plot(rates, drawn, color=colour, marker="o", markersize=3, label=label)
        curves.set(xscale="log", xlabel="slowest bandwidth between nodes (GB/s)")
        curves.set(yscale="log", ylabel="predicted step (s)")
        for axis in (curves.xaxis, curves.yaxis):
            axis.set_major_formatter("{x:g}")
        curves.legend()
        add_title(curves, "Where a pipeline wins", crossover_text(crossover))
