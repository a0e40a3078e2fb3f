"""States of random generators that are read where they have changed only."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_cephalo.accelerator.cpu import Cpu
from lightning_cephalo.accelerator.generators import (
    GeneratorsOfSteps,
    read_generators,
    write_generators,
)

CPU = Cpu(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    states = read_generators(CPU)
    yield
    write_generators(CPU, states)


def _consume_numpys_second() -> None:
    if np.random.get_state()[3]:
        np.random.normal()


def _give_numpys_second_again() -> None:
    name, key, position, _, _ = np.random.get_state()
    np.random.set_state((name, key, position, 1, 0.25))


def _plain(states: tuple[Any, ...]) -> Any:
    torchs, numpys, pythons = states
    own = {**numpys, "state": {k: np.asarray(v).tolist() for k, v in numpys["state"].items()}}
    return [state.tolist() for state in torchs], own, pythons


DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "one of two normal numbers": lambda: random.gauss(0, 1),
    "the other one": lambda: random.gauss(0, 1),
    "shuffle": lambda: random.shuffle(list(range(5))),
    "seed": lambda: random.seed(3),
    "setstate": lambda: random.setstate(random.Random(8).getstate()),
    "numpy": np.random.rand,
    "one of numpy's two normal numbers": np.random.normal,
    "numpy's other one": _consume_numpys_second,
    "numpy's other one, set": _give_numpys_second_again,
    "numpy's other one, set to another": lambda: np.random.set_state(
        (*np.random.get_state()[:4], 0.5)
    ),
    "numpy's seed": lambda: np.random.seed(3),
    "torch": lambda: torch.rand(3),
}


def test_whatever_draws_is_seen() -> None:
    generators = GeneratorsOfSteps(CPU)
    random.seed(1)
    np.random.seed(1)
    for name, draw in DRAWS.items():
        before = _plain(generators.read())
        draw()
        after = _plain(generators.read())
        assert after == _plain(read_generators(CPU)), name
        assert after != before, name


def test_states_are_read_anew_where_something_was_drawn_only() -> None:
    generators = GeneratorsOfSteps(CPU)
    first = generators.read()
    second = generators.read()
    assert second[1] is first[1] and second[2] is first[2]
    random.random()
    third = generators.read()
    assert third[1] is first[1] and third[2] is not first[2]
    np.random.rand()
    fourth = generators.read()
    assert fourth[1] is not first[1] and fourth[2] is third[2]


def test_generators_of_another_kind_are_always_read() -> None:
    kept = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(4))
        generators = GeneratorsOfSteps(CPU)
        first = generators.read()
        np.random.rand()
        assert generators.read()[1]["state"] != first[1]["state"]
    finally:
        np.random.set_bit_generator(kept)
