"""The seconds of a stage and of what crosses to the next one.

A wave is a part of the batch. All waves pass a stage forward, then all pass it backward.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lightning_cephalo.common.errors import PlanError


class Gathering(enum.Enum):
    """How often a stage gathers its units (ZeRO-3 in every wave, or ZeRO-2)."""

    REGATHER = "regather"
    """In every wave: two gathers and one reduce of each unit. Two units are held whole."""
    HOLD = "hold"
    """Once in a step: one gather and one reduce. All units and gradients are held whole."""


@dataclass(frozen=True)
class StageTimes:
    """The seconds of one stage; those of compute are its slowest rank's, summed over a wave."""

    units: int
    forward_s: float
    backward_s: float
    tail_s: float
    gather_s: float
    reduce_s: float
    gathering: Gathering
    ready_s: float = 0.0
    after_s: float = 0.0
    update_s: float = 0.0

    def __post_init__(self) -> None:
        # A search makes many of these from checked values: the one it could get wrong is checked.
        if self.units < 1:
            raise PlanError(f"StageTimes.units: expected at least one unit, but got {self.units}.")

    @property
    def regathers(self) -> bool:
        return self.gathering is Gathering.REGATHER

    @property
    def wave_forward_s(self) -> float:
        """Seconds by which one wave's forward follows the other at best."""
        return self.units * max(self._forward_collectives_s, self.forward_s)

    @property
    def wave_backward_s(self) -> float:
        """Seconds by which one wave's backward follows another; the tail hides collectives too."""
        collectives_s, own_s = self._backward_collectives_s, self.backward_s
        free = min(2, self.units)
        rest_s = (self.units - free) * max(collectives_s, own_s)
        return rest_s + max(free * collectives_s, free * own_s + self.tail_s)

    @property
    def lone_forward_s(self) -> float:
        """Seconds of a forward for which the stage has waited: two units are gathered already."""
        free = min(2, self.units)
        rest_s = (self.units - free) * max(self._forward_collectives_s, self.forward_s)
        return rest_s + free * self.forward_s

    @property
    def lone_backward_s(self) -> float:
        """Seconds of a backward for which the stage has waited, tail included."""
        free = min(2, self.units)
        rest_s = (self.units - free) * max(self._backward_collectives_s, self.backward_s)
        return rest_s + free * self.backward_s + self.tail_s

    @property
    def turn_s(self) -> float:
        """Seconds that the last stage waits for gathers between its last forward and backward."""
        late_s = self._forward_collectives_s - self.forward_s - self.tail_s
        return max(0.0, late_s, late_s + self._forward_collectives_s - self.backward_s)

    @property
    def _forward_collectives_s(self) -> float:
        return self.gather_s if self.regathers else 0.0

    @property
    def _backward_collectives_s(self) -> float:
        return self.gather_s + self.reduce_s if self.regathers else 0.0

    @property
    def first_forward_end_s(self) -> float:
        """Seconds from the start of the step within which gathers let no first forward end."""
        one, other = self.gather_s, self.forward_s
        return self.ready_s + self.units * max(one, other) + min(one, other)

    @property
    def reduced_s(self) -> float:
        """Seconds from the end of the last backward until all gradients are reduced."""
        behind = 1 if self.regathers else self.units - 1
        late_s = max(0.0, self.reduce_s - self.backward_s)
        return self.reduce_s + behind * late_s + self.after_s


@dataclass(frozen=True)
class Crossing:
    """What one wave's boundary takes from a stage to the next, each way."""

    wave_s: float
    latency_s: float = 0.0
