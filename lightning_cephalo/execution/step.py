"""One step on one rank: what goes into it, how far it is, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.plan.program import Program, Visit


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class MicrobatchCall:
    """What the executor needs of one microbatch.

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
class Divergence:
    """Where the microbatches of a rank have left the known order of visits.

    Attributes:
        position: In that order.
        place: Where they are instead; None: at the end of the step.
    """

    position: int
    place: Visit | None


@dataclass
class Step:
    """How far this rank is in one step.

    Attributes:
        calls: Of this rank's microbatches.
        microbatches: Their runs; none are left after a failure.
        trainable: By unit, whether it wants gradients.
        weights: What the microbatches weigh, once their losses are known.
        visits: The order by which the step runs; while it is traced, what is known of it.
        is_traced: Whether the order is discovered while the step runs.
        divergence: Where the microbatches have left the order.
        program: What this rank does; its forward is of no use while the step is traced.
        loss_factor: Factor of every loss that the gradients keep until the optimizer's step (a
            gradient scaler's).
        loss_scale: Factor of every loss in addition to its weight.
        gradient_scale: Factor of all gradients when they are reduced.
        with_loss: Microbatches whose loss has been computed.
        used: By unit that has been reduced: which parameters got a gradient on this rank.
    """

    calls: Sequence[MicrobatchCall]
    microbatches: list[Microbatch]
    trainable: tuple[bool, ...] = ()
    weights: list[float] = field(default_factory=list)
    visits: Sequence[Visit] = ()
    is_traced: bool = False
    divergence: Divergence | None = None
    program: Program = field(default_factory=lambda: Program((), ()))
    loss_factor: float = 1.0
    loss_scale: float = 1.0
    gradient_scale: float = 1.0
    with_loss: set[int] = field(default_factory=set)
    used: dict[int, list[bool]] = field(default_factory=dict)

    def has_returned(self, visit: int, microbatch: int) -> bool:
        """Whether only the loss is left of a microbatch."""
        if not self.microbatches or microbatch in self.with_loss:
            return False
        return self.microbatches[microbatch].finished

    def has_left(self, position: int) -> bool:
        """Whether the microbatches have left the order in front of this visit, or before."""
        return self.divergence is not None and self.divergence.position <= position

    @property
    def parked(self) -> list[Visit | None]:
        """Where this rank's microbatches are; None: at the end of the step."""
        return [microbatch.parked for microbatch in self.microbatches]
