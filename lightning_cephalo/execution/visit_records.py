"""What one microbatch retains of its visits, by their positions in the order of visits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor

from lightning_cephalo.execution.call_tree import CallStructure, Structure
from lightning_cephalo.execution.module_buffers import Shown
from lightning_cephalo.execution.module_state import Stored
from lightning_cephalo.execution.normalisation import Meeting
from lightning_cephalo.execution.offload import OffloadedTensor
from lightning_cephalo.execution.replay import ThreadState
from lightning_cephalo.execution.stored_outputs import Place
from lightning_cephalo.plan.program import Visit

_version_of = attrgetter("_version")


@dataclass
class Capture:
    """A tensor that a hook in a unit has seen, and may have taken out of it."""

    position: int
    source: Tensor | None
    leaf: Tensor
    hooks: Sequence[Callable[[Tensor], Any]] = ()


@dataclass(eq=False)
class UnitRecord:
    """The data that one visit of a unit retains for its backward."""

    position: int
    inputs: list[Any]
    structure: Structure | CallStructure
    output_leaves: dict[int, Tensor] = field(default_factory=dict, init=False)
    # Values of the class until a visit has others: every visit makes a record, and few visits have
    # most of these.
    outputs: list[Any] | None = field(default=None, init=False)
    body_again: Callable[..., Any] | None = field(default=None, init=False)
    tensors: Sequence[Tensor] = field(default=(), init=False)
    input_versions: tuple[int, ...] = field(default=(), init=False)
    random: tuple[Tensor, ...] | None = field(default=None, init=False)
    modes: ThreadState | None = field(default=None, init=False)
    buffers: Sequence[Any] = field(default=(), init=False)
    shown: Shown = field(default=(), init=False)
    stored: Stored | None = field(default=None, init=False)
    away: Sequence[OffloadedTensor] = field(default=(), init=False)
    meetings: Sequence[Meeting] = field(default=(), init=False)
    captures: Sequence[Capture] = field(default=(), init=False)
    places: Sequence[Place] = field(default=(), init=False)
    is_passed: bool = field(default=False, init=False)

    def watch_inputs(self) -> None:
        """Note the versions of the inputs."""
        tensors = [each for each in self.inputs if isinstance(each, Tensor)]
        self.tensors = self.inputs if len(tensors) == len(self.inputs) else tensors
        self.input_versions = tuple(map(_version_of, self.tensors))

    def inputs_are_unchanged(self) -> bool:
        """Whether nothing has written to the inputs since :meth:`watch_inputs`."""
        return self.input_versions == tuple(map(_version_of, self.tensors))

    @property
    def differentiable_inputs(self) -> list[Tensor]:
        """The inputs that need a gradient."""
        return [each for each in self.inputs if isinstance(each, Tensor) and each.requires_grad]


class VisitRecords(list["UnitRecord | Meeting | None"]):
    """One record for each visit, also of other microbatches; None: the visit retains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []
        self.entered: Visit | None = None
        self.entered_record: UnitRecord | None = None

    def add(self, record: UnitRecord | Meeting | None) -> None:
        """Add the microbatch's own next visit."""
        self.made.append(len(self))
        self.append(record)

    def forget_all(self) -> None:
        """Forget all visits."""
        self.clear()
        self.entered = self.entered_record = None

    def unit_at(self, position: int) -> UnitRecord | None:
        """Return the record of the unit that is visited at a position, or that meets there."""
        record = self[position]
        return record.record if isinstance(record, Meeting) else record

    def units(self) -> Iterator[UnitRecord]:
        """Yield the records of units."""
        return (each for each in self if isinstance(each, UnitRecord))

    def leaves_behind(self) -> Iterator[Tensor]:
        """Yield the leaves to which code behind units and meetings sends gradients."""
        for record in self:
            if isinstance(record, UnitRecord):
                yield from record.output_leaves.values()
            elif record is not None:
                yield from record.own or ()
