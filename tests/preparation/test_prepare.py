"""What is said of a loss that cannot be compared with that of its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cephalo.preparation.loss_check import check_measured
from lightning_cephalo.preparation.options import Options
from lightning_cephalo.preparation.prepare import Job


@pytest.mark.parametrize(
    ("options", "largest", "smallest", "wanted"),
    [
        ({}, 3, 1, "takes microbatches of 2 and 4 samples"),
        ({}, 8, 3, "takes microbatches of 2 and 4 samples"),
        ({"verbose": False}, 3, 1, ""),
    ],
)
def test_a_loss_that_cannot_be_compared_is_named_in_a_line(
    capsys: Any, options: Any, largest: int, smallest: int, wanted: str
) -> None:
    problem: Any = SimpleNamespace(
        ranks=[SimpleNamespace(largest_microbatch_size=largest)], minimum_microbatch_size=smallest
    )
    model: Any = SimpleNamespace(control=SimpleNamespace(rank=0))
    trainer: Any = SimpleNamespace()
    check_measured(Job(Options(**options), ()), problem, model, trainer)
    said = " ".join(capsys.readouterr().out.split())
    assert wanted in said and bool(said) == bool(wanted)
    assert not wanted or said.startswith("The loss of a batch was not compared")
