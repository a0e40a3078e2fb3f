"""The seconds of a stage and of what crosses to the next one.

A wave is a part of the batch. All waves pass a stage forward, then all pass it backward.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_cephalo.common.errors import PlanError


class Gathering(enum.Enum):
    """How often a stage gathers its units (ZeRO-3 in every wave, or ZeRO-2)."""

    REGATHER = "regather"
    """In every wave: two gathers and one reduce of each unit. Two units are held whole."""
    HOLD = "hold"
    """Once in a step: one gather and one reduce. All units and gradients are held whole."""


@dataclass(frozen=True)
class StageTimes:
    """The seconds of one stage; those of compute are its slowest rank's, summed over a wave.

    A search makes one of arrays, by units: ``units``, ``forward_s``, ``backward_s``, ``tail_s``.
    """

    units: Any
    forward_s: Any
    backward_s: Any
    tail_s: Any
    gather_s: float
    reduce_s: float
    gathering: Gathering
    ready_s: float = 0.0
    after_s: float = 0.0
    update_s: float = 0.0

    def __post_init__(self) -> None:
        # A search makes many of these from checked values: the one it could get wrong is checked.
        if np.min(self.units) < 1:
            raise PlanError(f"StageTimes.units: expected at least one unit, but got {self.units}.")

    @property
    def regathers(self) -> bool:
        return self.gathering is Gathering.REGATHER

    @property
    def wave_forward_s(self) -> Any:
        """Seconds by which one wave's forward follows the other at best."""
        return self.units * np.maximum(self._forward_collectives_s, self.forward_s)

    @property
    def wave_backward_s(self) -> Any:
        """Seconds by which one wave's backward follows another; the tail hides collectives too."""
        collectives_s, own_s = self._backward_collectives_s, self.backward_s
        rest_s = (self.units - self._free) * np.maximum(collectives_s, own_s)
        return rest_s + np.maximum(self._free * collectives_s, self._free * own_s + self.tail_s)

    @property
    def lone_forward_s(self) -> Any:
        """Seconds of a forward for which the stage has waited: two units are gathered already."""
        rest_s = np.maximum(self._forward_collectives_s, self.forward_s)
        return (self.units - self._free) * rest_s + self._free * self.forward_s

    @property
    def lone_backward_s(self) -> Any:
        """Seconds of a backward for which the stage has waited, tail included."""
        rest_s = np.maximum(self._backward_collectives_s, self.backward_s)
        return (self.units - self._free) * rest_s + self._free * self.backward_s + self.tail_s

    @property
    def for_search(self) -> tuple[Any, Any, Any]:
        """Seconds of the first wave's passes, and by how much waves follow in each of them."""
        return self.lone_forward_s + self.lone_backward_s, self.wave_forward_s, self.wave_backward_s

    @property
    def _free(self) -> Any:
        return np.minimum(2, self.units)

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
