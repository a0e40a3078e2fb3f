"""Estimates against published profiles, where these are at hand (all: benchmarks/estimates.py)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from lightning_cephalo.offline.estimate.analytic import find_efficiency
from lightning_cephalo.offline.estimate.models import work_of

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT.parent / "shared/data/cephalo-profiles"

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="no published profiles beside the checkout"
)


@pytest.fixture(scope="module")
def benchmark():
    specification = importlib.util.spec_from_file_location(
        "benchmark_estimates", ROOT / "benchmarks/estimates.py"
    )
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        specification.loader.exec_module(module)
    return module


def test_estimates_are_as_close_as_they_say(benchmark):
    found = benchmark.measurements(DATA, ["deepspeedbert_large", "deepspeedllama_3b"])
    assert len(found) > 10
    errors = [
        error
        for entry in found
        for error in benchmark.relative_errors(
            entry, find_efficiency(entry.device, entry.work.dtype)
        )
    ]
    assert np.median(errors) < 0.15
    assert np.quantile(errors, 0.9) < 0.4


def test_memory_of_a_sample_is_what_was_published():
    published = json.loads((DATA / "model_memory.json").read_text())
    curve = published["paper"]["deepspeedgpt_2.7b"]["profiled_compute_memory"]["float32"]
    work = work_of(
        "gpt2",
        sequence_length=512,
        n_embd=2560,
        n_head=80,
        n_layer=32,
        n_positions=512,
        vocab_size=49152,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    )
    sample = work.unit_peak_bytes.per_sample + 32 * work.boundary_bytes
    assert sample / 2**30 == pytest.approx((curve[3] - curve[0]) / 3, rel=0.1)
