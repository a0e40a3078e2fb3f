"""Solves a problem in a process of its own, while this one trains.

``python -m lightning_cephalo.plan.beside`` reads a pickled problem from its input and writes the
pickled plan. A thread would hold the lock of the interpreter for most of the time. A fork would
copy process groups and devices, and ``multiprocessing`` would import the user's script again.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from lightning_cephalo.plan.plan import Plan
from lightning_cephalo.plan.problem import Problem

_LIMIT_S = 30.0
_NICENESS = 5


class SolverBeside:
    """A problem that is being solved.

    ::

        solver = SolverBeside(problem)
        while not solver.is_done:
            train_a_step()
        plan = solver.plan            # None if there is none

    Raises:
        OSError: If no process can be started, or its files cannot be written.
    """

    def __init__(self, problem: Problem) -> None:
        folder = tempfile.TemporaryDirectory(prefix="cephalo-solver-")
        try:
            self._process = self._started(problem, Path(folder.name))
        except BaseException:
            folder.cleanup()
            raise
        self._end = weakref.finalize(self, _end, self._process, folder)

    def _started(self, problem: Problem, folder: Path) -> subprocess.Popen[bytes]:
        question, self._answer = folder / "problem", folder / "plan"
        question.write_bytes(pickle.dumps(problem))
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        with question.open("rb") as given, self._answer.open("wb") as answer:
            return subprocess.Popen(
                [sys.executable, "-m", "lightning_cephalo.plan.beside"],
                stdin=given,
                stdout=answer,
                stderr=subprocess.DEVNULL,
                env=environment,
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
        try:
            answer = pickle.loads(self._answer.read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):
            return None  # the disk was full, or temporary files were removed meanwhile
        return answer if isinstance(answer, Plan) else None

    def close(self) -> None:
        """End the process, and remove its files."""
        self._end()


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    folder.cleanup()


def _main() -> None:
    from lightning_cephalo.common.errors import PlanError, SolverError
    from lightning_cephalo.plan.solver.solve import solve

    with suppress(OSError, AttributeError):
        os.nice(_NICENESS)
    problem = pickle.load(sys.stdin.buffer)
    output = sys.stdout.buffer
    sys.stdout = sys.stderr  # solvers print
    try:
        plan: Plan | None = solve(problem, time_limit_s=_LIMIT_S)
    except (PlanError, SolverError):
        plan = None
    pickle.dump(plan, output)


if __name__ == "__main__":
    _main()
