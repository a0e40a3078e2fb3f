"""What a microbatch retains of its visits, also tensors that forward hooks take out of units.

A hook of this package comes before all others of a module in a unit; see ``unit_hooks.py``. It
makes the module's output an output of the unit: others see a stand-in for a leaf. If the unit is
recomputed, the tensor of the recomputation gets the leaf's gradient. Otherwise the unit's graph is
cut there. Hooks of the stand-in move to the tensor itself when the forward has ended.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.boundaries import Boundaries, can_have_gradient, run_backward
from lightning_cephalo.execution.call_tree import CallStructure, Structure, flatten_result
from lightning_cephalo.execution.normalisation import Meeting
from lightning_cephalo.execution.offload import OffloadedTensor
from lightning_cephalo.execution.overlay import View
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
    view: View | None = field(default=None, init=False)
    away: Sequence[OffloadedTensor] = field(default=(), init=False)
    meetings: Sequence[Meeting] = field(default=(), init=False)
    captures: Sequence[Capture] = field(default=(), init=False)
    places: Sequence[Place] = field(default=(), init=False)
    is_passed: bool = field(default=False, init=False)

    def watch_inputs(self) -> None:
        tensors = [each for each in self.inputs if isinstance(each, Tensor)]
        self.tensors = self.inputs if len(tensors) == len(self.inputs) else tensors
        self.input_versions = tuple(map(_version_of, self.tensors))

    def inputs_are_unchanged(self) -> bool:
        return self.input_versions == tuple(map(_version_of, self.tensors))

    @property
    def differentiable_inputs(self) -> list[Tensor]:
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
        self.clear()
        self.entered = self.entered_record = None

    def unit_at(self, position: int) -> UnitRecord | None:
        """Return the record of the unit that is visited at a position, or that meets there."""
        record = self[position]
        return record.record if isinstance(record, Meeting) else record

    def units(self) -> Iterator[UnitRecord]:
        return (each for each in self if isinstance(each, UnitRecord))

    def leaves_behind(self) -> Iterator[Tensor]:
        """Yield the leaves to which code behind units and meetings sends gradients."""
        for record in self:
            if isinstance(record, UnitRecord):
                yield from record.output_leaves.values()
            elif record is not None:
                yield from record.own or ()


class _Once:
    def __init__(self) -> None:
        self._has_seen = False

    def __call__(self, gradient: Tensor) -> None:
        if self._has_seen:
            raise UnitUseError(
                "A forward hook takes a tensor out of a unit and gives it a hook, and the module"
                " that has made the tensor uses it itself. The hook would see its gradient in"
                " parts. Use CephaloStrategy(recompute=True), or register the hook on another"
                " tensor: `y = y.view_as(y); y.register_hook(...)`."
            )
        self._has_seen = True


class _Retain:
    """A hook that keeps the gradient of a tensor as that of its stand-in."""

    def __init__(self, shown: weakref.ref[Tensor]) -> None:
        self._shown = shown
        self._gradient: Tensor | None = None

    def __call__(self, gradient: Tensor) -> None:
        self._gradient = gradient if self._gradient is None else self._gradient + gradient
        shown = self._shown()
        if shown is not None:
            shown.grad = self._gradient


class Captures:
    """The tensors that hooks take out of the units of one microbatch."""

    def __init__(
        self, records: VisitRecords, boundaries: Boundaries, recompute: bool, is_on: bool
    ) -> None:
        self._records = records
        self._boundaries = boundaries
        self._recompute = recompute
        self._is_on = is_on
        self.seen_again: list[Tensor] = []
        self.late_hooks = 0
        self._shown: list[tuple[Capture, weakref.ref[Tensor], dict[Any, Any]]] = []

    def show(self, output: Any) -> Any:
        """Make the tensors of a module in a unit outputs of the unit; None: it has none."""
        record = self._records.entered_record
        if record is None or not self._is_on:
            return None
        values, structure = flatten_result(output)
        before = len(record.captures)
        for index, value in enumerate(values):
            if not isinstance(value, Tensor) or not can_have_gradient(value):
                continue
            if not self._recompute and not value.requires_grad:
                continue
            with torch.enable_grad():
                leaf, shown = self._boundaries.show(value, record.position)
            source = None if self._recompute else value
            capture = Capture(len(self._records) - 1, source, leaf)
            record.captures = (*record.captures, capture)
            # the stand-in may be gone when hooks that it has got are due
            hooks: OrderedDict[Any, Any] = OrderedDict()
            shown._backward_hooks, values[index] = hooks, shown
            shown.grad_fn._register_hook_dict(shown)  # type: ignore[union-attr]
            self._shown.append((capture, weakref.ref(shown), hooks))
        return structure.unflatten(values) if len(record.captures) > before else None

    def leave(self, record: UnitRecord) -> None:
        """Forget hooks that a unit has registered, if it will register them again."""
        for _, _, hooks in self._shown[len(self._shown) - len(record.captures) :]:
            if self._recompute:
                hooks.clear()
            self.late_hooks -= len(hooks)

    def end_forward(self) -> None:
        """Take the hooks off the stand-ins."""
        owner = self._boundaries.owner
        for capture, reference, hooks in self._shown:
            found: list[Callable[[Tensor], Any]] = [
                hook for key, hook in hooks.items() if key is not owner
            ]
            hooks.clear()
            self.late_hooks += len(found)
            shown = reference()
            if found and capture.source is not None:
                found.insert(0, _Once())
            if shown is not None and shown.retains_grad:
                found.append(_Retain(reference))
            capture.hooks = found
        self._shown = []

    def hook_sources(self, record: UnitRecord) -> None:
        """Give the tensors of a unit that is not recomputed the hooks of their stand-ins."""
        for capture in record.captures:
            if capture.source is not None:
                _move_hooks(capture, capture.source)

    def backward(self, record: UnitRecord, before: int | None = None) -> None:
        """Run the backward of captured tensors of a unit that is not recomputed, the latest first.

        It goes back to the meeting before, whose gradients are not complete yet.
        """
        positions = [meeting.position for meeting in record.meetings]
        passed = [at for at in positions if before is None or at < before]
        start = max(passed, default=record.position)
        while record.captures and record.captures[-1].position >= start:
            *before_it, capture = record.captures
            record.captures = before_it
            if capture.source is not None and capture.leaf.grad is not None:
                run_backward([capture.source], [capture.leaf.grad], retain=True)

    # -- recomputation ------------------------------------------------------------------------

    def note_again(self, output: Any) -> None:
        """Note the tensors of :meth:`show` while a unit is computed again."""
        values = flatten_result(output)[0]
        tensors = [value for value in values if isinstance(value, Tensor)]
        self.seen_again += [value for value in tensors if can_have_gradient(value)]

    def reached_again(self, record: UnitRecord) -> list[tuple[Tensor, Tensor]]:
        """Return the captured tensors of a unit that was computed again, and their gradients."""
        seen, self.seen_again = self.seen_again, []
        if len(seen) != len(record.captures):
            raise UnitUseError(
                "A hook in a unit saw other tensors when the unit was computed again for the"
                " backward. Register it before the step, or use CephaloStrategy(recompute=False)."
            )
        for value, each in zip(seen, record.captures, strict=True):
            _move_hooks(each, value)
        pairs = [(value, each.leaf.grad) for value, each in zip(seen, record.captures, strict=True)]
        return [(value, gradient) for value, gradient in pairs if gradient is not None]


def _move_hooks(capture: Capture, tensor: Tensor) -> None:
    if tensor.requires_grad:
        for hook in capture.hooks:
            tensor.register_hook(hook)
    capture.hooks = ()
