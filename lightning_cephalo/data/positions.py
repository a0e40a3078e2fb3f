"""Where an epoch's order of samples stands, and how a resumed run continues it.

An order follows from a seed, an epoch, the pass, and the generators' states when it began. So a
position is small, and depends on no plan, no number of ranks, and no prefetched batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import numpy as np

from lightning_cephalo.data.randomness import (
    generators_of,
    read_states,
    samplers_within,
    write_states,
)


@dataclass(frozen=True)
class Position:
    """A place in the passes over a loader, as a checkpoint keeps it.

    Attributes:
        epoch: epoch of the pass that runs or has ended; of a stream, the one it was dealt in.
        number: number of the pass: in the epoch; of a stream, since it was dealt.
        step: global steps of the pass that are trained.
        items: samples (or lists of a batch sampler) in a global step.
        start: states of generators and samplers when the pass began.
        now: their states at the checkpoint; workers may have read ahead.
    """

    epoch: int
    number: int
    step: int
    items: int
    start: list[Any]
    now: list[Any]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, which ``torch.load(weights_only=True)`` reads."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Position:
        """Returns the position of `as_dict`."""
        return cls(**saved)


class Continue(Enum):
    """How a resumed run goes on from a `Position`."""

    INSIDE = "in the pass"
    AT_END = "Lightning first ends the epoch, without another step"
    BEHIND = "with the next epoch"


def states_of(source: object, others: Sequence[Any] = ()) -> list[Any]:
    """Returns the states of generators and stateful samplers within ``source``, as plain values."""
    generators = [*generators_of(source), *others]
    states = [_plain(state) for state in read_states(generators)]
    return [*states, *(sampler.state_dict() for sampler in _stateful_within(source))]


def restore_states(source: object, states: Sequence[Any], others: Sequence[Any] = ()) -> None:
    """Sets what `states_of` has read."""
    generators, samplers = [*generators_of(source), *others], _stateful_within(source)
    if len(states) != len(generators) + len(samplers):
        raise ValueError(
            f"Expects the generators and stateful samplers of the checkpoint, {len(states)}, but"
            f" the loader has {len(generators) + len(samplers)}. Build the same sampler."
        )
    write_states(generators, [_restored(state) for state in states[: len(generators)]])
    for sampler, state in zip(samplers, states[len(generators) :], strict=True):
        sampler.load_state_dict(state)


def _stateful_within(source: object) -> list[Any]:
    return [
        sampler
        for sampler in samplers_within(source)
        if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
    ]


def _plain(state: Any) -> Any:
    """Returns a state without numpy's arrays, which a checkpoint of weights may not hold."""
    if isinstance(state, np.ndarray):
        return {"numpy": state.tolist(), "dtype": str(state.dtype)}
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(_plain(value) for value in state)
    return state


def _restored(state: Any) -> Any:
    if isinstance(state, dict):
        if set(state) == {"numpy", "dtype"}:
            return np.array(state["numpy"], dtype=cast(Any, state["dtype"]))
        return {name: _restored(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(_restored(value) for value in state)
    return state
