"""How long a microbatch takes in the units and in the root, over growing sizes, on all ranks at once.

All ranks take part in every step, for the gathers; what a rank computes in it is its own affair. So
the fast ranks measure large microbatches in the time in which the slow ones measure small ones,
and a rank that is done goes on communicating with nothing to compute.
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lightning_cephalo.accumulation.agreement import RemoteRankError
from lightning_cephalo.accumulation.runner import MicrobatchCall
from lightning_cephalo.engine import Engine
from lightning_cephalo.profiling.errors import ProfilingError, is_out_of_memory
from lightning_cephalo.profiling.isolation import forget_gradients
from lightning_cephalo.profiling.memory import PeakMeter, batch_bytes
from lightning_cephalo.stepping import loss_and_weight

# Share of the time left that repeating one size may use.
_REPEATS, _REPEAT_SHARE = 3, 0.15
# A rank measures microbatches up to this multiple of its balanced share of the global batch.
_BEYOND_SHARE = 1.5
# From this size on a rank stops when larger microbatches gain less than this per sample.
_LARGE_SIZE, _WORTHWHILE_GAIN = 32, 0.02


@dataclass(frozen=True)
class Times:
    """Seconds of one microbatch on one rank, summed over its visits of units.

    Attributes:
        forward_s: All units' forward.
        backward_s: All units' backward.
        tail_s: Everything else: embedding, head, loss.
    """

    forward_s: float
    backward_s: float
    tail_s: float

    @property
    def total_s(self) -> float:
        """The three together."""
        return self.forward_s + self.backward_s + self.tail_s

    def least(self, other: Times | None) -> Times:
        """Part by part the shorter: whatever disturbs a measurement makes it longer."""
        if other is None:
            return self
        return Times(
            min(self.forward_s, other.forward_s),
            min(self.backward_s, other.backward_s),
            min(self.tail_s, other.tail_s),
        )


@dataclass
class Measured:
    """What one rank has measured.

    Attributes:
        times: Per microbatch size.
        peaks: Per microbatch size, peak bytes of a step with one such microbatch.
        smallest_too_large: Out of memory came at this size; None if it never did.
    """

    times: dict[int, Times] = field(default_factory=dict)
    peaks: dict[int, float] = field(default_factory=dict)
    smallest_too_large: int | None = None

    @property
    def largest(self) -> int:
        """The largest size that ran; 0 for none."""
        return max(self.times, default=0)


def ladder(smallest: int, limit: int) -> list[int]:
    """Sizes to measure: 1, 2, 3, 4, 6, 8, 12, 16, ... from ``smallest`` to ``limit``, both in."""
    sizes, power = {smallest, limit}, 1
    while power <= limit:
        sizes.update((power, power * 3 // 2))
        power *= 2
    return sorted(size for size in sizes if smallest <= size <= limit)


class Prober:
    """Runs profiling steps; collective.

    Args:
        engine: The sharded model.
        clock: Seconds, when all work issued to the device is done.
        batch_of: Gives a batch of so many samples on the device.
        step: The user's training step on one batch.
        context: The precision plugin's context of a training step.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        batch_of: Callable[[int], Any],
        step: Callable[[Any], Any],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.engine = engine
        self.agreement = engine.agreement
        self._clock = clock
        self._batch_of = batch_of
        self._step = step
        self._context = context
        self._times: Times | None = None
        self._peak: float = 0.0
        self.wall_s = 0.0

    def timed(self, size: int) -> tuple[Times | None, list[bool]]:
        """Time a step with one microbatch of ``size`` samples (0: take part without).

        Returns:
            This rank's times, None if it computed nothing; and per rank whether it ran out of
            memory, in which case nobody's times are good.

        Raises:
            ProfilingError: On every rank, if any fails otherwise.
        """
        self._times = None
        self.engine.runner.clock = self._clock
        start = time.perf_counter()
        try:
            refused = self._run(partial(self._step_of, size, 1), size)
        finally:
            self.engine.runner.clock = None
        self.wall_s = time.perf_counter() - start
        return self._times, refused

    def peak(self, size: int, count: int) -> tuple[float, list[bool]]:
        """Measure peak bytes of a step with ``count`` microbatches, as :meth:`timed` does times."""
        self._peak = 0.0
        refused = self._run(partial(self._watched_step_of, size, count), size)
        return self._peak, refused

    def _run(self, attempt: Callable[[], None], size: int) -> list[bool]:
        failure: BaseException | None = None
        try:
            attempt()
        except RemoteRankError:
            pass  # the failing rank tells what it was below
        except Exception as raised:
            failure = raised
        finally:
            forget_gradients(self.engine.module)
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        refused = failure is not None and is_out_of_memory(failure)
        try:
            said = self.agreement.exchange_objects((size, refused, message))
        except RuntimeError as lost:
            raise ProfilingError(
                f"Rank {self.agreement.rank} lost the connection to another rank while profiling"
                f" a microbatch of {_samples(size)}: that rank has died or was killed (by a lack of"
                f" host memory?). What its own output says comes first. Here: {failure or lost}"
            ) from (failure or lost)
        for rank, (at, out_of_memory, text) in enumerate(said):
            if text is not None and not out_of_memory:
                raise ProfilingError(
                    f"Rank {rank} failed while profiling a microbatch of {_samples(at)}: {text}\n"
                    "Profiling calls training_step after the setup() hook and before training"
                    " starts. CephaloStrategy(plan=...) trains without profiling."
                ) from failure
        if failure is not None:
            # its traceback holds the frames of the step, and these the activations
            traceback.clear_frames(failure.__traceback__)
            del failure
        if any(out_of_memory for _, out_of_memory, _ in said):
            gc.collect()
            if self.engine.device.type == "cuda":
                torch.cuda.empty_cache()
        return [out_of_memory for _, out_of_memory, _ in said]

    def _step_of(self, size: int, count: int) -> None:
        runner = self.engine.runner
        calls = self._calls(size, count)
        with self._context():
            runner.forward(calls)
        runner.backward()
        if calls and runner.times is not None:
            self._times = Times(
                runner.times.forward_s, runner.times.backward_s, runner.times.tail_s
            )

    def _watched_step_of(self, size: int, count: int) -> None:
        meter = PeakMeter(self.engine)
        with meter:
            self._step_of(size, count)
        if size:
            # every microbatch's batch is on the device during the step; here they are one
            held = batch_bytes(self._batch_of(size), self.engine.device)
            on_meter = held if self.engine.device.type == "cuda" else 0
            self._peak = float(meter.peak_bytes + count * held - min(on_meter, 0))

    def _calls(self, size: int, count: int) -> list[MicrobatchCall]:
        if not size:
            return []
        weight_of = partial(_finite_loss_and_weight, samples=size)
        try:
            batch = self._batch_of(size)
        except Exception as failure:
            # raised inside the runner, which tells the other ranks
            return [MicrobatchCall(partial(_raise, failure), weight_of)]
        return [MicrobatchCall(partial(self._step, batch), weight_of) for _ in range(count)]


