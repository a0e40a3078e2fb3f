"""Inputs, progress and results of one step on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_cephalo.execution.graph import Root
from lightning_cephalo.execution.loss_weights import LossWeights
from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.plan.program import Instruction, Program, Visit


@dataclass(frozen=True)
class MicrobatchCall:
    """The functions with which the executor runs one microbatch.

    Attributes:
        weight_of: Maps the step's return value to ``(loss, weight)``. The microbatch's share of
            the gradient is ``weight / total weight of all ranks``. A weight that is a tensor on the
            device is read when the device has more work to do. None: the step has no loss.
        on_resume: Called each time before the step resumes.
        on_pause: Called each time after the step has parked or returned.
        samples: Number of its samples; 0 if it is unknown.
    """

    step: Callable[[], Any]
    weight_of: Callable[[Any], tuple[Tensor, float | Tensor] | None]
    on_resume: Callable[[], None] | None = None
    on_pause: Callable[[], None] | None = None
    samples: int = 0


@dataclass(frozen=True)
class ForwardOutcome:
    """Results of the forward of one step: results and weights of this rank, notes of every rank.

    Attributes:
        losses: Number of microbatches with a loss on every rank.
        skipped: Number of microbatches without a loss, on all ranks.
    """

    results: tuple[Any, ...]
    weights: tuple[float, ...]
    total_weight: float
    notes: tuple[tuple[float, ...], ...] = ()
    losses: tuple[int, ...] = ()
    skipped: int = 0

    @property
    def is_skipped(self) -> bool:
        """Whether no microbatch of any rank has a loss; then there is no backward."""
        return self.skipped > 0 and not any(self.losses)


@dataclass
class Step:
    calls: Sequence[MicrobatchCall]
    microbatches: list[Microbatch]
    weights: LossWeights
    trainable: tuple[bool, ...] = ()
    visits: Sequence[Visit] = ()
    is_traced: bool = False
    is_apart: bool = False
    checks: bool = False
    program: Program = field(default_factory=lambda: Program((), ()))
    gradient_scale: float = 1.0
    with_loss: set[int] = field(default_factory=set)
    skipped: int = 0
    used: dict[int, list[bool]] = field(default_factory=dict)
    goes_on: bool = False
    roots: list[Root] = field(default_factory=list)
    # of a backward that the code calls itself: the visits that it passes
    reached: frozenset[int] | None = None
    before_visit: Callable[[Instruction], None] | None = None
    armed: set[int] = field(default_factory=set)  # units with gradients that are not reduced

    def forget_microbatches(self) -> None:
        """Drop the microbatches; no garbage collector finds cycles through nodes of a graph."""
        for microbatch in self.microbatches:
            microbatch.forget()
        self.microbatches.clear()

    @property
    def samples_with_weight(self) -> int:
        pairs = zip(self.calls, self.weights.values, strict=True)
        return sum(call.samples for call, weight in pairs if weight)

    def has_returned(self, visit: int, microbatch: int) -> bool:
        """Whether a microbatch's step has returned and only its loss remains."""
        if not self.microbatches or microbatch in self.with_loss:
            return False
        return self.microbatches[microbatch].finished

    @property
    def parked(self) -> list[Visit | None]:
        """The visits at which this rank's microbatches are parked; None: the end of the step."""
        return [microbatch.parked for microbatch in self.microbatches]

    def made(self) -> list[bool]:
        positions = {position for microbatch in self.microbatches for position in microbatch.made}
        return [position in positions for position in range(len(self.visits))]

    def paths(self) -> tuple[tuple[Visit, ...], ...]:
        paths = [tuple(self.visits[at] for at in each.made) for each in self.microbatches]
        return tuple(dict.fromkeys(paths))
