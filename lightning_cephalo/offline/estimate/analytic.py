"""Finds a device's times: from a table of curves, or estimated from its datasheet.

Every operator is bound by arithmetic or by memory. Matrix products (with attention) take
``FLOPs / (compute efficiency x peak)``, all others ``bytes / (bandwidth efficiency x bandwidth)``.
A pass takes the sum, or longer if the CPU cannot launch its operators in that time. The two
efficiencies are fitted to measured curves. The estimate serves to rank plans. Every result gives
the error of such estimates on devices that the fit had not seen.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_cephalo.offline.estimate.devices import Device, read_data, same_name
from lightning_cephalo.plan.curves import Curves, CurveTable

if TYPE_CHECKING:
    from lightning_cephalo.offline.estimate.work import ModelWork, Pass

# torch's time on the CPU to issue one operator, forward or backward: assumed, not measured.
LAUNCH_S = 5e-6
KINDS = ("fp32", "fp32 shared", "half")


@dataclass(frozen=True)
class Error:
    """The error of estimates against measurements: ``|estimate / measured - 1|``."""

    median: float
    most: float

    def __str__(self) -> str:
        return f"typically {self.median:.0%} off, 9 in 10 within {self.most:.0%}"


@dataclass(frozen=True)
class Efficiency:
    """Fractions of a device's peak rates that models reach; ``kind`` is one of KINDS."""

    device: str
    kind: str
    compute: float
    bandwidth: float
    error: Error | None = None


@functools.cache
def fitted() -> tuple[Efficiency, ...]:
    """Return what ``efficiencies.yaml`` holds."""
    rows = read_data("efficiencies.yaml")
    return tuple(Efficiency(**row | {"error": Error(*row["error"])}) for row in rows)


def find_efficiency(
    device: Device, dtype: str, efficiencies: Sequence[Efficiency] | None = None
) -> Efficiency:
    """Return the efficiency of the device, else of one with its chip, else of the pool."""
    known = fitted() if efficiencies is None else efficiencies
    by_device = {entry.device: entry for entry in known if entry.kind == kind_of(device, dtype)}
    return by_device.get(device.name) or by_device.get(device.like) or by_device[""]


def kind_of(device: Device, dtype: str) -> str:
    """Return the kind of efficiency that applies to this device in this dtype."""
    if dtype != "fp32":
        return "half"
    return "fp32 shared" if device.shares_fp32_units else "fp32"


def pass_s(work: Pass, device: Device, dtype: str, efficiency: Efficiency, samples: float) -> float:
    """Return the seconds of one pass over a microbatch of ``samples``."""
    arithmetic = work.flops.at(samples) / (efficiency.compute * device.peak_flops_per_s(dtype))
    memory = work.moved_bytes.at(samples) / (efficiency.bandwidth * device.bandwidth_bytes_per_s)
    return max(arithmetic + memory, work.operators * LAUNCH_S)


def curves_of(
    device: Device, work: ModelWork, largest_microbatch_size: int, tables: Sequence[CurveTable]
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
                return _completed(replace(curves, device=device.name, **cut), device, work)
    return estimate(work, device, largest_microbatch_size)


def _completed(curves: Curves, device: Device, work: ModelWork) -> Curves:
    missing = [name for name in ("tail_s", "compute_bytes") if not getattr(curves, name)]
    if not missing:
        return curves
    guess = estimate(work, device, curves.largest_microbatch_size)
    scale = statistics.median(
        known / guessed for known, guessed in zip(curves.forward_s, guess.forward_s, strict=True)
    )
    return replace(
        curves,
        tail_s=curves.tail_s or tuple(scale * seconds for seconds in guess.tail_s),
        compute_bytes=curves.compute_bytes or guess.compute_bytes,
        detail="; ".join(filter(None, [curves.detail, f"{' and '.join(missing)} estimated"])),
    )


def estimate(
    work: ModelWork,
    device: Device,
    largest_microbatch_size: int,
    *,
    efficiencies: Sequence[Efficiency] | None = None,
) -> Curves:
    """Estimate the curves of a device, with recompute. The label gives their error."""
    efficiency = find_efficiency(device, work.dtype, efficiencies)
    sizes = range(1, largest_microbatch_size + 1)

    def curve(of: Pass) -> tuple[float, ...]:
        return tuple(pass_s(of, device, work.dtype, efficiency, size) for size in sizes)

    forward, backward = curve(work.forward), curve(work.backward)
    chip = efficiency.device
    basis = f"fitted to curves of {chip}" if chip else "no curves of this device to fit to"
    error = f"; {efficiency.error}" if efficiency.error else ""
    return Curves(
        device=device.name,
        forward_s=forward,
        backward_s=tuple(f + b for f, b in zip(forward, backward, strict=True)),
        tail_s=curve(work.tail),
        compute_bytes=tuple(compute_bytes(work, size) for size in sizes),
        source="estimate",
        detail=f"datasheet ({device.source or 'none named'}), {basis}{error}",
    )


def compute_bytes(work: ModelWork, samples: int, *, recompute: bool = True) -> float:
    """Return the peak without state, gathered buffers and retained activations.

    Without recompute, the activations inside units are retained and do not count either.
    """
    unit = work.unit_peak_bytes.at(samples)
    if not recompute:
        unit = max(0.0, unit - work.kept_bytes * samples)
    return max(unit, work.root_peak_bytes.at(samples))
