"""Runs one microbatch in a greenlet, visit by visit, and the backward of its loss.

Its graph stays whole: see [Note: marks] in graph.py.
"""

from __future__ import annotations

import contextvars
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import greenlet
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.call_tree import (
    CallStructure,
    flatten_call,
    without_empty_caches,
)
from lightning_cephalo.execution.graph import (
    Marks,
    Root,
    Through,
    Windows,
    has_saved_tensor_hooks,
    nodes_between,
    nodes_of,
    now,
    refuse_saved_tensor_hooks,
)
from lightning_cephalo.execution.normalisation import Meeting, update_running
from lightning_cephalo.execution.over_batch import Asking, StepGreenlet, refuse_manual
from lightning_cephalo.execution.recomputed import Found, Places, RecomputedVisit
from lightning_cephalo.execution.replay import ThreadState
from lightning_cephalo.plan.program import NONE, ROOT, Visit, visit_of

if TYPE_CHECKING:
    from lightning_cephalo.execution.backward_pass import BackwardPass
    from lightning_cephalo.execution.unit_hooks import UnitForward

BEHIND_THE_LAST = Visit(NONE)
"""The place of a microbatch that has passed the last unit; only its loss is left."""

AT_BACKWARD = Visit(-4)
"""The place of a microbatch whose code has called a backward itself."""

AT_BATCH = Visit(-6)
"""The place of a microbatch that waits for the rows of the whole batch; see over_batch.py."""

AT_UPDATE = Visit(-5)
"""The place of a microbatch whose code is about to clip gradients or to run an optimizer."""

_MAX_PARKS_WHILE_STOPPING = 100


@dataclass
class Hooks:
    """Whether code of a step has registered hooks, which may store something in the backward."""

    exist: bool = False


@dataclass(frozen=True)
class MicrobatchOptions:
    """What the microbatches of a step have in common.

    Attributes:
        recompute: Whether the backward computes units again.
        last: Position of the last visit, if the order is known.
        outside: With several backwards, a context for code that is not the user's.
        meets: Whether microbatches can wait for one another in the middle of their code.
        searches: Whether the graph is searched for tensors of other microbatches.
        windows: The visits of all of them.
        hooks: Whether their code has registered hooks.
    """

    recompute: bool
    last: int = NONE
    outside: Callable[[], AbstractContextManager[Any]] | None = None
    meets: bool = False
    searches: bool = False
    windows: Windows = field(default_factory=Windows)
    hooks: Hooks = field(default_factory=Hooks)


