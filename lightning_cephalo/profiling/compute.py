"""How long a microbatch takes, over growing sizes, on all ranks at once.

All ranks take part in every step, for the gathers; what each computes in it is its own affair. So
the fast ranks measure large microbatches in the time in which the slow ones measure small ones,
and a rank that is done goes on communicating with nothing to compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_cephalo.profiling.errors import TooLittleMemoryError
from lightning_cephalo.profiling.memory import Held, Kept
from lightning_cephalo.profiling.probe import Prober, Times, samples

# Short steps are repeated: so many seconds for a size, so often at most.
_REPEATED_S, _REPEATS = 0.5, 3
# Share of the time left that repeating a size may use.
_REPEAT_SHARE = 0.3
# A size that takes more per sample than a smaller one by this much was disturbed: once more.
_SUSPICIOUS = 0.03
# A rank measures microbatches up to this multiple of its balanced share of the global batch.
_BEYOND_SHARE = 1.25
# From this size on a rank stops when larger microbatches gain less than this per sample.
_LARGE_SIZE, _WORTHWHILE_GAIN = 32, 0.02
# Numbers of microbatches whose memory is compared with that of one.
_COUNTS = (3, 2)


@dataclass
class Measured:
    """What one rank has measured.

    Attributes:
        times: Per microbatch size.
        held: Per microbatch size, bytes of a step with one such microbatch.
        smallest_too_large: Out of memory came at this size; None if it never did.
    """

    times: dict[int, Times] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
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
        beside_s = max(row[4] for row in rows)
        rates = [row[2] for row in rows]
        runs = [
            bool(wanted)
            and (size == smallest or expected_s + beside_s <= remaining_s)
            and (size == smallest or size <= _useful(rate, rates, sweep.global_batch_size))
            for wanted, expected_s, rate, _, _ in rows
        ]
        if not any(runs):
            if size == smallest:
                raise TooLittleMemoryError(_nobody(prober, smallest))
            break
        sweep.report(size, [rank for rank, run in enumerate(runs) if run])
        beside_s = _time_size(prober, measured, size, runs, remaining_s, sweep)
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
            raise TooLittleMemoryError(_nobody(prober, smallest))
    return able


def _time_size(
    prober: Prober,
    measured: Measured,
    size: int,
    runs: list[bool],
    remaining_s: float,
    sweep: Sweep,
) -> float:
    """Time one size; return the seconds that a step took beside this rank's own work.

    Once, twice or three times: again while it is quick, and on ranks that seem to have been
    disturbed.
    """
    rank, beside_s, spent_s = prober.agreement.rank, math.inf, 0.0
    idle = sweep.sizes[0] if sweep.everyone_runs and measured.largest else 0
    for _ in range(_REPEATS):
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
        suspicious = runs[rank] and _disturbed(measured, size)
        rows = prober.agreement.exchange([busy_s, prober.wall_s, float(suspicious)])
        beside_s = min(beside_s, max(0.0, prober.wall_s - max(row[0] for row in rows)))
        step_s = max(row[1] for row in rows)
        spent_s += step_s
        if spent_s + step_s > _REPEATED_S:
            runs = [run and bool(row[2]) for run, row in zip(runs, rows, strict=True)]
            if spent_s + step_s > _REPEAT_SHARE * remaining_s:
                break
    return 0.0 if math.isinf(beside_s) else beside_s


def _disturbed(measured: Measured, size: int) -> bool:
    """Whether a size took more per sample than a smaller one did, in any part that matters."""
    found, smaller = measured.times[size], [at for at in measured.times if at < size]
    for part in ("forward_s", "backward_s", "tail_s"):
        part_s = getattr(found, part)
        if part_s > 0.02 * found.total_s and any(
            part_s / size > (1.0 + _SUSPICIOUS) * getattr(measured.times[at], part) / at
            for at in smaller
        ):
            return True
    return False


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
        f"No rank has memory for a microbatch of {samples(smallest)} beside the model's"
        f" {prober.engine.gathered_bytes / 2**20:,.0f} MiB of gathered buffers. Use recompute=True,"
        " smaller units (unit_types=, unit_names=), a lower precision, or more or larger devices."
    )


def measure_memory(prober: Prober, measured: Measured, sweep: Sweep) -> Kept:
    """Measure what the smallest and the largest size that ran hold; collective.

    A peak is a maximum of what several moments hold, each of which grows evenly with the size; so
    a line between two sizes is never below it.

    Returns:
        What this rank keeps of samples and microbatches until their backward.
    """
    smallest = sweep.sizes[0]
    idle = smallest if sweep.everyone_runs and measured.times else 0
    for position in (0, -1):
        ran = sorted(measured.times)
        size = ran[position] if ran else 0
        if size in measured.held:
            size = 0
        held = _held(prober, size, 1, idle)
        if held is not None:
            measured.held[size] = held
        elif size:
            # it ran when it was timed, but only just: not to be relied on
            measured.smallest_too_large = size
            measured.times = {at: found for at, found in measured.times.items() if at < size}
    single = measured.held.get(smallest)
    for count in _COUNTS:
        several = _held(prober, smallest if single is not None else 0, count, idle)
        known = single is None or several is not None
        if all(row[0] for row in prober.agreement.exchange([float(known)])):
            break
    if single is None or several is None:
        return Kept(0.0, 0.0)
    largest = max(measured.held)
    return Kept.between(
        single.kept_bytes,
        several.kept_bytes,
        count,
        smallest,
        None if largest == smallest else (largest, measured.held[largest].kept_bytes),
    )


def _held(prober: Prober, size: int, count: int, idle: int) -> Held | None:
    """Bytes of a step; None for a rank that had nothing to measure, or not the memory for it."""
    while any(row[0] for row in prober.agreement.exchange([float(size)])):
        held, refused = prober.held(size or idle, count if size else 1)
        if not any(refused):
            return held if size else None
        if refused[prober.agreement.rank]:
            size, idle = 0, idle if size else 0
    return None
