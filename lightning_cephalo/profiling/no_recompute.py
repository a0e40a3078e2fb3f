"""What it would take to keep activations inside the units instead of computing them again.

Measured where the choice is the plan's, rank by rank: the same steps with kept graphs, at the
smallest and the largest microbatch that ran with recomputation. Forward and root are taken to be
the same; the backward is shorter by about a forward, and memory grows with the inside of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_cephalo.plan import RankProfile
from lightning_cephalo.profiling.memory_model import RetainedBytes, compute_curve
from lightning_cephalo.profiling.probe import Prober
from lightning_cephalo.profiling.sweep import Measured, Sweep, measure_memory

_REPEATS = 2


@dataclass(frozen=True)
class NoRecompute:
    """One rank's figures with kept activations.

    Attributes:
        measured: Times and memory of one or two sizes; none if the rank has not the memory.
        kept: What is kept until the backward.
    """

    measured: Measured
    kept: RetainedBytes


def measure_no_recompute(prober: Prober, recomputing: Measured, sweep: Sweep) -> NoRecompute:
    """Measure steps that keep their activations; collective.

    Args:
        prober: Runs profiling steps.
        recomputing: What was measured with recomputation; gives the sizes.
        sweep: As for that.
    """
    model = prober.model
    model.release_buffers()  # kept graphs have memory of their own
    model.executor.recompute = False
    measured = Measured()
    try:
        smallest = sweep.sizes[0]
        for size in (smallest if recomputing.times else 0, recomputing.largest):
            _time(prober, measured, size, smallest if sweep.everyone_runs else 0)
        kept = measure_memory(prober, measured, sweep)
    finally:
        model.executor.recompute = True
        model.release_buffers()
    return NoRecompute(measured, kept)


def _time(prober: Prober, measured: Measured, size: int, idle: int) -> None:
    if size in measured.times or (measured.smallest_too_large or size + 1) <= size:
        size = 0
    for _ in range(_REPEATS):
        while prober.control.any(bool(size)):
            times, refused = prober.timed(size or idle)
            if not any(refused):
                if size and times is not None:
                    measured.times[size] = times.least(measured.times.get(size))
                break
            if refused[prober.control.rank]:
                if size:
                    measured.times.pop(size, None)
                    measured.smallest_too_large = size
                size, idle = 0, idle if size else 0


def with_no_recompute(
    profile: RankProfile,
    no_recompute: NoRecompute,
    kept: RetainedBytes,
    units: int,
    gathered_bytes: float,
) -> RankProfile:
    """Leave recomputation to the plan, where this rank can do without at all.

    Args:
        profile: Measured with recomputation.
        no_recompute: This rank's figures without.
        kept: What any rank keeps of samples and microbatches without.
        units: How many units the model has.
        gathered_bytes: ``gathered_bytes`` of the problem, as far as it is full buffers.
    """
    measured, largest = no_recompute.measured, profile.largest_microbatch_size
    sizes = sorted(set(measured.times) & set(measured.held))
    if not sizes:
        return profile
    shares = [
        measured.times[size].backward_s / units / max(profile.backward_s[size - 1], 1e-12)
        for size in sizes
    ]
    every = np.arange(1, largest + 1)
    backward = np.interp(every, sizes, shares) * np.asarray(profile.backward_s)
    peaks = peaks_by_size(sizes, [measured.held[size].peak_bytes for size in sizes], largest)
    curve = compute_curve([*every.tolist()], peaks, largest, gathered_bytes, kept)
    return replace(
        profile,
        kept_backward_s=tuple(float(value) for value in backward),
        kept_compute_bytes=tuple(curve),
    )


def peaks_by_size(sizes: Sequence[int], peaks: Sequence[float], largest: int) -> list[float]:
    """Peaks of all sizes: on the line through those measured, which goes on beyond the last.

    A size that did not run with kept activations so gets the memory that it lacks.
    """
    slope = peaks[0] / sizes[0]
    if len(sizes) > 1:
        slope = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0])
    inside = np.interp(np.arange(1, largest + 1), sizes, peaks)
    return [
        float(peaks[-1] + max(slope, 0.0) * (size - sizes[-1]) if size > sizes[-1] else value)
        for size, value in enumerate(inside, start=1)
    ]