def _raise(failure: BaseException) -> None:
    raise failure


def _finite_loss_and_weight(result: Any, samples: int) -> tuple[torch.Tensor, float]:
    loss, weight = loss_and_weight(result, samples)
    if not bool(torch.isfinite(loss)):
        raise FloatingPointError(
            f"the loss is {float(loss)} before a single step was made. Check the data, the"
            " initialisation, and the precision."
        )
    return loss, weight


def _samples(size: int) -> str:
    return "1 sample" if size == 1 else f"{size} samples"


@dataclass(frozen=True)
class Sweep:
    """How far to measure.

    Attributes:
        sizes: Microbatch sizes, rising.
        global_batch_size: Samples of a step over all ranks.
        budget_s: Wall seconds.
        everyone_runs: Ranks that are done run their smallest size again: the user's step may
            communicate.
        report: Told the size that comes next and who runs it, on every rank.
    """

    sizes: Sequence[int]
    global_batch_size: int
    budget_s: float
    everyone_runs: bool = False
    report: Callable[[int, Sequence[int]], None] = lambda size, ranks: None


def measure_times(prober: Prober, sweep: Sweep) -> Measured:
    """Time growing microbatches until the time, the memory or the use of it ends; collective.

    Raises:
        ProfilingError: On every rank, if any fails other than by memory, or if none can run even
            the smallest microbatch.
    """
    started_s = time.perf_counter()
    agreement, measured = prober.agreement, Measured()
    smallest = sweep.sizes[0]
    everyone = list(range(agreement.world_size))
    sweep.report(smallest, everyone)
    able = _warm_up(prober, measured, smallest)
    beside_s = prober.wall_s
    for size in sweep.sizes:
        remaining_s = sweep.budget_s - (time.perf_counter() - started_s)
        wants = _wants(measured, size) and able
        rows = agreement.exchange(
            [float(wants), _expected_s(measured, size), _rate(measured), remaining_s, beside_s]
        )
        remaining_s = min(row[3] for row in rows)
        beside_s = max(row[4] for row in rows) if size > smallest else 0.0
        rates = [row[2] for row in rows]
        runs = [
            bool(wanted)
            and (size == smallest or expected_s + beside_s <= remaining_s)
            and (size == smallest or size <= _useful(rate, rates, sweep.global_batch_size))
            for wanted, expected_s, rate, _, _ in rows
        ]
        if not any(runs):
            if size == smallest:
                raise ProfilingError(_nobody(prober, smallest))
            break
        sweep.report(size, [rank for rank, run in enumerate(runs) if run])
        step_s = max(row[1] for row, run in zip(rows, runs, strict=True) if run) + beside_s
        repeats = min(_REPEATS, max(1, int(remaining_s * _REPEAT_SHARE / max(step_s, 1e-9))))
        beside_s = _time_size(prober, measured, size, runs, repeats, sweep)
    return measured


