"""Microbatches without a loss, in logged means and in outputs."""

from __future__ import annotations

from lightning_cephalo.adapters.skipped_steps import without_loss


def test_a_skipped_microbatch_counts_by_its_samples_in_logs_and_not_in_outputs():
    assert without_loss((1.0, None, 2.0), (7.0, 0.0, 5.0), (4, 3, 2)) == ((7.0, 3.0, 5.0), 6)
    assert without_loss((None,), (0.0,), (4,)) == ((4.0,), 0)
