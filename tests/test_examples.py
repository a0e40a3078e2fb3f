"""Each example trains on unequal ranks as on one device."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from common import assert_same_tensors, in_ranks, values_of
from plans import QUIET, plan_of

from lightning_cephalo import CephaloStrategy

EXAMPLES = Path(__file__).parents[1] / "examples"

# for each: options, microbatches of both ranks, and the tolerance that its optimizer needs
CASES: dict[str, tuple[dict[str, Any], list[tuple[int, ...]], float]] = {
    "contrastive": ({"samples": 256}, [(24, 24), (16,)], 1e-4),
    "gan": ({"samples": 256}, [(48,), (16,)], 1e-4),
    "momentum_teacher": ({"samples": 256}, [(24, 24), (16,)], 1e-5),
    "streaming": ({"samples": 256}, [(24, 24), (16,)], 1e-5),
    "token_weights": ({}, [(3, 3), (2,)], 1e-5),
}


def trained(name: str, plan: Any, options: dict[str, Any]) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    strategy: Any = "auto"
    if plan is not None:
        made = plan_of(*plan)
        strategy = CephaloStrategy(
            plan=made, global_batch_size=made.global_batch_size, verbose=False
        )
    devices = 1 if plan is None else len(plan)
    given = {**QUIET, "accelerator": "cpu", "devices": devices, "strategy": strategy, **options}
    return values_of(importlib.import_module(name).main(**given))


@pytest.mark.parametrize("name", CASES)
def test_an_example_trains_as_on_one_device(name):
    options, microbatches, tolerance = CASES[name]
    options = {**options, "max_epochs": 2}
    plan = [(microbatches[0], 0.6), (microbatches[1], 0.4)]
    (wanted,) = in_ranks(1, trained, name, None, options)
    for values in in_ranks(2, trained, name, plan, options):
        assert_same_tensors(values, wanted, tolerance)


def test_every_example_is_tested():
    main_job = {"byte_data", "byte_gpt", "job", "run_record", "train"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} - main_job == set(CASES)
