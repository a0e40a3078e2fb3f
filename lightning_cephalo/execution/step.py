"""Inputs, progress and results of one step on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_cephalo.execution.graph import Root, Windows
from lightning_cephalo.execution.loss_weights import LossWeights
from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.plan.program import Instruction, Program, Visit
from lightning_cephalo.sharding.unit import Unit


@dataclass(frozen=True)
class MicrobatchCall:
    """The functions with which the executor runs one microbatch.

    Attributes:
        weight_of: Maps the step's return value to ``(loss, weight)``. The microbatch's share of
            the gradient is ``weight / total weight of all ranks``. A weight that is a tensor on the
            device is read when the device has more work to do.
        on_resume: Called each time before the step resumes.
        on_pause: Called each time after the step has parked or returned.
        samples: Number of its samples; 0 if it is unknown.
    """

    step: Callable[[], Any]
    weight_of: Callable[[Any], tuple[Tensor, float | Tensor]]
    on_resume: Callable[[], None] | None = None
    on_pause: Callable[[], None] | None = None
    samples: int = 0


@dataclass(frozen=True)
class ForwardOutcome:
    """Results of the forward of one step: results and weights of this rank, notes of every rank.

    Attributes:
        losses: Number of microbatches with a loss on every rank.
    """

    results: tuple[Any, ...]
    weights: tuple[float, ...]
    total_weight: float
    notes: tuple[tuple[float, ...], ...] = ()
    losses: tuple[int, ...] = ()


NO_OUTCOME = ForwardOutcome((), (), 0.0)


@dataclass
class Step:
    """A step on its way.

    Attributes:
        note: Returns what this rank tells all others at the end of its forward.
        is_apart: Whether microbatches are at different visits.
        armed: Units with gradients that are not reduced.
        used: Per reduced unit, which parameters had gradients on this rank.
        reducing: The unit whose reduce is under way.
        showing: Units that stay gathered from the forward to the backward.
        goes_on: Whether the code runs on behind a backward.
        roots: Where the step's backward begins, as losses have left it.
        windows: Whose visits have made which nodes.
        reached: Of a backward that the code calls itself: the visits that it passes.
        before_visit: Called before a unit's backward.
    """

    calls: Sequence[MicrobatchCall]
    microbatches: list[Microbatch]
    weights: LossWeights
    note: Callable[[], Sequence[float]] = tuple
    trainable: tuple[bool, ...] = ()
    visits: Sequence[Visit] = ()
    is_traced: bool = False
    is_apart: bool = False
    program: Program = field(default_factory=lambda: Program((), ()))
    outcome: ForwardOutcome = NO_OUTCOME
    gradient_scale: float = 1.0
    with_loss: set[int] = field(default_factory=set)
    armed: set[int] = field(default_factory=set)
    used: dict[int, list[bool]] = field(default_factory=dict)
    reducing: Unit | None = None
    showing: Sequence[Unit] = ()
    goes_on: bool = False
    roots: list[Root] = field(default_factory=list)
    windows: Windows = field(default_factory=Windows)
    reached: frozenset[int] | None = None
    before_visit: Callable[[Instruction], None] | None = None

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
        return self.microbatches[microbatch].code.finished

    @property
    def parked(self) -> list[Visit | None]:
        """The visits at which this rank's microbatches are parked; None: the end of the step."""
        return [microbatch.code.parked for microbatch in self.microbatches]

    def made(self) -> list[bool]:
        positions = {position for microbatch in self.microbatches for position in microbatch.made}
        return [position in positions for position in range(len(self.visits))]

    def paths(self) -> tuple[tuple[Visit, ...], ...]:
        paths = [tuple(self.visits[at] for at in each.made) for each in self.microbatches]
        return tuple(dict.fromkeys(paths))
