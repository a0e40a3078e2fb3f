"""`make gpu-check` works from end to end, so that the first GPU gives a record."""

import datetime
import os
import sys
from pathlib import Path

import pytest
from launch import torchrun_environments

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def measure(rank, environments, folder, size):
    """In a rank that has simulated devices."""
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    sys.path.insert(0, str(BENCHMARKS))
    import gpu_check

    gpu_check.measure_on_this_rank(folder, gpu_check.Size(**size))


class SimulatedMachine:
    """Two devices of host memory."""

    description, count = "two simulated devices", 2

    def __init__(self, server):
        self._server = server

    def measure(self, ranks, folder, size):
        environments = torchrun_environments(ranks)
        asked = vars(size)
        for outcome in self._server.run(ranks, measure, environments, str(folder), asked):
            assert not outcome.findings, "\n".join(outcome.findings)

    def test(self):
        raise AssertionError("these tests run here already")


@pytest.mark.simulated
def test_a_record_has_every_figure(simulated, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    size = gpu_check.Size(32, 2, 2, 8, microbatch=2, microbatches=2, steps=1, rounds=1)
    today = datetime.date(2030, 1, 2)
    record = gpu_check.check(SimulatedMachine(simulated), size, today, tests=False)
    assert record.startswith("# 2030-01-02, two simulated devices\n")
    assert "- tests/gpu: not run\n" in record
    expected = "synchronising calls in steady steps: plain Lightning 0, cephalo 0, recomputing 0"
    assert expected in record
    for part in (
        "against plain Lightning",
        "offloaded boundaries",
        "updates inside the backward",
        "updated by the host",
        "a visit of a unit",
        "| step | ",
        "even, padded",
        "uneven, lists",
    ):
        assert part in record
    table = [line.split("|") for line in record.splitlines() if " MiB | " in line]
    assert len(table) == 3  # of one rank alone, and of two
    for row in table:
        # in a model of 2 MiB, the allocator's rounding of each tensor shows
        assert 0.9 < float(row[4]) < 1.5, record
