"""Solves a problem in a process of its own, while this one trains.

``python -m lightning_cephalo.plan.beside`` reads a problem as JSON and writes its plan. A thread
would hold the lock of the interpreter for most of the time. A fork would copy process groups and
devices, and ``multiprocessing`` would import the user's script again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.plan.plan import Plan
from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.solver.solve import solve

_LIMIT_S = 30.0
_NICENESS = 5


class SolverBeside:
    """A problem that is being solved.

    ::

        solver = SolverBeside(problem)
        while not solver.is_done:
            train_a_step()
        plan = solver.plan            # None if there is none
        solver.close()

    The process ends by itself after about 30 s at most.

    Raises:
        OSError: If no process can be started, or its files cannot be written.
    """

    def __init__(self, problem: Problem) -> None:
        # Files without names: this process does not wait for the other to read, as with a pipe.
        with tempfile.TemporaryFile("w+") as question:
            question.write(problem.to_json())
            question.seek(0)
            self._answer = tempfile.TemporaryFile("w+")  # noqa: SIM115  until close
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=question,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],  # whence the package is imported
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def is_done(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    @property
    def plan(self) -> Plan | None:
        """The plan, which this waits for; None if there is none, or the process has failed."""
        if self._process.wait() != 0:
            return None
        self._answer.seek(0)
        try:
            return Plan.from_json(self._answer.read())
        except PlanError:
            return None  # the disk was full

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._answer.close()


def _main() -> None:
    os.nice(_NICENESS)
    with redirect_stdout(sys.stderr):  # solvers print
        plan = solve(Problem.from_json(sys.stdin.read()), time_limit_s=_LIMIT_S)
    print(plan.to_json())


if __name__ == "__main__":
    _main()
