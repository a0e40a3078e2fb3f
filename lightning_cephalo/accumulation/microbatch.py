"""One microbatch: its greenlet, its visits of units, what it keeps for the backward.

[Note: cuts]
The user's step runs in a greenlet of its own. Where it enters a unit it parks until the scheduler
has gathered that unit. The autograd graph is cut there: a unit receives detached *leaves* instead
of the tensors that need a gradient, and its outputs are leaves again for the code after it (the
*glue*: residuals, embeddings, masks between units). Backward goes unit by unit: the outputs' leaves
hold the gradients that came from later, the unit's own graph carries them to its input leaves, and
the glue before it carries them on, once per tensor and summed over all its uses, when the visit
that used it first has been passed. That makes residuals around units, encoder outputs that enter
every decoder unit, and shared position biases exact.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import greenlet
import torch
from torch import Tensor

from lightning_cephalo.accumulation.arguments import (
    UnitUseError,
    refuse_changed_containers,
    without_empty_caches,
)
from lightning_cephalo.accumulation.nesting import (
    CallStructure,
    Structure,
    flatten_call,
    flatten_result,
)
from lightning_cephalo.accumulation.replay import ChangingBuffers, RandomState, ThreadState
from lightning_cephalo.accumulation.schedule import Visit

_MAX_PARKS_WHILE_STOPPING = 100
_CHANGED_INPUT = (
    "An input of a unit is changed in place, by the unit or by the code after it, so that the"
    " unit's backward cannot be computed. Write `x = x + y` instead of `x += y` there."
)


class _Passed(torch.autograd.Function):
    """What the glue sees of an output's leaf, so that it may change it in place (``x += y``)."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


# where the glue's graph ends: at parameters and other leaves, and at outputs of units
_ENDS = ("AccumulateGrad", "_PassedBackward")


@dataclass
class _Output:
    """An output of a unit as the glue sees it; unchanged as long as it has this node."""

    shown: Tensor
    node: Any
    leaf: Tensor


@dataclass
class _Leaf:
    """A tensor of the glue as the units see it."""

    original: Tensor
    leaf: Tensor
    first_visit: int


@dataclass
class _Record:
    """What one visit keeps for its backward."""

    body: Callable[..., Any]
    inputs: list[Any]
    structure: Structure | CallStructure
    input_versions: list[tuple[Tensor, int]]
    output_leaves: list[tuple[int, Tensor, int]] = field(default_factory=list)
    outputs: list[Any] | None = None
    random: RandomState | None = None
    modes: ThreadState | None = None
    buffers: list[Any] = field(default_factory=list)
    forward_s: float = 0.0


