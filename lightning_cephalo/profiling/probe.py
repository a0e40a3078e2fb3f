"""Runs profiling steps with the real executor and shards, and measures their time and memory."""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import ProfilingError, RemoteRankError
from lightning_cephalo.common.texts import printable
from lightning_cephalo.data.cutting import loss_and_weight
from lightning_cephalo.execution.loss_weights import checked_weight
from lightning_cephalo.execution.memory_errors import is_out_of_memory
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.features.manual_step import PhasedSteps
from lightning_cephalo.plan.program import COMPUTE, Instruction, Operation
from lightning_cephalo.profiling.isolation import forget_gradients
from lightning_cephalo.profiling.memory_model import Held, StepMeter
from lightning_cephalo.sharding.discovery import UnitKind

_TIMED = frozenset({*COMPUTE, Operation.MEET})


_Attempt: TypeAlias = Callable[[list[MicrobatchCall], Exception | None], None]
"""Runs a step of these microbatches, or with the error for which this rank has none."""


class Times(NamedTuple):
    """Seconds of one microbatch on one rank, summed over its visits of units."""

    forward_s: float
    backward_s: float
    tail_s: float


@dataclass(frozen=True)
class ProfiledStep:
    """The user's step, as training runs it."""

    run: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # autocast
    manual: PhasedSteps | None = None  # runs steps that call their backwards themselves


