"""Runs one microbatch in a greenlet and records its unit visits for the backward.

[Note: cuts]
The autograd graph is cut at units: they receive detached *leaves*, and their outputs become leaves
for the code after them (the *glue*). The backward of a visit goes from the leaves of its outputs to
those of its inputs. The glue before it follows, once per tensor and summed over all uses, at the
visit that used the tensor first. See docs/design/step.md.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import greenlet
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.boundaries import (
    Boundaries,
    VisitsBehind,
    can_have_gradient,
    has_saved_tensor_hooks,
    passed_before,
    refuse_saved_tensor_hooks,
    run_backward,
    zeroed_where,
)
from lightning_cephalo.execution.call_tree import (
    SINGLE,
    CallStructure,
    flatten_call,
    flatten_result,
    refuse_changed_containers,
    without_empty_caches,
)
from lightning_cephalo.execution.captures import Captures, UnitRecord, VisitRecords
from lightning_cephalo.execution.ends_policy import used_elsewhere
from lightning_cephalo.execution.meetings import Attendance
from lightning_cephalo.execution.normalisation import Meeting
from lightning_cephalo.execution.offload import HostArena
from lightning_cephalo.execution.over_batch import Asking, StepGreenlet, refuse_manual
from lightning_cephalo.execution.overlay import Overlay
from lightning_cephalo.execution.replay import ThreadState
from lightning_cephalo.execution.stored_outputs import StoredOutputs
from lightning_cephalo.execution.tensor_hooks import GradientParts, refuse_hooks_inside
from lightning_cephalo.plan.program import NONE, ROOT, Visit, visit_of

if TYPE_CHECKING:
    from lightning_cephalo.execution.unit_hooks import UnitForward

BEHIND_THE_LAST = Visit(NONE)
"""The place of a microbatch that has passed the last unit; only its loss is left."""

AT_BACKWARD = Visit(-4)
"""The place of a microbatch whose code has called a backward itself."""

AT_BATCH = Visit(-6)
"""The place of a microbatch that waits for the rows of the whole batch; see over_batch.py."""

AT_LAST_LAYERS = Visit(-7)
"""The place of a microbatch that waits for the last layers of the root unit; see ends_policy.py."""

AT_UPDATE = Visit(-5)
"""The place of a microbatch whose code is about to clip gradients or to run an optimizer."""

_MAX_PARKS_WHILE_STOPPING = 100
_NO_CHANGE = nullcontext()
_CHANGED_INPUT = (
    "An input of a unit is changed in place, by the unit or by the code after it, so that the"
    " unit's backward cannot be computed. Write `x = x + y` instead of `x += y` there."
)


def _needs_gradient(values: Sequence[Any]) -> bool:
    for value in values:  # noqa: SIM110  every visit asks
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


class Microbatch:
    """A run of the user's step over some samples."""

    def __init__(
        self,
        step: Callable[[], Any],
        accelerator: Accelerator,
        recompute: bool,
        inside: frozenset[int] | None = None,
        arena: HostArena | None = None,
        last: int = NONE,
        overlay: Overlay | None = None,
        outside: Callable[[], AbstractContextManager[Any]] | None = None,
        *,
        meets: bool = False,
        first_layers: Mapping[int, str] = MappingProxyType({}),
        stored: StoredOutputs | None = None,
        parts: GradientParts | None = None,
    ) -> None:
        self._inside = inside
        self._stored, self._parts = stored, parts
        # hooks that its code has registered, and those of them that see whole gradients
        self._hooks = self._hooks_in_units = 0
        self._counts_hooks = True
        self._outside = outside
        self.has_one_backward = outside is None
        self._retains = False
        self._overlay = overlay
        self._arena = arena
        self.last = last
        self._accelerator = accelerator
        self._device_types = accelerator.autocast_types
        self._recompute = recompute
        self._boundaries = Boundaries(
            inside, outside is not None, lets_go=arena is not None, first_layers=first_layers
        )
        self.asking = Asking(partial(self._park, AT_BATCH))
        ask = refuse_manual if outside is not None else self.asking.ask if meets else None
        self._greenlet = StepGreenlet(step, ask, self._boundaries.own_gradients)
        # a greenlet starts with no context variables of its own
        self._greenlet.gr_context = contextvars.copy_context()
        self._records = VisitRecords()
        self.captures = Captures(self._records, self._boundaries, recompute, is_on=outside is None)
        self.attendance = Attendance(
            self._records,
            self._boundaries,
            self.captures,
            self._park,
            accelerator,
            recompute=recompute,
            is_on=meets and outside is None,
        )
        # the scheduler's are equal during a step
        self._scheduler_modes: ThreadState | None = None
        self._backward_modes: ThreadState | None = None
        self.parked: Visit | None = None
        self.result: Any = None
        self.finished = False
        self.needed_last_layers = False

    def advance(self) -> None:
        """Run the step until it parks at a unit or returns."""
        if self._scheduler_modes is None:
            self._scheduler_modes = ThreadState.capture(self._device_types)
        step, owner = self._greenlet, self._boundaries.owner
        # with several backwards, manual_step.py refuses gradients through units
        owner.runs = self.has_one_backward
        handles = RemovableHandle.next_id
        try:
            switched = step.switch()
        finally:
            owner.runs = False
            if self._counts_hooks:
                self._hooks += RemovableHandle.next_id - handles
            if step.dead:  # else it has restored them when it parked
                self._scheduler_modes.restore()
        if step.dead:
            self.finished, self.result, self.parked = True, switched, None
            self.captures.end_forward()
            self._boundaries.end_forward()
        else:
            self.parked = switched

    def let_pass(self) -> None:
        """Wait, or have returned, while other microbatches make a visit."""
        self._records.append(None)

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
            for record in self._records.units():
                self._forget(record)
            self._records.forget_all()
            self._boundaries.clear()

    # -- steps that call their backwards themselves, inside the greenlet ------------------------

    def need_root(self) -> None:
        with self.outside():
            self._park(Visit(ROOT))

    def need_last_layers(self, names: frozenset[str], are_there: bool) -> None:
        """Park until the last layers of the root unit are shown, for the losses."""
        if self._records.entered is not None:
            raise used_elsewhere(names)
        self.needed_last_layers = True
        if are_there:
            return
        if has_saved_tensor_hooks():
            raise used_elsewhere(names)
        with self.outside():
            self._park(AT_LAST_LAYERS)

    def need_backward(self, loss: Tensor, retain: bool) -> None:
        self.result, self._retains = loss, retain
        with self.outside():
            self._park(AT_BACKWARD)
        self.result, self._counts_hooks = None, False  # an update registers hooks of ours

    def need_update(self) -> None:
        """Park until every rank is about to clip gradients or to run an optimizer."""
        with self.outside():
            self._park(AT_UPDATE)

    @property
    def made(self) -> list[int]:
        return self._records.made

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

    def visits_behind(self, roots: Sequence[Tensor]) -> VisitsBehind:
        return self._boundaries.visits_behind(roots, self._inputs_of)

    def _inputs_of(self, position: int) -> list[Tensor]:
        record = self._records[position]
        if not isinstance(record, UnitRecord):
            raise passed_before()
        return record.differentiable_inputs

    def refuse_other_backwards(self) -> None:
        """Raise UnitUseError if code has run a backward that ends at units."""
        if any(leaf.grad is not None for leaf in self._records.leaves_behind()):
            raise UnitUseError(
                "training_step has run a backward that ends at a unit, so that gradients before it"
                " would be lost (torch.autograd.backward?). Call self.manual_backward(loss)."
            )

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
        grad = torch.is_grad_enabled()
        flat, structure = flatten_call(args, kwargs)
        if grad and self._recompute and not isinstance(structure, CallStructure):
            args, kwargs = without_empty_caches(args, kwargs)
            flat, structure = flatten_call(args, kwargs)
        differentiable = grad and (trainable or _needs_gradient(flat))
        if differentiable and has_saved_tensor_hooks():
            refuse_saved_tensor_hooks("unit", ", or choose larger units with unit_names=")
        self._boundaries.drop_values()
        visit, records = visit_of(unit, differentiable, NONE), self._records
        modes = self._park(visit)
        position = len(records)  # visits that others have made meanwhile count
        # autocast would cache casts of weights that are about to be freed, and would cache them
        # without a graph where the forward runs without one
        torch.set_autocast_cache_enabled(False)
        records.entered = visit
        try:
            if differentiable:
                self._boundaries.to_leaves(flat, position)
                record = records.entered_record = UnitRecord(position, flat, structure)
                records.made.append(position)
                records.append(record)
                outputs = self._differentiable(unit, record, forward, modes)
            else:
                records.add(None)
                outputs = forward.body(*args, **kwargs)
        finally:
            records.entered = records.entered_record = None
            torch.set_autocast_cache_enabled(modes.autocast_cache)
        if len(records) == self.last + 1:
            self._park(BEHIND_THE_LAST)
        return outputs

    def _park_behind_the_last(self) -> None:
        if self._records.entered is None and len(self._records) == self.last + 1:
            self._park(BEHIND_THE_LAST)

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

    def _differentiable(
        self, unit: int, record: UnitRecord, forward: UnitForward, modes: ThreadState
    ) -> Any:
        args, kwargs = record.structure.unflatten(record.inputs)
        searches, found = self._inside is not None, None
        if self._stored is not None:
            found = self._stored.before(unit, searches=searches)
        handles = RemovableHandle.next_id
        try:
            if self._recompute:
                result = self._without_graph(record, forward, modes, args, kwargs)
            else:
                result = forward.body(*args, **kwargs)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error):
                raise UnitUseError(_CHANGED_INPUT) from error
            raise
        if not record.meetings:  # others have run meanwhile
            self._hooks_in_units += RemovableHandle.next_id - handles
        if record.captures:
            self.captures.leave(record)
        if not isinstance(record.structure, CallStructure):
            refuse_changed_containers(args, kwargs, record.inputs)
        refuse_hooks_inside(record.inputs)
        outputs, output_structure = flatten_result(result)
        if not self._recompute:
            record.outputs = outputs.copy()
        self._show(record, outputs, 0)
        if self._stored is not None and found is not None:
            has_graph = searches or not self._recompute
            places = self._stored.written(unit, found, has_graph=has_graph, searches=searches)
            if places:
                record.places = places
                self._show_stored(record, len(outputs))
        return outputs[0] if output_structure is SINGLE else output_structure.unflatten(outputs)

    def _show(self, record: UnitRecord, outputs: list[Any], start: int) -> None:
        """Replace outputs by stand-ins for leaves; the first has this place among all outputs."""
        for index, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                continue
            if not (can_have_gradient(output) if self._recompute else output.requires_grad):
                continue
            leaf, outputs[index] = self._boundaries.show(output, record.position)
            record.output_leaves[start + index] = leaf

    def _show_stored(self, record: UnitRecord, start: int) -> None:
        """Make what the unit has stored on its modules outputs of the unit."""
        for place in record.places:
            if not place.is_shown:
                continue
            values = place.values()
            if record.outputs is not None:
                record.outputs += values
            self._show(record, values, start)
            place.show(values)
            start += len(values)

    def _without_graph(
        self,
        record: UnitRecord,
        forward: UnitForward,
        modes: ThreadState,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a body that will be computed again, and note the state that it has found."""
        record.random, record.modes = self._accelerator.random_states(), modes
        record.body_again = forward.body
        record.watch_inputs()
        if self._overlay is not None:
            record.view = self._overlay.now(forward.with_buffers)
        # the check for tensors that leave otherwise needs their graph, which is dropped later
        has_graph = self._inside is not None
        torch._C._set_grad_enabled(has_graph)
        try:
            result = forward.body(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)
        if not record.inputs_are_unchanged():
            raise UnitUseError(_CHANGED_INPUT)
        return result

    def normalise(self, index: int, norm: nn.SyncBatchNorm, value: Tensor) -> Tensor:
        output = self.attendance.normalise(index, norm, value)
        self._park_behind_the_last()
        return output

    @property
    def has_hooks(self) -> bool:
        """Whether its code has registered hooks, which will run in its backward."""
        return self._hooks > self._boundaries.own_hooks

    @property
    def _has_hooks_between_units(self) -> bool:
        """Whether its code has registered hooks, and not only where they see whole gradients."""
        if not self._hooks:
            return False
        exact = self._hooks_in_units + self._boundaries.watched_hooks + self.captures.late_hooks
        return self._hooks > exact

    # -- between forward and backward, in the scheduler ---------------------------------------

    def offload(self, position: int) -> None:
        """Move the inputs of a visit to the host, when the user's code has left its unit."""
        record = self._records.unit_at(position)
        if self._arena is None or self.finished or record is None:
            return
        if self.parked is AT_LAST_LAYERS:  # its loss is next, and leads straight back to it
            return
        if self._records.entered_record is record:
            return  # it has stopped in the middle
        if record.outputs is not None:  # a retained graph holds the inputs anyway
            return
        moved = [self._arena.offload(leaf) for leaf in self._boundaries.let_go(record.position)]
        record.away = (*record.away, *(away for away in moved if away is not None))

    def fetch(self, position: int) -> None:
        record = self._records.unit_at(position)
        if self._arena is not None and record is not None and not record.is_passed:
            for away in record.away:
                self._arena.prefetch(away)

    # -- backward, in the scheduler -----------------------------------------------------------

    def backward_of_loss(self, loss: Tensor, without_weight: Tensor | None = None) -> None:
        """Run the backward of the loss, down to the leaves of the last units.

        The graph is freed unless the loss shares glue with units' inputs, which is walked again.
        """
        if not loss.requires_grad:
            raise UnitUseError(
                "The loss does not require a gradient: expected a tensor computed from trainable"
                " parameters. Is every parameter frozen, or was the loss detached?"
            )
        self._boundaries.refuse_leaks(loss)
        self._boundaries.owner.backwards += 1
        seen = self._has_hooks_between_units, self._inside is not None
        if self._parts is not None and any(seen) and self._parts.is_due(*seen):
            self._parts.warn(self._boundaries.in_parts(loss), *seen)
        retain = self._retains or self._boundaries.shares_glue(loss)
        with zeroed_where(loss, without_weight) if without_weight is not None else nullcontext():
            torch.autograd.backward([loss], retain_graph=retain)
        self._boundaries.drop_values()

    def backward_of_visit(self, position: int) -> None:
        """Run the backward of one visit and of the glue before it.

        At a meeting, only the code of the unit behind it: the rest waits for all microbatches.
        """
        record = self._records[position]
        if isinstance(record, Meeting):
            if record.record is not None and not record.record.is_passed:
                self._through_body(record.record)
                record.record.is_passed, record.record.outputs = True, None
            return
        if record is not None:
            is_passed = record.is_passed or self._through_body(record)
            if self._outside is None or (is_passed and not self._retains):
                self._records[position] = None
                if record.captures or record.meetings or record.away:
                    self._forget(record)
        self._boundaries.passed(position, self._retains)

    def _forget(self, record: UnitRecord) -> None:
        # they refer to the record, and its memory is to go now
        record.captures, record.meetings = (), ()
        for away in record.away:  # without gradients its values were never restored
            assert self._arena is not None
            self._arena.discard(away)

    def _through_body(self, record: UnitRecord) -> bool:
        """Run the backward of a visit's body; return whether its outputs had gradients."""
        gradients: list[tuple[int, Tensor]] = []
        for index, leaf in record.output_leaves.items():
            gradient = leaf.grad
            if gradient is not None:
                gradients.append((index, gradient))
        # a layer of synchronised normalisation has gradients of other microbatches' losses
        if (
            not gradients
            and not record.meetings
            and all(capture.leaf.grad is None for capture in record.captures)
        ):
            return False
        view, overlay = record.view, self._overlay
        if overlay is not None and view is not None and view.buffers:
            with overlay.replayed_buffers(view):
                self._from_outputs(record, gradients)
        else:
            self._from_outputs(record, gradients)
        if self._outside is not None:
            for leaf in record.output_leaves.values():
                leaf.grad = None
        return True

    def _from_outputs(self, record: UnitRecord, gradients: Sequence[tuple[int, Tensor]]) -> None:
        is_again = record.outputs is None
        outputs = self._compute_again(record) if record.outputs is None else record.outputs
        if not is_again and record.captures:
            self.captures.hook_sources(record)
        roots: list[Tensor] = []
        reached: list[Tensor] = []
        for index, gradient in gradients:
            output = outputs[index]
            if output.requires_grad:
                roots.append(output)
                reached.append(gradient)
        if is_again and (record.captures or self.captures.seen_again):
            for output, gradient in self.captures.reached_again(record):
                if output.requires_grad:
                    roots.append(output)
                    reached.append(gradient)
        if roots:
            # code before a cut in the unit may share nodes with the code behind it
            shares = bool(record.meetings or record.captures)
            run_backward(roots, reached, retain=shares or (self._retains and not is_again))
        if not is_again and record.captures:
            self.captures.backward(record)

    def _compute_again(self, record: UnitRecord) -> Sequence[Any]:
        assert record.random is not None
        assert record.modes is not None
        assert record.body_again is not None
        for away in record.away:
            assert self._arena is not None
            self._arena.restore(away)
        if not record.inputs_are_unchanged():
            raise UnitUseError(_CHANGED_INPUT)
        # the scheduler's modes are equal for all visits
        before = self._backward_modes if self.has_one_backward else self._scheduler_modes
        if before is None:
            before = self._backward_modes = ThreadState.capture(self._device_types)
        accelerator, random = self._accelerator, record.random
        drawn = accelerator.random_states()
        args, kwargs = record.structure.unflatten(record.inputs)
        self.attendance.again = iter(record.meetings)
        self.captures.seen_again = []
        if record.modes is not before and record.modes != before:
            record.modes.restore()
        torch.set_autocast_cache_enabled(False)
        torch._C._set_grad_enabled(True)
        accelerator.restore_random_states(random)
        body, overlay = record.body_again, self._overlay
        try:
            with _NO_CHANGE if overlay is None else overlay.replayed(record.view):
                return self._outputs_of(body(*args, **kwargs), record)
        finally:
            accelerator.restore_random_states(drawn)
            before.restore()
            if record.meetings:  # they have made cuts
                self._boundaries.end_forward()

    def _outputs_of(self, result: Any, record: UnitRecord) -> Sequence[Any]:
        outputs = flatten_result(result)[0]
        for place in record.places:
            values = place.values()
            if place.is_shown:
                outputs += values
            elif self._stored is not None:
                self._stored.seen_again(place, values)
        return outputs