def _warm_up(prober: Prober, measured: Measured, smallest: int) -> bool:
    """Run the first step, which finds the order of units, imports, fills caches; not counted.

    Returns whether this rank can run the smallest microbatch.
    """
    able = True
    for _ in range(prober.agreement.world_size + 1):
        _, refused = prober.timed(smallest if able else 0)
        if not any(refused):
            return able
        if refused[prober.agreement.rank]:
            able, measured.smallest_too_large = False, smallest
        if not any(row[0] for row in prober.agreement.exchange([float(able)])):
            raise ProfilingError(_nobody(prober, smallest))
    return able


def _time_size(
    prober: Prober, measured: Measured, size: int, runs: list[bool], repeats: int, sweep: Sweep
) -> float:
    """Time one size; return the seconds that a step took beside this rank's own work."""
    rank, beside_s = prober.agreement.rank, math.inf
    idle = sweep.sizes[0] if sweep.everyone_runs and measured.largest else 0
    for _ in range(repeats):
        while any(runs):
            times, refused = prober.timed(size if runs[rank] else idle)
            if not any(refused):
                break
            if refused[rank]:
                measured.times.pop(size, None)
                measured.smallest_too_large = size if runs[rank] else sweep.sizes[0]
                idle = 0
            runs = [run and not out for run, out in zip(runs, refused, strict=True)]
        else:
            break
        busy_s = 0.0 if times is None else times.total_s
        if runs[rank] and times is not None:
            measured.times[size] = times.least(measured.times.get(size))
        slowest_s = max(row[0] for row in prober.agreement.exchange([busy_s]))
        beside_s = min(beside_s, max(0.0, prober.wall_s - slowest_s))
    return 0.0 if math.isinf(beside_s) else beside_s


def _wants(measured: Measured, size: int) -> bool:
    """Whether this rank has memory for the size, as far as known, and may gain by it."""
    if measured.smallest_too_large is not None and size >= measured.smallest_too_large:
        return False
    if measured.times and measured.largest < size and measured.largest >= _LARGE_SIZE:
        largest = measured.largest
        before = max((known for known in measured.times if known <= largest // 2), default=largest)
        gain = 1.0 - (measured.times[largest].total_s / largest) / (
            measured.times[before].total_s / before
        )
        return before == largest or gain >= _WORTHWHILE_GAIN
    return True


def _expected_s(measured: Measured, size: int) -> float:
    """Seconds of this rank's own work at a size not measured yet, on from the last two."""
    if not measured.times:
        return 0.0
    last = measured.largest
    last_s = measured.times[last].total_s
    before = max((known for known in measured.times if known < last), default=0)
    before_s = measured.times[before].total_s if before else 0.0
    slope_s = (last_s - before_s) / (last - before)
    return last_s + max(slope_s, 0.0) * (size - last)


def _rate(measured: Measured) -> float:
    """Samples per second at the largest size measured."""
    if not measured.times:
        return 0.0
    return measured.largest / max(measured.times[measured.largest].total_s, 1e-9)


def _useful(rate: float, rates: Sequence[float], global_batch_size: int) -> float:
    """The largest microbatch worth measuring: somewhat more than a balanced share of the batch."""
    total = sum(rates)
    share = rate / total if total else 1.0
    return max(4.0, math.ceil(_BEYOND_SHARE * share * global_batch_size))


def _nobody(prober: Prober, smallest: int) -> str:
    return (
        f"No rank has memory for a microbatch of {_samples(smallest)} beside the model's"
        f" {prober.engine.gathered_bytes / 2**20:,.0f} MiB of gathered buffers. Use recompute=True,"
        " smaller units (unit_types=, unit_names=), a lower precision, or more or larger devices."
    )
