"""Estimates times from a datasheet: the model's work over the device's peak rate and efficiency.

Every operator is bound by arithmetic or by memory. Matrix products (with attention) take
``FLOPs / (compute efficiency x peak)``, all others ``bytes / (bandwidth efficiency x bandwidth)``.
A pass takes the sum, or longer if the CPU cannot launch its operators in that time. The two
efficiencies are fitted to measured curves. The estimate serves to rank plans. Every result gives
the error of such estimates on devices that the fit had not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.records import Amount, Checked, OneOf, Positive, Text
from lightning_cephalo.offline.estimate.devices import Device, read_data
from lightning_cephalo.plan.curves import Curves

if TYPE_CHECKING:
    from lightning_cephalo.offline.estimate.work import ModelWork, Pass

# torch's time on the CPU to issue one operator, forward or backward: assumed, not measured.
LAUNCH_S = 5e-6
KINDS = ("fp32", "fp32 shared", "half")


@dataclass(frozen=True)
class Error(Checked):
    """The error of estimates against measurements: ``|estimate / measured - 1|``."""

    median: Amount
    most: Amount

    def __str__(self) -> str:
        return f"typically {self.median:.0%} off, 9 in 10 within {self.most:.0%}"


@dataclass(frozen=True)
class Efficiency(Checked):
    """Fractions of a device's peak rates that models reach."""

    device: Text
    kind: Annotated[str, OneOf(KINDS, f"one of {KINDS}")]
    compute: Positive
    bandwidth: Positive
    error: Error | None = None


@functools.cache
def fitted() -> tuple[Efficiency, ...]:
    """Return what ``efficiencies.yaml`` holds."""
    keys = [field.name for field in fields(Efficiency)]
    rows = [
        records.mapping(f"efficiencies.yaml[{index}]", row, known=keys, required=keys)
        for index, row in enumerate(read_data("efficiencies.yaml"))
    ]
    return tuple(Efficiency(**row | {"error": Error(*row["error"])}) for row in rows)


def find_efficiency(
    device: Device, dtype: str, efficiencies: Sequence[Efficiency] | None = None
) -> Efficiency:
    """Return the efficiency of the device, else of one with its chip, else of the pool."""
    efficiencies = fitted() if efficiencies is None else efficiencies
    kind = kind_of(device, dtype)
    for wanted in dict.fromkeys((device.name, device.like, "")):
        for entry in efficiencies:
            if entry.device == wanted and entry.kind == kind:
                return entry
    raise PlanError(
        f"efficiencies: expected one of kind {kind!r} for all devices, but got none. "
        f"Fit to measured curves of that kind too."
    )


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


def estimate(
    work: ModelWork,
    device: Device,
    largest_microbatch_size: int,
    *,
    recompute: bool = True,
    efficiencies: Sequence[Efficiency] | None = None,
) -> Curves:
    """Estimate the curves of a device without measurements. The label gives their error."""
    efficiency = find_efficiency(device, work.dtype, efficiencies)
    sizes = range(1, largest_microbatch_size + 1)

    def curve(of: Pass) -> tuple[float, ...]:
        return tuple(pass_s(of, device, work.dtype, efficiency, size) for size in sizes)

    forward, backward = curve(work.forward), curve(work.backward)
    if recompute:
        backward = tuple(f + b for f, b in zip(forward, backward, strict=True))
    fitted = efficiency.device
    basis = f"fitted to curves of {fitted}" if fitted else "no curves of this device to fit to"
    error = f"; {efficiency.error}" if efficiency.error else ""
    return Curves(
        device=device.name,
        forward_s=forward,
        backward_s=backward,
        tail_s=curve(work.tail),
        compute_bytes=tuple(compute_bytes(work, size, recompute=recompute) for size in sizes),
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
