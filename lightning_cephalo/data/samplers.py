"""Samplers that slice one global order of samples by rank.

Every rank runs the user's own sampler with the same result, and takes its slice. So the samples of
step t over all ranks are those of one device with the global batch size, in the same order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, count, islice
from typing import Any

from torch.utils.data import Sampler

from lightning_cephalo.data.containers import known_length
from lightning_cephalo.data.dealing import Pass, check_sizes
from lightning_cephalo.data.positions import Continue, Position, restore_states, states_of
from lightning_cephalo.data.randomness import (
    SwappedRandomness,
    draws_from_global_generators,
    samplers_within,
)
from lightning_cephalo.data.shares import deal


def too_few_samples(step: str, samples: int, ranks: int) -> str:
    """Returns the warning of a step that is left out, since every rank must have a sample."""
    return (
        f"{step} has {samples} samples for {ranks} ranks. With manual optimization every rank runs"
        " training_step, so these samples are left out. Another batch_size, or"
        " DataLoader(drop_last=True), avoids this."
    )


class GlobalOrder(Sampler[Any]):
    """The order in which all ranks together visit the samples; the same on every rank.

    A sampler that draws from global generators runs under states seeded from ``(seed, epoch,
    pass)``. It is read lazily, so that an endless one works; its attributes show here.
    """

    def __init__(self, source: Iterable[Any], *, seed: int, epoch: int = 0) -> None:
        self.source = source
        self.seed = seed % 2**64
        self.epoch = epoch
        # A loader that restarts within an epoch (CombinedLoader's max_size_cycle) draws a new
        # order, as a torch sampler does; DistributedSampler would repeat the last order.
        self.passes = 0
        self.epochs_ahead = 0
        self._begun: tuple[int, int, list[Any]] | None = None
        self._resumed: tuple[Position, Continue] | None = None
        self._undoes_draws = False
        self._must_learn_epochs = False

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for attributes before __init__ has set `source`
        if name.startswith("__") or "source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.source, name)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass draw the order of ``epoch``; also sets it in the user's samplers."""
        if self._must_learn_epochs:  # the first epoch that Lightning sets is the continued one
            self._must_learn_epochs = False
            self.epochs_ahead = epoch - self.epoch
        self._set_epoch(epoch - self.epochs_ahead)

    def _set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.passes = 0
            if self._resumed is not None and self._resumed[1] is Continue.AT_END:
                # undoes what the loader has drawn for the pass that yielded nothing
                restore_states(self.source, self._resumed[0].now)
                self._resumed = None
        for sampler in samplers_within(self.source):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def steps(self, size: int) -> Iterator[tuple[int, list[Any]]]:
        """Yields the steps of a pass and their ``size`` items; the last may have fewer."""
        skipped = 0
        if self._resumed is not None:
            position, way = self._resumed
            if way is Continue.AT_END:
                return
            self._resumed = None
            if way is Continue.INSIDE:
                skipped, self.passes = position.step, position.number
                # the loader may have drawn from its sampler's generator since
                restore_states(self.source, position.start)
            elif self._undoes_draws:
                restore_states(self.source, position.now)
        self._begun = (self.epoch, self.passes, states_of(self.source))
        entropy = (self.seed, self.epoch, self.passes)
        self.passes += 1
        randomness = (
            SwappedRandomness(entropy)
            if draws_from_global_generators(self.source)
            else nullcontext()
        )
        with randomness:
            items = iter(self.source)
            for _ in islice(items, skipped * size):
                pass
        for number in count(skipped):
            with randomness:
                step = list(islice(items, size))
            if not step:
                return
            yield number, step

    def continue_at(self, position: Position, way: Continue, *, undoes_draws: bool = False) -> None:
        """Makes the next pass begin where another run has stopped."""
        restore_states(self.source, position.now)
        self._set_epoch(position.epoch + (way is Continue.BEHIND))
        self._resumed, self._undoes_draws = (position, way), undoes_draws
        self._must_learn_epochs = True

    @property
    def has_begun(self) -> bool:
        """Whether a pass has begun."""
        return self._begun is not None

    def position(self, step: int, items: int) -> Position:
        """Returns the position in the latest pass."""
        now = states_of(self.source)
        if self._begun is not None:
            epoch, number, start = self._begun
        elif self._resumed is not None and self._resumed[1] is not Continue.BEHIND:
            resumed = self._resumed[0]
            epoch, number, start = resumed.epoch, resumed.number, resumed.start
        else:  # the steps are those of an earlier epoch
            epoch, number, start = self.epoch - bool(step), 0, now
        return Position(epoch, number, step, items, start, now)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(step for _, step in self.steps(1))

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]


