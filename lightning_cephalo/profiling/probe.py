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
    """The user's step, as training runs it.

    Attributes:
        run: Computes the loss of a batch.
        context: Surrounds each step: autocast.
        manual: Runs steps that call their backwards themselves; None: the executor runs both.
    """

    run: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    manual: PhasedSteps | None = None


@dataclass
class Turn:
    """What this rank runs in a step: ``size`` samples; without any, ``idle`` ones."""

    size: int
    idle: int = 0

    @property
    def samples(self) -> int:
        """The samples of the microbatch; 0: there is none."""
        return self.size or self.idle

    def drop(self) -> None:
        """Run fewer samples, as the memory is lacking."""
        self.size, self.idle = 0, self.idle if self.size else 0


class Prober:
    """Runs profiling steps; collective.

    Where a rank lacks the memory for its turn, it drops it, and the others run again.
    """

    def __init__(
        self,
        model: ShardedModel,
        clock: Callable[[], float],
        batch_of: Callable[[int], Any],
        step: ProfiledStep,
    ) -> None:
        self.model, self.control, self.step = model, model.control, step
        self._clock, self._batch_of = clock, batch_of
        # of a device that runs behind its host, waits at each unit add up what a step hides
        self._is_launched = not model.accelerator.computes_on_host
        self._times_whole = self.control.any(self._is_launched)
        self._is_inside = False

    def timed(self, turn: Turn) -> Times | None:
        """Time a step with a microbatch; None: this rank ran none."""
        blocks = {n for n, unit in enumerate(self.model.units) if unit.kind is UnitKind.BLOCK}
        clock, whole_s = _PhaseClock(self._clock, blocks), math.inf

        def by_units() -> None:
            clock.times = Times(0.0, 0.0, 0.0)
            with self.model.executor.link.observed_by(clock):
                self._forward_backward(*self._calls(turn.samples, 1))

        def whole() -> None:
            nonlocal whole_s
            calls, started_s = self._calls(turn.samples, 1), self._clock()
            self._forward_backward(*calls)
            whole_s = self._clock() - started_s

        has_run = self._runs(by_units, turn)
        if self._times_whole:  # on all ranks
            has_run = self._runs(whole, turn)
        if not has_run:
            return None
        part = min(1.0, whole_s / max(sum(clock.times), 1e-12)) if self._is_launched else 1.0
        return Times(*(part * seconds for seconds in clock.times))

    def held(self, turn: Turn, count: int = 1) -> Held | None:
        """Measure the bytes of a step with ``count`` microbatches; None: it was not its turn."""
        found = Held()

        def step() -> None:
            nonlocal found
            own, meter = count if turn.size else 1, StepMeter(self.model)
            calls, failure = self._calls(turn.samples, own)
            with meter.measuring():
                self._forward_backward(calls, failure, meter.forward_done)
            if turn.size:
                # in a real step every microbatch has samples of its own on the device
                batch = self._batch_of(turn.size)
                found = meter.held(own * batch_bytes(batch, self.model.accelerator))

        return found if self._runs(step, turn) else None

    def _runs(self, attempt: Callable[[], None], turn: Turn) -> bool:
        """Run a step until all ranks have the memory; return whether this rank had a turn."""
        while self.control.any(bool(turn.size)):
            failure = self._failure_of(attempt)
            message = None if failure is None else printable(f"{type(failure).__name__}: {failure}")
            refused = failure is not None and is_out_of_memory(failure)
            rows = self.control.gather((turn.samples, refused, message))
            for rank, (size, out_of_memory, text) in enumerate(rows):
                if text is not None and not out_of_memory:
                    raise ProfilingError(
                        f"Rank {rank} failed while profiling a microbatch of {samples(size)}:"
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
                turn.drop()
            if not any(out_of_memory for _, out_of_memory, _ in rows):
                return bool(turn.size)
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

    def _calls(self, size: int, count: int) -> tuple[list[MicrobatchCall], BaseException | None]:
        """Return the microbatches to run, or why this rank cannot run them."""
        weight_of: Any = partial(_loss_and_weight, samples=size)
        try:
            batches = [self._batch_of(size) for _ in range(count if size else 0)]
        except Exception as failure:
            return [], failure
        return [
            MicrobatchCall(partial(self.step.run, batch), weight_of, samples=size)
            for batch in batches
        ], None


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
            self._add(instruction)

    def after_wait(self, instruction: Instruction) -> None:
        if instruction.operation is Operation.MEET:
            self._began_s = self._clock()

    def after(self, instruction: Instruction) -> None:
        if instruction.operation in _TIMED:
            self._add(instruction)

    def _add(self, instruction: Instruction) -> None:
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
