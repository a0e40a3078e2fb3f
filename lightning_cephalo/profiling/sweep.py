"""Times microbatches of growing sizes, on all ranks at the same time.

All ranks take part in every step because of the gathers, but each computes a size of its own. Those
whose next sizes take about as long run together; the others wait. Sizes double, up to somewhat more
than a rank's balanced share. Each runs two or three times, and the shortest time counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from lightning_cephalo.common.errors import TooLittleMemoryError
from lightning_cephalo.common.quantities import format_bytes
from lightning_cephalo.features.chunked_cross_entropy import largest_call
from lightning_cephalo.profiling.memory_model import Held, RetainedBytes
from lightning_cephalo.profiling.probe import Prober, Times, Turn, samples

# How often a size runs; the shortest time counts. Small ones, which take less than this part of a
# balanced step, run more often: they decide how far each rank measures.
_TIMES, _SMALL_TIMES, _SMALL = 2, 3, 0.25
# Share of the time left that repeating a size may use.
_REPEAT_SHARE = 0.3
# A rank measures microbatches up to the first multiple of its balanced share of the global batch.
# A size below the second multiple of the largest measured size is not worth a step.
_BEYOND_SHARE, _WORTHWHILE_GROWTH = 1.25, 1.3
# Skip a size if the largest useful one is less than this many times as large.
_SKIPPED = 1.5
# Ranks run together if their steps are expected to take at most this multiple of the shortest.
_TOGETHER = 1.5
# From this size on a rank stops when larger microbatches gain less than this per sample.
_LARGE_SIZE, _WORTHWHILE_GAIN = 32, 0.02
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

    def time(self, prober: Prober, turn: Turn) -> Times | None:
        """Time a step, and keep the shorter time of its size; collective."""
        size, times = turn.size, prober.timed(turn)
        if turn.size and times is not None:
            self.times[size] = times.least(self.times.get(size))
        elif size:
            self._lacked(size)
        return times

    def hold(self, prober: Prober, turn: Turn) -> None:
        """Measure the memory of a step; collective."""
        size, held = turn.size, prober.held(turn)
        if held is not None:
            self.held[size] = held
        elif size:  # it ran when it was timed, but only just: it may not run again
            self._lacked(size)

    def _lacked(self, size: int) -> None:
        self.smallest_too_large = size
        self.times = {at: times for at, times in self.times.items() if at < size}


def ladder(smallest: int, limit: int) -> list[int]:
    """Return the sizes to measure: 1, 2, 4, 8, ... from ``smallest`` to ``limit``, inclusive."""
    sizes, power = {smallest, limit}, 1
    while power <= limit:
        sizes.add(power)
        power *= 2
    return sorted(size for size in sizes if smallest <= size <= limit)


@dataclass(frozen=True)
class Sweep:
    """How far to measure."""

    sizes: Sequence[int]
    global_batch_size: int
    budget_s: float
    devices: Sequence[str]
    has_one_microbatch: bool = False
    report: Callable[[Sequence[int]], None] = lambda sizes: None

    def turn(self, measured: Measured, size: int) -> Turn:
        """Return what a rank runs that measures a size (0: none)."""
        idles = self.has_one_microbatch and measured.times
        return Turn(size, self.sizes[0] if idles else 0)


@dataclass
class _Pace:
    """The state of the sweep that all ranks know."""

    rates: list[float]
    beside_s: float

    def step_s(self, global_batch_size: int) -> float:
        """Return the seconds of a balanced step."""
        return global_batch_size / max(sum(self.rates), 1e-9) + self.beside_s


def measure_times(prober: Prober, sweep: Sweep) -> Measured:
    """Time growing microbatches until time, memory or benefit runs out; collective."""
    control, warm = prober.control, Measured()
    started_s = prober.now_s()
    smallest, whole = sweep.sizes[0], sweep.global_batch_size
    sweep.report([smallest] * control.world_size)
    warm.time(prober, Turn(smallest))  # the first, uncounted step
    measured = Measured(smallest_too_large=warm.smallest_too_large)
    pace = _Pace([0.0] * control.world_size, prober.wall_s)
    while True:
        size = _next_size(
            measured,
            sweep.sizes,
            _useful(pace.rates[control.rank], pace.rates, whole),
            sweep.has_one_microbatch,
        )
        remaining_s = sweep.budget_s - (prober.now_s() - started_s)
        own = [float(size), _expected_s(measured, size), remaining_s, pace.beside_s]
        rows = control.gather([*own, measured.largest])
        remaining_s = min(row[2] for row in rows)
        largest = [int(row[4]) for row in rows]
        if sweep.has_one_microbatch and _in_one_microbatch(largest, sweep.devices) < whole:
            remaining_s = math.inf  # there is no plan without these sizes
        pace.beside_s = max(row[3] for row in rows)
        sizes = _together([(int(row[0]), row[1]) for row in rows], smallest,
                          remaining_s - pace.beside_s)  # fmt: skip
        if not any(sizes):
            if not control.any(bool(measured.times)):
                raise TooLittleMemoryError(_nobody(prober, smallest))
            return measured
        sweep.report(sizes)
        _time_round(prober, measured, sizes, remaining_s, pace, sweep)


def _next_size(
    measured: Measured, sizes: Sequence[int], useful: float, has_one_microbatch: bool = False
) -> int:
    """Return the size to measure next; 0 for none."""
    largest, too_large = measured.largest, measured.smallest_too_large
    if not largest:
        return 0 if too_large is not None else sizes[0]
    most = min(int(useful), sizes[-1])
    size = next((size for size in sizes if size > largest), 0)
    if largest >= 4 and most < _SKIPPED * size:
        size = most
    if too_large is not None and size >= too_large:
        size = (largest + too_large) // 2
    worthwhile = size >= _WORTHWHILE_GROWTH * largest and _gains(measured)
    if has_one_microbatch:  # a rank's whole share is needed, whatever it gains
        worthwhile = size > largest
    return size if size <= most and worthwhile else 0


def _together(wanted: Sequence[tuple[int, float]], smallest: int, remaining_s: float) -> list[int]:
    """Return the size that each rank runs now; 0: it wants none, lacks the time, or waits."""
    affordable = [
        size if size == smallest or expected_s <= remaining_s else 0 for size, expected_s in wanted
    ]
    shortest_s = min(
        (expected_s for (_, expected_s), size in zip(wanted, affordable, strict=True) if size),
        default=0.0,
    )
    return [
        size if expected_s <= _TOGETHER * shortest_s else 0
        for (_, expected_s), size in zip(wanted, affordable, strict=True)
    ]


def _time_round(
    prober: Prober,
    measured: Measured,
    sizes: Sequence[int],
    remaining_s: float,
    pace: _Pace,
    sweep: Sweep,
) -> None:
    """Time one size on every rank that has one (0: none), two or three times if time allows."""
    beside_s = math.inf
    turn = sweep.turn(measured, sizes[prober.control.rank])
    for count in range(1, _SMALL_TIMES + 1):
        times = measured.time(prober, turn)
        busy_s = 0.0 if times is None else times.total_s
        rows = prober.control.gather([busy_s, prober.wall_s, _rate(measured), float(turn.size)])
        if not any(row[3] for row in rows):
            break
        beside_s = min(beside_s, max(0.0, prober.wall_s - max(row[0] for row in rows)))
        pace.rates = _by_device([row[2] for row in rows], sweep.devices)
        wall_s = max(row[1] for row in rows)
        is_small = wall_s <= _SMALL * pace.step_s(sweep.global_batch_size)
        if (count >= _TIMES and not is_small) or wall_s > _REPEAT_SHARE * remaining_s:
            break
    pace.beside_s = 0.0 if math.isinf(beside_s) else beside_s


def _gains(measured: Measured) -> bool:
    """Return whether larger microbatches than those measured may still gain time per sample."""
    largest = measured.largest
    if largest < _LARGE_SIZE:
        return True
    before = max((known for known in measured.times if known <= largest // 2), default=largest)
    gain = 1.0 - (measured.times[largest].total_s / largest) / (
        measured.times[before].total_s / before
    )
    return before == largest or gain >= _WORTHWHILE_GAIN


def _expected_s(measured: Measured, size: int) -> float:
    """Return the seconds of own work at an unmeasured size, extrapolated from the last two."""
    if not measured.times:
        return 0.0
    last = measured.largest
    last_s = measured.times[last].total_s
    before = max((known for known in measured.times if known < last), default=0)
    before_s = measured.times[before].total_s if before else 0.0
    slope_s = (last_s - before_s) / (last - before)
    return last_s + max(slope_s, 0.0) * (size - last)


def _rate(measured: Measured) -> float:
    """Return the samples per second at the best size."""
    return max((size / max(at.total_s, 1e-9) for size, at in measured.times.items()), default=0.0)


def _by_device(rates: Sequence[float], devices: Sequence[str]) -> list[float]:
    """Return the best rate of each rank's kind of device."""
    best: dict[str, float] = {}
    for rate, device in zip(rates, devices, strict=True):
        best[device] = max(rate, best.get(device, 0.0))
    return [best[device] for device in devices]


