"""Runs one microbatch in a greenlet, visit by visit, and the backward of its loss.

Its graph stays whole: see [Note: marks] in graph.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.call_tree import CallStructure, flatten_call, without_empty_caches
from lightning_cephalo.execution.graph import (
    Marks,
    Root,
    Through,
    Windows,
    has_saved_tensor_hooks,
    refuse_saved_tensor_hooks,
)
from lightning_cephalo.execution.recomputed import Found, Places, RecomputedVisit
from lightning_cephalo.execution.replay import ThreadState
from lightning_cephalo.execution.waiting import UserCode
from lightning_cephalo.plan.program import NONE, Visit, visit_of

if TYPE_CHECKING:
    from lightning_cephalo.execution.backward_pass import BackwardPass
    from lightning_cephalo.execution.unit_hooks import UnitForward

BEHIND_THE_LAST = Visit(NONE)
"""The place of a microbatch that has passed the last unit; only its loss is left."""


@dataclass(frozen=True)
class MicrobatchOptions:
    """What the microbatches of a step have in common.

    Attributes:
        recompute: Whether the backward computes units again.
        last: Position of the last visit, if the order is known.
        meets: Whether microbatches can wait for one another in the middle of their code.
        windows: Notes the visits of all of them; None: nobody looks.
    """

    recompute: bool
    last: int = NONE
    meets: bool = False
    windows: Windows | None = None


class Brought(Protocol):
    """What a microbatch brings to a place where all of them wait for one another."""

    @property
    def is_answered(self) -> bool:
        """Whether it can go on."""


class Microbatch:
    """A run of the user's step over some samples.

    Attributes:
        code: The run.
        has_one_backward: Whether its loss is what the step returns.
        meeting: What it brings to the place where it waits.
        entered: The visit that it makes now; None: it is between units.
        visiting: The same, if the backward computes the unit again.
        made: Positions of its visits.
    """

    has_one_backward = True

    def __init__(
        self,
        index: int,
        step: Callable[[], Any],
        places: Places,
        options: MicrobatchOptions,
        backwards: BackwardPass,
    ) -> None:
        self._index, self._places, self._options = index, places, options
        self._backwards = backwards
        self.last = options.last
        self._marks = Marks()
        types = places.accelerator.autocast_types
        self.code = UserCode(step, types, self._marks.__len__)
        # of a head that it has visited last: the visit, and the number of marks before
        self._head = (NONE, 0)
        self._recomputed: dict[int, RecomputedVisit] = {}
        self.entered: Visit | None = None
        self.visiting: RecomputedVisit | None = None
        self.meeting: Brought | None = None
        # visits, also of other microbatches, and its own
        self._passed = 0
        self.made: list[int] = []

    def advance(self) -> None:
        """Run the step until it parks at a unit or returns."""
        if not self._passed and self.has_one_backward and torch.is_grad_enabled():
            self._marks.add(NONE, _ignore)  # for code that makes no visits
        self.code.advance(self)

    def let_pass(self, position: int) -> None:
        """Wait, or have returned, while other microbatches make a visit."""
        self._passed = max(self._passed, position + 1)

    def abandon(self) -> None:
        """Stop the step where it is and drop all that it holds."""
        try:
            self.code.abandon()
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop what it holds for a backward."""
        self._marks.clear()
        for record in self._recomputed.values():
            record.leave()
        self._recomputed.clear()

    @property
    def meets(self) -> bool:
        """Whether it can wait for all others in the middle of its code."""
        return self._options.meets

    @property
    def is_answered(self) -> bool:
        """Whether it can go on at a place where it has waited for all others."""
        return self.meeting is not None and self.meeting.is_answered

    def need_root(self) -> None:
        """Wait for the root unit, which is gathered all step long."""

    @property
    def has_hooks(self) -> bool:
        """Whether its code has registered hooks, of tensors or of the backward of modules."""
        return self.code.handles > 0

    @property
    def has_loss(self) -> bool:
        """Whether :attr:`result` holds a loss whose backward is due."""
        return self.code.finished

    # -- forward, inside the greenlet ---------------------------------------------------------

    def visit(
        self,
        unit: int,
        trainable: bool,
        forward: UnitForward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Visit a unit: park until it is gathered, then compute its body."""
        if self.entered is not None:
            raise UnitUseError(
                f"The unit {forward.name!r} is called inside of another unit. Name the units"
                " without it, such as CephaloStrategy(units=[Block]): what is no unit can be"
                " called everywhere."
            )
        grad = torch.is_grad_enabled()
        again = self._options.recompute and forward.recomputes
        flat: list[Any] = []
        if grad and (again or not trainable):
            flat, structure = flatten_call(args, kwargs)
            if again and not isinstance(structure, CallStructure):
                args, kwargs = without_empty_caches(args, kwargs)
                flat, structure = flatten_call(args, kwargs)
        differentiable = grad and (trainable or _needs_gradient(flat))
        if differentiable and has_saved_tensor_hooks():
            refuse_saved_tensor_hooks(
                f"unit ({forward.name})", ", or choose larger units with units="
            )
        visit = visit_of(unit, differentiable, NONE)
        modes = self.code.park(visit)
        position = self._begin_visit()
        if forward.is_head:
            self._head = position, len(self._marks)
        # autocast would cache casts of weights that are about to be freed, and would cache them
        # without a graph where the forward runs without one
        torch.set_autocast_cache_enabled(False)
        self.entered = visit
        self._begin_nodes()
        try:
            if not differentiable:
                result = forward.body(*args, **kwargs)
                self.behind_visit()
                return result
            nodes = forward.renew_accumulators()
            if again:
                self.visiting = record = RecomputedVisit(
                    self._places, flat, structure, self._found(forward, modes)
                )
                self._recomputed[position] = record
                result = record.first(forward.body, args, kwargs)
            else:
                result = forward.body(*args, **kwargs)
            self._mark_end(position)
            del nodes  # the graph holds them
        finally:
            self.entered = self.visiting = None
            torch.set_autocast_cache_enabled(modes.autocast_cache)
        if self._options.windows is not None:
            self._options.windows.end()
        if self.has_one_backward and self._passed >= self.last + 1:
            result = Through.shown(result)
            if self.last == NONE:  # it may be the last
                self._marks.add(self._passed, _ignore)
        self.behind_visit()
        return result

    def _mark_end(self, position: int) -> None:
        """Let the backward tell when it comes to a visit."""
        record, end = self._recomputed.get(position), self._passed - 1
        self._marks.add(position, partial(self._backwards.arrive, self._index, end, record))

    def _begin_visit(self) -> int:
        position = self._passed
        self._passed += 1
        self.made.append(position)
        return position

    def _begin_nodes(self) -> None:
        """Note whose nodes come next; by meetings, a visit has several parts."""
        if self._options.windows is not None:
            self._options.windows.begin(self._index)

    def _found(self, forward: UnitForward, modes: ThreadState) -> Found:
        """Note the state in which a unit's body begins."""
        places = self._places
        view = places.overlay.now(forward.with_buffers)
        return Found(places.accelerator.random_states(), modes, view)

    def behind_visit(self) -> None:
        """Wait behind the last visit, where all that is left is the loss."""
        if self._passed == self.last + 1:
            self.code.park(BEHIND_THE_LAST)
            if torch.is_grad_enabled() and self.has_one_backward:
                self._marks.add(self._passed, _ignore)  # others have run meanwhile

    # -- places in the middle of its code where all microbatches meet ----------------------------

    def arrival(self) -> Callable[[], None] | None:
        """Return what a node in front of a meeting calls; glue has no instruction of its own."""
        if self.entered is None:
            return None
        return partial(self._backwards.arrive, self._index, self._passed - 1, self.visiting)

    def wait_for_all(self, place: Visit, meeting: Brought) -> None:
        """Wait until all microbatches of all ranks have come to a place."""
        self.meeting = meeting
        self.code.park(place)
        self.meeting = None

    def meet(self, place: Visit, meeting: Brought) -> None:
        """Wait for all in a visit of its own, within the unit that this microbatch visits."""
        visiting = self.visiting
        if visiting is not None:
            visiting.pause()
        if self.entered is not None and self._options.windows is not None:
            self._options.windows.end()
        self.wait_for_all(place, meeting)
        position = self._begin_visit()
        if self.entered is not None:
            self._begin_nodes()
        if visiting is not None:
            self._recomputed[position] = visiting  # it ends there, or later
            visiting.resume()
            visiting.met(meeting)

    def mark_behind_meeting(self, *, differentiable: bool) -> None:
        """End the backward of a loss behind a meeting between units, if it comes last."""
        if differentiable:
            self._marks.add(self._passed, _ignore)

    # -- between forward and backward, in the scheduler ---------------------------------------

    def offload(self, position: int) -> None:
        """Move the inputs of a visit to the host, when the user's code has left its unit."""
        record = self._recomputed.get(position)
        if record is None or self.code.finished or record is self.visiting:
            return
        record.offload()

    def fetch(self, position: int) -> None:
        record = self._recomputed.get(position)
        if record is not None:
            record.fetch()

    # -- backward -----------------------------------------------------------------------------

    def marks(self, reached: Container[int] | None) -> list[Root]:
        """Return the marks of visits as roots of a backward; None: of all visits."""
        return self._marks.roots(reached)

    def drop_marks_of_head(self, position: int) -> None:
        """Let the loss's backward pass a head, too, if that is this microbatch's last visit."""
        last, marks = self._head
        if last == position == self._passed - 1:
            self._marks.drop(marks)

    def backward_of_loss(self, loss: Tensor, without_weight: Tensor | None) -> list[Root]:
        """Run the backward of what stands behind the last visit; return where the rest begins."""
        refuse_without_gradient(loss)
        return self._marks.run_behind(loss, without_weight, has_hooks=self.has_hooks)


def refuse_without_gradient(loss: Tensor) -> None:
    """Raise UnitUseError for a loss that is a constant."""
    if not loss.requires_grad:
        raise UnitUseError(
            "The loss does not require a gradient: expected a tensor computed from trainable"
            " parameters. Is every parameter frozen, or was the loss detached?"
        )


def _ignore(gradients: Any) -> None:
    """Of a mark that only ends the backward of a loss."""


def _needs_gradient(values: Sequence[Any]) -> bool:
    for value in values:  # noqa: SIM110  every visit asks
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False
