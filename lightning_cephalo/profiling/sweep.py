"""Measures microbatches of growing sizes, on all ranks at the same time.

All ranks take part in every step because of the gathers, but each computes a size of its own. Those
whose next sizes take about as long run together; the others wait. Sizes double, up to somewhat more
than a rank's balanced share. Each runs twice, and the shorter time counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from lightning_cephalo.common.errors import TooLittleMemoryError
from lightning_cephalo.common.quantities import format_bytes
from lightning_cephalo.profiling.memory_model import Held, RetainedBytes
from lightning_cephalo.profiling.probe import Prober, Times, Turn, samples

_TIMES = 2
# A rank measures microbatches up to this multiple of its balanced share of the global batch. A
# size below this multiple of the largest measured one is not worth a step.
_BEYOND = 1.25
# Ranks run together if their steps are expected to take at most this multiple of the shortest.
_TOGETHER = 1.5
# Numbers of microbatches whose memory is compared with that of one; the second if the first one
# does not fit.
_COUNTS = (3, 2)


@dataclass
class Measured:
    """The measurements of one rank."""

    times: dict[int, Times] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    kept: RetainedBytes = field(default_factory=RetainedBytes)
    smallest_too_large: int | None = None

    @property
    def largest(self) -> int:
        """The largest size that ran; 0 for none."""
        return max(self.times, default=0)

    @property
    def samples_per_s(self) -> float:
        """The rate of the best size."""
        return max((size / max(sum(at), 1e-9) for size, at in self.times.items()), default=0.0)

    def expected_s(self, size: int) -> float:
        """Return the seconds of own work at a larger size."""
        return sum(self.times[self.largest]) * size / self.largest if self.times else 0.0

    def time(self, prober: Prober, turn: Turn) -> None:
        """Time a step; of each part the shorter time of its size counts; collective."""
        size, times = turn.size, prober.timed(turn)
        if times is not None:
            self.times[size] = Times(*map(min, times, self.times.get(size, times)))
        elif size:
            self._lacked(size)

    def hold(self, prober: Prober, turn: Turn) -> None:
        """Measure the memory of a step; collective."""
        size, held = turn.size, prober.held(turn)
        if held is not None:
            self.held[size] = held
        elif size:  # it ran when it was timed, but only just: it may not run again
            self._lacked(size)

    def ends(self) -> list[int]:
        """Return the two smallest and the two largest sizes that ran; 0 for those that lack."""
        ran = sorted(self.times)
        found = sorted({*ran[:2], *ran[-2:]})
        return found + [0] * (4 - len(found))

    def _lacked(self, size: int) -> None:
        self.smallest_too_large = size
        self.times = {at: times for at, times in self.times.items() if at < size}


@dataclass(frozen=True)
class Sweep:
    """How far to measure: equal on every rank but for ``report``."""

    smallest: int
    largest: int
    global_batch_size: int
    budget_s: float
    devices: Sequence[str]
    has_one_microbatch: bool = False
    report: Callable[[Sequence[int]], None] = lambda sizes: None

    def turn(self, measured: Measured, size: int) -> Turn:
        """Return what a rank runs that measures a size (0: none)."""
        idles = self.has_one_microbatch and measured.times
        return Turn(size, self.smallest if idles else 0)

    def next_size(self, measured: Measured, share: float) -> int:
        """Return the size to measure next on a rank with a balanced share; 0 for none."""
        largest, too_large = measured.largest, measured.smallest_too_large
        if not largest:
            return 0 if too_large is not None else self.smallest
        most = min(max(4, math.ceil(_BEYOND * share)), self.largest)
        if too_large is not None:
            most = min(most, (largest + too_large) // 2)
        # the last size takes the place of one that is little smaller
        size = 2 * largest if 3 * largest <= most else most
        return size if size >= _BEYOND * largest or largest < size == self.largest else 0


def measure_times(prober: Prober, sweep: Sweep) -> Measured:
    """Time growing microbatches until time, memory or benefit runs out; collective."""
    control, now_s = prober.control, prober.model.accelerator.now_s
    # there is no plan without the sizes of a job that runs its share at once
    ends_s = math.inf if sweep.has_one_microbatch else now_s() + sweep.budget_s
    sweep.report([sweep.smallest] * control.world_size)
    measured = Measured()
    measured.time(prober, Turn(sweep.smallest))
    measured.times.clear()  # the first step of a process takes longer
    while True:
        rates = _by_device(control.gather(measured.samples_per_s), sweep.devices)
        total = sum(rates)
        share = sweep.global_batch_size * rates[control.rank] / total if total else 0.0
        size = sweep.next_size(measured, share)
        rows = control.gather([float(size), measured.expected_s(size), ends_s - now_s()])
        left_s = min(row[2] for row in rows)
        sizes = _together([(int(row[0]), row[1]) for row in rows], sweep.smallest, left_s)
        if not any(sizes):
            if total:
                return measured
            raise TooLittleMemoryError(
                f"No rank has memory for a microbatch of {samples(sweep.smallest)} in addition to"
                f" the model's {format_bytes(prober.model.gathered_bytes)} of gathered buffers. Use"
                " recompute=True, smaller units (units=), a lower precision, or more or larger"
                " devices."
            )
        sweep.report(sizes)
        turn = sweep.turn(measured, sizes[control.rank])
        for _ in range(_TIMES):
            measured.time(prober, turn)


def _together(wanted: Sequence[tuple[int, float]], smallest: int, left_s: float) -> list[int]:
    """Return the size that each rank runs now; 0: it wants none, lacks the time, or waits."""
    fits = [bool(size) and (size == smallest or s <= left_s) for size, s in wanted]
    shortest_s = min((s for (_, s), fit in zip(wanted, fits, strict=True) if fit), default=0.0)
    return [
        size if fit and s <= _TOGETHER * shortest_s else 0
        for (size, s), fit in zip(wanted, fits, strict=True)
    ]


def _by_device(rates: Sequence[float], devices: Sequence[str]) -> list[float]:
    """Return the best rate of each rank's kind of device."""
    best: dict[str, float] = {}
    for rate, device in zip(rates, devices, strict=True):
        best[device] = max(rate, best.get(device, 0.0))
    return [best[device] for device in devices]


