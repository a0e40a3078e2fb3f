"""Measures microbatches of growing sizes, on all ranks at the same time.

All ranks take part in every step because of the gathers. Those whose next sizes take about as long
run them together; the others run none, or the smallest one where steps need every rank. Sizes
double, up to somewhat more than a rank's balanced share. Each runs twice, the smallest four times,
and the shortest time counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_cephalo.common.errors import TooLittleMemoryError
from lightning_cephalo.common.quantities import format_bytes
from lightning_cephalo.profiling.memory_model import Held, RetainedBytes
from lightning_cephalo.profiling.probe import Prober, Times, samples

# Runs of a size, and of the smallest ones, in which what disturbs a host weighs most.
_TIMES, _TIMES_OF_SMALL, _SMALL = 2, 4, 2
# Part of the budget that timing may use; the rest is for memory and the network.
_TIMING_SHARE = 0.7
# A rank measures microbatches up to this multiple of its balanced share of the global batch. A
# size below this multiple of the largest measured one is not worth a step.
_BEYOND = 1.25
# Ranks run together if their steps are expected to take at most this multiple of the shortest.
_TOGETHER = 1.5


@dataclass
class Measured:
    """The measurements of one rank."""

    times: dict[int, Times] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    kept: RetainedBytes = field(default_factory=RetainedBytes)
    smallest_too_large: int | None = None

    @property
    def largest(self) -> int:
        """The largest size that ran, or 0."""
        return max(self.times, default=0)

    @property
    def samples_per_s(self) -> float:
        """The rate of the best size."""
        return max((size / max(sum(at), 1e-9) for size, at in self.times.items()), default=0.0)

    def expected_s(self, size: int) -> float:
        """Return the seconds of own work at a larger size."""
        return sum(self.times[self.largest]) * size / self.largest if self.times else 0.0

    def time(self, prober: Prober, size: int) -> None:
        """Time a step; of each part the shorter time of its size counts; collective."""
        times = prober.timed(size)
        if times is None:
            self.lacks(size)
        else:
            self.times[size] = Times(*map(min, times, self.times.get(size, times)))

    def lacks(self, size: int) -> None:
        """Note that the rank lacks the memory for a size, unless it is 0."""
        if size:
            self.smallest_too_large = size
            self.times = {at: times for at, times in self.times.items() if at < size}


@dataclass(frozen=True)
class ProfileOptions:
    """The settings of profiling, equal on every rank."""

    global_batch_size: int
    budget_s: float  # the smallest size runs whatever it takes
    minimum_microbatch_size: int = 1
    ready_samples: int | None = None  # of the first ready batch, which is cut into microbatches
    single_microbatch: bool = False
    choose_recompute: bool = False
    verbose: bool = True

    @property
    def largest(self) -> int:
        """The most samples of a microbatch."""
        return min(self.global_batch_size, self.ready_samples or self.global_batch_size)

    @property
    def smallest(self) -> int:
        """The fewest samples of a microbatch."""
        return min(self.minimum_microbatch_size, self.largest)

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


def measure_times(prober: Prober, options: ProfileOptions, device: str) -> Measured:
    """Time growing microbatches until time, memory or benefit runs out; collective."""
    control, now_s, smallest = prober.control, prober.model.accelerator.now_s, options.smallest
    # there is no plan without the sizes of a job that runs its share at once
    ends_s = math.inf if options.single_microbatch else now_s() + _TIMING_SHARE * options.budget_s
    measured = Measured()
    measured.time(prober, smallest)
    measured.times.clear()  # the first step of a process takes longer
    while True:
        found = control.gather((device, measured.samples_per_s))
        # of each rank's kind of device the best
        rates = [max(rate for kind, rate in found if kind == own) for own, _ in found]
        total = sum(rates)
        share = options.global_batch_size * rates[control.rank] / total if total else 0.0
        size = options.next_size(measured, share)
        rows = control.gather([float(size), measured.expected_s(size), ends_s - now_s()])
        left_s = min(row[2] for row in rows)
        sizes = _together([(int(row[0]), row[1]) for row in rows], smallest, left_s)
        if not any(sizes):
            if total:
                return measured
            gathered = format_bytes(prober.model.gathered_bytes)
            raise TooLittleMemoryError(
                f"No rank has memory for a microbatch of {samples(smallest)} beside {gathered} of"
                " gathered buffers. Use recompute=True, smaller units (units=), a lower precision,"
                " or more or larger devices."
            )
        for _ in range(_TIMES_OF_SMALL if max(sizes) <= _SMALL * smallest else _TIMES):
            measured.time(prober, sizes[control.rank] or prober.idle)


def _together(wanted: Sequence[tuple[int, float]], smallest: int, left_s: float) -> list[int]:
    """Return the size that each rank runs now; 0: it wants none, lacks the time, or waits."""
    fits = [bool(size) and (size == smallest or s <= left_s) for size, s in wanted]
    shortest_s = min((s for (_, s), fit in zip(wanted, fits, strict=True) if fit), default=0.0)
    return [
        size if fit and s <= _TOGETHER * shortest_s else 0
        for (size, s), fit in zip(wanted, fits, strict=True)
    ]


def measure_memory(prober: Prober, measured: Measured, options: ProfileOptions) -> None:
    """Measure the memory of the smallest and the largest sizes that ran; collective.

    A peak is the maximum over moments whose memory grows linearly, until chunks of logits are full:
    two sizes at each end tell where that is (``rank_curves.compute_curve``).
    """
    for size in _ends(prober, measured):
        held = prober.held(size if measured.times else 0)
        if held is None:  # it ran when it was timed, but only just: it may not run again
            measured.lacks(size)
        else:
            measured.held[size] = held
    if prober.step.manual is None:  # with one microbatch its peak holds all
        measured.kept = _measure_retained(prober, measured, options.smallest)


def measure_without_recompute(
    prober: Prober, recomputing: Measured, options: ProfileOptions
) -> Measured:
    """Measure a few microbatches that ran, with retained activations; collective."""
    model, measured = prober.model, Measured()
    model.release_buffers()  # retained graphs have memory of their own
    model.executor.recompute = False
    try:
        for size in _ends(prober, recomputing):
            for _ in range(_TIMES):
                lacks = measured.smallest_too_large is not None
                measured.time(prober, prober.idle if lacks else size)
        measure_memory(prober, measured, options)
    finally:
        model.executor.recompute = True
        model.release_buffers()
    return measured


def _ends(prober: Prober, measured: Measured) -> list[int]:
    """Return the two smallest and the two largest sizes, on all ranks equally many; collective."""
    ran = sorted(measured.times)
    own = sorted({*ran[:2], *ran[-2:]})
    return own + [prober.idle] * (int(prober.control.max(len(own))) - len(own))


def _measure_retained(prober: Prober, measured: Measured, smallest: int) -> RetainedBytes:
    """Measure what ranks retain per sample and microbatch until the backward; collective."""
    one, found = measured.held.get(smallest), RetainedBytes()
    two = prober.held(0 if one is None else smallest, 2)
    if one is not None and two is not None:
        largest = max(measured.held)
        last = measured.held[largest]
        each = max(0.0, two.kept_bytes - one.kept_bytes)
        sample = each / smallest
        reducing = max(0.0, two.reducing_kept_bytes - one.reducing_kept_bytes) / smallest
        if largest > smallest:
            more = largest - smallest
            sample = max(0.0, last.kept_bytes - one.kept_bytes) / more
            reducing = max(0.0, last.reducing_kept_bytes - one.reducing_kept_bytes) / more
        microbatch = max(0.0, each - sample * smallest)
        found = RetainedBytes(sample, microbatch, min(reducing, sample))
    return RetainedBytes(*map(max, zip(*prober.control.gather([*found]), strict=True)))
