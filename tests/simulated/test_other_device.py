"""A device that this project has never heard of trains, if torch and Lightning know it."""

from __future__ import annotations

import warnings

import pytest
import simulated_cuda
from device_cases import assert_equal
from device_jobs import train
from launch import run_ranks, torchrun_environments
from simulated_server import DEVICES, observed_each
from test_training import IDLE_WITH_ALL_STATE, UNEVEN

pytestmark = pytest.mark.simulated

NAME = "warp"


def on_other_devices(rank, calls):
    """In a fork: devices of a third party may come after torch, as in life."""
    warnings.simplefilter("default")  # as in the interpreter of the other simulated devices
    simulated_cuda.start(DEVICES, name=NAME)
    return observed_each(rank, train, calls)


def trained_each(plans, **given):
    """What Lightning alone finds, and the ranks of each plan."""
    # Lightning alone takes the CPU for an accelerator of others, unless it is told a strategy
    alone = torchrun_environments(1) * 2, None, {"trainer": {"accelerator": "cpu"}}
    together, given = torchrun_environments(2), {"trainer": {"accelerator": NAME}, **given}
    calls = [alone, *((together, ranks, given) for ranks in plans)]
    outcomes = run_ranks(2, on_other_devices, calls, process_group=False)
    for outcome in (one for of_rank in outcomes for one in of_rank):
        assert not outcome.findings, "\n".join(outcome.findings)
    (wanted, _), *found = zip(*outcomes, strict=True)
    return wanted.value, [[one.value for one in of_plan] for of_plan in found]


def test_it_trains_as_lightning_alone():
    plans = (UNEVEN, IDLE_WITH_ALL_STATE)
    alone, runs = trained_each(plans, plan={"offload": True})
    for found in runs:
        assert_equal(found, alone)
        assert [one["device"] for one in found] == [f"{NAME}:{rank}" for rank in range(2)]


@pytest.mark.slow
def test_it_is_measured_and_planned_for():
    alone, (found,) = trained_each(["solve"])
    assert_equal(found, alone)
