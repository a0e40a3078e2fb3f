"""Refuses writes of the user's code to parameters, before anything is lost.

Each unit is a copy at one time of the step and rows at another, so that a write there cannot have
its effect once a step, on the whole parameter. `sharding/write_guard.py` makes it visible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_cephalo.common.errors import CephaloError, UnitUseError
from lightning_cephalo.execution.graph import gradient_through_units
from lightning_cephalo.sharding.gathered import FREED
from lightning_cephalo.sharding.unit import Unit
from lightning_cephalo.sharding.write_guard import REMEDY, spelled

# what locked parameters say, which torch may repeat in an error of its own
_FUNC = "yet support saved tensor hooks"
_SECOND = "backward through the graph a second time"
_SHARDED = "while sharded: each rank holds some rows"


class UserWrites:
    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse all use of sharded parameters in a ``with`` block; copies can be used."""
        guards = [flat.guard for unit in self._units for flat in unit.flats]
        for guard in guards:
            guard.close()
        try:
            yield
        finally:
            for guard in guards:
                guard.open()

    def check(self, doing: str) -> None:
        """Raise if code has written to parameters since the last check."""
        for told in self.found(doing):
            raise UnitUseError(told)

    def found(self, doing: str) -> Iterator[str]:
        """Yield what code has written to parameters since the last check."""
        assigned = [name for unit in self._units for name in unit.assigned()]
        if assigned:
            yield (
                f"`.data` of {spelled(assigned)} is assigned while sharded, which does not reach"
                f" the rows that each rank holds: the write would be lost. {REMEDY}"
            )
        written = [name for unit in self._units for name in unit.written()]
        if written:
            yield (
                f"{doing} writes to {spelled(written)} inside of a step, where parameters are"
                " copies that are freed after their use: the write would be lost. In addition it"
                f" would run once per microbatch. {REMEDY}"
            )


def explained(error: RuntimeError) -> RuntimeError:
    """Return the error to raise for code that needs what is in units, or in other ranks' rows."""
    if "appears to not have been used in the graph" in str(error) or needs_freed(error):
        return gradient_through_units()
    if _FUNC in str(error):
        return UnitUseError(
            "A unit computes gradients by torch.func (grad, vjp, jacrev, hessian). torch allows it"
            " in no unit that is computed again. Use CephaloStrategy(recompute=False)."
        )
    if _SECOND in str(error):
        return UnitUseError(
            "A second backward through the same graph: the first one has freed it. Call"
            " self.manual_backward(loss, retain_graph=True) the first time, or sum the losses."
        )
    if _SHARDED in str(error) and not isinstance(error, CephaloError):
        return UnitUseError(str(error))  # load_state_dict() keeps the text alone
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return error
    return UnitUseError(
        "training_step combines a sharded parameter with another tensor: each rank holds some of"
        " its rows. Inside of a step a unit's parameters can be used in its forward only."
        f" {REMEDY}"
    )


_VERSION = re.compile(r"is at version (\d+); expected version")


def needs_freed(error: BaseException) -> bool:
    """Whether a backward has failed as it needs parameters that are freed."""
    found = _VERSION.search(str(error))
    return found is not None and int(found[1]) >= FREED


def read_elsewhere(error: RuntimeError, unit: Unit) -> None:
    """Raise by name if a backward has failed as an embedding's values are gone."""
    shapes = (str(list(shape))[1:-1] for flat in unit.flats for shape in flat.contents.shapes)
    if needs_freed(error) and any(shape in str(error) for shape in shapes):
        raise UnitUseError(
            f"training_step computes with the parameters of {unit.name!r} behind a call of it. Its"
            " parameters are freed then, and its backward gathers none. Name the units without it,"
            " such as CephaloStrategy(units=[Block]): what is no unit is there all step long."
        ) from error


def used_outside(names: list[str]) -> str:
    """Return what to tell of parameters whose gradient comes while their unit is not visited."""
    return (
        f"A gradient has come to parameters of {spelled(names)} outside of the backward of their"
        " unit, so that it would be lost: the unit returns or stores a parameter that other code"
        " computes with, or code has called a backward itself. Use a unit's parameters in its"
        " forward only, or choose units that hold both places: CephaloStrategy(units=[...])."
    )
