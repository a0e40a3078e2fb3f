"""Samplers that slice one global order of samples by rank.

Every rank runs the user's own sampler with the same result, and takes its slice. So the samples of
step t over all ranks are those of one device with the global batch size, in the same order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import Any

from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_cephalo.data.containers import known_length
from lightning_cephalo.data.dealing import Dealing
from lightning_cephalo.data.passes import Pass, Passes
from lightning_cephalo.data.shares import deal

# they draw from global generators, if at all, before their first item
_DRAW_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def too_few_samples(step: str, samples: int, ranks: int) -> str:
    """Returns the warning of a step that is left out, since every rank must have a sample."""
    return (
        f"{step} has {samples} samples for {ranks} ranks. With manual optimization every rank runs"
        " training_step, so these samples are left out. Another batch_size, or"
        " DataLoader(drop_last=True), avoids this."
    )


class GlobalOrder(Sampler[Any]):
    """The order in which all ranks together visit the samples; the same on every rank.

    The sampler runs under global random states seeded from ``(seed, epoch, pass)``, as it may
    draw from them. It is read lazily, so that an endless one works; its attributes show here.
    """

    def __init__(self, source: Iterable[Any], passes: Passes) -> None:
        self.source, self.passes = source, passes

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for attributes before __init__ has set `source`
        if name.startswith("__") or "source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.source, name)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass draw the order of ``epoch``; also sets it in the user's samplers."""
        self.passes.set_epoch(epoch)

    def steps(self, size: int) -> Iterator[tuple[Pass, list[Any]]]:
        """Yields the steps of a pass, by ``size`` items; the last may have fewer."""
        own = self.passes.begin()
        if own is None:
            return
        with own.randomness:
            items = iter(self.source)
            for _ in islice(items, own.skipped * size):
                pass
        own.steps = own.skipped
        randomness: AbstractContextManager[None] = own.randomness
        while True:
            with randomness:
                step = list(islice(items, size))
            if not step:
                return
            yield own, step
            if type(self.source) in _DRAW_AT_ONCE:
                randomness = nullcontext()

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(step for _, step in self.steps(1))

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]


class RankBatchSampler(Sampler[list[Any]]):
    """Yields this rank's keys of each global step; a drop-in ``batch_sampler`` for a DataLoader.

    It yields ``[]`` in a step without samples for this rank, so that all take the same number.

    Args:
        source: the user's sampler, or one of lists of keys if ``lists_per_step`` is given.
        drop_last: drop a smaller last step. Ignored with ``lists_per_step``.
        lists_per_step: for a custom batch sampler, the number of its consecutive lists in one
            global step. They are dealt in proportion to the sizes, whatever their lengths.

    Attributes:
        sampler: the `GlobalOrder`; Lightning calls its ``set_epoch``.
        original: the user's loader that was rebuilt with this sampler, or None; not pickled.
    """

    def __init__(
        self,
        source: Iterable[Any],
        dealing: Dealing,
        *,
        drop_last: bool = False,
        lists_per_step: int | None = None,
    ) -> None:
        self._rank, self._ranks, self._whole = dealing.rank, len(dealing.sizes), sum(dealing.sizes)
        self._every_rank = dealing.every_rank
        self.drop_last, self.lists_per_step = drop_last, lists_per_step
        self.passes = Passes(dealing, lists_per_step or self._whole, source)
        # An instance attribute, not a property: Lightning's _IndexBatchSamplerWrapper (predict)
        # copies only the __dict__, and must find `sampler` there.
        self.sampler = GlobalOrder(source, self.passes)
        self.original: object | None = None
        self._has_warned = False

    def __iter__(self) -> Iterator[list[Any]]:
        for own, step in self.sampler.steps(self.passes.items):
            keys = step if self.lists_per_step is None else list(chain.from_iterable(step))
            is_cut = self.lists_per_step is None and self.drop_last and len(keys) < self._whole
            if is_cut or (self._every_rank and len(keys) < self._ranks):
                if not is_cut:
                    self._warn(len(keys))
                return
            dealt = deal(len(keys), own.sizes_of(own.steps))
            own.steps += 1
            start = sum(dealt[: self._rank])
            yield keys[start : start + dealt[self._rank]]

    def warn_of_samples_left_out(self) -> None:
        """Warns before a pass if its last step has too few samples for every rank; else then."""
        if not self._every_rank or self.drop_last or self.lists_per_step is not None:
            return
        samples = known_length(self.sampler)
        rest = 0 if samples is None else samples % self._whole
        if 0 < rest < self._ranks:
            self._warn(rest)

    def _warn(self, samples: int) -> None:
        if self._rank or self._has_warned:
            return
        self._has_warned = True
        step = "The last step of an epoch"
        warnings.warn(too_few_samples(step, samples, self._ranks), stacklevel=2)

    def __len__(self) -> int:
        items, per_step = len(self.sampler), self.passes.items
        is_left_out = self.drop_last or (self._every_rank and items % per_step < self._ranks)
        if self.lists_per_step is None and is_left_out:
            return items // per_step
        return -(-items // per_step)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "original": None}
