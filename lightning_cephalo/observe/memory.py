"""Measures the memory that a rank holds, and accounts for it by kind.

The planner predicts a :class:`RankMemory`; training and profiling measure one with a
:class:`MemoryMeter`. It reads a device's own peak, which costs nothing. On the CPU it counts the
bytes of live tensors, operator by operator. This takes time, so nothing is timed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator.base import MemoryFigures
from lightning_cephalo.accelerator.emulated import MemoryTracker
from lightning_cephalo.accelerator.torch_device import distinct_bytes
from lightning_cephalo.common.records import Amount, Count, Record, whole
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.observe.recorder import Look
from lightning_cephalo.plan.program import Instruction, Operation
from lightning_cephalo.sharding.placement import local_part

# The first step creates the optimizer state; from the second step on, all steps are alike.
COUNTED_STEP = 2


@dataclass(frozen=True)
class RankMemory(Record):
    """Bytes of one rank; None where a figure is not known.

    Each kind is the largest amount of it that was held at any moment of the step. The exception is
    ``inside_bytes``: the peak minus all other kinds, as in the planner's formula. It is 0 if the
    peak came while there was less of the others. So the kinds sum to the peak, or to more.

    Attributes:
        peak_bytes: Most bytes held at the same time.
        state_bytes: This rank's share of parameters, gradients and optimizer state. Early updates
            hold few gradients at a time.
        gathered_bytes: Full parameters of gathered units.
        gradients_bytes: Full gradients of units, and the buffers that a reduce receives into.
        boundaries_bytes: Retained between forward and backward: the samples, boundary activations,
            and the inside of units where it is not recomputed.
        inside_bytes: Memory that one microbatch takes in a unit, or in the root, while it runs.
        other_bytes: Everything else that is held all the time: buffers, counters, libraries'
            workspaces.
        host_bytes: Memory of the host that is taken for boundaries and optimizer state; no part of
            the others.
        resting_state_bytes: What is held of ``state_bytes`` between two steps.
        parameters: Elements of the parameters of which this rank holds the rows.
        step: The training step that was counted, from 1; None where all steps were (or none).
    """

    kind = "memory"

    peak_bytes: Amount | None = None
    state_bytes: Amount | None = None
    gathered_bytes: Amount | None = None
    gradients_bytes: Amount | None = None
    boundaries_bytes: Amount | None = None
    inside_bytes: Amount | None = None
    other_bytes: Amount | None = None
    host_bytes: Amount | None = None
    step: Count | None = None
    resting_state_bytes: Amount | None = None
    parameters: Annotated[int, partial(whole, minimum=0)] | None = None

    @property
    def bytes_per_parameter(self) -> tuple[float, float] | None:
        """Measured bytes of state per parameter: between two steps, and the most within one."""
        if not self.parameters or self.resting_state_bytes is None or self.state_bytes is None:
            return None
        return self.resting_state_bytes / self.parameters, self.state_bytes / self.parameters


class MemoryMeter:
    """Measures how many bytes this rank holds.

    Without the device's own figures, the meter counts the bytes of live tensors.
    """

    def __init__(self, figures: MemoryFigures | None, tracker: MemoryTracker | None = None) -> None:
        self._tracker: MemoryTracker | None = None
        if figures is None:
            figures = self._tracker = tracker or MemoryTracker()
        self.figures = figures

    @property
    def is_free(self) -> bool:
        """Whether measuring does not slow steps down."""
        return self._tracker is None

    @contextmanager
    def measuring(self, *made_before: Any) -> Iterator[None]:
        """Measure what happens inside, and on the CPU also the tensors that were made before."""
        if self._tracker is None:
            self.figures.reset_peak()
            yield
            return
        with self._tracker:
            self._tracker.track(*made_before)
            yield

    def bytes_without(self, *tensors: Tensor) -> int:
        """Return the bytes held now except for those of ``tensors``, which count from now on."""
        held = self.figures.current_bytes
        self.figures.untrack(*tensors)
        rest = self.figures.current_bytes
        if rest < held or not self.is_free:
            self.figures.track(*tensors)
        return rest


class StateElsewhere(Protocol):
    """Optimizer state of which a part lives in host memory."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device that it passes through."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes."""

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor of it lies in host memory that is apart from the device."""


