"""Runs one microbatch in a greenlet and records its unit visits for the backward.

[Note: cuts]
The user's step runs in a greenlet of its own. When it enters a unit, it parks until the scheduler
has gathered that unit. The autograd graph is cut there. A unit receives detached *leaves* instead
of the tensors that need a gradient. Its outputs become leaves for the code after it (the *glue*:
residuals, embeddings, masks between units).

The backward goes unit by unit:

1. The leaves of a unit's outputs hold the gradients from later code.
2. The unit's own graph carries them to the leaves of its inputs.
3. The glue before the unit carries them on, once per tensor and summed over all uses of the tensor.
   This happens after the backward of the visit that used the tensor first.

So gradients are exact for residuals around units, for encoder outputs that enter every decoder
unit, and for shared position biases.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import greenlet
import torch
from torch import Tensor, nn

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.arguments import refuse_changed_containers, without_empty_caches
from lightning_cephalo.execution.boundaries import (
    Boundaries,
    VisitsBehind,
    passed_before,
    zeroed_where,
)
from lightning_cephalo.execution.call_tree import (
    CallStructure,
    Structure,
    flatten_call,
    flatten_result,
)
from lightning_cephalo.execution.module_buffers import ModuleBuffers, Shown
from lightning_cephalo.execution.module_state import ModuleState, Stored
from lightning_cephalo.execution.normalisation import (
    Meeting,
    Statistics,
    moments_of,
    update_running,
)
from lightning_cephalo.execution.offload import HostArena, OffloadedTensor
from lightning_cephalo.execution.over_batch import Answer, Question, StepGreenlet, refuse_manual
from lightning_cephalo.execution.replay import ChangingBuffers, RandomState, ThreadState
from lightning_cephalo.plan.program import NONE, ROOT, Visit

BEHIND_THE_LAST = Visit(NONE)
"""The place of a microbatch that has passed the last unit; only its loss is left."""

AT_BACKWARD = Visit(-4)
"""The place of a microbatch whose code has called a backward itself."""

AT_BATCH = Visit(-6)
"""The place of a microbatch that waits for the rows of the whole batch; see over_batch.py."""

AT_UPDATE = Visit(-5)
"""The place of a microbatch whose code is about to clip gradients or to run an optimizer."""

_MAX_PARKS_WHILE_STOPPING = 100
_CHANGED_INPUT = (
    "An input of a unit is changed in place, by the unit or by the code after it, so that the"
    " unit's backward cannot be computed. Write `x = x + y` instead of `x += y` there."
)


@dataclass
class _Capture:
    """A tensor that a hook in a unit has seen, and may have taken out of it.

    Attributes:
        position: The latest visit when it was seen.
        source: The tensor, with its graph; None if the unit is recomputed.
        leaf: The leaf whose gradient comes from the code that has it now.
    """

    position: int
    source: Tensor | None
    leaf: Tensor


@dataclass
class _Record:
    """The data that one visit retains for its backward."""

    position: int
    body: Callable[..., Any]
    inputs: list[Any]
    structure: Structure | CallStructure
    input_versions: list[tuple[Tensor, int]]
    output_leaves: list[tuple[int, Tensor]] = field(default_factory=list)
    outputs: list[Any] | None = None
    random: RandomState | None = None
    modes: ThreadState | None = None
    buffers: list[Any] = field(default_factory=list)
    shown: Shown = field(default_factory=list)
    stored: Stored | None = None
    away: list[OffloadedTensor] = field(default_factory=list)
    # layers in the unit that need statistics of the global batch; its backward begins at the last
    meetings: list[Meeting] = field(default_factory=list)
    captures: list[_Capture] = field(default_factory=list)
    is_passed: bool = False


@dataclass
class _Entered:
    """The unit whose code a microbatch is running."""

    unit: int
    differentiable: bool
    record: _Record | None = None


class Microbatch:
    """A run of the user's step over some samples.

    Args:
        step: Calls the user's step and returns its result.
        accelerator: This rank's device.
        recompute: Whether to retain only the inputs of a unit and recompute the unit in the
            backward.
        inside: As for :class:`~lightning_cephalo.execution.boundaries.Boundaries`.
        arena: Host memory for boundaries; None: they stay on the device.
        last: Position of the last visit; -1 if it is unknown. The step parks once more after that
            visit, so that its loss is an instruction of its own.
        state: The tensors that the step stores on modules; None: a recomputed unit finds those of
            the end of the step.
        buffers: The buffers of the model's modules; None: as for ``state``.
        outside: Returns a context for code of this package that runs within the step; None if the
            step has one backward only. See ``execution/manual_step.py``.
        meets: Whether the step meets all others, for losses over the whole batch and statistics.

    Attributes:
        parked: The visit that it waits for; None: none.
        made: Positions of its visits in the order.
        asked: The rows with which it waits for a loss over the whole batch; None: it does not.
        moments: What it brings to the meeting that it waits for; None: it waits for none.
        values_per_channel: How many values that is.
        statistics: What it then gets.
        result: Return value of the step.
        finished: Whether the step has returned.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        accelerator: Accelerator,
        recompute: bool,
        inside: frozenset[int] | None = None,
        arena: HostArena | None = None,
        last: int = NONE,
        state: ModuleState | None = None,
        buffers: ModuleBuffers | None = None,
        outside: Callable[[], AbstractContextManager[Any]] | None = None,
        *,
        meets: bool = False,
    ) -> None:
        self._inside = inside
        self._outside = outside
        self._retains = False
        self._state = state
        self._buffers = buffers
        self._arena = arena
        self.last = last
        self._accelerator = accelerator
        self._device_types = accelerator.autocast_types
        self._recompute = recompute
        ask = refuse_manual if outside is not None else self._ask if meets else None
        self._greenlet = StepGreenlet(step, ask, self._own_gradients)
        self.asked: Question | None = None
        self._answer: Answer | None = None
        self._meets = meets and outside is None
        self.moments: Tensor | None = None
        self.values_per_channel = 0
        self.statistics: Statistics | None = None
        self._entered: _Entered | None = None
        self._again: Iterator[Meeting] = iter(())
        self._seen_again: list[Tensor] = []
        # a greenlet starts with no context variables of its own
        self._greenlet.gr_context = contextvars.copy_context()
        self._records: list[_Record | Meeting | None] = []
        self.made: list[int] = []
        self._boundaries = Boundaries(inside, several_backwards=outside is not None)
        self.parked: Visit | None = None
        self.result: Any = None
        self.finished = False

    def advance(self) -> None:
        """Run the step until it parks at a unit or returns."""
        before = ThreadState.capture(self._device_types)
        try:
            # with several backwards, manual_step.py refuses gradients through units
            with self._boundaries.refusing_gradients(self._outside is None):
                switched = self._greenlet.switch()
        finally:
            before.restore()
        if self._greenlet.dead:
            self.finished, self.result, self.parked = True, switched, None
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
            for record in self._records:
                self._forget(record)
            self._records, self._boundaries = [], Boundaries()

    # -- steps that call their backwards themselves, inside the greenlet ------------------------

    def need_root(self) -> None:
        """Park until the root unit is gathered."""
        with self.outside():
            self._park(Visit(ROOT))

    def need_backward(self, loss: Tensor, retain: bool) -> None:
        """Park until the backward of a loss has run.

        Args:
            loss: The loss.
            retain: Whether another backward may pass the same graph.
        """
        self.result, self._retains = loss, retain
        with self.outside():
            self._park(AT_BACKWARD)
        self.result = None

    def need_update(self) -> None:
        """Park until every rank is about to clip gradients or to run an optimizer."""
        with self.outside():
            self._park(AT_UPDATE)

    # -- losses over the whole batch ----------------------------------------------------------

    def _ask(self, question: Question) -> Answer:
        self.asked = question
        self._park(AT_BATCH)
        answer, self._answer = self._answer, None
        assert answer is not None
        return answer

    def _own_gradients(self) -> AbstractContextManager[None]:
        return self._boundaries.refusing_gradients(False)

    def answer(self, answer: Answer) -> None:
        """Give the step the rows of the whole batch; it goes on when it is next advanced."""
        self.asked, self._answer = None, answer

    @property
    def is_answered(self) -> bool:
        """Whether the step can go on after it has waited for the whole batch."""
        return self._answer is not None

    @property
    def was_over_batch(self) -> bool:
        """Whether the step has computed a loss over the whole batch."""
        return self._greenlet.was_asked

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context for code of this package that runs within the step."""
        return nullcontext() if self._outside is None else self._outside()

    @property
    def has_loss(self) -> bool:
        """Whether :attr:`result` holds a loss whose backward is due."""
        return self.finished or self.parked is AT_BACKWARD

    def visits_behind(self, roots: Sequence[Tensor]) -> VisitsBehind:
        """Return the visits that a backward from these tensors passes."""
        return self._boundaries.visits_behind(roots, self._inputs_of)

    def _inputs_of(self, position: int) -> list[Tensor]:
        record = self._records[position]
        if not isinstance(record, _Record):
            raise passed_before()
        return [each for each in record.inputs if isinstance(each, Tensor) and each.requires_grad]

    def refuse_other_backwards(self) -> None:
        """Raise UnitUseError if code has run a backward that ends at units."""
        records = [record for record in self._records if isinstance(record, _Record)]
        meetings = [record for record in self._records if isinstance(record, Meeting)]
        leaves = [leaf for record in records for _, leaf in record.output_leaves]
        leaves += [leaf for meeting in meetings for leaf in meeting.own or ()]
        if any(leaf.grad is not None for leaf in leaves):
            raise UnitUseError(
                "training_step has run a backward that ends at a unit, so that gradients before it"
                " would be lost (torch.autograd.backward?). Call self.manual_backward(loss)."
            )

    # -- forward, inside the greenlet ---------------------------------------------------------

    def visit(
        self,
        unit: int,
        trainable: bool,
        body: Callable[..., Any],
        buffers: ChangingBuffers,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Visit a unit: park until it is gathered, then compute its body."""
        if self._recompute and torch.is_grad_enabled():
            args, kwargs = without_empty_caches(args, kwargs)
        flat, structure = flatten_call(args, kwargs)
        grad = torch.is_grad_enabled()
        differentiable = grad and (
            trainable or any(isinstance(value, Tensor) and value.requires_grad for value in flat)
        )
        if differentiable:
            _refuse_saved_tensor_hooks("unit", ", or choose larger units with unit_names=")
        self._boundaries.drop_values()
        modes = self._park(Visit(unit, differentiable))
        position = len(self._records)  # visits that others have made meanwhile count
        self.made.append(position)
        # autocast would cache casts of weights that are about to be freed, and would cache them
        # without a graph where the forward runs without one
        torch.set_autocast_cache_enabled(False)
        self._entered = _Entered(unit, differentiable)
        try:
            if differentiable:
                outputs = self._differentiable(position, flat, structure, body, buffers, modes)
            else:
                self._records.append(None)
                outputs = body(*args, **kwargs)
        finally:
            self._entered = None
            torch.set_autocast_cache_enabled(modes.autocast_cache)
        self._park_behind_the_last()
        return outputs

    def _park_behind_the_last(self) -> None:
        if self._entered is None and len(self._records) - 1 == self.last:
            self._park(BEHIND_THE_LAST)

    def _park(self, place: Visit) -> ThreadState:
        """Switch to the scheduler until it resumes this greenlet; return this greenlet's modes."""
        modes = ThreadState.capture(self._device_types)
        # inference mode belongs to the thread too; left on, other microbatches would run in it
        outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        with outside or nullcontext():
            greenlet.getcurrent().parent.switch(place)
        modes.restore()
        return modes

    def _differentiable(
        self,
        position: int,
        flat: list[Any],
        structure: Structure | CallStructure,
        body: Callable[..., Any],
        buffers: ChangingBuffers,
        modes: ThreadState,
    ) -> Any:
        inputs = [self._boundaries.leaf_of(value, position) for value in flat]
        record = _Record(
            position,
            body,
            inputs,
            structure,
            [(value, value._version) for value in inputs if isinstance(value, Tensor)],
        )
        self._records.append(record)
        assert self._entered is not None
        self._entered.record = record
        args, kwargs = structure.unflatten(inputs)
        if self._recompute:
            record.random, record.modes = RandomState(self._accelerator), modes
            versions, kept = buffers.versions(), buffers.save()
            record.shown = [] if self._buffers is None else self._buffers.now(buffers.modules)
            record.stored = None if self._state is None else self._state.now()
            # the check for tensors that leave otherwise needs their graph, which is dropped below
            with torch.no_grad() if self._inside is None else nullcontext():
                result = self._result_of(body, args, kwargs)
            record.buffers = buffers.changed_since(versions, kept)
            self._refuse_changed_inputs(record)
        else:
            result = self._result_of(body, args, kwargs)
        refuse_changed_containers(args, kwargs, inputs)
        outputs, output_structure = flatten_result(result)
        if not self._recompute:
            record.outputs = list(outputs)
        for index, output in enumerate(outputs):
            if not isinstance(output, Tensor) or not _can_have_gradient(output):
                continue
            if not self._recompute and not output.requires_grad:
                continue
            leaf, outputs[index] = self._boundaries.show(output, position)
            record.output_leaves.append((index, leaf))
        return output_structure.unflatten(outputs)

    @staticmethod
    def _result_of(body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return body(*args, **kwargs)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error):
                raise UnitUseError(_CHANGED_INPUT) from error
            raise

    def _refuse_changed_inputs(self, record: _Record) -> None:
        if any(value._version != version for value, version in record.input_versions):
            raise UnitUseError(_CHANGED_INPUT)

    # -- layers that need statistics of the global batch --------------------------------------

    def normalise(self, index: int, norm: nn.SyncBatchNorm, value: Tensor) -> Tensor:
        """Meet all microbatches of all ranks at a layer, then return its output.

        Args:
            index: Index of the layer.
            norm: The layer, in training mode.
            value: Its input.
        """
        if not self._meets:
            raise UnsupportedError(
                "A torch.nn.SyncBatchNorm in training mode is called in evaluation, or with manual"
                " optimization. Ranks cannot meet there: they may call it differently often. Call"
                " eval() before, or use torch.nn.BatchNorm."
            )
        entered = self._entered
        if entered is None:
            needs = [value, *norm.parameters(recurse=False)]
            differentiable = torch.is_grad_enabled() and any(each.requires_grad for each in needs)
        else:
            differentiable = entered.differentiable
        if differentiable:
            _refuse_saved_tensor_hooks("torch.nn.SyncBatchNorm")
        self._boundaries.drop_values()
        self.moments = moments_of(norm, value)
        self.values_per_channel = value.numel() // value.shape[1]
        self._park(Visit(ROOT if entered is None else entered.unit, differentiable, index))
        statistics, self.moments, self.statistics = self.statistics, None, None
        assert statistics is not None
        record = None if entered is None else entered.record
        meeting = Meeting(norm, len(self._records), statistics, record)
        self.made.append(meeting.position)
        self._records.append(meeting if differentiable else None)
        update_running(norm, statistics)
        if self._recompute and record is not None:
            # other microbatches have drawn numbers meanwhile
            meeting.random = RandomState(self._accelerator)
            record.meetings.append(meeting)
            return meeting.normalised(value)
        if record is not None:
            record.meetings.append(meeting)
        output = self._cut_at(meeting, value)
        self._park_behind_the_last()
        return output

    def normalise_again(self, norm: nn.SyncBatchNorm, value: Tensor) -> Tensor:
        """Return a layer's output while its unit is computed again, with a graph."""
        meeting = next(self._again, None)
        if meeting is None or meeting.norm is not norm:
            raise UnitUseError(
                "A unit calls its layers of torch.nn.SyncBatchNorm otherwise when it is computed"
                " again for the backward. Use CephaloStrategy(recompute=False)."
            )
        assert meeting.random is not None
        meeting.random.restore()
        update_running(norm, meeting.statistics)
        return self._cut_at(meeting, value)

    def _cut_at(self, meeting: Meeting, value: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return meeting.normalised(value)
        is_inside = meeting.record is not None
        return meeting.cut(
            value, self._boundaries.leaf_of(value, meeting.position, is_inside=is_inside)
        )

    def sums_at(self, position: int) -> Tensor | None:
        """Return what this microbatch brings to a meeting in the backward; None: nothing."""
        meeting = self._records[position]
        return meeting.sums() if isinstance(meeting, Meeting) else None

    def backward_of_meeting(self, position: int, sums: Tensor) -> None:
        """Run the backward of a layer, and of the code before it back to the last cut.

        Args:
            position: Position of the meeting.
            sums: Those of all microbatches of all ranks.
        """
        meeting = self._records[position]
        record = None
        if isinstance(meeting, Meeting):
            meeting.finish(sums)
            record, self._records[position] = meeting.record, None
        self._boundaries.passed(position)
        self._boundaries.through_glue(position)
        if record is not None:
            self._through_captures(record, before=position)

    # -- tensors that hooks take out of units -------------------------------------------------

    def capture(self, output: Any) -> Any:
        """Return the output of a module in a unit so that a hook may take it out of the unit.

        Its tensors become outputs of the unit: the graph is cut there. None: they stay as they are.
        """
        record = None if self._entered is None else self._entered.record
        if record is None or self._outside is not None:
            return None
        values, structure = flatten_result(output)
        before = len(record.captures)
        for index, value in enumerate(values):
            if not isinstance(value, Tensor) or not _can_have_gradient(value):
                continue
            if not self._recompute and not value.requires_grad:
                continue
            with torch.enable_grad():
                leaf, values[index] = self._boundaries.show(value, record.position)
            source = None if self._recompute else value
            record.captures.append(_Capture(len(self._records) - 1, source, leaf))
        return structure.unflatten(values) if len(record.captures) > before else None

    def capture_again(self, output: Any) -> None:
        """Note the tensors of :meth:`capture` while a unit is computed again."""
        values = flatten_result(output)[0]
        tensors = [value for value in values if isinstance(value, Tensor)]
        self._seen_again += [value for value in tensors if _can_have_gradient(value)]

    def _through_captures(self, record: _Record, before: int | None = None) -> None:
        """Run the backward of captured tensors of a unit that is not recomputed.

        The latest come first: the code behind one may have used others. It goes back to the
        meeting before, whose gradients are not complete yet.

        Args:
            record: Of the unit.
            before: Position of a meeting that has been passed; None: none has.
        """
        positions = [meeting.position for meeting in record.meetings]
        passed = [at for at in positions if before is None or at < before]
        start = max(passed, default=record.position)
        while record.captures and record.captures[-1].position >= start:
            capture = record.captures.pop()
            if capture.source is not None and capture.leaf.grad is not None:
                torch.autograd.backward([capture.source], [capture.leaf.grad], retain_graph=True)

    # -- between forward and backward, in the scheduler ---------------------------------------

    def _unit_at(self, position: int) -> _Record | None:
        """Return the record of the unit that is visited at a position, or that meets there."""
        record = self._records[position]
        return record.record if isinstance(record, Meeting) else record

    def offload(self, position: int) -> None:
        """Move the inputs of a visit to the host, when the user's code has left its unit."""
        record = self._unit_at(position)
        if self._arena is None or self.finished or record is None:
            return
        if self._entered is not None and self._entered.record is record:
            return  # it has stopped in the middle
        if record.outputs is not None:  # a retained graph holds the inputs anyway
            return
        moved = [self._arena.offload(leaf) for leaf in self._boundaries.let_go(record.position)]
        record.away += [away for away in moved if away is not None]

    def fetch(self, position: int) -> None:
        """Begin to copy the inputs of a visit back to the device."""
        record = self._unit_at(position)
        if self._arena is not None and record is not None and not record.is_passed:
            for away in record.away:
                self._arena.prefetch(away)

    # -- backward, in the scheduler -----------------------------------------------------------

    def backward_of_loss(self, loss: Tensor, without_weight: Tensor | None = None) -> None:
        """Run the backward of the loss, down to the leaves of the last units.

        Graph buffers are freed as on one device, unless the loss shares glue with the inputs of
        units: that glue is walked again later.

        Args:
            loss: The loss times its weight.
            without_weight: A bool on the device: true if the weight is 0, so that gradients are 0
                even if the loss is 0/0.
        """
        if not loss.requires_grad:
            raise UnitUseError(
                "The loss does not require a gradient: expected a tensor computed from trainable"
                " parameters. Is every parameter frozen, or was the loss detached?"
            )
        self._boundaries.refuse_leaks(loss)
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
                self._forget(record)  # without gradients the offloaded values were never restored
        self._boundaries.passed(position)
        self._boundaries.through_glue(position, self._retains)

    def _forget(self, record: _Record | Meeting | None) -> None:
        if not isinstance(record, _Record):
            return
        record.captures.clear()
        record.meetings.clear()  # they refer to the record, and its memory is to go now
        if self._arena is not None:
            for away in record.away:
                self._arena.discard(away)

    def _through_body(self, record: _Record) -> bool:
        """Run the backward of a visit's body; return whether its outputs had gradients."""
        gradients = [(i, leaf.grad) for i, leaf in record.output_leaves if leaf.grad is not None]
        captured = any(capture.leaf.grad is not None for capture in record.captures)
        # a layer of synchronised normalisation has gradients of other microbatches' losses
        if not gradients and not record.meetings and not captured:
            return False
        with self._replayed_buffers(record):
            outputs = record.outputs if record.outputs is not None else self._compute_again(record)
            reached = [(outputs[i], gradient) for i, gradient in gradients]
            if record.outputs is None:
                reached += self._captured_again(record)
            reached = [(output, gradient) for output, gradient in reached if output.requires_grad]
            if reached:
                torch.autograd.backward(
                    [output for output, _ in reached],
                    [gradient for _, gradient in reached],
                    # code before a cut in the unit may share nodes with the code behind it
                    retain_graph=bool(record.meetings or record.captures)
                    or (self._retains and record.outputs is not None),
                )
            if record.outputs is not None:
                self._through_captures(record)
        if self._outside is not None:
            for _, leaf in record.output_leaves:
                leaf.grad = None
        return True

    def _captured_again(self, record: _Record) -> list[tuple[Tensor, Tensor]]:
        """Return the captured tensors of a unit that was computed again, and their gradients."""
        seen, self._seen_again = self._seen_again, []
        if len(seen) != len(record.captures):
            raise UnitUseError(
                "A hook in a unit saw other tensors when the unit was computed again for the"
                " backward. Register it before the step, or use CephaloStrategy(recompute=False)."
            )
        pairs = [(value, each.leaf.grad) for value, each in zip(seen, record.captures, strict=True)]
        return [(value, gradient) for value, gradient in pairs if gradient is not None]

    @contextmanager
    def _replayed_buffers(self, record: _Record) -> Iterator[None]:
        with ExitStack() as stack:
            if record.shown and self._buffers is not None:
                stack.enter_context(self._buffers.replayed(record.shown))
            if record.buffers:  # on top: the unit itself writes these, and will again
                stack.enter_context(ChangingBuffers.replayed(record.buffers))
            yield

    def _compute_again(self, record: _Record) -> Sequence[Any]:
        assert record.random is not None and record.modes is not None
        for away in record.away:
            assert self._arena is not None
            self._arena.restore(away)
        self._refuse_changed_inputs(record)
        before = ThreadState.capture(self._device_types)
        args, kwargs = record.structure.unflatten(record.inputs)
        record.modes.restore()
        torch.set_autocast_cache_enabled(False)
        try:
            stored: AbstractContextManager[None] = nullcontext()
            if self._state is not None and record.stored is not None:
                stored = self._state.replayed(record.stored)
            self._again, self._seen_again = iter(record.meetings), []
            with record.random.replayed(), torch.enable_grad(), stored:
                return flatten_result(record.body(*args, **kwargs))[0]
        finally:
            before.restore()
            self._boundaries.end_forward()  # meetings have made cuts


def _refuse_saved_tensor_hooks(what: str, other_remedy: str = "") -> None:
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise UnitUseError(
            f"A {what} is called inside a saved-tensor-hooks context (torch.utils.checkpoint or"
            " save_on_cpu around it). Cephalo recomputes units itself: switch gradient"
            f" checkpointing off in the model{other_remedy}."
        )


def _can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
