"""A device that this project has never heard of trains, if torch and Lightning know it."""

from __future__ import annotations

import contextlib
import tempfile

import pytest
from device_cases import assert_equal
from device_jobs import train
from launch import torchrun_environments
from simulated_server import Server
from test_training import IDLE_WITH_ALL_STATE, UNEVEN

pytestmark = pytest.mark.simulated

NAME = "warp"


@pytest.fixture(scope="module")
def others():
    """Runs functions on ranks with devices of a third party.

    They need an interpreter of their own: after its first backward, torch starts no queue for other
    devices, and the tests' own has run some.
    """
    with tempfile.TemporaryFile() as log, contextlib.closing(Server(log, NAME)) as server:
        yield server


def trained_each(server, plans, **given):
    """What Lightning alone finds, and the ranks of each plan."""
    # Lightning alone takes the CPU for an accelerator of others, unless it is told a strategy
    alone = torchrun_environments(1) * 2, None, {"trainer": {"accelerator": "cpu"}}
    together, given = torchrun_environments(2), {"trainer": {"accelerator": NAME}, **given}
    outcomes = server.run_each(2, train, [alone, *((together, ranks, given) for ranks in plans)])
    for outcome in (one for of_call in outcomes for one in of_call):
        assert not outcome.findings, "\n".join(outcome.findings)
    (wanted, _), *found = outcomes
    return wanted.value, [[one.value for one in of_plan] for of_plan in found]


def test_it_trains_as_lightning_alone(others):
    plans = (UNEVEN, IDLE_WITH_ALL_STATE)
    alone, runs = trained_each(others, plans, plan={"offload": True})
    for found in runs:
        assert_equal(found, alone)
        assert [one["device"] for one in found] == [f"{NAME}:{rank}" for rank in range(2)]


@pytest.mark.slow
def test_it_is_measured_and_planned_for(others):
    alone, (found,) = trained_each(others, ["solve"])
    assert_equal(found, alone)
