"""A sampler that slices one global order of samples by rank.

Every rank runs the user's own sampler with the same result, and takes its slice. So the samples of
step t over all ranks are those of one device with the global batch size, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_cephalo.data.containers import known_length
from lightning_cephalo.data.dealing import Dealing, Idle
from lightning_cephalo.data.passes import Passes
from lightning_cephalo.data.shares import deal

# they draw from global generators, if at all, before their first item
_DRAW_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def warn_of_too_few_samples(samples: int, ranks: int) -> None:
    """Warns of a step that is left out, since every rank must have a sample."""
    rank_zero_warn(
        f"A step has {samples} samples for {ranks} ranks. With manual optimization every rank runs"
        " training_step, so these samples are left out. Another batch_size, or"
        " DataLoader(drop_last=True), avoids this."
    )


class RankBatchSampler(Sampler[list[Any]]):
    """Yields this rank's keys of each global step; a drop-in ``batch_sampler`` for a DataLoader.

    It yields `Idle` in a step without samples for this rank, so that all take the same number. The
    user's sampler runs under global random states seeded from ``(seed, epoch, pass)``, as it may
    draw from them. It is read lazily, so that an endless one works. With ``lists_per_step`` it
    yields lists of keys, so many of which are a global step; ``drop_last`` is then ignored.
    """

    def __init__(
        self,
        source: Iterable[Any],
        dealing: Dealing,
        *,
        drop_last: bool = False,
        lists_per_step: int | None = None,
    ) -> None:
        self.source, self.drop_last, self.lists_per_step = source, drop_last, lists_per_step
        self._rank, self._whole = dealing.rank, sum(dealing.sizes)
        self._fewest = len(dealing.sizes) if dealing.every_rank else 1
        # Lightning sets the epoch of what is called sampler; it must be in the __dict__, which its
        # _IndexBatchSamplerWrapper (predict) copies.
        self.sampler = self.passes = Passes(dealing, lists_per_step or self._whole, source)
        rest = (known_length(source) or 0) % self.passes.items
        if lists_per_step is None and not drop_last and 0 < rest < self._fewest:
            warn_of_too_few_samples(rest, self._fewest)

    def __iter__(self) -> Iterator[list[Any]]:
        own, size = self.passes.begin(), self.passes.items
        with own.randomness.active():
            items = iter(self.source)
            for _ in islice(items, own.skipped * size):
                pass
        own.steps, has_drawn = own.skipped, False
        while True:
            with nullcontext() if has_drawn else own.randomness.active():
                keys = list(islice(items, size))
            if self.lists_per_step is not None:
                keys = list(chain.from_iterable(keys))
            elif self.drop_last and len(keys) < self._whole:
                return
            if not keys:
                return
            if len(keys) < self._fewest:
                warn_of_too_few_samples(len(keys), self._fewest)
                continue
            dealt = deal(len(keys), own.sizes_of(own.steps))
            own.steps += 1
            start = sum(dealt[: self._rank])
            yield keys[start : start + dealt[self._rank]] or Idle(keys[-1])
            has_drawn = type(self.source) in _DRAW_AT_ONCE

    def __len__(self) -> int:
        items, per_step = len(self.source), self.passes.items  # type: ignore[arg-type]
        rest = items % per_step
        is_left_out = self.lists_per_step is None and (self.drop_last or rest < self._fewest)
        return items // per_step + (rest > 0 and not is_left_out)
