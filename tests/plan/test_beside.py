"""A solver in a process beside training."""

from __future__ import annotations

from dataclasses import replace

from test_replan import PROBLEM

from lightning_cephalo.plan import solve
from lightning_cephalo.plan.beside import SolverBeside


def test_a_process_beside_this_one_gives_the_plan_or_none():
    tight = [replace(rank, capacity_bytes=1.0) for rank in PROBLEM.ranks]
    beside = [SolverBeside(PROBLEM), SolverBeside(replace(PROBLEM, ranks=tuple(tight)))]
    found, none = (each.plan for each in beside)
    assert replace(found, solve_s=None) == replace(solve(PROBLEM), solve_s=None)
    assert none is None and all(each.is_done for each in beside)
    third = SolverBeside(PROBLEM)
    for each in (*beside, third):
        each.close()
    assert third.is_done and third.plan is None  # killed
