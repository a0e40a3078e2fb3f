"""The passes over a loader: what they deal, where one stands, and how a resumed run continues it.

Every rank runs the user's own sampler with the same result, and takes its slice, so that a step has
the samples of one device. A pass follows from a seed, an epoch, its number, and the generators'
states when it began. So a position depends on no plan, number of ranks, or prefetched batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, islice
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_cephalo.data.batch_layout import BatchLayout, mapped
from lightning_cephalo.data.randomness import (
    SeparateRandomness,
    generators_of,
    read_states,
    samplers_within,
    write_states,
)
from lightning_cephalo.data.shares import deal

Broadcast = Callable[[Any], Any]
"""A collective that returns rank 0's object on every rank."""

Gather = Callable[[list[float]], list[list[float]]]
"""A collective that returns every rank's numbers, in rank order; called in the main process."""

# they draw from global generators, if at all, before their first item
_DRAW_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True)
class Dealing:
    """How the samples of a loader are dealt to the ranks."""

    rank: int
    sizes: tuple[int, ...]  # of every rank's part of a step, in proportion
    seed: int
    broadcast: Broadcast
    gather: Gather
    epoch: int = 0
    trains: bool = True
    # a step with too few samples for that is left out: every rank must run the code of each step
    every_rank: bool = False
    # over all ranks; None: the loader's batch size times the ranks
    global_batch_size: int | None = None
    layout: BatchLayout = field(default_factory=BatchLayout)  # of ready batches


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
        epoch -= self._epochs_ahead
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
        """Returns the dealt steps, at most ``ahead`` of training; None if others have iterated."""
        dealt = self.running.steps
        return dealt if not self.begun or trained <= dealt <= trained + ahead else None

    def continue_at(self, position: Position, way: Continue, *, undoes_draws: bool = False) -> None:
        """Makes the next pass begin where another run has stopped; ValueError: other generators.

        ``undoes_draws``: the loader draws now, and would not have drawn between two epochs.
        """
        self._restore(position.now)
        self._epochs_ahead = 0
        self.set_epoch(position.epoch + (way is Continue.BEHIND))
        self._epochs_ahead = None
        if way is Continue.BEHIND:
            self._resumed = 0, position.now if undoes_draws else None
            return
        self._latest, self._number = position, position.number
        self._resumed = position.step, position.start or None
        self._at_next_epoch = position.now if way is Continue.AT_END else None

    def position(
        self, trained: int, length: int | None, *, cycles: bool, ahead: int
    ) -> Position | None:
        """Returns where training stands, reading ``ahead`` of it; None if that is unknown.

        A loader that ``cycles`` begins anew within an epoch.
        """
        if cycles and trained and not length:
            return None
        step = (trained - 1) % length + 1 if cycles and trained and length else trained
        least = step if length is None else min(step, length)
        if self.begun and not least <= self.running.steps <= step + ahead:
            return None
        now = self._states()
        if self._latest is None:  # the steps are those of an earlier epoch
            start = now if step else []  # no pass has begun, before which the loader may draw
            return Position(self.epoch - bool(step), 0, step, self.items, start, now)
        return replace(self._latest, step=step, now=now)

    def _states(self) -> list[Any]:
        """Returns states without numpy's types, which a checkpoint of weights may not hold."""

        def plain(_: object, leaf: Any) -> Any:
            return leaf.tolist() if isinstance(leaf, np.ndarray | np.generic) else leaf

        return list(mapped(read_states(generators_of(self._source)), plain))

    def _restore(self, states: Sequence[Any]) -> None:
        write_states(generators_of(self._source), states)


class RankBatchSampler(Sampler[list[Any]]):
    """Yields this rank's keys of each global step; a drop-in ``batch_sampler`` for a DataLoader.

    A rank without samples in a step gets one key that does not count (`Pass.idle`). The user's
    sampler is read lazily, so that an endless one works.
    """

    def __init__(
        self, lists: Iterable[list[Any]], dealing: Dealing, *, per_step: int = 1, items: int
    ) -> None:
        self.lists, self.per_step, self._rank = lists, per_step, dealing.rank
        self._fewest = len(dealing.sizes) if dealing.every_rank else 1
        self._draws_at_once = type(getattr(lists, "sampler", None)) in _DRAW_AT_ONCE
        # Lightning sets the epoch of what is called sampler; it must be in the __dict__, which its
        # _IndexBatchSamplerWrapper (predict) copies.
        self.sampler = self.passes = Passes(dealing, items, lists)

    def __iter__(self) -> Iterator[list[Any]]:
        own = self.passes.begin()
        with own.randomness.active():
            lists = iter(self.lists)
            for _ in islice(lists, own.skipped * self.per_step):
                pass
        own.steps, has_drawn = own.skipped, False
        while True:
            with nullcontext() if has_drawn else own.randomness.active():
                keys = list(chain.from_iterable(islice(lists, self.per_step)))
            has_drawn = self._draws_at_once
            if not keys:
                return
            if len(keys) < self._fewest:
                warn_of_too_few_samples(len(keys), self._fewest)
                continue
            dealt = deal(len(keys), own.sizes_of(own.steps))
            own.steps += 1
            start = sum(dealt[: self._rank])
            own.idle.append(not dealt[self._rank])
            yield keys[start : start + dealt[self._rank]] or keys[-1:]

    def __len__(self) -> int:
        return -(-len(self.lists) // self.per_step)  # type: ignore[arg-type]


def warn_of_too_few_samples(samples: int, ranks: int) -> None:
    """Warns of a step that is left out, since every rank must have a sample."""
    rank_zero_warn(
        f"A step has {samples} samples for {ranks} ranks. With manual optimization every rank runs"
        " training_step, so these samples are left out. Another batch_size, or"
        " DataLoader(drop_last=True), avoids this."
    )
