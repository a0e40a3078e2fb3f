"""The seconds of a pipeline's step as a formula.

A wave is a part of the batch. All waves pass a stage forward, then all pass it backward. Stages and
links are machines, which every wave passes in one order, taking ``p_k`` seconds on the k-th. The
last wave leaves it at ``sum of p_j for j <= k + (waves - 1) x max of p_j for j <= k + latencies``.
That is exact: a permutation flow shop whose jobs are equal. Forward and backward each have their
own slowest machine. A stage has gathered two units while it waited for its first wave, so the sum
has the shorter ``lone_forward_s``. Its gathers may also end its first forward later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageTimes:
    """The seconds of one stage; those of compute are its slowest rank's, summed over a wave.

    A stage that regathers has two gathers and one reduce of each unit in every wave (ZeRO-3), and
    holds two units whole. Else it has one of each in a step (ZeRO-2), and holds all units whole.
    """

    units: int
    forward_s: float
    backward_s: float
    tail_s: float
    gather_s: float
    reduce_s: float
    regathers: bool = False
    ready_s: float = 0.0
    after_s: float = 0.0
    update_s: float = 0.0

    @property
    def wave_forward_s(self) -> float:
        """Seconds by which one wave's forward follows the other at best."""
        return self.units * max(self._forward_collectives_s, self.forward_s)

    @property
    def wave_backward_s(self) -> float:
        """Seconds by which one wave's backward follows another; the tail hides collectives too."""
        collectives_s, own_s = self._backward_collectives_s, self.backward_s
        rest_s = (self.units - self._free) * max(collectives_s, own_s)
        return rest_s + max(self._free * collectives_s, self._free * own_s + self.tail_s)

    @property
    def lone_forward_s(self) -> float:
        """Seconds of a forward for which the stage has waited: two units are gathered already."""
        rest_s = max(self._forward_collectives_s, self.forward_s)
        return (self.units - self._free) * rest_s + self._free * self.forward_s

    @property
    def lone_backward_s(self) -> float:
        """Seconds of a backward for which the stage has waited, tail included."""
        rest_s = max(self._backward_collectives_s, self.backward_s)
        return (self.units - self._free) * rest_s + self._free * self.backward_s + self.tail_s

    @property
    def turn_s(self) -> float:
        """Seconds that the last stage waits for gathers between its last forward and backward."""
        late_s = self._forward_collectives_s - self.forward_s - self.tail_s
        return max(0.0, late_s, late_s + self._forward_collectives_s - self.backward_s)

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

    @property
    def _free(self) -> int:
        return min(2, self.units)

    @property
    def _forward_collectives_s(self) -> float:
        return self.gather_s if self.regathers else 0.0

    @property
    def _backward_collectives_s(self) -> float:
        return self.gather_s + self.reduce_s if self.regathers else 0.0


@dataclass(frozen=True)
class Crossing:
    """What one wave's boundary takes from a stage to the next, each way."""

    wave_s: float
    latency_s: float = 0.0

    @property
    def arrival_s(self) -> float:
        return self.wave_s + self.latency_s


def pipeline_s(stages: Sequence[StageTimes], crossings: Sequence[Crossing], waves: int) -> float:
    """Return the seconds of a step; there is a crossing between each two stages."""
    behind_stages = (Crossing(0.0), *reversed(crossings))
    from_last = list(zip(reversed(stages), behind_stages, strict=True))
    forward_s = rest_s = slowest_s = 0.0
    for stage, behind in from_last:
        rest_s += behind.arrival_s
        slowest_s = max(slowest_s, behind.wave_s, stage.wave_forward_s)
        forward_s = max(forward_s, stage.first_forward_end_s + rest_s + (waves - 1) * slowest_s)
        rest_s += stage.lone_forward_s
    forward_s += stages[-1].turn_s
    reduced_s = busy_s = slowest_s = 0.0
    for stage, behind in from_last:
        busy_s += behind.arrival_s + stage.lone_backward_s
        slowest_s = max(slowest_s, behind.wave_s, stage.wave_backward_s)
        end_s = forward_s + busy_s + (waves - 1) * slowest_s
        reduced_s = max(reduced_s, end_s + stage.reduced_s)
    return reduced_s + max(stage.update_s for stage in stages)
