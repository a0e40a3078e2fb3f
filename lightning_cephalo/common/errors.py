"""The package's errors. Each one is a :class:`CephaloError` and also the built-in error that it is.

``except ValueError`` and ``except RuntimeError`` therefore keep working. A message says what came,
what was expected, and the remedy::

    try:
        plan = solve(problem)
    except CephaloError as error:
        print(error)

One more error, ``OutOfMemoryInStepError``, lives in ``execution/memory_errors.py``, because its
built-in base is torch's and this folder works without torch.
"""

from __future__ import annotations


class CephaloError(Exception):
    """Base of every error that this package defines."""


class PlanError(CephaloError, ValueError):
    """A problem, a plan or a file cannot be used."""


class UnwritableError(PlanError, OSError):
    """A file cannot be written; the operating system's own error is the cause."""


class InfeasibleError(PlanError):
    """No plan exists: the message names the resource that binds, how much is missing, and what
    would help.
    """


class ProgramError(PlanError):
    """Programs of a step cannot run; the message names the rank, and what stands where."""


class SolverError(CephaloError, RuntimeError):
    """The solver stopped without any plan, though one may exist: the message gives its reason."""


class ProfilingError(CephaloError, RuntimeError):
    """Profiling cannot go on; every rank raises it, naming the rank, the size and the reason."""


class TooLittleMemoryError(ProfilingError):
    """A rank cannot hold what every rank must, or no rank can run the smallest microbatch."""


class UnsupportedError(CephaloError, RuntimeError):
    """Something cannot work under cephalo; the message names it and the way out."""


class UnitUseError(CephaloError, RuntimeError):
    """A unit is used in a way that cannot be cut into microbatches."""


class BatchSplitError(CephaloError, ValueError):
    """A batch has no batch dimension that cephalo can cut."""


class HostMemoryError(CephaloError, RuntimeError):
    """The host has less memory for offloaded boundaries than a step needs."""


class RemoteRankError(CephaloError, RuntimeError):
    """Another rank failed; the message names that rank and its error."""
