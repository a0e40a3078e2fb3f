"""Traces the order in which microbatches visit units, then replays and checks it.

::

    TRACING --- all ranks reach the end ---> REPLAYING
       ^                                        |
       +--- all ranks leave it at one place ----+

While a step is traced, all ranks exchange the positions of their microbatches before each visit.
Then they gather the requested unit; nothing is prefetched. From the next step on the order is
known, and a program is compiled from it.

If microbatches leave the order, their rank still communicates as the program says. It reports the
divergence in the exchange that ends the forward. If all ranks with data have left the order at one
place, the step is traced from there on. Otherwise all ranks raise.

Orders are stored per set of trainable units: freezing a unit changes which units are reduced, not
the user's code.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.step import Divergence
from lightning_cephalo.plan.check import check
from lightning_cephalo.plan.program import Program, Visit, compile_step
from lightning_cephalo.ranks.control import ControlGroup

# sent in place of a unit's index
NO_DATA, FINISHED, FAILED = -1.0, -2.0, -3.0


def where(*, failed: bool, parked: Sequence[Visit | None]) -> tuple[float, float]:
    """Return this rank's position for an exchange: the unit or a code, and differentiable or not.

    The codes are ``NO_DATA``, ``FINISHED`` and ``FAILED``.
    """
    if failed:
        return FAILED, 0.0
    if not parked:
        return NO_DATA, 0.0
    visit = parked[0]
    if visit is None:
        return FINISHED, 0.0
    return float(visit.unit), float(visit.differentiable)


class Visits:
    """Stores the order of visits and compares the positions of microbatches and ranks.

    Args:
        names: Names of all units, by index.

    Attributes:
        last: The order of the last training step.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._known: dict[tuple[bool, ...], tuple[Visit, ...]] = {}
        self._programs: dict[tuple[object, ...], Program] = {}
        self.last: tuple[Visit, ...] = ()

    def known(self, trainable: tuple[bool, ...]) -> tuple[Visit, ...] | None:
        """Return the order with these units trainable; None: it must be traced."""
        return self._known.get(trainable)

    def learn(self, trainable: tuple[bool, ...], visits: Sequence[Visit]) -> None:
        """Store the order of a step that has reached its end."""
        self.last = self._known[trainable] = tuple(visits)

    def forget(self) -> None:
        """Forget all orders: the next step is traced."""
        self._known.clear()
        self._programs.clear()  # else programs pile up where orders change often

    def program(
        self,
        visits: Sequence[Visit],
        microbatches: int,
        trainable: tuple[bool, ...],
        *,
        reshard_after_forward: bool,
        offload_boundaries: bool,
    ) -> Program:
        """Return the checked program of a step; see :func:`~.program.compile_step`."""
        key = (
            tuple(visits),
            microbatches,
            trainable,
            reshard_after_forward,
            offload_boundaries,
        )
        if key not in self._programs:
            program, without_data = (
                compile_step(
                    visits,
                    count,
                    trainable,
                    reshard_after_forward=reshard_after_forward,
                    offload_boundaries=offload_boundaries,
                )
                for count in (microbatches, 0)
            )
            # the program without data is the same on all ranks: if each rank's collectives match
            # it, they match one another
            check([program, without_data])
            self._programs[key] = program
        return self._programs[key]

    # -- where microbatches are ---------------------------------------------------------------

    def check_parked(self, parked: Sequence[Visit | None]) -> None:
        """Raise UnitUseError unless all of this rank's microbatches are at the same place."""
        if len(set(parked)) > 1:
            names = [f"microbatch {i}: {self._name(visit)}" for i, visit in enumerate(parked)]
            raise self._differ(names[1:], names[0])

    def differ(self, microbatch: int, parked: Visit | None, expected: Visit | None) -> UnitUseError:
        """Return the error for a microbatch that is not where the others are."""
        return self._differ(
            [f"microbatch {microbatch}: {self._name(parked)}"], self._name(expected)
        )

    def agree(self, said: Sequence[Sequence[float]]) -> Visit | None:
        """Return the visit that all ranks with data are at; None at the end or after a failure.

        Args:
            said: Result of :func:`where` on every rank.

        Raises:
            UnitUseError: If ranks are at different places; raised on all ranks.
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

    def agree_on_divergence(
        self,
        control: ControlGroup,
        own: Divergence | None,
        parked: Sequence[Visit | None],
        expected: Sequence[Visit],
    ) -> int:
        """Return the position from which all ranks trace the step again; collective.

        Args:
            control: Exchanges messages between ranks.
            own: The point where this rank has left the order.
            parked: Positions of its microbatches; empty on a rank without data.
            expected: The order.

        Raises:
            UnitUseError: If ranks with data have not all left the order at one place; raised on
                all ranks.
        """
        position = len(expected) if own is None else own.position
        place = where(failed=False, parked=parked)
        if own is not None:
            place = where(failed=False, parked=[own.place])
        said = control.gather([float(position) if parked else NO_DATA, *place])
        with_data = [(rank, *row) for rank, row in enumerate(said) if row[0] != NO_DATA]
        positions = {int(row[1]) for row in with_data}
        if len({tuple(row[1:]) for row in with_data}) == 1:
            return positions.pop()
        first = min(positions)
        names = []
        for rank, at, unit, flag in with_data:
            visit = _visit(unit, flag) if int(at) == first else _at(expected, first)
            names.append(f"rank {rank}: {self._name(visit)}")
        raise self._differ(names, self._name(_at(expected, first)))

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


def _at(visits: Sequence[Visit], position: int) -> Visit | None:
    return visits[position] if position < len(visits) else None
