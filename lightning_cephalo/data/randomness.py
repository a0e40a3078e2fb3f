"""Random states for samplers: separate from training's, and equal on all ranks.

Ranks that trained different numbers of microbatches have drawn different amounts from the global
generators. Samplers that drew from these would differ between ranks, and slices of one global batch
would overlap. So samplers run under separate global states, and their own generators start equally.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_SAMPLER_ATTRIBUTES = ("sampler", "_sampler", "batch_sampler", "base_sampler")


def _read_global() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _write_global(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@contextmanager
def preserved_randomness() -> Generator[None, None, None]:
    """Restores the CPU generators of torch, numpy and ``random`` afterwards."""
    states = _read_global()
    try:
        yield
    finally:
        _write_global(states)


class SeparateRandomness:
    """Separate global CPU random states, which follow from ``entropy``."""

    def __init__(self, entropy: Sequence[int]) -> None:
        words = np.random.SeedSequence(entropy).generate_state(3, np.uint64)
        self._states = (
            torch.Generator().manual_seed(int(words[0]) >> 1).get_state(),
            # RandomState seeds are 32 bits wide
            np.random.RandomState(int(words[1]) % 2**32).get_state(),
            random.Random(int(words[2])).getstate(),
        )

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Swaps the states in for a ``with`` block; the next block continues them."""
        with preserved_randomness():
            _write_global(self._states)
            try:
                yield
            finally:
                self._states = _read_global()


def samplers_within(source: object) -> list[Any]:
    """Returns ``source`` and the samplers that it wraps, outermost first, each once."""
    found: list[Any] = []

    def visit(value: object) -> None:
        if value is None or any(value is seen for seen in found):
            return
        found.append(value)
        for name, inner in getattr(value, "__dict__", {}).items():
            for item in inner if isinstance(inner, list | tuple) else (inner,):
                if isinstance(item, Sampler) or (item is inner and name in _SAMPLER_ATTRIBUTES):
                    visit(item)

    visit(source)
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


def read_states(generators: Iterable[Any]) -> list[Any]:
    """Returns the states of ``generators``, picklable."""
    return [_state_of(generator) for generator in generators]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def write_states(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Sets ``generators``; raises ValueError if ranks built samplers with other ones."""
    if len(generators) != len(states):
        raise ValueError(
            f"Expects samplers with the same generators on every rank, but this rank's hold "
            f"{len(generators)} and rank 0's {len(states)}. Build the same sampler on every rank."
        )
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.set_state(state)
