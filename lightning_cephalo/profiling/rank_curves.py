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
# Memory that grows by less than this part of before has slowed down.
_SLOWER = 0.9
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

    Between two sizes it lies on their line. Where chunks of logits fill up in between, growth slows
    down: then it lies on the lines of the sizes at both ends, up to where they meet. Sizes beyond
    those measured lie on the steepest line.
    """
    if not largest:
        return ()
    every, rising = np.arange(1, largest + 1), np.maximum.accumulate(np.asarray(peaks, dtype=float))
    slopes = np.diff(rising) / np.diff(sizes) if len(sizes) > 1 else [rising[0] / sizes[0]]
    dense = np.interp(every, sizes, rising) + max(slopes) * np.maximum(every - sizes[-1], 0)
    for at in range(len(sizes) - 1):
        bound = np.full(largest, rising[at + 1])
        if at > 1 and slopes[at - 1] < _SLOWER * slopes[at - 2]:
            continue  # they were full before
        if at:
            bound = np.minimum(bound, rising[at] + slopes[at - 1] * (every - sizes[at]))
        if at + 2 < len(sizes):
            bound = np.minimum(bound, rising[at + 1] - slopes[at + 1] * (sizes[at + 1] - every))
        is_between = (every > sizes[at]) & (every < sizes[at + 1]) & (len(sizes) > 2)
        dense = np.where(is_between, np.maximum(dense, bound), dense)
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
        curves: dict[str, Any] = {
            curve: _merged(group, curve, length, max if curve in _MEMORY else statistics.median)
            for curve in (*_TIMES, "kept_backward_s", *_MEMORY)
        }
        is_noise = (
            length
            and min(capacities) >= (1.0 - _ALIKE) * max(capacities)
            and all(
                abs(sum(getattr(own, curve)[at] - curves[curve][at] for curve in _TIMES))
                <= _ALIKE * sum(curves[curve][at] for curve in _TIMES)
                for own in group
                for at in range(length)
            )
        )
        if len(group) > 1 and is_noise:
            shared = replace(group[0], capacity_bytes=min(capacities), **curves)
            found = [shared if own.name == name else own for own in found]
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
