"""Deals streams: loaders whose samples have no index, so that no sampler can deal them.

Every rank reads the whole stream, and keeps its part of each global batch. So a step has the
samples of one device, in the same order, with any number of workers. Checksums of every global
batch are compared, so that a stream that differs between ranks is refused.

With ``Trainer(use_distributed_sampler=False)`` each rank reads a part of its own (`OwnPart`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from lightning_cephalo.common.errors import BatchSplitError, UnsupportedError
from lightning_cephalo.data import reading
from lightning_cephalo.data.batch_layout import NoSamples
from lightning_cephalo.data.containers import own_copy
from lightning_cephalo.data.dealing import Dealing, RankCollate
from lightning_cephalo.data.fingerprints import fingerprint
from lightning_cephalo.data.passes import Passes, is_stateful
from lightning_cephalo.data.randomness import SeparateRandomness, generators_of
from lightning_cephalo.data.rank_loader import RankLoader
from lightning_cephalo.data.samplers import warn_of_too_few_samples
from lightning_cephalo.data.shares import deal

_CHECKED = 8  # samples at the two ends of a global batch
_OWN_PART = (
    " If it divides itself between ranks, give Trainer(use_distributed_sampler=False): each rank"
    " then trains its own part."
)


class GlobalStep(NamedTuple):
    """A rank's part of a global batch; a tuple, which torch's pinning of memory passes through."""

    batch: Any
    fingerprint: float
    samples: int


class StreamCollate:
    """Collates this rank's part under global random states that the stream does not see."""

    def __init__(self, collate_fn: Callable[[Any], Any], dealing: Dealing) -> None:
        self.rank, self.sizes, self.every_rank = dealing.rank, dealing.sizes, dealing.every_rank
        self.own = RankCollate(collate_fn, None)
        self._randomness: SeparateRandomness | None = None

    def __call__(self, samples: Any) -> GlobalStep:
        # before collating: some collate functions change their samples
        ends = _CHECKED // 2
        checksum = float(fingerprint([*samples[:ends], *samples[-ends:]]))
        dealt = _dealt(len(samples), self.sizes, self.every_rank)
        if dealt is None:
            return GlobalStep(None, checksum, len(samples))
        start = sum(dealt[: self.rank])
        self.own.dataset = samples  # to show one of them without samples
        if self._randomness is None:  # in the process, and the pass, of a worker
            self._randomness = SeparateRandomness((torch.initial_seed() % 2**64, self.rank))
        with self._randomness.active():
            batch = self.own(samples[start : start + dealt[self.rank]])
        self.own.dataset = None
        return GlobalStep(batch, checksum, len(samples))


class ReadyCutter:
    """Cuts this rank's part out of ready batches; in evaluation, or gives them to ranks in turn."""

    def __init__(self, dealing: Dealing) -> None:
        self.sizes, self._dealing, self._turn = dealing.sizes, dealing, 0

    def __call__(self, batch: Any) -> GlobalStep:
        if batch is None:  # on all ranks: Lightning skips the step, as on one device
            return GlobalStep(None, 0.0, 0)
        if len(self.sizes) == 1:
            return GlobalStep(batch, 0.0, 1)
        checksum, dealing = float(fingerprint(batch)), self._dealing
        try:
            count = dealing.layout.batch_size(batch)
            dealt = _dealt(count, self.sizes, dealing.every_rank)
            part = None if dealt is None else self._part_of(batch, dealt, count)
            return GlobalStep(part, checksum, count)
        except BatchSplitError:
            if dealing.trains:
                raise
        turn, self._turn = self._turn % len(self.sizes), self._turn + 1
        return GlobalStep(batch if turn == dealing.rank else NoSamples(batch), checksum, 1)

    def _part_of(self, batch: Any, dealt: Sequence[int], count: int) -> Any:
        samples = dealt[self._dealing.rank]
        if samples == count:
            return batch
        start = min(sum(dealt[: self._dealing.rank]), count - 1)
        part = self._dealing.layout.take(batch, start, start + max(samples, 1))
        return part if samples else NoSamples(part)


