"""What one microbatch retains of its visits, by their positions in the order of visits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_cephalo.execution.call_tree import CallStructure, Structure
from lightning_cephalo.execution.module_buffers import Shown
from lightning_cephalo.execution.module_state import Stored
from lightning_cephalo.execution.normalisation import Meeting
from lightning_cephalo.execution.offload import OffloadedTensor
from lightning_cephalo.execution.replay import RandomState, ThreadState
from lightning_cephalo.execution.stored_outputs import Place
from lightning_cephalo.execution.vocabulary.questions import Question


@dataclass
class Capture:
    """A tensor that a hook in a unit has seen, and may have taken out of it.

    Attributes:
        position: The latest visit when it was seen.
        source: The tensor, with its graph; None if the unit is recomputed.
        leaf: The leaf whose gradient comes from the code that has it now.
    """

    position: int
    source: Tensor | None
    leaf: Tensor


@dataclass(eq=False, slots=True)
class UnitRecord:
    """The data that one visit of a unit retains for its backward.

    Attributes:
        position: Its position in the order of visits.
        body: The unit's own forward.
        inputs: Its arguments, with leaves in place of tensors that need a gradient.
        structure: Rebuilds the call from the inputs.
        input_versions: Versions of the inputs that are tensors, before the body ran, for
            recomputation.
        output_leaves: The leaves of its outputs, with their places among all outputs.
        outputs: The outputs, with their graph; None if the unit is recomputed.
        random: The random number generators before the body ran, for recomputation.
        modes: The modes of the thread, likewise.
        buffers: Buffers of the unit that the body has changed, as they were before.
        shown: What all buffers of the unit were before.
        stored: What the microbatch found on modules before.
        away: Inputs in host memory.
        meetings: Layers in the unit that need statistics of the global batch. The unit's backward
            begins at the last.
        captures: Tensors that hooks have seen in the unit.
        places: Attributes in which the unit has stored tensors, which follow its outputs.
        is_passed: Whether the backward of the code behind the last meeting is done.
    """

    position: int
    body: Callable[..., Any]
    inputs: list[Any]
    structure: Structure | CallStructure
    input_versions: Sequence[int] = ()
    output_leaves: list[tuple[int, Tensor]] = field(default_factory=list)
    outputs: list[Any] | None = None
    random: RandomState | None = None
    modes: ThreadState | None = None
    # few visits have these: empty lists would be most of what the garbage collector walks
    buffers: Sequence[Any] = ()
    shown: Shown = ()
    stored: Stored | None = None
    away: Sequence[OffloadedTensor] = ()
    meetings: Sequence[Meeting] = ()
    captures: Sequence[Capture] = ()
    places: Sequence[Place] = ()
    is_passed: bool = False

    def inputs_are_unchanged(self) -> bool:
        """Whether nothing has written to the inputs since the body began."""
        return self.input_versions == self.versions_now()

    def versions_now(self) -> list[int]:
        """Return the versions of the inputs that are tensors."""
        return [each._version for each in self.inputs if isinstance(each, Tensor)]

    @property
    def differentiable_inputs(self) -> list[Tensor]:
        """The inputs that need a gradient."""
        return [each for each in self.inputs if isinstance(each, Tensor) and each.requires_grad]


@dataclass(slots=True)
class Entered:
    """The unit whose code a microbatch is running.

    Attributes:
        unit: Its index.
        differentiable: Whether its visit has a backward.
        record: The record of that visit; None: it retains nothing.
    """

    unit: int
    differentiable: bool
    record: UnitRecord | None = None


class VisitRecords:
    """The records of one microbatch: one place for each visit, also for those that others make.

    Attributes:
        made: Positions of the microbatch's own visits.
        entered: The unit whose code is running; None: code between units is.
    """

    def __init__(self) -> None:
        self._records: list[UnitRecord | Meeting | Question | None] = []
        self.made: list[int] = []
        self.entered: Entered | None = None

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, position: int) -> UnitRecord | Meeting | Question | None:
        return self._records[position]

    def add(self, record: UnitRecord | Meeting | Question | None) -> None:
        """Add the microbatch's own next visit; None: it retains nothing."""
        self.made.append(len(self._records))
        self._records.append(record)

    def let_pass(self) -> None:
        """Add a visit that only others make."""
        self._records.append(None)

    def is_at(self, position: int) -> bool:
        """Whether the latest visit is the one at this position."""
        return len(self._records) - 1 == position

    def drop(self, position: int) -> None:
        """Forget what a visit retains."""
        self._records[position] = None

    def clear(self) -> None:
        """Forget all visits."""
        self._records, self.entered = [], None

    @property
    def entered_record(self) -> UnitRecord | None:
        """The record of the unit whose code is running; None: there is none."""
        return None if self.entered is None else self.entered.record

    def unit_at(self, position: int) -> UnitRecord | None:
        """Return the record of the unit that is visited at a position, or that meets there."""
        record = self._records[position]
        if record is None or isinstance(record, UnitRecord):
            return record
        return record.record if isinstance(record, Meeting) else None

    def units(self) -> Iterator[UnitRecord]:
        """Yield the records of units."""
        return (each for each in self._records if isinstance(each, UnitRecord))

    def leaves_behind(self) -> Iterator[Tensor]:
        """Yield the leaves to which code behind units and meetings sends gradients."""
        for record in self._records:
            if isinstance(record, UnitRecord):
                yield from (leaf for _, leaf in record.output_leaves)
            elif record is not None:
                yield from record.own or ()
