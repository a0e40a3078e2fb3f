"""The advice in words and as a table."""

from __future__ import annotations

import math
from collections import Counter

from rich.table import Table

from lightning_cephalo.common.quantities import BYTES_PER_S, format_seconds
from lightning_cephalo.offline.pipeline.crossover import Crossover
from lightning_cephalo.offline.pipeline.plan import Advice, Pipeline, PlannedStage

ADVICE_ONLY = "This is advice: training does not run pipelines."


def pipeline_name(pipeline: Pipeline) -> str:
    """Return a short name, such as ``pipeline of 3 stages, units 9 | 2 | 21, 16 waves``."""
    units = " | ".join(map(str, pipeline.units))
    return f"pipeline of {len(pipeline.stages)} stages, units {units}, {pipeline.waves} waves"


def crossover_text(crossover: Crossover) -> str:
    rate = crossover.bandwidth_bytes_per_s
    if math.isinf(rate):
        most = crossover.points[-1].bandwidth_bytes_per_s
        return f"a pipeline wins at all bandwidths between nodes up to {_rate(most)}"
    if not rate:
        least = crossover.points[0].bandwidth_bytes_per_s
        return f"no pipeline wins at any bandwidth between nodes down to {_rate(least)}"
    return f"a pipeline wins below about {_rate(rate)} between nodes"


def advice_lines(advice: Advice, crossover: Crossover | None = None) -> list[str]:
    if advice.best is None:
        return [f"No pipeline fits. Tried: {advice.covers}.", ADVICE_ONLY]
    step_s = advice.best.step_s
    if advice.pipeline_wins:
        verdict = f"A pipeline would be {advice.today_s / step_s:.3g} times as fast"
    else:
        verdict = "No pipeline is needed"
    lines = [
        f"{verdict}: {format_seconds(step_s)} a step, "
        f"{format_seconds(advice.today_s)} with one stage of all ranks, as training runs it.",
        f"None is faster than {format_seconds(advice.bound_s)}, among {advice.covers}. Inside a "
        f"stage a wave is as short as possible.",
    ]
    if crossover is not None:
        text = crossover_text(crossover)
        lines.append(f"{text[0].upper()}{text[1:]}.")
    return [*lines, ADVICE_ONLY]


def pipeline_table(advice: Advice, pipeline: Pipeline) -> Table:
    table = Table(
        title=f"Pipeline (advice only), {format_seconds(pipeline.step_s)} a step",
        caption="forward and backward: by how much one wave follows the other",
        caption_justify="left",
    )
    headings = ("units", "gathers", "samples of a wave", "forward", "backward", "fullest rank")
    for heading in ("stage", "ranks", *headings):
        table.add_column(heading, justify="right" if heading in headings else "left")
    last = 0
    for index, planned in enumerate(pipeline.stages, start=1):
        first, last = last + 1, last + planned.stage.units
        table.add_row(
            str(index),
            "\n".join(advice.problem.blocks[block].name for block in planned.stage.blocks),
            str(first) if first == last else f"{first}–{last}",
            "every wave" if planned.stage.regathers else "once",
            _samples(planned),
            format_seconds(planned.times.wave_forward_s),
            format_seconds(planned.times.wave_backward_s),
            f"{_fullest(planned):.0%}",
        )
    return table


def _samples(planned: PlannedStage) -> str:
    counts = Counter(rank.batch_size for rank in planned.plan.ranks)
    parts = (f"{ranks} × {batch}" for batch, ranks in sorted(counts.items(), reverse=True))
    return ", ".join(parts)


def _fullest(planned: PlannedStage) -> float:
    ranks = planned.plan.ranks
    return max((rank.memory_bytes or 0.0) / (rank.capacity_bytes or math.inf) for rank in ranks)


def _rate(bytes_per_s: float) -> str:
    return BYTES_PER_S.text(float(f"{bytes_per_s:.2g}"))
