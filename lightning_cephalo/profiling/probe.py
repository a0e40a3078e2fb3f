"""Runs profiling steps with the real executor and shards, and measures their time and memory."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_cephalo.common.errors import (
    ProfilingError,
    RemoteRankError,
)
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
from lightning_cephalo.profiling.lost_rank import lost_rank_explained
from lightning_cephalo.profiling.memory_model import Held, StepMeter, batch_bytes
from lightning_cephalo.sharding.discovery import UnitKind


@dataclass(frozen=True)
class Times:
    """Seconds of one microbatch on one rank, summed over its visits of units."""

    forward_s: float
    backward_s: float
    tail_s: float

    @property
    def total_s(self) -> float:
        """The sum of the three."""
        return self.forward_s + self.backward_s + self.tail_s

    def least(self, other: Times | None) -> Times:
        """Return the shorter time of each part: what disturbs a measurement makes it longer."""
        if other is None:
            return self
        return Times(
            min(self.forward_s, other.forward_s),
            min(self.backward_s, other.backward_s),
            min(self.tail_s, other.tail_s),
        )


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
        self.model = model
        self.control = model.control
        self._clock = clock
        self._batch_of = batch_of
        self.step = step
        self._times: Times | None = None
        self._held = Held()
        self._is_inside = False
        self.wall_s = 0.0

    def now_s(self) -> float:
        """Return the seconds of the host's clock."""
        return self.model.accelerator.now_s()

    def timed(self, turn: Turn) -> Times | None:
        """Time a step with a microbatch; None: this rank ran none."""
        while self.control.any(bool(turn.size)):
            self._times = None
            start_s = self.now_s()
            is_run = self._run(partial(self._timed_step_of, turn.samples), turn)
            self.wall_s = self.now_s() - start_s
            if is_run:
                return self._times
        return None

    def held(self, turn: Turn, count: int = 1) -> Held | None:
        """Measure the bytes of a step with ``count`` microbatches; None: it was not its turn."""
        while self.control.any(bool(turn.size)):
            own = count if turn.size else 1
            if self._run(partial(self._watched_step_of, turn.samples, own), turn):
                return self._held if turn.size else None
        return None

    def _failure_of(self, attempt: Callable[[], None], doing: str) -> BaseException | None:
        """Run a step, and return the error of this rank; those of others are told afterwards."""
        try:
            with lost_rank_explained(self.control.rank, doing):
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

    def _run(self, attempt: Callable[[], None], turn: Turn) -> bool:
        """Run a step; return whether all ranks had the memory."""
        doing = f"profiling a microbatch of {samples(turn.samples)}"
        failure = self._failure_of(attempt, doing)
        message = None if failure is None else printable(f"{type(failure).__name__}: {failure}")
        refused = failure is not None and is_out_of_memory(failure)
        with lost_rank_explained(self.control.rank, doing):
            said = self.control.gather((turn.samples, refused, message))
        for rank, (at, out_of_memory, text) in enumerate(said):
            if text is not None and not out_of_memory:
                raise ProfilingError(
                    f"Rank {rank} failed while profiling a microbatch of {samples(at)}: {text}\n"
                    "Profiling calls training_step after the setup() hook and before training"
                    " starts. CephaloStrategy(plan=...) trains without profiling."
                ) from failure
        if failure is not None:
            # its traceback holds the frames of the step, and the frames hold the activations
            traceback.clear_frames(failure.__traceback__)
            del failure
        if refused:
            turn.drop()
        if not any(out_of_memory for _, out_of_memory, _ in said):
            return True
        gc.collect()
        self.model.accelerator.empty_cache()
        return False

    def _timed_step_of(self, size: int) -> None:
        blocks = {n for n, unit in enumerate(self.model.units) if unit.kind is UnitKind.BLOCK}
        clock = _PhaseClock(self._clock, blocks)
        with self.model.executor.link.observed_by(clock):
            self._forward_backward(*self._calls(size, 1))
        if size:
            self._times = Times(clock.forward_s, clock.backward_s, clock.tail_s)

    def _watched_step_of(self, size: int, count: int) -> None:
        calls, failure = self._calls(size, count)
        meter = StepMeter(self.model)
        with meter.measuring():
            self._forward_backward(calls, failure, meter.forward_done)
        if size:
            # in a real step every microbatch has samples of its own on the device
            samples_bytes = count * batch_bytes(self._batch_of(size), self.model.accelerator)
            self._held = meter.held(samples_bytes)

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
        if not size:
            return [], None
        weight_of: Any = partial(_finite_loss_and_weight, samples=size)
        try:
            batches = [self._batch_of(size) for _ in range(count)]
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
        self._began_s = self._met_s = 0.0
        self.forward_s = self.backward_s = self.tail_s = 0.0

    def before(self, instruction: Instruction) -> None:
        if instruction.operation in COMPUTE or instruction.operation is Operation.MEET:
            self._met_s = 0.0
            self._began_s = self._clock()

    def before_wait(self, instruction: Instruction) -> None:
        if instruction.operation is Operation.MEET:
            self._met_s += self._clock() - self._began_s

    def after_wait(self, instruction: Instruction) -> None:
        if instruction.operation is Operation.MEET:
            self._began_s = self._clock()

    def after(self, instruction: Instruction) -> None:
        if instruction.operation is Operation.MEET:
            # behind the wait the backward goes on to the meeting before; the forward does little
            self.backward_s += self._met_s + self._clock() - self._began_s
        if instruction.operation not in COMPUTE:
            return
        took_s = self._clock() - self._began_s
        if instruction.unit not in self._blocks:
            self.tail_s += took_s
        elif instruction.operation is Operation.BACKWARD:
            self.backward_s += took_s
        else:
            self.forward_s += took_s


def _finite_loss_and_weight(result: Any, samples: int) -> tuple[torch.Tensor, float]:
    found = loss_and_weight(result, samples)
    if found is None:
        raise TypeError(
            "training_step returned None for a batch that is profiled, so that its backward cannot"
            " be timed; expected a loss."
        )
    loss, weight = found
    weight = checked_weight(float(weight))
    if weight and not bool(torch.isfinite(loss)):  # the mean over no tokens may be 0/0
        raise FloatingPointError(
            f"the loss is {loss.item()} before a single step was made. Check the data, the"
            " initialisation, and the precision."
        )
    # a sample without weight takes as long as others; its gradients may be NaN, and are dropped
    return loss, weight or float(samples)


def samples(size: int) -> str:
    return "1 sample" if size == 1 else f"{size} samples"