_END = GlobalStep(None, 0.0, 0)
"""What a rank reads behind its last step."""


def _dealt(count: int, sizes: Sequence[int], every_rank: bool) -> tuple[int, ...] | None:
    """Returns every rank's number of samples; None if each must have one and there are too few."""
    return None if every_rank and count < len(sizes) else deal(count, sizes)


class DealtStream(RankLoader):
    """Yields this rank's part of each global batch of a stream that every rank reads whole.

    Args:
        cut: makes a `GlobalStep` of a ready batch; None: the loader yields these.

    Raises:
        UnsupportedError: on iteration, on every rank, if ranks read different samples.
    """

    def __init__(
        self, loader: Any, dealing: Dealing, original: object, cut: ReadyCutter | None = None
    ) -> None:
        self._fewest = len(dealing.sizes) if dealing.every_rank else 0
        self._cut = cut
        self._passes = Passes(
            dealing,
            0 if cut is not None else sum(dealing.sizes),
            others=generators_of(loader),
            # workers hold the sizes of their pass
            deals_here=cut is not None or not getattr(loader, "num_workers", 0),
            is_stateful=is_stateful(loader),
        )
        super().__init__(loader, dealing, original)

    @property
    def sampler(self) -> Passes:
        """What sets the epoch; Lightning calls its ``set_epoch``."""
        return self._passes

    passes = sampler

    def __iter__(self) -> Iterator[Any]:
        own, loader = self._passes.begin(), self.loader
        dealer: Any = loader.collate_fn if self._cut is None else self._cut  # type: ignore[attr-defined]
        dealer.sizes = own.sizes_of(0)
        # Ranks draw different amounts in training, and a stream may draw in this process.
        with own.randomness.active():
            items = iter(loader)
        number = 0
        while True:
            dealer.sizes = own.sizes_of(own.steps)
            with own.randomness.active():
                step = next(items, _END)
                if step is not _END and self._cut is not None:
                    step = self._cut(step)
            is_skipped = step is not _END and own.steps < own.skipped
            is_left_out = 0 < step.samples < self._fewest
            own.steps += step is not _END and not is_left_out
            if is_skipped:
                continue
            self._compare(step, number)
            if step is _END:
                return
            number += 1
            if is_left_out:
                warn_of_too_few_samples(step.samples, self._fewest)
            else:
                yield step.batch

    def _own_length(self) -> int | None:
        # steps that are left out would count, and no epoch would end
        return None if self._fewest else super()._own_length()

    def _compare(self, step: GlobalStep, number: int) -> None:
        """Raises on every rank if ranks read different samples; collective."""
        own = [float(step is not _END), float(step.samples), step.fingerprint]
        everyones = self._dealing.gather(own)
        if len(everyones) > 1 and own[1] and not own[2]:
            raise UnsupportedError(
                f"The stream {_name_of(self.original)} yields samples without visible content, so"
                " that ranks cannot see whether they read the same ones. Yield tensors, arrays,"
                f" numbers, strings, or objects that hold these.{_OWN_PART}"
            )
        if all(row == everyones[0] for row in everyones):
            return
        rows = "; ".join(
            f"rank {rank}: {f'{int(row[1])} samples, checksum {int(row[2])}' if row[0] else 'none'}"
            for rank, row in enumerate(everyones)
        )
        raise UnsupportedError(
            f"Step {number} of the stream {_name_of(self.original)} has other samples on some ranks"
            f" ({rows}). Every rank must read the whole stream, in the same order, and it is dealt"
            " by the plan. So leave out split_dataset_by_node (Hugging Face), split_by_node"
            " (WebDataset: nodesplitter=None) or code of your own that reads the rank, and seed"
            f" what shuffles. Division between DataLoader workers may stay.{_OWN_PART}"
        )


