"""Updates units inside the backward, as soon as their gradients are reduced.

[Note: early updates]
A unit's gradient is final when its reduce is done: its rows are updated, and the gradient's memory
is given back. The optimizer's own ``step`` updates the root unit, and parameters of which this rank
cannot know yet whether any rank has used them: it knows it of those that it has used itself, and
of others where the summed gradient is not zero. The exchange behind the backward tells the rest.

An error between two of these updates leaves weights half-updated: a rank that fails learns nothing
of the others, which go on. So the error says it on all ranks, and no such checkpoint is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

from torch import nn

from lightning_cephalo.common.errors import CephaloError
from lightning_cephalo.sharding.unit import Unit


class Updater(Protocol):
    """Updates parameters as the user's optimizer does; ``adapters/early_update.py`` has one."""

    def is_exact(self) -> bool:
        """Return whether updates in this step's backward give what the optimizer's step gives."""

    def update(self, parameters: Sequence[nn.Parameter], on_host: bool = False) -> list[bool]:
        """Update sharded parameters by their gradients, and return for each whether it was."""

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer updates this sharded parameter."""

    def check(self) -> None:
        """Raise if code has changed in the backward what updates there had used before."""

    def finish(self) -> None:
        """End a step, behind the optimizer's own."""


class EarlyUpdates:
    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)
        self._updated = 0
        self._may = self._may_again = False
        self.updater: Updater | None = None
        self.is_on = False

    @property
    def left_half_updated(self) -> bool:
        """Whether units were updated in a step whose other updates have not come."""
        return self._updated > 0

    def begin(self) -> None:
        """Find out whether this rank may update early in the step that begins."""
        self._may = self._may_again or (self.updater is not None and self.updater.is_exact())
        self.is_on, self._may_again = self._may, False

    def repeat(self) -> None:
        """Let the step that begins next be the one of before, which has failed."""
        self._may_again = self._may

    def agree(self, everyone: bool) -> bool:
        """Learn whether all ranks may; return whether that changes this step."""
        before, self.is_on = self.is_on, everyone
        return before is not everyone

    def count(self) -> None:
        """Count an update of a unit, also on a rank that has failed: the others make it."""
        self._updated += 1

    def update(
        self, unit: Unit, used: Sequence[bool], has_samples: bool, on_host: bool = False
    ) -> None:
        """Update what is known to have a gradient, and give the gradient's memory back."""
        assert self.updater is not None
        unit.publish(unit.surely_used(used, has_samples))
        parameters = unit.reduced_parameters()
        unit.give_back(self.updater.update(parameters, on_host))

    def check(self) -> None:
        """Raise if the optimizer's step would not make the updates that units have had."""
        if self.is_on and self.updater is not None:
            self.updater.check()

    def finish(self) -> None:
        """Give all gradients back that the optimizer's step has used."""
        self._updated = 0
        if not self.is_on or self.updater is None:
            return
        self.updater.finish()
        for unit in self._units:
            parameters = unit.reduced_parameters()
            updated = [p.grad is not None and self.updater.holds(p) for p in parameters]
            unit.give_back(updated, keeps_unused=False)

    def explain(self, failure: BaseException) -> None:
        """Let an error say that it leaves weights half-updated, if it does."""
        if not self.left_half_updated:
            return
        said = (
            f"Weights are half-updated: this step had updated {self._updated} of"
            f" {len(self._units)} units. Continue from the last checkpoint:"
            " fit(model, ckpt_path=...)."
        )
        if said in str(failure) or said in getattr(failure, "__notes__", ()):
            return
        if isinstance(failure, CephaloError) and len(failure.args) == 1:
            failure.args = (f"{failure}\n{said}",)
        elif isinstance(failure, Exception) and hasattr(failure, "add_note"):
            failure.add_note(said)
        else:  # Lightning shows no text of an interrupt; Python 3.10 has no notes
            warnings.warn(said, stacklevel=2)
