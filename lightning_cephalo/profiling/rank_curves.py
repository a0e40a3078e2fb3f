"""Makes the curves of a rank's profile of what it measured, and one profile of equal ranks'."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_cephalo.accelerator import Device
from lightning_cephalo.plan import RankProfile
from lightning_cephalo.profiling.memory_model import Held, RetainedBytes
from lightning_cephalo.profiling.sweep import Measured

# Ranks with the same device name whose times differ by less count as equal.
_ALIKE = 0.10
# Curves of which equal ranks get the medians, and those of which they get the largest.
_TIMES = ("forward_s", "backward_s", "tail_s")
_MEMORY = (
    "compute_bytes",
    "reducing_compute_bytes",
    "kept_compute_bytes",
    "kept_reducing_compute_bytes",
)


def profile_of(
    device: Device, measured: Measured, kept: RetainedBytes, units: int, gathered_bytes: float
) -> RankProfile:
    """Return dense curves from the measured sizes; per unit where the problem wants it."""
    sizes, largest = sorted(measured.times), measured.largest

    def dense(part: str, count: int) -> tuple[float, ...]:
        values = [getattr(measured.times[size], part) / count for size in sizes]
        return tuple(np.interp(np.arange(1, largest + 1), sizes, values).tolist()) if sizes else ()

    compute, reducing = _compute_curves(measured.held, largest, gathered_bytes, kept)
    return RankProfile(
        name=device.name,
        forward_s=dense("forward_s", units),
        backward_s=dense("backward_s", units),
        tail_s=dense("tail_s", 1),
        compute_bytes=compute,
        capacity_bytes=device.capacity_bytes,
        reducing_compute_bytes=reducing,
    )


def without_recompute(
    profile: RankProfile,
    retaining: Measured,
    kept: RetainedBytes,
    units: int,
    gathered_bytes: float,
) -> RankProfile:
    """Add the curves without recomputation to a profile, if this rank ran any such size."""
    sizes, largest = sorted(retaining.times), profile.largest_microbatch_size
    if not sizes:
        return profile
    shares = [
        retaining.times[size].backward_s / units / max(profile.backward_s[size - 1], 1e-12)
        for size in sizes
    ]
    backward = np.interp(np.arange(1, largest + 1), sizes, shares) * profile.backward_s
    compute, reducing = _compute_curves(retaining.held, largest, gathered_bytes, kept)
    return replace(
        profile,
        kept_backward_s=tuple(backward.tolist()),
        kept_compute_bytes=compute,
        kept_reducing_compute_bytes=reducing,
    )


def _compute_curves(
    held: Mapping[int, Held], largest: int, gathered_bytes: float, kept: RetainedBytes
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return ``compute_bytes`` up to the first reduce, and from it on."""
    sizes = sorted(held)
    peaks = [held[size].peak_bytes for size in sizes]
    reducing = [held[size].reducing_peak_bytes for size in sizes]
    return (
        compute_curve(sizes, peaks, largest, gathered_bytes, kept),
        compute_curve(sizes, reducing, largest, gathered_bytes, kept.reducing),
    )


def compute_curve(
    sizes: Sequence[int], peaks: Sequence[float], largest: int, gathered: float, kept: RetainedBytes
) -> tuple[float, ...]:
    """Return ``compute_bytes`` of 1 to ``largest`` samples; a larger batch holds no less.

    Sizes beyond those measured lie on the line through the smallest and the largest one.
    """
    if not largest:
        return ()
    every, rising = np.arange(1, largest + 1), np.maximum.accumulate(np.asarray(peaks, dtype=float))
    slope = rising[0] / sizes[0]
    if len(sizes) > 1:
        slope = (rising[-1] - rising[0]) / (sizes[-1] - sizes[0])
    dense = np.interp(every, sizes, rising) + slope * np.maximum(every - sizes[-1], 0)
    inside = dense - gathered - kept.microbatch_bytes - kept.sample_bytes * every
    return tuple(np.maximum(inside, 0.0).tolist())


def merge_equal_ranks(profiles: Sequence[RankProfile]) -> list[RankProfile]:
    """Give ranks that differ only by noise the same profile, or equal devices get unequal plans.

    They are equal with the same name, and capacities and times within 10%. They get median times,
    the largest memory figures, and the smallest capacity.
    """
    found = list(profiles)
    for name in {profile.name for profile in profiles}:
        members = [index for index, profile in enumerate(profiles) if profile.name == name]
        group = [profiles[index] for index in members]
        length = min(profile.largest_microbatch_size for profile in group)
        capacities = [profile.capacity_bytes for profile in group]
        if len(group) < 2 or not length or min(capacities) < (1.0 - _ALIKE) * max(capacities):
            continue
        curves: dict[str, Any] = {
            curve: _merged(group, curve, length, statistics.median)
            for curve in (*_TIMES, "kept_backward_s")
        }
        totals = [sum(curves[curve][at] for curve in _TIMES) for at in range(length)]
        if any(
            abs(sum(getattr(profile, curve)[at] for curve in _TIMES) - total) > _ALIKE * total
            for profile in group
            for at, total in enumerate(totals)
        ):
            continue
        curves |= {curve: _merged(group, curve, length, max) for curve in _MEMORY}
        shared = replace(
            group[0],
            capacity_bytes=min(capacities),
            updated_parameters_per_s=min(profile.updated_parameters_per_s for profile in group),
            **curves,
        )
        for index in members:
            found[index] = shared
    return found


def _merged(
    group: Sequence[RankProfile],
    curve: str,
    length: int,
    of: Callable[[Sequence[float]], float],
) -> tuple[float, ...]:
    """Return one curve of several ranks' ones; none if any rank has none."""
    curves = [getattr(profile, curve)[:length] for profile in group]
    return tuple(of(each) for each in zip(*curves, strict=True)) if all(curves) else ()
