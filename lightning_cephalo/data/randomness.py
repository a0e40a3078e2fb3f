"""Random states for samplers: separate from training's, and equal on all ranks.

Ranks that trained different numbers of microbatches have drawn different amounts from the global
generators. Samplers that drew from these would differ between ranks, and slices of one global batch
would overlap. So samplers run under separate global states, and their own generators start equally.
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


class SwappedRandomness:
    """Separate global CPU random states in a ``with`` block; entering again continues them."""

    def __init__(self, entropy: Sequence[int]) -> None:
        words = np.random.SeedSequence(entropy).generate_state(3, np.uint64)
        torch_generator = torch.Generator().manual_seed(int(words[0]) >> 1)
        # RandomState seeds are 32 bits wide
        numpy_state = np.random.RandomState(int(words[1]) % 2**32).get_state()
        self._states = (
            torch_generator.get_state(),
            numpy_state,
            random.Random(int(words[2])).getstate(),
        )
        self._outside: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> None:
        self._outside = _read_global()
        _write_global(self._states)

    def __exit__(self, *error: object) -> None:
        assert self._outside is not None
        self._states = _read_global()
        _write_global(self._outside)
        self._outside = None


def samplers_within(source: object) -> list[object]:
    """Returns ``source`` and the samplers that it wraps, outermost first, each once."""
    found: list[object] = []

    def visit(value: object) -> None:
        if value is None or any(value is seen for seen in found):
            return
        found.append(value)
        attributes = getattr(value, "__dict__", {})
        for name, inner in attributes.items():
            if isinstance(inner, Sampler) or name in _SAMPLER_ATTRIBUTES:
                visit(inner)
            elif isinstance(inner, list | tuple):
                for item in inner:
                    if isinstance(item, Sampler):
                        visit(item)

    visit(source)
    return found


def generators_of(source: object) -> list[Any]:
    """Returns the samplers' generators in a fixed order, without torch's default one."""
    found: list[Any] = []
    for sampler in samplers_within(source):
        for value in getattr(sampler, "__dict__", {}).values():
            if (
                isinstance(value, GENERATOR_TYPES)
                and value is not torch.default_generator
                and not any(value is seen for seen in found)
            ):
                found.append(value)
    return found


def _state_access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    bits = generator.bit_generator
    return (lambda: bits.state), (lambda state: setattr(bits, "state", state))


def read_states(generators: Iterable[Any]) -> list[Any]:
    """Returns the states of ``generators``, picklable."""
    return [_state_access(generator)[0]() for generator in generators]


def write_states(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Sets ``generators``; raises ValueError if ranks built samplers with other ones."""
    if len(generators) != len(states):
        raise ValueError(
            f"Expects samplers with the same generators on every rank, but this rank's hold "
            f"{len(generators)} and rank 0's {len(states)}. Build the same sampler on every rank."
        )
    for generator, state in zip(generators, states, strict=True):
        _state_access(generator)[1](state)
