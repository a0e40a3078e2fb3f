"""The passes over a loader: what they deal, where one stands, and how a resumed run continues it.

A pass follows from a seed, an epoch, its number, and the generators' states when it began. So a
position is small, and depends on no plan, no number of ranks, and no prefetched batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from lightning_cephalo.data.containers import mapped
from lightning_cephalo.data.dealing import Dealing
from lightning_cephalo.data.randomness import (
    SeparateRandomness,
    generators_of,
    read_states,
    samplers_within,
    write_states,
)


@dataclass(frozen=True)
class Position:
    """A place in the passes over a loader; a checkpoint keeps ``vars()`` of it, plain values."""

    epoch: int  # of the pass that runs or has ended
    number: int  # of the pass in the epoch
    step: int  # global steps of the pass that are trained
    items: int  # samples (or lists of a batch sampler) in a global step
    start: list[Any]  # states of generators when the pass began
    now: list[Any]  # their states at the checkpoint; workers may have read ahead


class Continue(Enum):
    """How a resumed run goes on from a `Position`."""

    INSIDE = "in the pass"
    AT_END = "Lightning first ends the epoch, without another step"
    BEHIND = "with the next epoch"


class Pass:
    """One pass over a loader."""

    def __init__(self, entropy: tuple[int, ...], skipped: int, sizes: tuple[int, ...]) -> None:
        self.randomness = SeparateRandomness(entropy)
        self.skipped = skipped  # steps that a run that is resumed has trained
        self.steps = 0  # that were dealt, prefetched and skipped ones included
        # of steps that were dealt, but not yielded: whether this rank has no samples
        self.idle = deque[bool]()
        self._sizes: list[tuple[float, tuple[int, ...]]] = [(0.0, sizes)]

    def sizes_of(self, step: float) -> tuple[int, ...]:
        """Returns every rank's samples in a step, in proportion."""
        return next(sizes for start, sizes in reversed(self._sizes) if start <= step)

    def change(self, sizes: tuple[int, ...], from_step: float) -> None:
        """Deals other sizes from a step on, and in all later passes."""
        earlier = [each for each in self._sizes if each[0] < from_step]
        self._sizes = [*earlier, (from_step, sizes)]


class Passes:
    """The passes over a loader; equal on every rank.

    ``items`` is the samples of a global step, or lists of a batch sampler; 0 if they vary.
    ``source`` is the loader or sampler whose generators are saved.
    """

    def __init__(self, dealing: Dealing, items: int, source: object) -> None:
        self.seed, self.epoch, self.items = dealing.seed, dealing.epoch, items
        self.begun = 0  # passes, in all epochs
        self.running = Pass((), 0, dealing.sizes)  # the latest one
        # epochs that Lightning counts more than were trained; None: the next one that it sets tells
        self._epochs_ahead: int | None = 0
        self._source = source
        # A loader that restarts within an epoch (CombinedLoader's max_size_cycle) draws a new
        # order, as a torch sampler does; DistributedSampler would repeat the last order.
        self._number = 0
        self._latest: Position | None = None  # the pass that has begun, or that is resumed
        self._resumed: tuple[int, list[Any] | None] = (0, None)  # steps that it skips, its states
        self._at_next_epoch: list[Any] | None = None  # states

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that of ``epoch``; also sets it in the user's samplers."""
        if self._epochs_ahead is None:
            self._epochs_ahead = epoch - self.epoch
        self._set_epoch(epoch - self._epochs_ahead)

    def _set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._number = epoch, 0
            if self._at_next_epoch is not None:
                self._restore(self._at_next_epoch)  # the loader may have drawn since
                self._at_next_epoch, self._resumed = None, (0, None)
        for sampler in samplers_within(self._source):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)

    def begin(self) -> Pass:
        """Begins a pass."""
        self.begun += 1
        (skipped, states), self._resumed = self._resumed, (0, None)
        if states is not None:
            self._restore(states)  # the loader may have drawn from its sampler's generator since
        states = self._states()
        self._latest = Position(self.epoch, self._number, 0, self.items, states, states)
        entropy = (self.seed % 2**64, self.epoch, self._number)
        self._number += 1
        # a new one: an unfinished iterator of another pass must not write into it
        self.running = Pass(entropy, skipped, self.running.sizes_of(math.inf))
        return self.running

    def dealt_steps(self, trained: int, ahead: int) -> int | None:
        """Returns the dealt steps of the latest pass; None if only the next one can change.

        That is so if not only training has iterated. ``ahead`` steps may have been read already.
        """
        dealt = self.running.steps
        known = not self.begun or trained <= dealt <= trained + ahead
        return dealt if known else None

    def continue_at(self, position: Position, way: Continue, *, undoes_draws: bool = False) -> None:
        """Makes the next pass begin where another run has stopped; ValueError: other generators.

        ``undoes_draws``: the loader draws now, and would not have drawn between two epochs.
        """
        self._restore(position.now)
        self._set_epoch(position.epoch + (way is Continue.BEHIND))
        self._epochs_ahead = None
        if way is Continue.BEHIND:
            self._resumed = 0, position.now if undoes_draws else None
            return
        self._latest, self._number = position, position.number
        self._resumed = position.step, position.start
        self._at_next_epoch = position.now if way is Continue.AT_END else None

    def position(
        self, trained: int, length: int | None, *, cycles: bool, ahead: int
    ) -> Position | None:
        """Returns where training stands in the latest pass; None if that is unknown.

        It is if something else than training has iterated, or if the loader ``cycles`` (begins
        anew within an epoch) and has no ``length``. ``ahead`` steps may have been read already.
        """
        step = trained
        if cycles and trained:
            if not length:
                return None
            step = (trained - 1) % length + 1
        least = step if length is None else min(step, length)
        if self.begun and not least <= self.running.steps <= step + ahead:
            return None
        now = self._states()
        if self._latest is None:  # the steps are those of an earlier epoch
            return Position(self.epoch - bool(step), 0, step, self.items, now, now)
        return replace(self._latest, step=step, now=now)

    def _states(self) -> list[Any]:
        """Returns states without numpy's types, which a checkpoint of weights may not hold."""

        def plain(_: object, leaf: Any) -> Any:
            return leaf.tolist() if isinstance(leaf, np.ndarray | np.generic) else leaf

        plain_states: list[Any] = mapped(read_states(generators_of(self._source)), plain)
        return plain_states

    def _restore(self, states: Sequence[Any]) -> None:
        write_states(generators_of(self._source), states)
