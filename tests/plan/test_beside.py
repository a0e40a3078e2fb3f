"""A solver in a process beside training."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import pytest
from full_disk import file_size_limit
from test_replan import PROBLEM

from lightning_cephalo.plan import solve
from lightning_cephalo.plan.beside import SolverBeside


def test_a_process_beside_this_one_gives_the_plan_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tight = [replace(rank, capacity_bytes=1.0) for rank in PROBLEM.ranks]
    beside = [SolverBeside(PROBLEM), SolverBeside(replace(PROBLEM, ranks=tuple(tight)))]
    found, none = (each.plan for each in beside)
    assert replace(found, solve_s=None) == replace(solve(PROBLEM), solve_s=None)
    assert none is None and all(each.is_done for each in beside)
    assert not list(tmp_path.iterdir())  # so that nothing remains where a training is killed
    third = SolverBeside(PROBLEM)
    for each in (*beside, third):
        each.close()
    assert third.is_done and third.plan is None  # killed
    assert not list(tmp_path.iterdir())


def test_where_the_disk_is_full_no_process_starts_and_no_file_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with file_size_limit(100), pytest.raises(OSError, match="File too large"):
        SolverBeside(PROBLEM)
    assert not list(tmp_path.iterdir())
