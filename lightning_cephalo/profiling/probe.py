"""Runs profiling steps with the real executor and shards, and measures their time and memory."""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

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
from lightning_cephalo.profiling.memory_model import Held, StepMeter, batch_bytes
from lightning_cephalo.sharding.discovery import UnitKind

_TIMED = frozenset({*COMPUTE, Operation.MEET})


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
    samples there, then with none.
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
        self._clock, self._batch_of, self._idle = clock, batch_of, idle
        # of a device that runs behind its host, waits at each unit add up what a step hides
        self._is_launched = not model.accelerator.computes_on_host
        self._times_whole = self.control.any(self._is_launched)
        self._is_inside = False

    def timed(self, size: int) -> Times | None:
        """Time a step with a microbatch of so many samples; None: it did not run."""
        blocks = {n for n, unit in enumerate(self.model.units) if unit.kind is UnitKind.BLOCK}
        times, whole_s = Times(0.0, 0.0, 0.0), math.inf

        def by_units(size: int) -> None:
            nonlocal times
            clock = _PhaseClock(self._clock, blocks)
            with self.model.executor.link.observed_by(clock):
                self._forward_backward(*self._calls(size, 1))
            times = clock.times

        def whole(size: int) -> None:
            nonlocal whole_s
            calls, started_s = self._calls(size, 1), self._clock()
            self._forward_backward(*calls)
            whole_s = self._clock() - started_s

        has_run = self._runs(by_units, size)
        if self._times_whole:  # on all ranks
            has_run = self._runs(whole, size) and has_run
        part = min(1.0, whole_s / max(sum(times), 1e-12)) if self._is_launched else 1.0
        return Times(*(part * seconds for seconds in times)) if has_run else None

    def held(self, size: int, count: int = 1) -> Held | None:
        """Measure the bytes of a step with ``count`` microbatches; None: it did not run."""
        found = Held()

        def step(size: int) -> None:
            nonlocal found
            meter = StepMeter(self.model)
            calls, failure = self._calls(size, count)
            with meter.measuring():
                self._forward_backward(calls, failure, meter.forward_done)
            if size:
                # in a real step every microbatch has samples of its own on the device
                batch = self._batch_of(size)
                found = meter.held(count * batch_bytes(batch, self.model.accelerator))

        return found if self._runs(step, size) else None

    def _runs(self, attempt: Callable[[int], None], wanted: int) -> bool:
        """Run a step until all ranks have the memory; return whether this rank ran its size."""
        size = wanted
        while self.control.any(size > 0):
            failure = self._failure_of(partial(attempt, size))
            message = None if failure is None else printable(f"{type(failure).__name__}: {failure}")
            refused = failure is not None and is_out_of_memory(failure)
            rows = self.control.gather((size, refused, message))
            for rank, (samples_of, out_of_memory, text) in enumerate(rows):
                if text is not None and not out_of_memory:
                    raise ProfilingError(
                        f"Rank {rank} failed while profiling a microbatch of {samples(samples_of)}:"
                        f" {text}\nProfiling calls training_step after the setup() hook and before"
                        " training starts. CephaloStrategy(plan=...) trains without profiling. If a"
                        " tensor without a row per sample was cut, such as class weights of as many"
                        " rows, give CephaloStrategy(split_batch=function)."
                    ) from failure
            if failure is not None:
                # its traceback holds the frames of the step, and the frames hold the activations
                traceback.clear_frames(failure.__traceback__)
                del failure
            if refused:
                size = self._idle if size > self._idle else 0
            if not any(out_of_memory for _, out_of_memory, _ in rows):
                return 0 < size == wanted
            gc.collect()
            self.model.accelerator.empty_cache()
        return False

    def _failure_of(self, attempt: Callable[[], None]) -> Exception | None:
        """Run a step, and return the error of this rank; those of others come afterwards."""
        try:
            attempt()
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
        failure: BaseException | None,
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

    def _calls(self, size: int, count: int) -> tuple[list[MicrobatchCall], Exception | None]:
        """Return the microbatches to run, or why this rank cannot run them."""
        weight_of = partial(_loss_and_weight, samples=size)
        try:
            batches = [self._batch_of(size) for _ in range(count if size else 0)]
        except Exception as failure:
            return [], failure
        steps = [partial(self.step.run, batch) for batch in batches]
        return [MicrobatchCall(step, weight_of, samples=size) for step in steps], None


class _PhaseClock(Observer):
    """Sums this rank's compute time by phase."""

    def __init__(self, clock: Callable[[], float], blocks: Container[int]) -> None:
        self._clock, self._blocks = clock, blocks
        self._began_s = 0.0
        self.times = Times(0.0, 0.0, 0.0)

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
        if instruction.operation not in _TIMED:
            return
        took_s, (forward_s, backward_s, tail_s) = self._clock() - self._began_s, self.times
        if instruction.operation is Operation.MEET:
            # without the wait; behind it the backward goes on, and the forward does little
            backward_s += took_s
        elif instruction.unit not in self._blocks:
            tail_s += took_s
        elif instruction.operation is Operation.BACKWARD:
            backward_s += took_s
        else:
            forward_s += took_s
        self.times = Times(forward_s, backward_s, tail_s)


def _loss_and_weight(result: Any, samples: int) -> tuple[torch.Tensor, float]:
    found = loss_and_weight(result, samples)
    if found is None:
        raise TypeError(
            "training_step returned None for a batch that is profiled, so that its backward cannot"
            " be timed; expected a loss."
        )
    # a sample without weight takes as long as others
    return found[0], checked_weight(float(found[1])) or float(samples)


def samples(size: int) -> str:
    return "1 sample" if size == 1 else f"{size} samples"
