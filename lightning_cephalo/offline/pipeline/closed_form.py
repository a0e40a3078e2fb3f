"""The seconds of a pipeline's step as a formula.

Stages and links are machines, which every wave passes in one order, taking ``p_k`` seconds on the
k-th. The last wave leaves it at ``sum of p_j for j <= k + (waves - 1) x max of p_j for j <= k +
latencies``. That is exact: a permutation flow shop whose jobs are equal. Forward and backward each
have their own slowest machine. A stage has gathered two units while it waited for its first wave,
so the sum has the shorter ``lone_forward_s``. Its gathers may also end its first forward later.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.pipeline.times import Crossing, StageTimes


def pipeline_s(stages: Sequence[StageTimes], crossings: Sequence[Crossing], waves: int) -> float:
    """Return the seconds of a step."""
    check_shape(stages, crossings, waves)
    update_s = max(stage.update_s for stage in stages)
    return float(reduced_s(stages, crossings, waves) + update_s)


def reduced_s(stages: Sequence[StageTimes], crossings: Sequence[Crossing], waves: int) -> float:
    """Return the seconds until all stages have reduced their gradients; without the update."""
    end_s = forward_s(stages, crossings, waves) + stages[-1].turn_s
    busy_s = slowest_s = found = 0.0
    for index in reversed(range(len(stages))):
        stage = stages[index]
        if index < len(crossings):
            busy_s += crossings[index].wave_s + crossings[index].latency_s
            slowest_s = max(slowest_s, crossings[index].wave_s)
        busy_s += stage.lone_backward_s
        slowest_s = max(slowest_s, stage.wave_backward_s)
        found = max(found, end_s + busy_s + (waves - 1) * slowest_s + stage.reduced_s)
    return found


def forward_s(stages: Sequence[StageTimes], crossings: Sequence[Crossing], waves: int) -> float:
    found = after_s = slowest_s = 0.0
    for index in reversed(range(len(stages))):
        stage = stages[index]
        if index < len(crossings):
            after_s += crossings[index].wave_s + crossings[index].latency_s
            slowest_s = max(slowest_s, crossings[index].wave_s)
        slowest_s = max(slowest_s, stage.wave_forward_s)
        found = max(found, stage.first_forward_end_s + after_s + (waves - 1) * slowest_s)
        after_s += stage.lone_forward_s
    return found


def check_shape(stages: Sequence[StageTimes], crossings: Sequence[Crossing], waves: int) -> None:
    """Raise PlanError unless these are stages, the crossings between them, and waves."""
    if not stages or len(crossings) != len(stages) - 1 or waves < 1:
        raise PlanError(
            f"pipeline: expected at least one stage and one wave, and one crossing less than "
            f"stages, but got {len(stages)} stages, {len(crossings)} crossings and {waves} waves."
        )