def measure_memory(prober: Prober, measured: Measured, sweep: Sweep) -> None:
    """Measure the memory of the smallest and the largest sizes that ran; collective.

    A peak is the maximum over moments whose memory grows linearly, until chunks of logits are full:
    two sizes at each end tell where that is (``rank_curves.compute_curve``).
    """
    for size in measured.ends():
        measured.hold(prober, sweep.turn(measured, size))
    if prober.step.manual is None:  # with one microbatch its peak holds all
        measured.kept = _measure_retained(prober, measured, sweep)


def measure_without_recompute(prober: Prober, recomputing: Measured, sweep: Sweep) -> Measured:
    """Measure steps that retain the activations inside units; collective.

    Only a few microbatches that ran with recomputation run. Forward and root are assumed to be
    unchanged.
    """
    model, measured = prober.model, Measured()
    model.release_buffers()  # retained graphs have memory of their own
    model.executor.recompute = False
    try:
        for size in recomputing.ends():
            turn = sweep.turn(recomputing, 0 if measured.smallest_too_large else size)
            for _ in range(_TIMES):
                measured.time(prober, turn)
        measure_memory(prober, measured, sweep)
    finally:
        model.executor.recompute = True
        model.release_buffers()
    return measured


def _measure_retained(prober: Prober, measured: Measured, sweep: Sweep) -> RetainedBytes:
    """Measure what this rank retains per sample and microbatch until its backward; collective."""
    smallest = sweep.smallest
    single, several = measured.held.get(smallest), None
    for count in _COUNTS:
        several = prober.held(sweep.turn(measured, smallest if single is not None else 0), count)
        if prober.control.all(single is None or several is not None):
            break
    if single is None or several is None:
        return RetainedBytes()
    largest = max(measured.held)

    def between(kept: Callable[[Held], float]) -> RetainedBytes:
        larger = None if largest == smallest else (largest, kept(measured.held[largest]))
        return RetainedBytes.between(kept(single), kept(several), count, smallest, larger)

    found = between(attrgetter("kept_bytes"))
    reducing = between(attrgetter("reducing_kept_bytes"))
    return replace(found, reducing_sample_bytes=min(reducing.sample_bytes, found.sample_bytes))
