"""What goes into a step and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class MicrobatchCall:
    """What the runner needs of one microbatch.

    Attributes:
        step: Calls the user's step.
        weight_of: Takes what the step returned, gives ``(loss, weight)``: the microbatch's share
            of the gradient is ``weight / total weight of all ranks``.
        on_resume: Called each time before the step goes on.
        on_pause: Called each time after it has parked or returned.
    """

    step: Callable[[], Any]
    weight_of: Callable[[Any], tuple[Tensor, float]]
    on_resume: Callable[[], None] = _nothing
    on_pause: Callable[[], None] = _nothing


@dataclass(frozen=True)
class ForwardOutcome:
    """What the forward of one step gave.

    Attributes:
        results: What each of this rank's microbatches returned.
        weights: Their weights.
        total_weight: Of all microbatches of all ranks.
        notes: What ``note`` gave on every rank.
    """

    results: tuple[Any, ...]
    weights: tuple[float, ...]
    total_weight: float
    notes: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class StepTimes:
    """Synchronised times of this rank's last step, filled when ``clock`` is given.

    Attributes:
        forward_s: Sum over visits and microbatches of the units' forward.
        backward_s: Likewise backward, recompute and glue included.
        tail_s: Everything else: embedding, head, loss and its backward.
        visits: Number of visits that one microbatch makes.
    """

    forward_s: float
    backward_s: float
    tail_s: float
    visits: int
