"""What is said of a loss that cannot be compared with that of its parts."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from plans import plan_of
from torch.utils.data import DataLoader

from lightning_cephalo.data.shares import deal
from lightning_cephalo.preparation.job import Job, Loaders
from lightning_cephalo.preparation.loss_check import LossCheck, _are_divided_alike
from lightning_cephalo.preparation.options import Options, Planner


@pytest.mark.parametrize(
    ("options", "largest", "smallest", "wanted"),
    [
        ({}, 3, 1, "takes microbatches of 2 and 4 samples"),
        ({}, 8, 3, "takes microbatches of 2 and 4 samples"),
        ({"planner": Planner(verbose=False)}, 3, 1, ""),
    ],
)
def test_a_loss_that_cannot_be_compared_is_named_in_a_line(
    capsys: Any, options: Any, largest: int, smallest: int, wanted: str
) -> None:
    problem: Any = SimpleNamespace(
        ranks=[SimpleNamespace(largest_microbatch_size=largest)], minimum_microbatch_size=smallest
    )
    model: Any = SimpleNamespace(control=SimpleNamespace(rank=0))
    unused: Any = SimpleNamespace()
    LossCheck(Job(Options(**options), ()), model, unused, unused).of_samples(problem)
    said = " ".join(capsys.readouterr().out.split())
    assert wanted in said and bool(said) == bool(wanted)
    assert not wanted or said.startswith("The loss of a batch was not compared")


def met(loaders: list[list[int]], mode: str) -> list[list[int]]:
    """The sizes of the batches that come together, step by step."""
    count = min(map(len, loaders)) if mode == "min_size" else max(map(len, loaders))
    if mode == "max_size":
        return [[own[step] for own in loaders if step < len(own)] for step in range(count)]
    return [[own[step % len(own)] for own in loaders] for step in range(count)]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_loaders_are_divided_alike_only_where_all_steps_counted_one_by_one_are(mode: str) -> None:
    alike = 0
    choices = list(product((4, 8, 16), (16, 20, 32), (True, False)))
    plans = {4: (2, 1, 1), 8: (3, 3, 2), 16: (6, 6, 4)}  # by the size of the first loader
    for one, other in product(choices, choices):
        own: Any = plans[one[0]]
        pair: list[Any] = [
            DataLoader(list(range(count)), batch_size=size, drop_last=drop)
            for size, count, drop in (one, other)
        ]
        plan = plan_of(*(((size,), size / sum(own)) for size in own))
        job = Job(Options(), (), loaders=Loaders(tuple(pair), object(), mode), plan=plan)
        counted = [[len(batch) for batch in loader.batch_sampler] for loader in pair]
        parts = [
            [[Fraction(part, size) for part in deal(size, own)] for size in together]
            for together in met(counted, mode)
        ]
        if _are_divided_alike(job, 1):
            assert all(part == step[0] for step in parts for part in step), (one, other)
            alike += 1
    assert alike > 100
