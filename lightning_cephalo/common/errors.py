"""The package's errors. Each is a :class:`CephaloError` and also the matching built-in error.

``except ValueError`` and ``except RuntimeError`` therefore keep working. A message states what was
expected, the actual value, and the remedy::

    try:
        plan = solve(problem)
    except CephaloError as error:
        print(error)

One more error, ``OutOfMemoryInStepError``, is in ``execution/memory_errors.py``, because its second
base class is torch's and this folder works without torch.
"""

from __future__ import annotations


class CephaloError(Exception):
    """Base of every error that this package defines."""


class PlanError(CephaloError, ValueError):
    """A problem, a plan or a file cannot be used."""


class UnwritableError(PlanError, OSError):
    """A file cannot be written; the operating system's own error is the cause."""


class RecoveryError(CephaloError, RuntimeError):
    """A training cannot go on from kept steps, or none can be kept; the message says why."""


class KeptForAnotherError(RecoveryError):
    """What is kept cannot be gone on from in this training; every start finds the same."""


class InfeasibleError(PlanError):
    """No plan exists. The message names the limiting resource, the missing amount and remedies."""


class ProgramError(PlanError):
    """The programs of a step cannot run; the message names the rank, the fault and its place."""


class SolverError(CephaloError, RuntimeError):
    """The solver stopped without a plan, though one may exist; the message gives its reason."""


class ProfilingError(CephaloError, RuntimeError):
    """Profiling cannot continue. Every rank raises it and names the rank, size and reason."""


class TooLittleMemoryError(ProfilingError):
    """A rank cannot hold the minimum of every rank, or no rank can run the smallest microbatch."""


class UnsupportedError(CephaloError, RuntimeError):
    """A feature cannot work under cephalo; the message names it and the remedy."""


class UnitUseError(CephaloError, RuntimeError):
    """A unit is used in a way that cannot be split into microbatches."""


class BatchSplitError(CephaloError, ValueError):
    """A batch has no batch dimension that cephalo can cut."""


class HostMemoryError(CephaloError, RuntimeError):
    """The host has less memory for offloaded boundaries or optimizer state than is needed."""


class RemoteRankError(CephaloError, RuntimeError):
    """Another rank failed; the message names that rank and its error."""
