"""Whether batches of several loaders are divided alike, against all steps counted one by one."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from lightning_cephalo.data import deal
from lightning_cephalo.data.proportions import Batches, are_divided_alike

PLAN = (3, 3, 2)
PLANS = {4: (2, 1, 1), 8: PLAN, 16: (6, 6, 4)}  # by the size of the first loader


def steps_of(size: int, samples: int, drop_last: bool) -> list[int]:
    full, rest = divmod(samples, size)
    return [size] * full + [rest] * (rest > 0 and not drop_last)


def met(loaders: list[list[int]], mode: str) -> list[list[int]]:
    """The sizes of the batches that come together, step by step."""
    count = min(map(len, loaders)) if mode == "min_size" else max(map(len, loaders))
    if mode == "max_size":
        return [[own[step] for own in loaders if step < len(own)] for step in range(count)]
    return [[own[step % len(own)] for own in loaders] for step in range(count)]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_what_is_divided_alike_has_equal_parts_in_every_step(mode):
    said = []
    choices = list(product((4, 8, 16), (16, 20, 32), (True, False)))
    for one, other in product(choices, choices):
        counted, plan = [steps_of(*one), steps_of(*other)], PLANS[one[0]]
        parts = [
            [[Fraction(own, size) for own in deal(size, plan)] for size in together]
            for together in met(counted, mode)
        ]
        alike = all(part == step[0] for step in parts for part in step)
        found = [Batches.of(size, count, drop_last=drop) for size, count, drop in (one, other)]
        answer = are_divided_alike(found, mode, plan)
        assert alike or not answer, (one, other)
        said.append(answer == alike)
    assert sum(said) > 0.95 * len(said), "hardly ever too careful"


def test_what_is_unknown_is_not_alike_and_one_loader_is():
    endless = Batches.of(8, None, drop_last=False)
    assert not are_divided_alike([endless, endless], "min_size", PLAN)
    dropping = Batches.of(8, None, drop_last=True)
    assert are_divided_alike([dropping, dropping], "min_size", PLAN)
    unknown = Batches.of(None, 30, drop_last=True)
    assert not are_divided_alike([dropping, unknown], "min_size", PLAN)
    assert are_divided_alike([endless, endless], "sequential")
    assert are_divided_alike([unknown], "min_size")
