"""The formula of a pipeline's step, against the event simulation and by hand."""

from __future__ import annotations

import random

import pytest
from pipeline_cases import random_pipeline

from lightning_cephalo.offline.pipeline.simulate import simulate_pipeline
from lightning_cephalo.offline.pipeline.times import Crossing, StageTimes, pipeline_s
from lightning_cephalo.plan.program import Operation


def test_it_equals_the_simulation_of_every_unit_on_random_pipelines():
    dice = random.Random(1)
    for _ in range(200):
        stages, crossings, waves = random_pipeline(dice)
        simulated_s = max(own[-1].end_s for own in simulate_pipeline(stages, crossings, waves))
        assert pipeline_s(stages, crossings, waves) == pytest.approx(simulated_s, rel=1e-9)


def _stage(forward_s: float, backward_s: float, units: int = 1, **more) -> StageTimes:
    values = {"tail_s": 0.0, "gather_s": 0.0, "reduce_s": 0.0} | more
    return StageTimes(units, forward_s, backward_s, **values)


def test_forward_and_backward_each_have_their_own_slowest_stage():
    # forward 1 + 3, backward 4 + 2, and three further waves behind 3 and behind 4
    assert pipeline_s([_stage(1, 4), _stage(3, 2)], [Crossing(0)], 4) == 1 + 3 + 9 + 2 + 4 + 12


def test_links_are_machines_and_latency_is_not():
    stages = [_stage(1, 2), _stage(1, 2)]
    assert pipeline_s(stages, [Crossing(0.5)], 4) == 2.5 + 3 * 1 + 4.5 + 3 * 2
    assert pipeline_s(stages, [Crossing(5)], 4) == 7 + 3 * 5 + 9 + 3 * 5
    assert pipeline_s(stages, [Crossing(0.5, 10)], 4) == 36


@pytest.mark.parametrize(
    ("regathers", "seconds"),
    [
        # the fill: G; then F and B hide all but the reduce that follows the last backward
        (False, 1 + 2 * 4 * 2 + 2 * 4 * 4 + 1),
        (True, 1 + 2 * 4 * 2 + 2 * 4 * 4 + 1),
    ],
)
def test_hidden_collectives_show_at_the_ends_only(regathers, seconds):
    stage = _stage(2, 4, 4, gather_s=1, reduce_s=1, regathers=regathers)
    assert pipeline_s([stage], [], 2) == seconds


def test_slow_collectives_count_in_every_wave_or_once():
    slow = {"gather_s": 5, "reduce_s": 5}
    once = _stage(2, 4, 4, **slow)
    # 4 gathers and the last unit's forward, 3 waves, 4 x 4 backwards of 4, 3 reduces that lag by 1
    assert pipeline_s([once], [], 4) == 4 * 5 + 2 + 3 * 8 + 4 * 16 + 5 + 3
    again = _stage(2, 4, 4, **slow, regathers=True)
    # collectives follow each other without a pause, from the first gather to the last reduce
    assert pipeline_s([again], [], 4) == pytest.approx(16 * 5 + 16 * 10, rel=0.03)


def test_a_stage_that_waits_for_its_first_wave_has_gathered_in_the_meantime():
    first, second = _stage(10, 10), _stage(2, 2, 4, gather_s=2, reduce_s=0)
    assert pipeline_s([first, second], [Crossing(0)], 1) == 10 + 8 + 8 + 10
    late = _stage(2, 2, 4, gather_s=6, reduce_s=0)
    assert pipeline_s([first, late], [Crossing(0)], 1) == 4 * 6 + 2 + 8 + 10


def test_the_simulation_says_what_each_stage_does_when():
    events = simulate_pipeline([_stage(1, 2), _stage(1, 2, update_s=3)], [Crossing(0.5)], 2)
    first, second = (
        [(each.microbatch, each.operation, each.start_s, each.end_s) for each in own]
        for own in events
    )
    assert first == [
        (0, Operation.FORWARD, 0, 1),
        (1, Operation.FORWARD, 1, 2),
        (0, Operation.BACKWARD, 6, 8),
        (1, Operation.BACKWARD, 8, 10),
        (-1, Operation.UPDATE, 10, 10),
    ]
    assert len(second) == 5 and second[-1][-1] == 13
