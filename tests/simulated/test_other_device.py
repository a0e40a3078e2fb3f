"""A device that this project has never heard of trains, if torch and Lightning know it."""

from __future__ import annotations

import contextlib
import tempfile

import pytest
from device_jobs import train
from launch import torchrun_environments
from simulated_server import Server
from test_training import IDLE_WITH_ALL_STATE, UNEVEN, assert_equal

pytestmark = pytest.mark.simulated

NAME = "warp"


@pytest.fixture(scope="module")
def others():
    """Runs functions on ranks with devices of a third party."""
    with tempfile.TemporaryFile() as log, contextlib.closing(Server(log, NAME)) as server:
        yield server


def trained(server, ranks, *, world_size=None, **given):
    environments = torchrun_environments(world_size or (len(ranks) if ranks else 1))
    # Lightning alone takes the CPU for an accelerator of others, unless it is told a strategy
    given = {"trainer": {"accelerator": NAME if ranks else "cpu"}, **given}
    outcomes = server.run(len(environments), train, environments, ranks, given)
    for outcome in outcomes:
        assert not outcome.findings, "\n".join(outcome.findings)
    return [outcome.value for outcome in outcomes]


def test_it_trains_as_lightning_alone(others):
    (alone,) = trained(others, None)
    for ranks in (UNEVEN, IDLE_WITH_ALL_STATE):
        found = trained(others, ranks, plan={"offload": True})
        assert_equal(found, alone)
        assert [one["device"] for one in found] == [f"{NAME}:{rank}" for rank in range(2)]


@pytest.mark.slow
def test_it_is_measured_and_planned_for(others):
    (alone,) = trained(others, None)
    assert_equal(trained(others, "solve", world_size=2), alone)