class Prober:
    """Runs profiling steps; collective.

    Where a rank lacks the memory for its microbatch, the step runs again with one of ``idle``
    samples there, as while others are measured, then with none.
    """

    def __init__(
        self,
        model: ShardedModel,
        clock: Callable[[], float],
        batch_of: Callable[[int], Any],
        step: ProfiledStep,
        idle: int = 0,
    ) -> None:
        self.model, self.control, self.step = model, model.control, step
        self._clock, self._batch_of, self.idle = clock, batch_of, idle
        # of a device that runs behind its host, waits at each unit add up what a step hides
        self._is_launched = not model.accelerator.computes_on_host
        self._times_whole = self.control.any(self._is_launched)
        self._is_inside = False

    def timed(self, size: int) -> Times | None:
        """Time a step with a microbatch of so many samples; None: it did not run."""
        clock, whole_s = _PhaseClock(self._clock, self.model), math.inf

        def step(calls: list[MicrobatchCall], failure: Exception | None) -> None:
            nonlocal whole_s
            started_s, clock.seconds = self._clock(), [0.0, 0.0, 0.0]
            self._forward_backward(calls, failure)
            whole_s = self._clock() - started_s

        with self.model.executor.link.observed_by(clock):
            has_run = self._runs(step, size)
        by_phase_s = clock.seconds
        if self._times_whole:  # on all ranks
            has_run = self._runs(step, size) and has_run
        part = min(1.0, whole_s / max(sum(by_phase_s), 1e-12)) if self._is_launched else 1.0
        return Times(*(part * seconds for seconds in by_phase_s)) if has_run else None

    def held(self, size: int, count: int = 1) -> Held | None:
        """Measure the bytes of a step with ``count`` microbatches; None: it did not run."""
        found = Held()

        def step(calls: list[MicrobatchCall], failure: Exception | None) -> None:
            nonlocal found
            meter = StepMeter(self.model)
            with meter.measuring():
                self._forward_backward(calls, failure, meter.forward_done)
            if calls:
                # in a real step every microbatch has samples of its own on the device
                leaves = pytree.tree_leaves(self._batch_of(calls[0].samples))
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                holds = self.model.accelerator.holds
                found = meter.held(count * sum(own.nbytes for own in tensors if holds(own)))

        return found if self._runs(step, size, count) else None

    def _runs(self, attempt: _Attempt, wanted: int, count: int = 1) -> bool:
        """Run a step until all ranks have the memory; return whether this rank ran its size."""
        size = wanted
        while self.control.any(size > 0):
            failure = self._failure_of(attempt, size, count)
            message = None if failure is None else printable(f"{type(failure).__name__}: {failure}")
            refused = failure is not None and is_out_of_memory(failure)
            rows = self.control.gather((size, refused, message))
            for rank, (samples_of, out_of_memory, text) in enumerate(rows):
                if text is not None and not out_of_memory:
                    raise ProfilingError(
                        f"Rank {rank} failed while profiling a microbatch of {samples(samples_of)}:"
                        f" {text}\nCephaloStrategy(plan=...) trains without profiling. If a tensor"
                        " without a row per sample was cut, such as class weights of as many rows,"
                        " give CephaloStrategy(split_batch=function)."
                    ) from failure
            if failure is not None:
                # its traceback holds the frames of the step, and the frames hold the activations
                traceback.clear_frames(failure.__traceback__)
                del failure
            if not any(out_of_memory for _, out_of_memory, _ in rows):
                return 0 < size == wanted
            if refused:
                size = self.idle if size > self.idle else 0
            gc.collect()
            self.model.accelerator.empty_cache()
        return False

    def _failure_of(self, attempt: _Attempt, size: int, count: int) -> Exception | None:
        """Run a step, and return the error of this rank; those of others come afterwards."""

        def weight_of(result: Any) -> tuple[torch.Tensor, float]:
            loss, weight = loss_and_weight(result, size)
            # a sample without weight takes as long as others
            return loss, checked_weight(float(weight)) or float(size)

        calls: list[MicrobatchCall] = []
        failure = None
        try:
            batches = [self._batch_of(size) for _ in range(count if size else 0)]
        except Exception as error:  # the other ranks are about to run the step
            failure = error
        else:
            steps = [partial(self.step.run, batch) for batch in batches]
            calls = [MicrobatchCall(step, weight_of, samples=size) for step in steps]
        try:
            attempt(calls, failure)
        except RemoteRankError:
            pass  # the failing rank reports its error
        except Exception as raised:
            # the others wait for this rank in the middle of the step, and it cannot go on
            if self._is_inside and not self.model.executor.failure.gave_up:
                raise
            return raised
        finally:
            forget_gradients(self.model.module)
        return None

    def _forward_backward(
        self,
        calls: list[MicrobatchCall],
        failure: Exception | None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_inside = True
        manual = self.step.manual
        if manual is not None:
            with self.step.context(), manual.measuring():
                manual.run(next(iter(calls), None), failure=failure)
        else:
            with self.step.context():
                self.model.executor.forward(calls, failure=failure)
            between()
            self.model.executor.backward()
        self._is_inside = False


class _PhaseClock(Observer):
    """Sums this rank's seconds of forwards, of backwards, and of both at the ends of the model."""

    def __init__(self, clock: Callable[[], float], model: ShardedModel) -> None:
        self._clock, self._began_s = clock, 0.0
        self._is_block = [unit.kind is UnitKind.BLOCK for unit in model.units]
        self.seconds = [0.0, 0.0, 0.0]

    def before(self, instruction: Instruction) -> None:
        if instruction.operation in _TIMED:
            self._began_s = self._clock()

    def before_wait(self, instruction: Instruction) -> None:
        if instruction.operation is Operation.MEET:
            self.after(instruction)

    def after_wait(self, instruction: Instruction) -> None:
        if instruction.operation is Operation.MEET:
            self.before(instruction)

    def after(self, instruction: Instruction) -> None:
        operation = instruction.operation
        if operation not in _TIMED:
            return
        # behind a wait of MEET the backward goes on, and the forward does little
        phase = int(operation in (Operation.BACKWARD, Operation.MEET))
        if operation is not Operation.MEET and not self._is_block[instruction.unit]:
            phase = 2
        self.seconds[phase] += self._clock() - self._began_s


def samples(size: int) -> str:
    return "1 sample" if size == 1 else f"{size} samples"