class Microbatch:
    """A run of the user's step over some samples."""

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
        self._outside = options.outside
        self.last = options.last
        self.has_one_backward = options.outside is None
        self._device_types = places.accelerator.autocast_types
        self.asking = Asking(partial(self._park, AT_BATCH))
        ask = self.asking.ask if options.meets else None
        self._greenlet = StepGreenlet(step, ask if self.has_one_backward else refuse_manual)
        # a greenlet starts with no context variables of its own
        self._greenlet.gr_context = contextvars.copy_context()
        # the scheduler's are equal during a step
        self._scheduler_modes: ThreadState | None = None
        self.parked: Visit | None = None
        self.result: Any = None
        self.finished = False
        self.meeting: Meeting | None = None
        # the graph
        self._marks = Marks()
        # of a head that it has visited last: the visit, and the number of marks before
        self._head = (NONE, 0)
        self._windows: dict[int, tuple[int, int]] = {}
        self._recomputed: dict[int, RecomputedVisit] = {}
        self._entered: Visit | None = None
        self._visiting: RecomputedVisit | None = None
        self._begun = self._handles = self._first_handle = 0
        self._retains = False
        # visits, also of other microbatches, and its own
        self._passed = 0
        self.made: list[int] = []

    def advance(self) -> None:
        """Run the step until it parks at a unit or returns."""
        if self._scheduler_modes is None:
            self._scheduler_modes = ThreadState.capture(self._device_types)
        step = self._greenlet
        self._first_handle = RemovableHandle.next_id - len(self._marks)
        try:
            if not self._passed and self.has_one_backward and torch.is_grad_enabled():
                self._mark(NONE)
            switched = step.switch()
        finally:
            torch.clear_autocast_cache()  # casts of one microbatch are no part of another's graph
            self._handles += self._new_handles()
            self._options.hooks.exist = self._options.hooks.exist or self._handles > 0
            if step.dead:  # else it has restored them when it parked
                self._scheduler_modes.restore()
        if step.dead:
            self.finished, self.result, self.parked = True, switched, None
        else:
            self.parked = switched

    def _new_handles(self) -> int:
        """Return how many hooks its code has registered since it goes on."""
        return RemovableHandle.next_id - self._first_handle - len(self._marks)

    def let_pass(self, position: int) -> None:
        """Wait, or have returned, while other microbatches make a visit."""
        self._passed = max(self._passed, position + 1)

    def abandon(self) -> None:
        """Stop the step where it is and drop all that it holds."""
        before = ThreadState.capture(self._device_types)
        try:
            # the user's cleanup code may call units again and park there
            for _ in range(_MAX_PARKS_WHILE_STOPPING):
                if self._greenlet.dead:
                    break
                self._greenlet.throw(greenlet.GreenletExit)
        finally:
            before.restore()
            self.forget()

    def forget(self) -> None:
        """Drop what it holds for a backward."""
        self._marks.clear()
        for record in self._recomputed.values():
            record.leave()
        self._recomputed.clear()

    # -- steps that call their backwards themselves, inside the greenlet ------------------------

    def need_root(self) -> None:
        with self.outside():
            self._park(Visit(ROOT))

    def need_backward(self, loss: Tensor, retain: bool) -> None:
        self.result, self._retains = loss, retain
        with self.outside():
            self._park(AT_BACKWARD)
        self.result = None

    def need_update(self) -> None:
        """Park until every rank is about to clip gradients or to run an optimizer."""
        with self.outside():
            self._park(AT_UPDATE)

    @property
    def was_over_batch(self) -> bool:
        return self._greenlet.was_asked

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context for code of this package that runs within the step."""
        return nullcontext() if self._outside is None else self._outside()

    @property
    def has_loss(self) -> bool:
        """Whether :attr:`result` holds a loss whose backward is due."""
        return self.finished or self.parked is AT_BACKWARD

    @property
    def retains(self) -> bool:
        """Whether another backward through the same graph will come."""
        return self._retains

    def visits_behind(self, roots: Sequence[Tensor]) -> set[int]:
        """Return the positions of the visits that a backward from these tensors passes."""
        return self._visits_of(nodes_of(roots))

    def visits_between(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> set[int]:
        """Return the positions of the visits through which outputs depend on inputs."""
        wanted = {get_gradient_edge(each).node for each in inputs}
        return self._visits_of(nodes_between(nodes_of(outputs), wanted))

    def _visits_of(self, nodes: Iterable[Any]) -> set[int]:
        numbers = sorted(node._sequence_nr() for node in nodes if not hasattr(node, "variable"))
        return {
            position
            for position, (first, end) in self._windows.items()
            if bisect_left(numbers, first) < bisect_left(numbers, end)
        }

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
        if self._entered is not None:
            raise UnitUseError(
                f"The unit {forward.name!r} is called inside of another unit. Name the units"
                " without it, such as CephaloStrategy(unit_types=[Block]): what is no unit can be"
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
                f"unit ({forward.name})", ", or choose larger units with unit_names="
            )
        visit = visit_of(unit, differentiable, NONE)
        modes = self._park(visit)
        position = self._begin_visit()
        if forward.is_head:
            self._head = position, len(self._marks)
        # autocast would cache casts of weights that are about to be freed, and would cache them
        # without a graph where the forward runs without one
        torch.set_autocast_cache_enabled(False)
        self._entered, first = visit, now()
        self._begun = first  # by meetings, a visit has several parts
        try:
            if not differentiable:
                result = forward.body(*args, **kwargs)
                self._behind_visit()
                return result
            if self._options.hooks.exist or self._new_handles():
                self._options.hooks.exist = True
                self._mark(position)
            nodes = forward.renew_accumulators()
            if again:
                self._visiting = record = RecomputedVisit(
                    self._places, flat, structure, self._found(forward, modes)
                )
                self._recomputed[position] = record
                result = record.first(forward.body, args, kwargs)
            else:
                result = forward.body(*args, **kwargs)
            self._mark_end(position)
            del nodes  # the graph holds them
        finally:
            self._entered = self._visiting = None
            torch.set_autocast_cache_enabled(modes.autocast_cache)
        if self._options.searches:
            self._options.windows.add(self._index, self._begun)
        if not self.has_one_backward:
            self._windows[position] = (first, now())
        if self.has_one_backward and self._passed >= self.last + 1:
            result = Through.shown(result)
            if self.last == NONE:  # it may be the last
                self._marks.add(self._passed, _ignore)
        self._behind_visit()
        return result

    def _mark_end(self, position: int) -> None:
        """Let the backward tell when it comes to a visit."""
        record, end = self._recomputed.get(position), self._passed - 1
        self._marks.add(position, partial(self._backwards.arrive, self._index, end, record))

    def _mark(self, position: int) -> None:
        """Let the backward tell when it has passed all that follows here."""
        self._marks.add(position, partial(self._backwards.leave, self._index))

    def _begin_visit(self) -> int:
        position = self._passed
        self._passed += 1
        self.made.append(position)
        return position

    def _found(self, forward: UnitForward, modes: ThreadState) -> Found:
        """Note the state in which a unit's body begins."""
        places, overlay = self._places, self._places.overlay
        view = None if overlay is None else overlay.now(forward.with_buffers)
        return Found(places.accelerator.random_states(), modes, view)

    def _behind_visit(self) -> None:
        """Wait behind the last visit, where all that is left is the loss."""
        if self._passed == self.last + 1:
            self._park(BEHIND_THE_LAST)
            if torch.is_grad_enabled() and self.has_one_backward:
                self._marks.add(self._passed, _ignore)  # others have run meanwhile

    def _park(self, place: Visit) -> ThreadState:
        """Switch to the scheduler until it resumes this greenlet; return this greenlet's modes."""
        others = self._scheduler_modes
        assert others is not None
        modes = others.now()
        if modes is not others:
            others.restore()
        if torch.is_inference_mode_enabled():
            # it belongs to the thread too; left on, other microbatches would run in it
            with torch.inference_mode(False):
                self._greenlet.parent.switch(place)
        else:
            self._greenlet.parent.switch(place)
        if modes is not others:
            modes.restore()
        return modes

    def normalise(self, index: int, norm: nn.SyncBatchNorm, value: Tensor) -> Tensor:
        """Meet all microbatches of all ranks at a layer, then return its output."""
        if not self._options.meets:
            raise UnsupportedError(
                "A torch.nn.SyncBatchNorm in training mode is called in evaluation, or with manual"
                " optimization. Ranks cannot meet there: they may call it differently often. Call"
                " eval() before, or use torch.nn.BatchNorm."
            )
        visiting, entered = self._visiting, self._entered
        if entered is None:
            needs = [value, *norm.parameters(recurse=False)]
            differentiable = torch.is_grad_enabled() and _needs_gradient(needs)
        else:
            differentiable = entered.differentiable
        if differentiable and visiting is None:
            refuse_saved_tensor_hooks("torch.nn.SyncBatchNorm")
        arrive = None  # glue has no instruction of its own
        if entered is not None:
            arrive = partial(self._backwards.arrive, self._index, self._passed - 1, visiting)
        self.meeting = meeting = Meeting(norm, arrive)
        meeting.bring(value)
        if visiting is not None:
            visiting.pause()
        if entered is not None and self._options.searches:
            self._options.windows.add(self._index, self._begun)
        self._park(Visit(ROOT if entered is None else entered.unit, differentiable, index))
        self.meeting = None
        position, self._begun = self._begin_visit(), now()
        if visiting is not None:
            self._recomputed[position] = visiting  # it ends there, or later
            visiting.resume()
            visiting.met(meeting)
        assert meeting.statistics is not None
        update_running(norm, meeting.statistics)
        if entered is not None:
            return meeting.normalised(value)
        if differentiable:
            self._mark(self._passed)
        output = meeting.normalised(value)
        self._behind_visit()
        return output

    @property
    def has_hooks(self) -> bool:
        """Whether its code has registered hooks, which will run in its backward."""
        return self._handles > 0

    # -- between forward and backward, in the scheduler ---------------------------------------

    def offload(self, position: int) -> None:
        """Move the inputs of a visit to the host, when the user's code has left its unit."""
        record = self._recomputed.get(position)
        if record is None or self.finished or record is self._visiting:
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

    def backward_of_loss(
        self, loss: Tensor, without_weight: Tensor | None, joint: set[int]
    ) -> list[Root]:
        """Run the backward of what stands behind the last visit; return where the rest begins."""
        if not loss.requires_grad:
            raise UnitUseError(
                "The loss does not require a gradient: expected a tensor computed from trainable"
                " parameters. Is every parameter frozen, or was the loss detached?"
            )
        if not self.has_one_backward:
            return [(loss, torch.ones_like(loss))]
        if self._options.searches:
            self._options.windows.refuse_others(nodes_of([loss], joint), self._index)
        return self._marks.run_behind(loss, without_weight, has_hooks=self.has_hooks)


def _ignore(gradients: Any) -> None:
    """Of a mark that only ends the backward of a loss."""


def _needs_gradient(values: Sequence[Any]) -> bool:
    for value in values:  # noqa: SIM110  every visit asks
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False
