"""What a rank holds at the worst moment of a step, by kind: measured, or predicted by a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank; None where a figure is not known.

    Each kind is the most of it that was held at once, at whatever moment of the step, except for
    ``inside_bytes``: that is what the peak has beside all others (0 if it came while there was less
    of those), as in the planner's formula. So the kinds sum to the peak, or to more.

    Attributes:
        peak_bytes: Most bytes held at once.
        state_bytes: This rank's part of parameters, gradients and what the optimizer keeps of them.
        gathered_bytes: Full parameters of gathered units.
        gradients_bytes: Full gradients of units, and what a reduce receives into.
        boundaries_bytes: What is kept of the samples between forward and backward: the samples,
            boundary activations, and the inside of units where it is not recomputed.
        inside_bytes: What one microbatch takes in a unit, or in the root, while it is there.
        other_bytes: What rests beside all this: buffers, counters, libraries' workspaces.
        step: The training step that was counted, from 1; None where all steps were (or none).
    """

    peak_bytes: float | None = None
    state_bytes: float | None = None
    gathered_bytes: float | None = None
    gradients_bytes: float | None = None
    boundaries_bytes: float | None = None
    inside_bytes: float | None = None
    other_bytes: float | None = None
    step: int | None = None
