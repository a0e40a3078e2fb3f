"""All microbatches visit the same units in the same order: agreed on once, then checked."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.plan.program import Visit

# what a rank says instead of the unit that it is parked at
NO_DATA, FINISHED, FAILED = -1.0, -2.0, -3.0


def where(*, failed: bool, parked: Sequence[Visit | None]) -> tuple[float, float]:
    """Where this rank is, as numbers for an exchange: unit or one of the above, differentiable."""
    if failed:
        return FAILED, 0.0
    if not parked:
        return NO_DATA, 0.0
    visit = parked[0]
    if visit is None:
        return FINISHED, 0.0
    return float(visit.unit), float(visit.differentiable)


class Order:
    """Compares where microbatches and ranks are.

    Args:
        names: Of all units, by their index.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def check(self, microbatch: int, parked: Visit | None, expected: Visit | None) -> None:
        """Raise UnitUseError if a microbatch is not where the agreed order says."""
        if parked != expected:
            found = f"microbatch {microbatch}: {self._name(parked)}"
            raise self._differ([found], self._name(expected))

    def check_parked(self, parked: Sequence[Visit | None]) -> None:
        """Raise UnitUseError if this rank's microbatches are not all at one place."""
        if len(set(parked)) > 1:
            names = [f"microbatch {i}: {self._name(visit)}" for i, visit in enumerate(parked)]
            raise self._differ(names[1:], names[0])

    def agree(self, said: Sequence[Sequence[float]]) -> Visit | None:
        """Return the visit that all ranks with data are at; None at the end or after a failure.

        Args:
            said: :func:`where` of every rank.

        Raises:
            UnitUseError: If ranks are at different places; on all of them.
        """
        wanted = {(unit, flag) for unit, flag in said if unit != NO_DATA}
        if any(unit == FAILED for unit, _ in wanted):
            return None
        if len(wanted) > 1:
            names = [
                f"rank {rank}: {self._name(_visit(unit, flag))}"
                for rank, (unit, flag) in enumerate(said)
                if unit != NO_DATA
            ]
            raise self._differ(names[1:], names[0])
        return _visit(*wanted.pop()) if wanted else None

    def _name(self, visit: Visit | None) -> str:
        if visit is None:
            return "the end of the step"
        without = "" if visit.differentiable else " (without gradient)"
        return f"unit {self._names[visit.unit]!r}{without}"

    @staticmethod
    def _differ(found: Sequence[str], expected: str) -> UnitUseError:
        why = ""
        if any("(without gradient)" in place for place in (*found, expected)):
            why = " Without gradient: under torch.no_grad, or in reentrant torch.utils.checkpoint."
        return UnitUseError(
            "Microbatches must visit the same units in the same order, in every step and on every"
            f" rank; expected {expected}, but {'; '.join(found)}. Modules that only some samples"
            " pass cannot be units: choose others with CephaloStrategy(unit_types=...) or"
            f" unit_names=...{why}"
        )


def _visit(unit: float, differentiable: float) -> Visit | None:
    return None if unit == FINISHED else Visit(int(unit), bool(differentiable))
