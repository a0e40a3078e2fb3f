"""Measures what this rank holds while it trains.

The peak costs nothing on a device with an allocator of its own, which knows it, and on an emulated
one: that of all steps is taken. On the CPU someone must count the bytes of live tensors, operator
by operator, which takes time: one step is counted, and not timed. The kinds are looked at in one
step everywhere, before each action of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator.base import MemoryFigures
from lightning_cephalo.accelerator.emulated import MemoryTracker
from lightning_cephalo.accelerator.torch_device import distinct_bytes
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.observe.memory_account import RankMemory
from lightning_cephalo.plan.program import Instruction
from lightning_cephalo.sharding.placement import local_part

# The first step makes what the optimizer keeps: from the second on all steps are alike.
COUNTED_STEP = 2


class MemoryMeter(Observer):
    """Follows a training through its steps; see :class:`~.memory_account.RankMemory`.

    Args:
        engine: The sharded model.
        optimizers: Those that step.
    """

    def __init__(self, engine: ShardedModel, optimizers: Sequence[Optimizer]) -> None:
        self._engine = engine
        self._optimizers = optimizers
        self._figures = engine.accelerator.memory
        # None but in the step that is counted
        self._tracker: MemoryFigures | None = None
        self._steps = 0
        self._state = self._gathered = self._gradients = self._boundaries = self._other = 0
        self._peak = 0
        self._has_counted = False
        if self._figures is not None:
            self._figures.reset_peak()

    @property
    def slowed(self) -> bool:
        """Whether the last step took longer for being counted."""
        return self._steps == COUNTED_STEP and self._figures is None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: the forward, the backward, and the optimizer's."""
        self._steps += 1
        if self._steps != COUNTED_STEP:
            yield
            return
        executor = self._engine.executor
        try:
            if self._figures is not None:
                self._tracker = self._figures
                executor.attach(self)
                yield
            else:
                with MemoryTracker() as tracker:
                    tracker.track(self._engine.module, *_state_of(self._optimizers))
                    for flat in self._engine.flats:
                        made = [flat.shard, flat.full, flat.grad_shard]
                        tracker.track([tensor for tensor in made if tensor is not None])
                    tracker.track(self._engine.buffers())
                    self._tracker = tracker
                    executor.attach(self)
                    yield
            self._state = self._state_bytes()
            self._peak = self._tracker.peak_bytes
            self._has_counted = True
        finally:
            self._tracker = None
            executor.detach(self)

    def before_forward(self, batch: Any) -> None:
        """Called with the step's batch, before it is cut."""
        if self._tracker is None:
            return
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        held = self._tracker.current_bytes
        self._tracker.untrack(*tensors)
        resting = self._tracker.current_bytes
        if resting < held or self._figures is None:
            self._tracker.track(*tensors)
        self._look()
        self._other = resting - self._state_bytes() - self._buffers()

    def after_forward(self) -> None:
        """Called between the forward and the backward, when all boundaries are there."""
        if self._tracker is None:
            return
        held = self._tracker.current_bytes
        self._boundaries = held - self._state_bytes() - self._other - self._buffers()

    def measured(self) -> RankMemory | None:
        """What was measured; None before the counted step."""
        if not self._has_counted:
            return None
        peak = self._peak if self._figures is None else max(self._peak, self._figures.peak_bytes)
        known = self._state + self._gathered + self._gradients + self._boundaries + self._other
        return RankMemory(
            peak_bytes=peak,
            state_bytes=self._state,
            gathered_bytes=self._gathered,
            gradients_bytes=self._gradients,
            boundaries_bytes=self._boundaries,
            inside_bytes=max(0, peak - known),
            other_bytes=self._other,
            step=COUNTED_STEP if self._figures is None else None,
        )

    def before(self, instruction: Instruction) -> None:
        self._look()

    def _look(self) -> None:
        gathered, gradients = self._gathered_bytes(), self._gradient_bytes()
        self._gathered = max(self._gathered, gathered)
        self._gradients = max(self._gradients, gradients)

    def _buffers(self) -> int:
        return self._gathered_bytes() + self._gradient_bytes()

    def _gathered_bytes(self) -> int:
        # idle buffers are held as well
        lent = sum(pool.held_bytes for pool in self._engine.parameter_pools)
        own = [flat.full for flat in self._engine.flats if not flat.is_lent]
        return lent + distinct_bytes(own)

    def _gradient_bytes(self) -> int:
        received = sum(unit.receiving_bytes for unit in self._engine.units)
        return sum(pool.held_bytes for pool in self._engine.gradient_pools) + received

    def _state_bytes(self) -> int:
        flats = self._engine.flats
        held = [flat.shard for flat in flats]
        held += [flat.grad_shard for flat in flats if flat.grad_shard is not None]
        # a counter of every parameter whatever this rank's share is no part of the state
        held += [local_part(v) for v in _state_of(self._optimizers) if isinstance(v, DTensor)]
        return distinct_bytes(held)


def _state_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    leaves = pytree.tree_leaves([dict(optimizer.state) for optimizer in optimizers])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
