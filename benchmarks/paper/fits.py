"""Fits the efficiencies of devices to measured curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from lightning_cephalo.offline.estimate.analytic import KINDS, Efficiency, kind_of, pass_s
from lightning_cephalo.offline.estimate.devices import Device
from lightning_cephalo.offline.estimate.work import ModelWork
from lightning_cephalo.plan.curves import Curves

# Weight of the pull towards the pool. It is weak, so a device's own curves decide where they hold
# information. Values that they leave open (such as bandwidth, with matrix products only) stay at
# the pool's.
_PULL = 0.1


@dataclass(frozen=True)
class Measurement:
    """Measured curves of one model on one device, to fit to. ``backward_s`` is with recompute."""

    device: Device
    work: ModelWork
    curves: Curves


def fit(measurements: Iterable[Measurement]) -> tuple[Efficiency, ...]:
    """Fit efficiencies to measured curves by least squares of log(estimate / measured).

    The result holds one efficiency for all devices of a kind, and one for each device. Curves count
    equally, whatever their length.
    """
    fitted = []
    measurements = tuple(measurements)
    for kind in KINDS:
        of_kind = [
            entry for entry in measurements if kind_of(entry.device, entry.work.dtype) == kind
        ]
        if not of_kind:
            continue
        pool = _fit("", kind, of_kind, None)
        fitted.append(pool)
        for device in sorted({entry.device.name for entry in of_kind}):
            own = [entry for entry in of_kind if entry.device.name == device]
            fitted.append(_fit(device, kind, own, pool))
    return tuple(fitted)


def relative_errors(measurement: Measurement, efficiency: Efficiency) -> list[float]:
    """Return ``|estimate / measured - 1|`` of every point of both curves."""
    return [abs(math.expm1(log)) for log in _log_errors(measurement, efficiency)]


def _log_errors(measurement: Measurement, efficiency: Efficiency) -> list[float]:
    work, device, curves = measurement.work, measurement.device, measurement.curves
    errors = []
    for size in range(1, curves.largest_microbatch_size + 1):
        forward, backward = (
            pass_s(of, device, work.dtype, efficiency, size) for of in (work.forward, work.backward)
        )
        errors.append(math.log(forward / curves.forward_s[size - 1]))
        errors.append(math.log((forward + backward) / curves.backward_s[size - 1]))
    return errors


def _fit(
    device: str, kind: str, measurements: Sequence[Measurement], pool: Efficiency | None
) -> Efficiency:
    def residuals(logs: np.ndarray) -> np.ndarray:
        candidate = Efficiency(device, kind, *np.exp(logs).tolist())
        rows = []
        for entry in measurements:
            row = np.asarray(_log_errors(entry, candidate))
            rows.append(row / math.sqrt(len(row)))
        if pool is not None:
            rows.append(_PULL * math.sqrt(len(rows)) * (logs - start))
        return np.concatenate(rows)

    start = np.log([0.5, 0.5] if pool is None else [pool.compute, pool.bandwidth])
    # a device may slightly exceed the datasheet's boost clock, and caches the memory's bandwidth
    bounds = (np.log([0.01, 0.01]), np.log([1.2, 3.0]))
    found = least_squares(residuals, start, bounds=bounds, loss="soft_l1")
    return Efficiency(device, kind, *np.exp(found.x).tolist())