def _in_one_microbatch(largest: Sequence[int], devices: Sequence[str]) -> int:
    """Return the samples of a step in which every rank runs its largest measured size."""
    least: dict[str, int] = {}
    for size, device in zip(largest, devices, strict=True):
        least[device] = min(size, least.get(device, size))
    return sum(least[device] for device in devices)


def _useful(rate: float, rates: Sequence[float], global_batch_size: int) -> float:
    """Return the largest useful microbatch: somewhat more than a balanced share of the batch."""
    total = sum(rates)
    share = rate / total if total else 1.0
    return max(4.0, math.ceil(_BEYOND_SHARE * share * global_batch_size))


def _nobody(prober: Prober, smallest: int) -> str:
    return (
        f"No rank has memory for a microbatch of {samples(smallest)} in addition to the model's"
        f" {format_bytes(prober.model.gathered_bytes)} of gathered buffers. Use recompute=True,"
        " smaller units (units=), a lower precision, or more or larger devices."
    )


def measure_memory(prober: Prober, measured: Measured, sweep: Sweep) -> None:
    """Measure the memory of the smallest and the largest size that ran; collective.

    A peak is the maximum over moments whose memory grows linearly, so a line between sizes is never
    below it. Chunks of logits stop growing when full: sizes around that are measured, too.
    """
    smallest = sweep.sizes[0]
    bends: list[int] = []

    def measure(size: int) -> None:
        size = 0 if size in measured.held else size
        measured.hold(prober, sweep.turn(measured, size))

    for position in (0, -1):
        largest_call.tokens = 0
        ran = sorted(measured.times)
        measure(ran[position] if ran else 0)
        if not position and smallest in measured.held:
            bends = _bends(smallest)
    while prober.control.any(bool(bends)):
        size = bends.pop() if bends else 0
        measure(size if size <= measured.largest else 0)
    if prober.step.manual is None:  # with one microbatch its peak holds all
        measured.kept = _measure_retained(prober, measured, sweep)


