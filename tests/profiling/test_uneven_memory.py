"""What even sharding cannot hold, we train."""

import pytest
from uneven_memory import LARGE, SMALL, STEPS, model, under_cephalo, under_even_sharding

pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no")


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_even_sharding_exceeds_the_small_ranks_memory_by_arithmetic(size):
    large, small = size.capacities_bytes
    assert large == 3 * small
    # fp32 parameters, gradients, and Adam's two moments
    state_bytes = 16 * sum(parameter.numel() for parameter in model(size.depth).parameters())
    assert small < state_bytes / 2 < state_bytes < large + small


def test_even_sharding_runs_out_of_memory_on_the_small_rank():
    _, small = under_even_sharding(SMALL)
    assert (small.failure, small.steps) == ("OutOfMemoryError", 0)
    assert small.peak_bytes <= SMALL.capacities_bytes[1]


@pytest.mark.slow
def test_the_plan_fits_both_ranks_and_trains():
    outcomes = under_cephalo(SMALL)
    for outcome, capacity_bytes in zip(outcomes, SMALL.capacities_bytes, strict=True):
        assert (outcome.message, outcome.steps) == ("", STEPS)
        assert outcome.peak_bytes <= outcome.predicted_bytes <= capacity_bytes
        assert outcome.peak_bytes == pytest.approx(outcome.predicted_bytes, rel=0.1)
    large, small = outcomes
    assert large.state_fraction > 2 * small.state_fraction
