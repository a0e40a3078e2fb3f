"""Estimates from datasheets, and fits to measured curves."""

from __future__ import annotations

from dataclasses import replace

from lightning_cephalo.offline.estimate.analytic import (
    KINDS,
    compute_bytes,
    estimate,
    find_efficiency,
    fitted,
    kind_of,
    pass_s,
)
from lightning_cephalo.offline.estimate.devices import CATALOGUE, find_device
from lightning_cephalo.offline.estimate.work import Linear, ModelWork, Pass

WORK = ModelWork(
    model="block",
    dtype="fp16",
    sequence_length=512,
    units=24,
    unit_parameters=50e6,
    largest_unit_parameters=50e6,
    root_parameters=100e6,
    forward=Pass(Linear(0.0, 54e9), Linear(1e6, 0.3e9), 30),
    backward=Pass(Linear(0.0, 108e9), Linear(0.3e9, 0.5e9), 60),
    tail=Pass(Linear(0.0, 310e9), Linear(0.6e9, 1e9), 40),
    boundary_bytes=2e6,
    kept_bytes=60e6,
    unit_peak_bytes=Linear(5e6, 80e6),
    root_peak_bytes=Linear(1e6, 200e6),
)


def test_more_samples_take_longer_and_more():
    for device in CATALOGUE:
        curves = estimate(WORK, device, 8)
        for curve in (curves.forward_s, curves.backward_s, curves.tail_s, curves.compute_bytes):
            assert list(curve) == sorted(curve), device.name
            assert curve[0] > 0, device.name
        assert curves.source == "estimate"
        assert "% off, 9 in 10 within" in curves.detail
        assert device.source in curves.detail


def test_recompute_adds_a_forward_and_keeps_less():
    device = find_device("RTX 4090")
    curves = estimate(WORK, device, 4)
    efficiency = find_efficiency(device, "fp16")
    for size in range(1, 5):
        kept_s = pass_s(WORK.backward, device, "fp16", efficiency, size)
        assert curves.backward_s[size - 1] == curves.forward_s[size - 1] + kept_s
        kept_bytes = compute_bytes(WORK, size, recompute=False)
        assert kept_bytes <= compute_bytes(WORK, size) == curves.compute_bytes[size - 1]


def test_faster_devices_take_less():
    times = [estimate(WORK, find_device(name), 4).forward_s[3] for name in ("A100", "V100", "T4")]
    assert times == sorted(times)


def test_a_small_pass_is_bound_by_launches():
    tiny = replace(WORK, forward=Pass(Linear(0.0, 1e3), Linear(0.0, 1e3), 30))
    assert estimate(tiny, find_device("H100"), 2).forward_s == (30 * 5e-6,) * 2


def test_default_efficiencies_cover_every_kind_and_are_sane():
    pools = {entry.kind for entry in fitted() if not entry.device}
    assert pools == set(KINDS)
    for entry in fitted():
        assert 0.2 < entry.compute < 1.1
        assert 0.2 < entry.bandwidth < 2
        assert entry.error is not None
        assert 0 < entry.error.median < entry.error.most < 0.6
        assert not entry.device or find_device(entry.device).name == entry.device


def test_a_device_uses_its_own_fit_or_its_chips_or_the_pool():
    assert find_efficiency(find_device("A6000"), "fp16").device == "A6000"
    assert find_efficiency(find_device("V100 32GB"), "fp16").device == "V100 16GB"
    assert find_efficiency(find_device("RTX 4090"), "bf16").device == ""
    assert kind_of(find_device("RTX 4090"), "fp32") == "fp32 shared"
    assert kind_of(find_device("A100"), "fp32") == "fp32"
    assert kind_of(find_device("A100"), "tf32") == "half"