def measure_without_recompute(prober: Prober, recomputing: Measured, sweep: Sweep) -> Measured:
    """Measure steps that retain the activations inside units; collective.

    Only the smallest and the largest microbatch that ran with recomputation run. Forward and root
    are assumed to be unchanged.
    """
    model, measured = prober.model, Measured()
    model.release_buffers()  # retained graphs have memory of their own
    model.executor.recompute = False
    try:
        for size in (min(recomputing.times, default=0), recomputing.largest):
            is_done = size in measured.times or measured.smallest_too_large is not None
            turn = sweep.turn(recomputing, 0 if is_done else size)
            for _ in range(_TIMES):
                measured.time(prober, turn)
        measure_memory(prober, measured, sweep)
    finally:
        model.executor.recompute = True
        model.release_buffers()
    return measured


def _bends(smallest: int) -> list[int]:
    """Return the sizes around which a chunk of logits is full; the smallest one has just run."""
    if not largest_call.tokens:
        return []
    below = largest_call.chunk_tokens * smallest // largest_call.tokens
    return [size for size in (below, below + 1) if size > smallest]


def _measure_retained(prober: Prober, measured: Measured, sweep: Sweep) -> RetainedBytes:
    """Measure what this rank retains per sample and microbatch until its backward; collective."""
    smallest = sweep.sizes[0]
    single, several = measured.held.get(smallest), None
    for count in _COUNTS:
        several = prober.held(sweep.turn(measured, smallest if single is not None else 0), count)
        known = single is None or several is not None
        if prober.control.all(known):
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
