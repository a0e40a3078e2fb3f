"""Refuses writes of the user's code to parameters, before anything is lost.

Each unit is a copy at one time of the step and rows at another, so that a write there cannot have
its effect once a step, on the whole parameter. `sharding/write_guard.py` makes it visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_cephalo.common.errors import CephaloError, ShardedUseError, UnitUseError
from lightning_cephalo.execution.tensor_hooks import gradient_through_units
from lightning_cephalo.sharding.unit import Unit
from lightning_cephalo.sharding.write_guard import REMEDY, spelled

# what locked parameters say, which torch may repeat in an error of its own
_SHARDED = "while sharded: each rank holds some rows"


class UserWrites:
    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse all use of sharded parameters in a ``with`` block; copies can be used."""
        for unit in self._units:
            unit.lock()
        try:
            yield
        finally:
            for unit in self._units:
                unit.unlock()

    def check(self, doing: str) -> None:
        """Raise if code has written to parameters since the last check."""
        assigned = [name for unit in self._units for name in unit.assigned()]
        if assigned:
            raise UnitUseError(
                f"`.data` of {spelled(assigned)} is assigned while sharded, which does not reach"
                f" the rows that each rank holds: the write would be lost. {REMEDY}"
            )
        written = [name for unit in self._units for name in unit.written()]
        if written:
            raise UnitUseError(
                f"{doing} writes to {spelled(written)} inside of a step, where parameters are"
                " copies that are freed after their use: the write would be lost. In addition it"
                f" would run once per microbatch. {REMEDY}"
            )


def explained(error: RuntimeError) -> RuntimeError:
    """Return the error to raise for code that needs what is in units, or in other ranks' rows."""
    if "appears to not have been used in the graph" in str(error):
        return gradient_through_units()
    if _SHARDED in str(error) and not isinstance(error, CephaloError):
        return ShardedUseError(str(error))  # load_state_dict() keeps the text alone
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return error
    return UnitUseError(
        "training_step combines a sharded parameter with another tensor: each rank holds some of"
        " its rows. Inside of a step a unit's parameters can be used in its forward only."
        f" {REMEDY}"
    )
