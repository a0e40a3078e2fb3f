"""Containers that modules hold show each microbatch what it has left, and are one afterwards."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch

from lightning_cephalo.execution.shared_containers import SharedContainers, is_container


class Counter:
    def __init__(self) -> None:
        self.count = 0


def test_each_microbatch_starts_from_the_same_contents_and_means_are_stored():
    history: dict[str, Any] = {"a": [1.0], "b": []}
    counter, recent, array = Counter(), deque([1], maxlen=2), np.zeros(2)
    containers = SharedContainers()
    containers.begin(2)
    for name, value in {"h": history, "c": counter, "r": recent, "x": array}.items():
        for inner, each in containers.note(name, value):
            containers.note(inner, each)
    for microbatch in range(2):
        containers.resume(microbatch)
        assert (history, counter.count, list(recent)) == ({"a": [1.0], "b": []}, 0, [1])
        history["a"].append(float(microbatch))
        history["b"].append(10.0 + microbatch)
        counter.count += 1
        recent.append(2)
        array += 1
        assert containers.pause(microbatch) is None
    containers.resume(1)
    assert history == {"a": [1.0, 1.0], "b": [11.0]}
    assert containers.pause(1) is None
    leaves = {name: values for name, values in containers.leaves() if name != "x"}
    assert leaves == {
        "len(h['a'])": [2, 2],
        "h['a'][1]": [0.0, 1.0],
        "len(h['b'])": [1, 1],
        "h['b'][0]": [10.0, 11.0],
        "len(c)": [1, 1],
        "c.count": [1, 1],
        "len(r)": [2, 2],
        "r[1]": [2, 2],
    }
    containers.finish({"h['a'][1]": 0.25, "h['b'][0]": 10.25})
    assert history == {"a": [1.0, 0.25], "b": [10.25]}
    assert (counter.count, list(recent), list(array)) == (1, [1, 2], [1.0, 1.0])


@pytest.mark.parametrize(
    "make",
    [lambda: iter([1, 2]), lambda: (each for each in range(3)), lambda: iter({1: 2})],
)
def test_an_iterator_that_a_microbatch_advances_is_named(make):
    containers, iterator = SharedContainers(), make()
    containers.begin(2)
    containers.note("rates", iterator)
    assert containers.pause(0) is None
    next(iterator)
    name, _ = containers.pause(0) or ("", "")
    assert name == "rates"


def test_contents_that_a_hook_changes_belong_to_all_microbatches_or_are_named():
    same, differing = [0], [0]
    containers = SharedContainers()
    containers.begin(2)
    containers.note("same", same)
    containers.note("differing", differing)
    for microbatch in (1, 0):
        containers.resume(microbatch)
        same.append(1)
        differing.append(microbatch)
        if microbatch:
            containers.pause(microbatch)
    before = containers.shown()
    same.append(2)
    assert containers.spread(before, lambda one, other: one == other) is None
    before = containers.shown()
    differing.append(3)
    assert containers.spread(before, lambda one, other: one == other) == "differing"
    containers.pause(0)
    containers.resume(1)
    assert same == [0, 1, 2]


def test_objects_of_frameworks_are_no_containers():
    assert is_container(Counter()) and is_container([])
    assert not any(map(is_container, (np.float64(1.0), "text", len, Counter)))


@pytest.mark.parametrize("drawn", [0, 4])
def test_a_cycle_that_a_microbatch_advances_is_named_in_each_round(drawn):
    containers, turns = SharedContainers(), cycle([1, 2, 3])
    for _ in range(drawn):
        next(turns)
    containers.begin(2)
    containers.note("turns", turns)
    assert containers.pause(0) is None
    next(turns)
    assert containers.pause(1) == ("turns", "cycle")


def test_a_generator_that_a_microbatch_draws_from_is_named_once():
    containers, noise = SharedContainers(), torch.Generator()
    for step in range(2):
        containers.begin(2)
        containers.note("noise", noise)
        containers.pause(0)
        torch.rand(1, generator=noise)
        with pytest.warns(UserWarning, match="'noise'") if not step else nullcontext():
            containers.pause(1)
