"""Draws what stages do in a step, and the seconds of a step over the bandwidth between nodes."""

from __future__ import annotations

import math
from os import PathLike

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.canvas import (
    BLACK,
    BLUE,
    GREEN,
    PALE,
    SKY,
    VERMILION,
    add_legend,
    add_title,
    empty_figure,
    save,
)
from lightning_cephalo.offline.pipeline.crossover import Crossover
from lightning_cephalo.offline.pipeline.plan import Advice
from lightning_cephalo.offline.pipeline.simulate import Work
from lightning_cephalo.offline.pipeline.text import crossover_text

_COLOURS = {Work.FORWARD: SKY, Work.BACKWARD: BLUE, Work.UPDATE: GREEN}


def pipeline_figure(advice: Advice, crossover: Crossover, path: str | PathLike[str]) -> None:
    """Draw the stages of the fastest pipelines, and where pipelines win."""
    if advice.best is None:
        raise PlanError("pipeline_figure: expected a pipeline to draw, but none fits.")
    stages = sum(len(pipeline.stages) for pipeline in advice.best.pipelines)
    figure, (lanes, curves) = empty_figure(path, 13, max(3.6, 1.6 + 0.62 * stages), columns=2)
    row, labels = 0, []
    for pipeline in advice.best.pipelines:
        for span in pipeline.simulate().spans:
            lanes.broken_barh(
                [(span.start_s, span.end_s - span.start_s)],
                (row + span.stage + 0.1, 0.8),
                facecolors=_COLOURS[span.work],
                edgecolors="white",
                linewidth=0.3,
            )
        for planned in pipeline.stages:
            names = [advice.problem.blocks[block].name for block in planned.stage.blocks]
            labels.append(f"{planned.stage.units} units on\n" + "\n".join(names))
        row += len(pipeline.stages)
    lanes.set_ylim(stages, 0)
    lanes.set_yticks([index + 0.5 for index in range(stages)], labels)
    lanes.tick_params(axis="y", length=0)
    lanes.set_facecolor(PALE)
    lanes.set_xlabel("time in the step (s)")
    add_title(lanes, "What stages do", "simulated; advice only: training does not run pipelines")
    add_legend(figure, [(work.value, colour) for work, colour in _COLOURS.items()])
    rates = [point.bandwidth_bytes_per_s / 1e9 for point in crossover.points]
    for label, colour, seconds in (
        ("one stage of all ranks (at least)", BLACK, [p.today_s for p in crossover.points]),
        ("fastest pipeline", VERMILION, [p.pipeline_s for p in crossover.points]),
    ):
        drawn = [one if math.isfinite(one) else math.nan for one in seconds]
        curves.plot(rates, drawn, color=colour, marker="o", markersize=3, label=label)
    curves.set_xscale("log")
    curves.set_yscale("log")
    curves.set_xlabel("slowest bandwidth between nodes (GB/s)")
    curves.set_ylabel("predicted step (s)")
    curves.legend(frameon=False, fontsize=9)
    add_title(curves, "Where a pipeline wins", crossover_text(crossover))
    save(figure, path)
