"""What a step keeps on modules shows whether it depends on how its batch is cut."""

from __future__ import annotations

import random
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from torch import nn

from lightning_cephalo.profiling.stored_values import Kept, StoredValues, warn_of_kept

ROWS = torch.tensor([1.0, 5.0, 2.0, 3.0])


class _Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.held = None
        self.kept = None
        self.noise = None


def _kept(step, again=False):
    module = _Steps()
    stored = StoredValues({"": vars(module), "inner": vars(module.inner)})
    for rows in (ROWS, ROWS[:2], ROWS[2:], *([ROWS] if again else [])):
        stored.begin()
        step(module, rows)
        stored.end(len(rows))
        module.kept = module.inner.held = None
    return stored.kept()


def _numbers(kept):
    return [name for name, _, _ in kept.numbers]


@pytest.mark.parametrize(
    ("value", "is_found"),
    [
        (lambda rows: float(rows.mean()), False),
        (lambda rows: rows.mean(), False),
        (lambda rows: 7, False),
        (lambda rows: rows.shape[0] > 2, False),  # a flag
        (lambda rows: float(rows.max()), True),
        (lambda rows: rows.amax(), True),
        (lambda rows: float(rows.sum()), True),
        (lambda rows: len(rows), True),  # also with parts of one size
        (lambda rows: torch.tensor(len(rows)), True),
        (lambda rows: float("nan"), False),
    ],
)
def test_numbers_that_are_no_means_over_samples_are_found(value, is_found):
    def step(module, rows):
        module.kept = module.inner.held = value(rows)

    assert _numbers(_kept(step)) == (["inner.held", "kept"] if is_found else [])


def test_random_numbers_are_none():
    def step(module, rows):
        module.kept = random.random()
        module.inner.held = len(rows)

    assert _numbers(_kept(step, again=True)) == ["inner.held"]


def _generated():
    while True:
        yield from (1, 2, 3)


def _later(iterator, count):
    for _ in range(count):
        next(iterator)
    return iterator


@pytest.mark.parametrize(
    ("held", "draw"),
    [
        (torch.Generator(), lambda held: torch.rand(2, generator=held)),
        (np.random.default_rng(1), lambda held: held.random()),
        (np.random.RandomState(1), lambda held: held.rand()),
        (random.Random(1), lambda held: held.random()),
        ([random.Random(1)], lambda held: held[0].random()),
        ({"a": random.Random(1)}, lambda held: held["a"].random()),
        (cycle([1, 2, 3]), next),
        (_later(cycle([1, 2, 3]), 4), next),
        (iter(range(10)), next),
        (map(str, cycle([1, 2])), next),
        (zip(iter([1, 2, 3, 4, 5, 6]), cycle("ab"), strict=False), next),
        (islice(cycle([1, 2]), 10), next),
        (_generated(), next),
    ],
)
def test_generators_and_iterators_that_advance_are_found(held, draw):
    def step(module, rows):
        draw(module.noise)

    module = _Steps()
    module.noise = held
    stored = StoredValues({"": vars(module)})
    stored.begin()
    stored.end(4)
    assert not stored.kept().drawn
    stored.begin()
    draw(held)
    stored.end(4)
    ((name, kind),) = stored.kept().drawn
    assert name.startswith("noise") and kind


def test_the_warnings_name_them():
    rows = [Kept(), Kept((("best", 5.0, (5.0, 3.0)), ("seen", 4, (2, 2))), (("noise", "cycle"),))]
    with (
        pytest.warns(UserWarning, match="stores 5 in 'best' for a batch, and 5 and 3 for its"),
        pytest.warns(UserWarning, match="draws from 'noise' \\(a cycle\\)"),
    ):
        warn_of_kept(rows)
