"""Makes the curves of a rank's profile of what it measured, and one profile of equal ranks'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator import Device
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import KeptCurves, Problem, RankProfile
from lightning_cephalo.plan.curves import Curves, CurveTable, save_measured
from lightning_cephalo.plan.problem import CURVES, MEMORY_CURVES, TIME_CURVES
from lightning_cephalo.profiling.sweep import Measured

_T = TypeVar("_T", RankProfile, KeptCurves)
# Ranks with the same device name whose times and capacities differ by less count as equal.
_ALIKE = 0.10
# Memory that grows by less than this part of before has slowed down.
_SLOWER = 0.9
# Of equal ranks' figures, times are medians, memory is the largest, and the rest the smallest.
_LEAST = (
    "capacity_bytes",
    "updated_parameters_per_s",
    "host_updated_parameters_per_s",
    "to_device_bytes_per_s",
    "to_host_bytes_per_s",
)
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


def profile_of(
    device: Device,
    measured: Measured,
    retaining: Measured | None,
    units: int,
    gathered_bytes: float,
) -> RankProfile:
    """Return dense curves of what was measured, ``retaining`` without recomputation."""
    times, every = measured.times, np.arange(1, measured.largest + 1)
    if not times:
        return RankProfile(device.name, (), (), (), (), device.capacity_bytes)

    def dense(values: Mapping[int, float]) -> tuple[float, ...]:
        sizes = sorted(values)
        return tuple(np.interp(every, sizes, [values[size] for size in sizes]).tolist())

    def memory(own: Measured) -> list[tuple[float, ...]]:
        """Return ``compute_bytes`` up to the first reduce, and from it on."""
        sizes, fixed = sorted(own.held), gathered_bytes + own.kept.microbatch_bytes
        peaks = [own.held[size].peak_bytes for size in sizes]
        reducing = [own.held[size].reducing_peak_bytes for size in sizes]
        return [
            compute_curve(sizes, peaks, every, fixed, own.kept.sample_bytes),
            compute_curve(sizes, reducing, every, fixed, own.kept.reducing_sample_bytes),
        ]

    compute, reducing = memory(measured)
    profile = RankProfile(
        device.name,
        forward_s=dense({size: at.forward_s / units for size, at in times.items()}),
        backward_s=dense({size: at.backward_s / units for size, at in times.items()}),
        tail_s=dense({size: at.tail_s for size, at in times.items()}),
        compute_bytes=compute,
        capacity_bytes=device.capacity_bytes,
        reducing_compute_bytes=reducing,
    )
    if retaining is None or not retaining.times:
        return profile
    shares = dense(
        {m: at.backward_s / max(times[m].backward_s, 1e-12) for m, at in retaining.times.items()}
    )
    compute, reducing = memory(retaining)
    kept = KeptCurves(tuple(np.multiply(shares, profile.backward_s)), compute, reducing)
    return replace(profile, kept=kept)


def compute_curve(
    sizes: Sequence[int],
    peaks: Sequence[float],
    every: np.ndarray,
    fixed: float,
    per_sample: float,
) -> tuple[float, ...]:
    """Return the peaks of ``every`` size from 1 on, without what is fixed and what a sample keeps.

    A larger batch holds no less. Between two sizes it lies on their line. Where chunks of logits
    fill up in between, growth slows down: then it lies on the lines of the sizes at both ends, up
    to where they meet. Sizes beyond those measured lie on the steepest line.
    """
    rising = np.maximum.accumulate(np.asarray(peaks, dtype=float))
    slopes = np.diff(rising) / np.diff(sizes) if len(sizes) > 1 else [rising[0] / sizes[0]]
    dense = np.interp(every, sizes, rising) + max(slopes) * np.maximum(every - sizes[-1], 0)
    for at, (low, high) in enumerate(pairwise(sizes)):
        were_full = at > 1 and slopes[at - 1] < _SLOWER * slopes[at - 2]
        if were_full or len(sizes) == 2:
            continue
        between = every[low : high - 1]
        before = rising[at] + (slopes[at - 1] if at else np.inf) * (between - low)
        behind = rising[at + 1] - [*slopes, 0.0][at + 1] * (high - between)
        dense[between - 1] = np.maximum(dense[between - 1], np.minimum(before, behind))
    return tuple(np.maximum(dense - fixed - per_sample * every, 0.0).tolist())


def merge_equal_ranks(profiles: Sequence[RankProfile]) -> list[RankProfile]:
    """Give ranks that differ only by noise the same profile, or equal devices get unequal plans.

    They are equal with the same name, and capacities and times within 10 %.
    """
    found = list(profiles)
    for name in {profile.name for profile in profiles}:
        group = [profile for profile in profiles if profile.name == name]
        length = min(profile.largest_microbatch_size for profile in group)
        capacities = [profile.capacity_bytes for profile in group]
        group = [own.up_to(length) for own in group]
        # by rank and size
        totals = np.sum([[getattr(own, curve) for own in group] for curve in TIME_CURVES], axis=0)
        typical = np.median(totals, axis=0)
        if (
            not length
            or min(capacities) < (1.0 - _ALIKE) * max(capacities)
            or np.any(np.abs(totals - typical) > _ALIKE * typical)
        ):
            continue
        least: dict[str, Any] = {rate: min(getattr(own, rate) for own in group) for rate in _LEAST}
        kept = [own.kept for own in group if own.kept is not None]
        shared = replace(
            _merged(group), **least, kept=_merged(kept) if len(kept) == len(group) else None
        )
        found = [shared if own.name == name else own for own in found]
    return found


def _merged(records: Sequence[_T]) -> _T:
    """Return the first of some records, with the curves of all."""
    merged: dict[str, Any] = {}
    for curve in filter(partial(hasattr, records[0]), CURVES):
        own = [getattr(record, curve) for record in records]
        merge = np.max if curve in MEMORY_CURVES else np.median
        merged[curve] = merge(own, axis=0) if all(own) else ()
    return replace(records[0], **merged)


def remember(problem: Problem, model: ShardedModel, batch: Any) -> str | None:
    """Save the curves of every kind of device for ``cephalo plan``; return why it failed."""
    recompute, curves = model.executor.recompute, {}
    try:
        for rank in filter(attrgetter("forward_s"), problem.ranks):
            curves[rank.name] = Curves(
                rank.name,
                rank.forward_s,
                rank.backward_s if recompute else np.add(rank.backward_s, rank.forward_s).tolist(),
                rank.tail_s,
                rank.compute_bytes if recompute else (),  # another peak without recomputation
                source="measured",
                detail=f"on the running job, torch {torch.__version__}",
            )
        # tokens, where a sample's first dimension is one of them
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        length = max(1, leaves[0].shape[1]) if leaves and leaves[0].ndim > 1 else 1
        dtype = _DTYPES.get(model.compute_dtype or torch.float32, "fp32")
        kind, count = type(model.module).__name__, model.parameter_count
        save_measured(CurveTable(kind, dtype, length, tuple(curves.values()), parameters=count))
    except Exception as error:  # only one rank saves, and the others go on
        return f"{type(error).__name__}: {error}"
    return None