def deal_stream(loader: Any, dealing: Dealing) -> DealtStream:
    """Returns a loader of this rank's part of each global batch; collective."""
    if reading.yields_ready_batches(loader):
        seeds = _equal_seeds(loader)
        source = reading.with_changes(loader, **seeds) if seeds else loader
        return DealtStream(source, dealing, loader, ReadyCutter(dealing))
    if dealing.trains and len(dealing.sizes) > 1:
        _look_whether_it_begins_anew(loader, dealing)
    collate = StreamCollate(loader.collate_fn, dealing)
    options = {"collate_fn": collate, **_equal_seeds(loader)}
    source = reading.with_batch_size(loader, sum(dealing.sizes), **options)
    return DealtStream(source, dealing, loader)


class OwnPart(RankLoader):
    """Yields this rank's own samples, on every rank until the last one has run out.

    Ranks that have run out continue with `NoSamples`, so that every sample counts once. With
    ``every_rank`` all end with the first.
    """

    _sample: Any = None

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self.loader)
        batch: Any = None
        while True:
            batch = next(batches, _END) if batch is not _END else _END
            is_batch = batch is not _END and batch is not None
            if self._sample is None and is_batch:
                self._sample = self._first_of(batch)
            everyones = [bool(row[0]) for row in self._dealing.gather([float(batch is not _END)])]
            if not (all(everyones) if self._dealing.every_rank else any(everyones)):
                return
            # Lightning skips a step whose batch is None, and the other ranks would wait for it
            yield batch if is_batch else self._shown()

    def _shown(self) -> NoSamples:
        if self._sample is None:  # nothing can be shown of a part that has nothing at all
            return NoSamples(())
        # a hook may change the containers that it gets
        return NoSamples(own_copy(self._sample, with_arrays=True))

    def _first_of(self, batch: Any) -> Any:
        """Returns the first sample of a batch, or a batch that cannot be cut as it is."""
        with suppress(BatchSplitError):
            batch = self._dealing.layout.take(batch, 0, 1)
        return own_copy(batch, with_arrays=True)


def own_part(loader: Any, dealing: Dealing) -> OwnPart:
    """Returns a user's loader of this rank's own samples, so that ranks end together; collective.

    Training streams get the batch size of the plan.
    """
    source = loader = reading.original_of(loader)
    if dealing.trains and 0 in dealing.sizes:
        raise UnsupportedError(
            f"The plan gives rank {dealing.sizes.index(0)} no samples, but with"
            " use_distributed_sampler=False each rank trains samples of its own, which would be"
            " lost. Give each rank samples in the plan, or leave use_distributed_sampler out."
        )
    is_batched = reading.is_stream(loader) and not reading.yields_ready_batches(loader)
    if dealing.trains and is_batched:
        source = reading.with_batch_size(loader, dealing.sizes[dealing.rank])
    return OwnPart(source, dealing, loader)


def _equal_seeds(loader: Any) -> dict[str, Any]:
    """Returns the option that seeds workers as on one device: Lightning's differs by rank."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return {}
    own = loader.worker_init_fn
    by_rank = isinstance(own, partial) and own.func.__name__ == pl_worker_init_function.__name__
    seeds = int(os.environ.get("PL_SEED_WORKERS", "0")) and own is None
    equally = partial(pl_worker_init_function, rank=0)
    return {"worker_init_fn": equally} if by_rank or seeds else {}


def _name_of(loader: Any) -> str:
    kind = loader.dataset if isinstance(loader, DataLoader) else loader
    return type(kind).__name__


def _look_whether_it_begins_anew(loader: Any, dealing: Dealing) -> None:
    def first() -> int:
        with reading.untouched(loader), SeparateRandomness((dealing.seed % 2**64, 0)).active():
            return fingerprint(next(iter(loader.dataset), None))

    if first() != first() and dealing.rank == 0:
        warnings.warn(
            f"The stream {_name_of(loader)} begins with another sample each time that it is read,"
            " and its first samples are also read before training. One that goes on where its last"
            " reader has stopped, as an open file does, loses these. So begin anew in __iter__, and"
            " take the epoch from set_epoch(). If it is random, seed it, or draw from the global"
            " generators.",
            stacklevel=2,
        )
