"""What can go wrong while planning, from the user's mistake to the solver's."""

from __future__ import annotations


class PlanError(ValueError):
    """A problem or a plan that cannot be used: the message says what came, what was expected and
    the remedy.
    """


class InfeasibleError(PlanError):
    """No plan exists: the message names the resource that binds, how much is missing, and what
    would help.
    """


class SolverError(RuntimeError):
    """The solver stopped without any plan, though one may exist: the message gives its reason."""
