"""The policies of benchmarks/optimizer_offload.py in virtual time: one of its cases."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.processes
def test_early_updates_hide_all_that_moves_and_predictions_hold_for_every_policy(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from optimizer_offload import BLOCKING, POLICIES, rows_of

    rows = {row.policy: row for row in rows_of(2, 6)}
    assert tuple(rows) == POLICIES
    resident_s = rows["all on device"].measured_s
    early, late = rows["planned, early"], rows["planned, late"]
    # both keep about half of the moments in host memory
    assert early.measured_host_bytes > 1e6 and late.measured_host_bytes > 1e6
    assert early.measured_s <= 1.05 * resident_s
    assert early.measured_bytes < 0.85 * rows["all on device"].measured_bytes
    # behind the backward nothing hides, and a plan that knows this is the shortest
    static_s = rows["static, all on host"].measured_s
    assert resident_s < late.measured_s < rows["filled, then static"].measured_s < static_s
    assert static_s < rows[BLOCKING].measured_s
    errors = []
    for row in rows.values():
        assert row.measured_s <= 1.1 * row.predicted_s  # the closed form
        errors.append(abs(row.predicted_s / row.measured_s - 1))
        assert row.measured_bytes <= row.predicted_bytes <= 1.05 * row.measured_bytes
        if row.predicted_host_bytes:
            assert row.predicted_host_bytes == pytest.approx(row.measured_host_bytes, rel=0.05)
    assert max(errors) <= 0.15 and statistics.median(errors) <= 0.05
