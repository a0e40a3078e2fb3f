"""Random states for samplers: separate from training's, and equal on all ranks.

Ranks have drawn different amounts from the global generators in training. Samplers that drew from
these would differ, and slices of one global batch would overlap. So samplers run under separate
global states, and their own generators start equally.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_SAMPLER_ATTRIBUTES = ("sampler", "_sampler", "batch_sampler", "base_sampler")
# the objects whose methods ``np.random.rand`` and ``random.random`` are
_GLOBAL: tuple[Any, ...] = (
    torch.default_generator,
    np.random.rand.__self__,  # type: ignore[attr-defined]
    random.random.__self__,  # type: ignore[attr-defined]
)


@contextmanager
def preserved_randomness(others: Sequence[Any] = ()) -> Generator[None, None, None]:
    """Restores the CPU generators of torch, numpy and ``random``, and others, afterwards."""
    held = (*_GLOBAL, *others)
    states = read_states(held)
    try:
        yield
    finally:
        write_states(held, states)


class SeparateRandomness:
    """Separate global CPU random states, which follow from ``entropy``."""

    def __init__(self, entropy: Sequence[int]) -> None:
        words = [int(word) for word in np.random.SeedSequence(entropy).generate_state(3, np.uint64)]
        seeded = np.random.RandomState(words[1] % 2**32)  # whose seeds are 32 bits wide
        torchs = torch.Generator().manual_seed(words[0] >> 1)
        self._states = read_states((torchs, seeded, random.Random(words[2])))

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Swaps the states in for a ``with`` block; the next block continues them."""
        with preserved_randomness():
            write_states(_GLOBAL, self._states)
            try:
                yield
            finally:
                self._states = read_states(_GLOBAL)


def samplers_within(source: object, found: list[Any] | None = None) -> list[Any]:
    """Returns ``source`` and the samplers that it wraps, outermost first, each once."""
    found = [] if found is None else found
    if source is None or any(source is seen for seen in found):
        return found
    found.append(source)
    for name, inner in getattr(source, "__dict__", {}).items():
        for item in inner if isinstance(inner, list | tuple) else (inner,):
            if isinstance(item, Sampler) or (item is inner and name in _SAMPLER_ATTRIBUTES):
                samplers_within(item, found)
    return found


def generators_of(source: object) -> list[Any]:
    """Returns the samplers' generators in a fixed order, without torch's default one."""
    held = {
        id(value): value
        for sampler in samplers_within(source)
        for value in getattr(sampler, "__dict__", {}).values()
        if isinstance(value, GENERATOR_TYPES) and value is not torch.default_generator
    }
    return list(held.values())


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Returns what reads a generator's state, and what sets it."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    return generator.get_state, generator.set_state


def read_states(generators: Iterable[Any]) -> list[Any]:
    """Returns the states of ``generators``, picklable."""
    return [_access(generator)[0]() for generator in generators]


def write_states(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Sets ``generators``; raises ValueError for states of another number of them."""
    if len(generators) != len(states):
        raise ValueError(
            f"Expects samplers with {len(states)} generators, but these have {len(generators)}."
            " Build the same sampler on every rank, and in a run that is resumed."
        )
    for generator, state in zip(generators, states, strict=True):
        _access(generator)[1](state)
