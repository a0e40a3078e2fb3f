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

from lightning_cephalo.data.dealing import Dealing
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

    A rank without samples in a step gets one key that does not count (`Pass.idle`). The user's
    sampler runs under global random states seeded from ``(seed, epoch, pass)``, as it may draw from
    them. It is read lazily, so that an endless one works.
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
