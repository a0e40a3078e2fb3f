"""Measures steps that retain the activations inside units instead of recomputing them.

Runs only if the plan chooses recomputation rank by rank, at the smallest and the largest microbatch
that ran with it. Forward and root are assumed to be unchanged.
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
    """One rank's figures with retained activations."""

    measured: Measured
    kept: RetainedBytes


def measure_no_recompute(prober: Prober, recomputing: Measured, sweep: Sweep) -> NoRecompute:
    """Measure steps that retain their activations; collective."""
    model = prober.model
    model.release_buffers()  # retained graphs have memory of their own
    model.executor.recompute = False
    measured = Measured()
    try:
        for size in (min(recomputing.times, default=0), recomputing.largest):
            is_done = size in measured.times or measured.smallest_too_large is not None
            turn = sweep.turn(recomputing, 0 if is_done else size)
            for _ in range(_REPEATS):
                measured.time(prober, turn)
        kept = measure_memory(prober, measured, sweep)
    finally:
        model.executor.recompute = True
        model.release_buffers()
    return NoRecompute(measured, kept)


def with_no_recompute(
    profile: RankProfile,
    no_recompute: NoRecompute,
    kept: RetainedBytes,
    units: int,
    gathered_bytes: float,
) -> RankProfile:
    """Add the curves without recomputation to a profile, if this rank ran any such size."""
    measured, largest = no_recompute.measured, profile.largest_microbatch_size
    sizes = sorted(set(measured.times) & set(measured.held))
    if not sizes:
        return profile
    looked_at = [size for size in sorted(measured.held) if size <= sizes[-1]]
    shares = [
        measured.times[size].backward_s / units / max(profile.backward_s[size - 1], 1e-12)
        for size in sizes
    ]
    every = np.arange(1, largest + 1)
    backward = np.interp(every, sizes, shares) * np.asarray(profile.backward_s)
    held = [measured.held[size] for size in looked_at]

    def curve(peaks: Sequence[float], retained: RetainedBytes) -> tuple[float, ...]:
        every_peak = peaks_by_size(looked_at, peaks, largest)
        found = compute_curve([*every.tolist()], every_peak, largest, gathered_bytes, retained)
        return tuple(found)

    return replace(
        profile,
        kept_backward_s=tuple(float(value) for value in backward),
        kept_compute_bytes=curve([each.peak_bytes for each in held], kept),
        kept_reducing_compute_bytes=curve(
            [each.reducing_peak_bytes for each in held], kept.reducing
        ),
    )


def peaks_by_size(sizes: Sequence[int], peaks: Sequence[float], largest: int) -> list[float]:
    """Return the peaks of all sizes, interpolated and extrapolated from the measured ones."""
    slope = peaks[0] / sizes[0]
    if len(sizes) > 1:
        slope = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0])
    inside = np.interp(np.arange(1, largest + 1), sizes, peaks)
    return [
        float(peaks[-1] + max(slope, 0.0) * (size - sizes[-1]) if size > sizes[-1] else value)
        for size, value in enumerate(inside, start=1)
    ]