class Microbatch:
    """A run of the user's step over some samples.

    Args:
        step: Calls the user's step and returns what it returns.
        device: This rank's device.
        recompute: Keep only what enters a unit and compute its inside again in the backward.
        clock: Returns seconds after all work issued so far is done; None: nothing is timed.
        inside: Ids of the units' parameters, in a step that looks for tensors which leave a unit
            other than as its outputs; None: nobody looks.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        device: torch.device,
        recompute: bool,
        clock: Callable[[], float] | None = None,
        inside: frozenset[int] | None = None,
    ) -> None:
        self._inside = inside
        self._device = device
        self._device_types = tuple({"cpu", device.type})
        self._recompute = recompute
        self._clock = clock
        self._greenlet = greenlet.greenlet(step)
        # a greenlet starts with no context variables of its own
        self._greenlet.gr_context = contextvars.copy_context()
        self._records: list[_Record | None] = []
        self._leaves: dict[int, _Leaf] = {}
        self._outputs: dict[int, _Output] = {}
        self.parked: Visit | None = None
        self.result: Any = None
        self.finished = False
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []

    def advance(self) -> None:
        """Run the step until it parks at a unit or returns."""
        before = ThreadState.capture(self._device_types)
        try:
            switched = self._greenlet.switch()
        finally:
            before.restore()
        if self._greenlet.dead:
            self.finished, self.result, self.parked = True, switched, None
        else:
            self.parked = switched

    def abandon(self) -> None:
        """Stop the step where it is and drop what it keeps."""
        before = ThreadState.capture(self._device_types)
        try:
            # code that cleans up may call units again and park there
            for _ in range(_MAX_PARKS_WHILE_STOPPING):
                if self._greenlet.dead:
                    break
                self._greenlet.throw(greenlet.GreenletExit)
        finally:
            before.restore()
            self._records, self._leaves, self._outputs = [], {}, {}

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
        """Pass a unit: park until it is gathered, then compute its body."""
        if self._recompute and torch.is_grad_enabled():
            args, kwargs = without_empty_caches(args, kwargs)
        flat, structure = flatten_call(args, kwargs)
        grad = torch.is_grad_enabled()
        differentiable = grad and (
            trainable or any(isinstance(value, Tensor) and value.requires_grad for value in flat)
        )
        if differentiable and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise UnitUseError(
                "A unit is called inside a saved-tensor-hooks context (torch.utils.checkpoint or"
                " save_on_cpu around it). Cephalo recomputes units itself: switch gradient"
                " checkpointing off in the model, or choose larger units with unit_names=."
            )
        position = len(self._records)
        modes = ThreadState.capture(self._device_types)
        # inference mode is the thread's too; left on, the other microbatches would run in it
        outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        with outside or nullcontext():
            greenlet.getcurrent().parent.switch(Visit(unit, differentiable))
        modes.restore()

        start = self._clock() if self._clock else 0.0
        # autocast would keep casts of weights that are about to be freed, and without their graph
        # where the forward runs without one
        torch.set_autocast_cache_enabled(False)
        try:
            if differentiable:
                outputs = self._differentiable(position, flat, structure, body, buffers, modes)
            else:
                self._records.append(None)
                outputs = body(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(modes.autocast_cache)
        if self._clock:
            self.forward_s.append(self._clock() - start)
        return outputs

    def _differentiable(
        self,
        position: int,
        flat: list[Any],
        structure: Structure | CallStructure,
        body: Callable[..., Any],
        buffers: ChangingBuffers,
        modes: ThreadState,
    ) -> Any:
        inputs = [self._leaf_of(value, position) for value in flat]
        record = _Record(
            body,
            inputs,
            structure,
            [(value, value._version) for value in inputs if isinstance(value, Tensor)],
        )
        self._records.append(record)
        args, kwargs = structure.unflatten(inputs)
        if self._recompute:
            record.random, record.modes = RandomState(self._device), modes
            versions, kept = buffers.versions(), buffers.keep()
            # whoever looks for tensors that leave otherwise needs their graph; it is dropped below
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
            leaf = _new_leaf(output)
            outputs[index] = shown = _Passed.apply(leaf)
            record.output_leaves.append((index, leaf, id(shown)))
            self._outputs[id(shown)] = _Output(shown, shown.grad_fn, leaf)
        return output_structure.unflatten(outputs)

    @staticmethod
    def _result_of(body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return body(*args, **kwargs)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error):
                raise UnitUseError(_CHANGED_INPUT) from error
            raise

    def _leaf_of(self, value: Any, position: int) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        output = self._outputs.get(id(value))
        if output is not None and value.grad_fn is output.node:
            return output.leaf
        known = self._leaves.get(id(value))
        if known is None:
            self._refuse_leaks(value)
            known = _Leaf(value, _new_leaf(value), position)
            self._leaves[id(value)] = known
        return known.leaf

    def _refuse_changed_inputs(self, record: _Record) -> None:
        if any(value._version != version for value, version in record.input_versions):
            raise UnitUseError(_CHANGED_INPUT)

    def _refuse_leaks(self, tensor: Tensor) -> None:
        """Refuse what was computed inside a unit and came out other than as its output."""
        if self._inside is None:
            return
        nodes = _nodes([tensor.grad_fn])
        variables = [n.variable for n in nodes if type(n).__name__ == "AccumulateGrad"]
        # any microbatch's leaves: what is stored on a module is the last microbatch's
        if any(id(v) in self._inside or hasattr(v, "_leaf_of_unit") for v in variables):
            raise UnitUseError(
                "The loss depends on a tensor that was computed inside a unit and is not one of"
                " its outputs: it was stored on a module or recorded by a hook (an auxiliary loss,"
                " router logits), or the unit's parameters are used outside of it. Its gradient"
                " would be lost. Return it from the unit's forward, or leave it out of the loss."
            )

    # -- backward, in the scheduler -----------------------------------------------------------

    def backward_of_loss(self, loss: Tensor) -> None:
        """Run the backward of the tail, down to the leaves of the last units.

        Graph buffers are freed as on one device unless the tail shares glue with units' inputs,
        which is walked again later.
        """
        if not loss.requires_grad:
            raise UnitUseError(
                "The loss that training_step returned does not require a gradient: expected a"
                " tensor computed from trainable parameters. Is every parameter frozen, or was"
                " the loss detached?"
            )
        self._refuse_leaks(loss)
        torch.autograd.backward([loss], retain_graph=self._shares_glue(loss))

    def _shares_glue(self, loss: Tensor) -> bool:
        pending = [entry.original.grad_fn for entry in self._leaves.values()]
        pending = [node for node in pending if node is not None]
        if not pending:
            return False
        return bool(_reachable([loss.grad_fn]) & _reachable(pending))

    def backward_of_visit(self, position: int) -> None:
        """Carry gradients through one visit and the glue before it."""
        record = self._records[position]
        self._records[position] = None
        start = self._clock() if self._clock else 0.0
        if record is not None:
            self._through_body(record)
        self._through_glue(position)
        if self._clock:
            self.backward_s.append(self._clock() - start)

    def _through_body(self, record: _Record) -> None:
        gradients = [(i, leaf.grad) for i, leaf, _ in record.output_leaves if leaf.grad is not None]
        for _, _, shown in record.output_leaves:
            self._outputs.pop(shown, None)
        if not gradients:
            return
        with ChangingBuffers.replayed(record.buffers) if record.buffers else nullcontext():
            outputs = record.outputs if record.outputs is not None else self._compute_again(record)
            reached = [(outputs[i], gradient) for i, gradient in gradients]
            reached = [(output, gradient) for output, gradient in reached if output.requires_grad]
            if reached:
                torch.autograd.backward(
                    [output for output, _ in reached], [gradient for _, gradient in reached]
                )

    def _compute_again(self, record: _Record) -> Sequence[Any]:
        assert record.random is not None and record.modes is not None
        self._refuse_changed_inputs(record)
        before = ThreadState.capture(self._device_types)
        args, kwargs = record.structure.unflatten(record.inputs)
        record.modes.restore()
        torch.set_autocast_cache_enabled(False)
        try:
            with record.random.replayed(), torch.enable_grad():
                return flatten_result(record.body(*args, **kwargs))[0]
        finally:
            before.restore()

    def _through_glue(self, position: int) -> None:
        entries = [entry for entry in self._leaves.values() if entry.first_visit == position]
        if not entries:
            return
        reached = [entry for entry in entries if entry.leaf.grad is not None]
        if reached:
            torch.autograd.backward(
                [entry.original for entry in reached],
                [entry.leaf.grad for entry in reached],
                retain_graph=True,
            )
        for entry in entries:
            del self._leaves[id(entry.original)]


def _new_leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach().requires_grad_()
    leaf._leaf_of_unit = True  # type: ignore[attr-defined]
    return leaf


def _reachable(roots: Sequence[Any]) -> set[Any]:
    """Nodes of the graph that hold buffers, from these on, down to the leaves of outputs."""
    return {node for node in _nodes(roots) if type(node).__name__ not in _ENDS}


def _nodes(roots: Sequence[Any]) -> set[Any]:
    seen: set[Any] = set()
    stack = [node for node in roots if node is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ not in _ENDS:
            stack.extend(following for following, _ in node.next_functions if following is not None)
    return seen


def _can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
