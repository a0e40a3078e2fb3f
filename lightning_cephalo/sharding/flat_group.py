"""Flats that are gathered, armed, reduced and freed together."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

from lightning_cephalo.sharding.flat import Flat
from lightning_cephalo.sharding.transfers import Pending, Wait, wait_for


class UnitState(enum.Enum):
    """State of the parameters of a unit, or of a part of it.

    SHARDED -> (gather) -> GATHERING -> (wait) -> GATHERED -> (free) -> SHARDED.

    Freeing GATHERING parameters waits for their gather first.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Flats:
    """Several flats, and the bytes of their full tensors."""

    flats: list[Flat]

    @property
    def trainable(self) -> bool:
        """Whether any parameter needs a gradient now."""
        return any(flat.trainable for flat in self.flats)

    @property
    def trained(self) -> list[Flat]:
        """The flats that need gradients now."""
        return [flat for flat in self.flats if flat.trainable]

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered parameters."""
        return sum(flat.numel * flat.dtype.itemsize for flat in self.flats)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the full gradients during a backward."""
        return sum(flat.numel * flat.master_dtype.itemsize for flat in self.trained)

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes of the full gradients as they travel."""
        return sum(flat.numel * flat.sent_dtype.itemsize for flat in self.trained)


class FlatGroup(Flats):
    """Flats of a unit that move together: all of them, or one end of the root unit."""

    def __init__(
        self, flats: Sequence[Flat], names: Sequence[str], show: Callable[[], None]
    ) -> None:
        self.flats, self.names, self._show = list(flats), frozenset(names), show
        self.state = UnitState.SHARDED
        self._pending: list[Pending] = []
        self._reducing: list[Pending] = []

    @property
    def works(self) -> tuple[list[Any], list[Any]]:
        """Pending handles of torch.distributed: those of the gather, and those of the reduce."""
        return (
            [work for pending in self._pending for work in pending.works],
            [work for pending in self._reducing for work in pending.works],
        )

    @property
    def is_reducing(self) -> bool:
        """Whether a reduce is under way."""
        return bool(self._reducing)

    @property
    def trained_parameters(self) -> int:
        """Number of parameters in its trainable flats."""
        return sum(len(flat.sharded) for flat in self.trained)

    def start_gather(self) -> None:
        """Begin to gather; does nothing if the gather has already begun."""
        if self.state is not UnitState.SHARDED:
            return
        # resumes where a call without enough memory stopped: nothing is communicated twice
        for flat in self.flats[len(self._pending) :]:
            self._pending.append(flat.gather())
        self.state = UnitState.GATHERING

    def finish_gather(self, wait: Wait = wait_for) -> None:
        """Wait for a gather that has begun, and give the modules the full parameters."""
        if self.state is not UnitState.GATHERING:
            return
        for pending in self._pending:
            pending.wait(wait)
        self._pending = []
        self.state = UnitState.GATHERED
        self._show()

    def free(self, wait: Wait = wait_for) -> None:
        """Free the full parameters and give the modules the sharded ones."""
        if self.state is UnitState.SHARDED:
            return
        for pending in self._pending:
            pending.wait(wait)
        self._pending = []
        self.state = UnitState.SHARDED
        self._show()
        for flat in self.flats:
            flat.free()

    def outdate(self) -> None:
        """Let graphs raise that still need the full parameters, which are free."""
        for flat in self.flats:
            flat.outdate()

    def arm(self) -> None:
        """Prepare zeroed gradients of the trainable parameters for accumulation."""
        for flat in self.trained:
            flat.arm()

    def arm_late(self) -> None:
        """Do so when gradients may have landed already, which count."""
        for flat in self.trained:
            flat.arm_late()

    @property
    def has_landed(self) -> bool:
        """Whether gradients have come to parameters that are not armed."""
        return any(flat.has_landed for flat in self.flats)

    def forget_landed(self) -> None:
        """Drop what has landed for a step whose backward has not come."""
        for flat in self.flats:
            if flat.grad_full is None:
                for parameter in flat.parameters:
                    parameter.grad = None

    def used(self) -> list[bool]:
        """Per trainable flat and parameter, whether a gradient has landed on this rank."""
        return [used for flat in self.trained for used in flat.used()]

    def start_reduce(self, scale: float, *, in_place: bool = False) -> None:
        """Begin to sum the gradients over the ranks; see ``Flat.reduce``."""
        for flat in self.trained[len(self._reducing) :]:  # as in start_gather
            self._reducing.append(flat.reduce(scale, in_place=in_place))

    def wait_reduce(self, wait: Wait = wait_for) -> None:
        """Wait for this rank's slice of the summed gradients and free the full gradients."""
        for pending in self._reducing:
            pending.wait(wait)
        if self._reducing:
            for flat in self.flats:
                flat.look_for_late()
        self._reducing = []
        for flat in self.flats:
            flat.disarm()

    def take_late(self) -> bool:
        """Return whether gradients have come behind a reduce since the last call."""
        late = self.has_landed or any(flat.has_late for flat in self.flats)
        for flat in self.flats:
            flat.has_late = False
        return late

    def publish(self, used: Sequence[bool]) -> None:
        """Set ``.grad`` where any rank used the parameter; flags in the order of :meth:`used`."""
        start = 0
        for flat in self.trained:
            end = start + len(flat.sharded)
            flat.publish(used[start:end])
            start = end