class RankBatchSampler(Sampler[list[Any]]):
    """Yields this rank's keys of each global step; a drop-in ``batch_sampler`` for a DataLoader.

    It yields ``[]`` in a step without samples for this rank, so that all take the same number.

    Args:
        order: the global order of keys, or of lists of keys if ``lists_per_step`` is given.
        drop_last: drop a smaller last step. Ignored with ``lists_per_step``.
        lists_per_step: for a custom batch sampler, the number of its consecutive lists in one
            global step. They are dealt in proportion to ``batch_sizes``, whatever their lengths.
        every_rank: give every rank a sample in each step; drop a last step with too few for that.

    Attributes:
        sampler: the `GlobalOrder`; Lightning calls its ``set_epoch``.
        original: the user's loader that was rebuilt with this sampler, or None; not pickled.
    """

    def __init__(
        self,
        order: GlobalOrder,
        *,
        rank: int,
        batch_sizes: Sequence[int],
        drop_last: bool = False,
        lists_per_step: int | None = None,
        every_rank: bool = False,
    ) -> None:
        # An instance attribute, not a property: Lightning's _IndexBatchSamplerWrapper (predict)
        # copies only the __dict__, and must find `sampler` there.
        self.sampler = order
        self.rank = rank
        self.drop_last = drop_last
        self.lists_per_step = lists_per_step
        self.every_rank = every_rank
        self._has_warned = False
        self.passes = 0
        self.original: object | None = None
        self._ranks, self._whole = len(batch_sizes), sum(batch_sizes)
        check_sizes(tuple(batch_sizes), rank)
        self._pass = Pass(tuple(batch_sizes))

    def change_batch_sizes(self, batch_sizes: Sequence[int], *, from_step: float) -> None:
        """Deals other sizes from a step of the latest pass on, and in all later passes.

        The samples of a step over all ranks stay the same. Sizes that sum to another number than
        before are proportions. Prefetched steps must come before ``from_step``.
        """
        sizes = tuple(batch_sizes)
        if self.lists_per_step is None and sum(sizes) != self._whole:
            sizes = deal(self._whole, sizes)
        self._pass.change(sizes, from_step)

    def dealt_steps(self, trained: int, ahead: int) -> int | None:
        """Returns the dealt steps of the latest pass; None if not only training has iterated."""
        dealt = self._pass.steps
        return dealt if not self.passes or trained <= dealt <= trained + ahead else None

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the order; Lightning calls it if this is a loader's ``sampler``."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        # a new one: an unfinished iterator of another pass must not write into it
        own = self._pass = Pass(self._pass.latest)
        self.passes += 1
        for number, step in self.sampler.steps(self.items):
            if self.lists_per_step is None:
                keys = step
                if self.drop_last and len(keys) < self._whole:
                    return
            else:
                keys = list(chain.from_iterable(step))
            if self.every_rank and len(keys) < self._ranks:
                self._warn(len(keys))
                return
            dealt = deal(len(keys), own.sizes_of(number))
            own.steps = number + 1
            start = sum(dealt[: self.rank])
            yield keys[start : start + dealt[self.rank]]

    def warn_of_samples_left_out(self) -> None:
        """Warns before a pass if its last step has too few samples for every rank; else then."""
        if not self.every_rank or self.drop_last or self.lists_per_step is not None:
            return
        samples = known_length(self.sampler)
        rest = 0 if samples is None else samples % self._whole
        if 0 < rest < self._ranks:
            self._warn(rest)

    def _warn(self, samples: int) -> None:
        if self.rank or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            too_few_samples("The last step of an epoch", samples, self._ranks),
            stacklevel=2,
        )

    def __len__(self) -> int:
        items = len(self.sampler)
        is_left_out = self.drop_last or (self.every_rank and items % self.items < self._ranks)
        if self.lists_per_step is None and is_left_out:
            return items // self.items
        return -(-items // self.items)

    @property
    def items(self) -> int:
        """Samples of a global step over all ranks, or lists of a custom batch sampler."""
        return self.lists_per_step or self._whole

    def position(self, trained: int, *, cycles: bool, ahead: int) -> Position | None:
        """Returns where training stands in the latest pass; None if that is unknown.

        It is if something else than training has iterated, or if the loader ``cycles`` (begins
        anew within an epoch) and has no length. ``ahead`` steps may have been read already.
        """
        length = known_length(self)
        step = trained
        if cycles and trained:
            if not length:
                return None
            step = (trained - 1) % length + 1
        drawn = self._pass.steps
        least = step if length is None else min(step, length)
        if self.sampler.has_begun and not least <= drawn <= step + ahead:
            return None
        return self.sampler.position(step, self.items)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "original": None}
