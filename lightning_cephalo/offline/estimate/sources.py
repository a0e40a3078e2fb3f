"""Finds a device's curves: from a table, or estimated."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_cephalo.offline.estimate.analytic import compute_bytes, estimate
from lightning_cephalo.offline.estimate.devices import Device, same_name
from lightning_cephalo.plan.curves import Curves, CurveTable

if TYPE_CHECKING:
    from lightning_cephalo.offline.estimate.work import ModelWork


def curves_of(
    device: Device,
    work: ModelWork,
    largest_microbatch_size: int,
    tables: Sequence[CurveTable],
) -> Curves:
    """Return the first known curves of a device, with recompute and without empty fields.

    Fields that a table lacks are estimated. ``tail_s`` is scaled by the ratio of the table's
    forward to the estimated one. ``compute_bytes`` comes from the operators alone, as bytes depend
    on the model and hardly on the device.
    """
    for table in tables:
        if not table.matches(work.model, work.dtype, work.sequence_length, work.parameters):
            continue
        for curves in table.curves:
            if same_name(curves.device, device.name):
                names = ("forward_s", "backward_s", "tail_s", "compute_bytes")
                cut = {name: getattr(curves, name)[:largest_microbatch_size] for name in names}
                return _completed(dataclasses.replace(curves, **cut), device, work)
    return estimate(work, device, largest_microbatch_size)


def _completed(curves: Curves, device: Device, work: ModelWork) -> Curves:
    filled = []
    tail_s, peaks = curves.tail_s, curves.compute_bytes
    sizes = range(1, curves.largest_microbatch_size + 1)
    if not tail_s:
        guess = estimate(work, device, len(sizes))
        scale = statistics.median(
            known / guessed
            for known, guessed in zip(curves.forward_s, guess.forward_s, strict=True)
        )
        tail_s = tuple(scale * seconds for seconds in guess.tail_s)
        filled.append("tail_s")
    if not peaks:
        peaks = tuple(compute_bytes(work, size) for size in sizes)
        filled.append("compute_bytes")
    detail = curves.detail
    if filled:
        detail = "; ".join(filter(None, [detail, f"{' and '.join(filled)} estimated"]))
    return dataclasses.replace(curves, tail_s=tail_s, compute_bytes=peaks, detail=detail)