class TrainingMemory(Observer):
    """Follows a training through its steps, and accounts for its memory.

    The peak is that of all steps if the meter is free, else that of one step. The kinds are always
    read in one step only, before each of its instructions.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizers: Sequence[Optimizer],
        moved: StateElsewhere | None = None,
        keeps_looks: bool = False,
    ) -> None:
        self._model, self.moved = model, moved
        self._optimizers = optimizers
        self._meter = MemoryMeter(model.accelerator.memory)
        self._figures = self._meter.figures
        self._figures.reset_peak()
        self._is_counting = self._has_counted = False
        self._steps = 0
        self._state = self._gathered = self._gradients = self._boundaries = self._other = 0
        self._peak = self._resting_state = 0
        self._keeps_looks = keeps_looks
        self._looks: list[Look] = []

    @property
    def slowed(self) -> bool:
        """Whether counting made the last step slower."""
        return self._steps == COUNTED_STEP and not self._meter.is_free

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step inside: the forward, the backward, and the optimizer's update."""
        self._steps += 1
        if self._steps != COUNTED_STEP:
            yield
            return
        with ExitStack() as counted:
            if not self._meter.is_free:
                counted.enter_context(self._meter.measuring(*self._made_before()))
            counted.enter_context(self._model.executor.link.observed_by(self))
            self._is_counting = True
            counted.callback(setattr, self, "_is_counting", False)
            yield
            self._state = max(self._state, self._state_bytes())
            self._end_look()
            self._peak = max(self._peak, self._figures.peak_bytes)
            self._has_counted = True

    def _made_before(self) -> list[Any]:
        made = [self._model.module, *_state_of(self._optimizers), *self._model.buffers()]
        rows = (tensor for flat in self._model.flats for tensor in (flat.shard, flat.gathered.full))
        return [*made, *rows, *self._own_gradients()]

    def _own_gradients(self) -> list[Tensor]:
        gradients = (flat.gradient.own for flat in self._model.flats)
        return [gradient for gradient in gradients if gradient is not None]

    def before_forward(self, batch: Any) -> None:
        """Read the memory at rest, with the step's batch before it is split."""
        if not self._is_counting:
            return
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        resting = self._meter.bytes_without(*tensors)
        self._look()
        self._resting_state = self._state_bytes()
        self._other = max(0, resting - self._resting_state - self._buffers())

    def after_forward(self) -> None:
        """Read the boundaries between the forward and the backward, when all exist."""
        if self._is_counting:
            held = self._figures.current_bytes
            # what rested before may be gone by now
            known = self._state_bytes() + self._other + self._buffers()
            self._boundaries = max(0, held - known)

    def measured(self) -> RankMemory | None:
        """Return the measured memory; None before the counted step."""
        if not self._has_counted:
            return None
        peak = max(self._peak, self._figures.peak_bytes) if self._meter.is_free else self._peak
        known = self._state + self._gathered + self._gradients + self._boundaries + self._other
        return RankMemory(
            peak_bytes=peak,
            state_bytes=self._state,
            gathered_bytes=self._gathered,
            gradients_bytes=self._gradients,
            boundaries_bytes=self._boundaries,
            inside_bytes=max(0, peak - known),
            other_bytes=self._other,
            host_bytes=self._host_bytes(),
            step=None if self._meter.is_free else COUNTED_STEP,
            resting_state_bytes=self._resting_state,
            parameters=sum(flat.shard.numel() for flat in self._model.flats),
        )

    def _host_bytes(self) -> int:
        arena, moved = self._model.executor.arena, self.moved
        boundaries = 0 if arena is None else arena.held_bytes
        return boundaries + (0 if moved is None else moved.host_bytes)

    def before(self, instruction: Instruction) -> None:
        self._look()
        if instruction.operation is Operation.UPDATE:
            self._state = max(self._state, self._state_bytes())
        if self._keeps_looks:
            self._end_look()
            self._begin_look(instruction)

    def looks(self) -> tuple[Look, ...]:
        """Return what was held before each instruction of the counted step, if it was kept."""
        return tuple(self._looks) if self._has_counted else ()

    def _begin_look(self, instruction: Instruction) -> None:
        flats = self._model.flats
        rows = distinct_bytes([flat.shard for flat in flats])
        gradients = distinct_bytes(self._own_gradients())
        # early updates give gradients back: what holds their memory now counts where it belongs
        optimizer = max(0, self._state_bytes() - rows - gradients)
        parts = (rows, optimizer, gradients, self._gathered_bytes(), self._gradient_bytes())
        known = (self._other, *parts)
        activations = max(0, self._figures.current_bytes - sum(known))
        sizes = tuple(map(float, (*known, activations)))
        self._looks.append(Look(instruction, sizes, float(self._host_bytes())))

    def _end_look(self) -> None:
        """Note the peak since the last look, and begin a new one."""
        if not self._keeps_looks:
            return
        peak = self._figures.peak_bytes
        self._peak = max(self._peak, peak)
        if self._looks:  # else it is that of earlier steps
            last = self._looks[-1]
            inside = max(0.0, peak - sum(last.sizes))
            self._looks[-1] = replace(last, sizes=(*last.sizes, inside))
        self._figures.reset_peak()

    def _look(self) -> None:
        gathered, gradients = self._gathered_bytes(), self._gradient_bytes()
        self._gathered = max(self._gathered, gathered)
        self._gradients = max(self._gradients, gradients)

    def _buffers(self) -> int:
        return self._gathered_bytes() + self._gradient_bytes()

    def _gathered_bytes(self) -> int:
        # idle buffers count as well
        pools = (*self._model.parameter_pools, self._model.padding.gathers)
        lent = sum(pool.held_bytes for pool in pools)
        own = [flat.gathered.full for flat in self._model.flats if not flat.gathered.is_lent]
        return lent + distinct_bytes(own)

    def _gradient_bytes(self) -> int:
        received = sum(unit.receiving_bytes for unit in self._model.units)
        pools = (*self._model.gradient_pools, self._model.padding.reduces)
        return sum(pool.held_bytes for pool in pools) + received

    def _state_bytes(self) -> int:
        held = [*(flat.shard for flat in self._model.flats), *self._own_gradients()]
        # not part of the state: a counter per parameter, which does not depend on the share
        held += [local_part(v) for v in _state_of(self._optimizers) if isinstance(v, DTensor)]
        if self.moved is None:
            return distinct_bytes(held)
        on_device = [tensor for tensor in held if not self.moved.is_on_host(tensor)]
        return distinct_bytes(on_device) + self.moved.staging_bytes


def _state_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    leaves = pytree.tree_leaves([dict(optimizer.state) for optimizer in optimizers])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
