"""What is said of a loss that cannot be compared with that of its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cephalo.preparation.loss_check import LossCheck, check_measured
from lightning_cephalo.preparation.options import Options
from lightning_cephalo.preparation.prepare import Job


@pytest.mark.parametrize(
    ("options", "largest", "smallest", "wanted"),
    [
        ({"collate_per_microbatch": True}, 8, 1, "collate_per_microbatch=True never collates"),
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


def test_manual_backwards_under_a_given_plan_are_said_once_not_to_be_compared(capsys: Any) -> None:
    model: Any = SimpleNamespace(control=SimpleNamespace(rank=0))
    unused: Any = SimpleNamespace()
    check = LossCheck(Job(Options(), ()), model, unused, unused, manual=unused)
    for _ in range(2):
        check.of_first_step(None, [], unused)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("The losses of manual backwards are not compared with those of parts") == 1
    assert "no mean over samples differs from one device" in said and "Without plan=" in said
