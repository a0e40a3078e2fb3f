"""Deals streams: loaders whose samples have no index, so that no sampler can deal them.

Every rank reads the whole stream, and keeps its part of each global batch. So a step has the
samples of one device, in the same order, with any number of workers.

A stream may also divide itself between ranks. Then each rank trains its own part. Checksums of the
first samples tell the two apart, and those of every global batch are compared.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from lightning_cephalo.common.errors import BatchSplitError, UnsupportedError
from lightning_cephalo.data import reading
from lightning_cephalo.data.batch_layout import BatchLayout, NoSamples
from lightning_cephalo.data.collate import RankCollate
from lightning_cephalo.data.fingerprints import fingerprint
from lightning_cephalo.data.lockstep import (
    AllHaveNext,
    Gather,
    LockStepLoader,
    StatefulLockStepLoader,
    is_stateful,
    lock_step,
)
from lightning_cephalo.data.positions import Continue, Position, restore_states, states_of
from lightning_cephalo.data.randomness import SwappedRandomness
from lightning_cephalo.data.reinstantiate import reinstantiate
from lightning_cephalo.data.samplers import too_few_samples
from lightning_cephalo.data.shares import deal

_COMPARED = 8  # samples at the start of a stream
_CHECKED = 8  # samples at the two ends of a global batch
_WAY_OUT = (
    "Let the dataset yield the whole stream on every rank, in the same order, and cephalo deals it"
    " by the plan. So leave out split_dataset_by_node (Hugging Face), split_by_node (WebDataset:"
    " nodesplitter=None) or code of your own that reads the rank, and seed what shuffles. Division"
    " between DataLoader workers may stay."
)


@dataclass(frozen=True)
class Start:
    """The start of a rank's stream.

    Attributes:
        fingerprint: of the first samples or batch; 0: there is none; None: nothing can be seen.
        rows: samples of the first batch, for loaders of ready batches; else 0.
        begins_anew: a second iterator of the dataset begins with the same sample.
    """

    fingerprint: int | None
    rows: int = 0
    begins_anew: bool = True
    read: int = 0

    @property
    def numbers(self) -> list[float]:
        """Numbers to gather from all ranks."""
        return [-1.0 if self.fingerprint is None else float(self.fingerprint), float(self.rows)]

    @staticmethod
    def is_whole(everyones: Sequence[Sequence[float]]) -> bool:
        """Returns whether all ranks read the same stream, from all ranks' `numbers`."""
        same = all(row == everyones[0] for row in everyones)
        return len(everyones) == 1 or (same and everyones[0][0] >= 0)


def start_of(
    loader: Any, layout: BatchLayout | None, seed: int, *, leaves_whole: bool = False
) -> Start:
    """Reads the first samples of a stream, by an iterator of their own."""
    loader = reading.original_of(loader)
    if not reading.yields_ready_batches(loader):
        samples = _first_samples(loader, seed, _COMPARED)
        again = _first_samples(loader, seed, 1)
        anew = fingerprint(samples[:1]) == fingerprint(again)
        read = len(samples) + len(again)
        return Start(fingerprint(samples) if samples else 0, begins_anew=anew, read=read)
    with SwappedRandomness((seed % 2**64, 0)), reading.generators_kept(loader):
        batch = next(iter(_equally_seeded(loader)), None)
    if batch is None:
        return Start(0)
    try:
        rows = (layout or BatchLayout()).batch_size(batch)
    except BatchSplitError as error:
        if leaves_whole:
            return Start(fingerprint(batch), 1)
        raise BatchSplitError(
            f"{error} {_name_of(loader)} yields ready batches, which only split_batch can cut. The"
            " batch then needs a len(): its number of samples."
        ) from error
    return Start(fingerprint(batch), rows)


def _first_samples(loader: Any, seed: int, count: int) -> list[Any]:
    with SwappedRandomness((seed % 2**64, 0)), reading.generators_kept(loader):
        return list(islice(iter(loader.dataset), count))


class GlobalStep(NamedTuple):
    """A rank's part of a global batch; a tuple, which torch's pinning of memory passes through."""

    batch: Any
    fingerprint: float
    samples: int


class StreamCollate:
    """Collates this rank's part under global random states that the stream does not see."""

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        rank: int,
        sizes: Sequence[int],
        every_rank: bool = False,
    ) -> None:
        self.rank, self.sizes, self.every_rank = rank, tuple(sizes), every_rank
        self.own = RankCollate(collate_fn, None)
        self._randomness: SwappedRandomness | None = None

    def __call__(self, samples: Any) -> GlobalStep:
        # before collating: some collate functions change their samples
        ends = _CHECKED // 2
        checksum = fingerprint([*samples[:ends], *samples[-ends:]])
        dealt = _dealt(len(samples), self.sizes, self.every_rank)
        if dealt is None:
            return GlobalStep(None, float(checksum or 0), len(samples))
        start = sum(dealt[: self.rank])
        self.own.dataset = samples  # to show one of them without samples
        if self._randomness is None:  # in the process, and the pass, of a worker
            self._randomness = SwappedRandomness((torch.initial_seed() % 2**64, self.rank))
        with self._randomness:
            batch = self.own(samples[start : start + dealt[self.rank]])
        self.own.dataset = None
        return GlobalStep(batch, float(checksum or 0), len(samples))


class ReadyCutter:
    """Cuts this rank's part out of ready batches."""

    def __init__(
        self,
        layout: BatchLayout,
        rank: int,
        sizes: Sequence[int],
        every_rank: bool,
        *,
        leaves_whole: bool = False,
    ) -> None:
        self.layout, self.rank, self.every_rank = layout, rank, every_rank
        self.sizes = tuple(sizes)
        self.leaves_whole = leaves_whole
        self._turn = 0

    def __call__(self, batch: Any) -> GlobalStep:
        try:
            return _part_of(batch, self.layout, self.rank, self.sizes, self.every_rank)
        except BatchSplitError:
            if not self.leaves_whole:
                raise
        turn, self._turn = self._turn % len(self.sizes), self._turn + 1
        mine = batch if turn == self.rank else NoSamples(batch)
        return GlobalStep(mine, float(fingerprint(batch) or 0), 1)


class DealtStream(LockStepLoader):
    """Yields this rank's part of each global batch of a stream that every rank reads whole.

    Args:
        gather: compares the global batches of all ranks, once per step and once at the end.
        items: samples of a step over all ranks; 0 if ready batches have any sizes.
        cut: makes a `GlobalStep` of a ready batch; None: the loader yields these.
        fewest: leaves out steps with fewer samples; 0 for none.

    Raises:
        UnsupportedError: on iteration, on every rank, if ranks read different samples.
    """

    _own = LockStepLoader._own | {
        "_gather",
        "_seed",
        "_epoch",
        "_items",
        "_cut",
        "_passes",
        "_drawn",
        "_start",
        "_resumed",
        "_fewest",
        "_warns",
        "_changes",
    }

    def __init__(
        self,
        loader: Any,
        *,
        gather: Gather,
        seed: int,
        epoch: int,
        items: int = 0,
        cut: ReadyCutter | None = None,
        fewest: int = 0,
        warns: bool = False,
        **options: Any,
    ) -> None:
        self._fewest, self._warns = fewest, warns
        self._gather, self._cut, self._items = gather, cut, items
        self._seed, self._epoch, self._passes = seed % 2**64, epoch, 0
        self._drawn = 0
        self._changes: list[tuple[float, tuple[int, ...]]] = []
        self._start: list[Any] | None = None
        self._resumed: tuple[Position, Continue] | None = None
        super().__init__(loader, **options)

    @property
    def seed(self) -> int:
        """The seed of the global generators while the stream is read."""
        return self._seed

    @property
    def items(self) -> int:
        """Samples of a step over all ranks; 0 if ready batches have any sizes."""
        return self._items

    @property
    def passes(self) -> int:
        """The number of passes that have begun."""
        return self._passes

    @property
    def _deals_here(self) -> bool:
        """Whether this process deals, not workers, which hold the sizes of their pass."""
        return self._cut is not None or not getattr(self.loader, "num_workers", 0)

    def dealt_steps(self, trained: int, ahead: int) -> int | None:
        """Returns the dealt steps of the latest pass; None if only the next one can change."""
        known = self._deals_here and trained <= self._drawn <= trained + ahead
        return self._drawn if known else None

    def change_batch_sizes(self, batch_sizes: Sequence[int], *, from_step: float) -> None:
        """Deals other sizes (or proportions) from a step on; infinite: from the next pass on."""
        sizes = tuple(batch_sizes)
        if self._items and sum(sizes) != self._items:
            sizes = deal(self._items, sizes)
        if self._deals_here:
            self._changes = [each for each in self._changes if each[0] < from_step]
            self._changes.append((from_step, sizes))
        else:  # workers of this pass hold copies
            self._change(sizes)

    def _change(self, sizes: tuple[int, ...]) -> None:
        loader: Any = self.loader
        dealer: Any = loader.collate_fn if self._cut is None else self._cut
        dealer.sizes = sizes

    def _change_until(self, step: float) -> None:
        """Follow the changes up to a step of the running pass."""
        while self._changes and self._changes[0][0] <= step:
            self._change(self._changes.pop(0)[1])

    def continue_at(self, position: Position, way: Continue) -> None:
        """Makes the next pass begin where another run has stopped; ValueError: other generators."""
        self._restore(position.now)
        self._epoch = position.epoch
        self._passes = position.number + (way is not Continue.INSIDE)
        self._resumed = (position, way)

    def position(self, trained: int, *, cycles: bool, ahead: int) -> Position | None:
        """Returns where training stands in the latest pass, as `RankBatchSampler.position` does."""
        step = trained
        if cycles and trained:
            if not self._length:
                return None
            step = (trained - 1) % self._length + 1
        now = states_of(None, self._generators())
        epoch, number, start = self._epoch, self._passes - 1, self._start
        if start is None:  # no pass has begun
            start = now
            if self._resumed is not None and self._resumed[1] is Continue.INSIDE:
                number, start = self._passes, self._resumed[0].start
            elif not step:
                number = self._passes
        elif not is_stateful(self.loader) and not step <= self._drawn <= step + ahead:
            return None
        return Position(epoch, number, step, self._items, start, now)

    def _generators(self) -> list[Any]:
        own = getattr(self.loader, "generator", None)
        is_own = isinstance(own, torch.Generator) and own is not torch.default_generator
        return [own] if is_own else []

    def _restore(self, states: list[Any]) -> None:
        restore_states(None, states, self._generators())

    def __iter__(self) -> Iterator[Any]:
        if self._resumed is not None and self._resumed[1] is Continue.AT_END:
            self._resumed = None
            return iter(())
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        skipped = 0
        if self._resumed is not None:
            (position, way), self._resumed = self._resumed, None
            if way is Continue.INSIDE:
                skipped = position.step
                self._restore(position.start)
        self._start = states_of(None, self._generators())
        # Ranks draw different amounts in training, and a stream may draw in this process.
        randomness = SwappedRandomness((self._seed, self._epoch, self._passes))
        self._passes += 1
        with randomness:
            items = iter(self.loader)
        number = self._drawn = 0
        self._change_until(float("inf"))
        while True:
            self._change_until(self._drawn)
            with randomness:
                step = self._next_step(items)
            is_left_out = step is not None and 0 < step.samples < self._fewest
            if self._drawn < skipped and step is not None:
                number, self._drawn = number + 1, self._drawn + (not is_left_out)
                continue
            self._drawn += step is not None and not is_left_out
            own = [0.0, 0.0, 0.0] if step is None else [1.0, float(step.samples), step.fingerprint]
            everyones = self._gather(own)
            if any(row != everyones[0] for row in everyones):
                raise UnsupportedError(self._differ(everyones, number))
            if step is None:
                return
            number += 1
            if is_left_out:
                self._warn_once(step.samples)
            else:
                yield step.batch

    def _warn_once(self, samples: int) -> None:
        if self._warns:
            step = f"A step of the stream {_name_of(self.original)}"
            warnings.warn(too_few_samples(step, samples, self._fewest), stacklevel=2)
        self._warns = False

    def _own_length(self) -> int | None:
        """Returns the number of steps, never too many (no epoch would end); None: unknown."""
        steps = super()._own_length()
        if not steps or not self._fewest:
            return steps
        if self._cut is not None:
            return None
        loader: Any = self.loader
        rest = 0 if loader.drop_last else len(loader.dataset) % loader.batch_size
        return steps - (0 < rest < self._fewest)

    def _next_step(self, items: Iterator[Any]) -> GlobalStep | None:
        try:
            item = next(items)
        except StopIteration:
            return None
        return item if self._cut is None else self._cut(item)

    def _differ(self, everyones: list[list[float]], number: int) -> str:
        own = "; ".join(
            f"rank {rank}: {f'{int(row[1])} samples, checksum {int(row[2])}' if row[0] else 'none'}"
            for rank, row in enumerate(everyones)
        )
        return (
            f"The stream {_name_of(self.original)} began equally on all ranks, but step {number} of"
            f" this pass has other samples on some ranks ({own}). {_WAY_OUT}"
        )


class StatefulDealtStream(DealtStream, StatefulLockStepLoader):
    """A `DealtStream` around a loader that Lightning can save and restore mid-epoch."""


def deal_stream(
    loader: Any,
    *,
    rank: int,
    sizes: Sequence[int],
    seed: int,
    epoch: int,
    gather: Gather,
    all_have_next: AllHaveNext,
    layout: BatchLayout | None,
    training: bool = True,
    every_rank: bool = False,
) -> LockStepLoader:
    """Returns a loader of this rank's part of each global batch; collective."""
    ready = reading.yields_ready_batches(loader)
    common = {"all_have_next": all_have_next, "layout": layout, "original": loader}
    alone = len(sizes) == 1  # nobody can have other samples, so that nothing is read ahead
    own = Start(None, 0) if alone else start_of(loader, layout, seed, leaves_whole=not training)
    if training and rank == 0 and not own.begins_anew:
        warnings.warn(_goes_on(loader, own), stacklevel=2)
    if not alone and not Start.is_whole(gather(own.numbers)):
        if rank == 0:
            said = (
                _divided(loader, sizes, ready, own, every_rank)
                if training
                else _unequal(loader, own)
            )
            warnings.warn(said, stacklevel=2)
        return lock_step(
            loader if ready else reinstantiate(loader, batch_size=max(sizes[rank], 1)),
            idle=not sizes[rank],
            every_rank=every_rank,
            **common,
        )
    source = _equally_seeded(loader) if ready else loader

    cut = ReadyCutter(layout or BatchLayout(), rank, sizes, every_rank, leaves_whole=not training)
    if not ready:

        def collate(function: Any) -> Any:
            if isinstance(function, StreamCollate):
                return function
            return StreamCollate(function, rank, sizes, every_rank)

        source = reinstantiate(
            loader, batch_size=sum(sizes), wrap_collate=collate, **_equal_seeds(loader)
        )
    return (StatefulDealtStream if is_stateful(source) else DealtStream)(
        source,
        gather=gather,
        seed=seed,
        epoch=epoch,
        items=0 if ready else sum(sizes),
        cut=cut if ready else None,
        fewest=len(sizes) if every_rank else 0,
        warns=rank == 0,
        **common,
    )


def _equally_seeded(loader: Any) -> Any:
    """Returns a loader of ready batches whose workers have the seeds of one device."""
    seeds = _equal_seeds(loader)
    return reinstantiate(loader, batch_size=None, **seeds) if seeds else loader


def _equal_seeds(loader: Any) -> dict[str, Any]:
    """Returns the option that seeds workers as on one device: Lightning's differs by rank."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return {}
    own = loader.worker_init_fn
    by_rank = isinstance(own, partial) and own.func.__name__ == pl_worker_init_function.__name__
    seeds = int(os.environ.get("PL_SEED_WORKERS", "0")) and own is None
    equally = partial(pl_worker_init_function, rank=0)
    return {"worker_init_fn": equally} if by_rank or seeds else {}


def _dealt(count: int, sizes: Sequence[int], every_rank: bool) -> tuple[int, ...] | None:
    """Returns every rank's number of samples; None if each must have one and there are too few."""
    return None if every_rank and count < len(sizes) else deal(count, sizes)


def _part_of(
    batch: Any, layout: BatchLayout, rank: int, sizes: Sequence[int], every_rank: bool
) -> GlobalStep:
    if batch is None:  # on all ranks: Lightning skips the step, as on one device
        return GlobalStep(None, 0.0, 0)
    if len(sizes) == 1:
        return GlobalStep(batch, 0.0, 1)
    checksum, count = float(fingerprint(batch) or 0), layout.batch_size(batch)
    dealt = _dealt(count, sizes, every_rank)
    if dealt is None:
        return GlobalStep(None, checksum, count)
    if dealt[rank] == count:
        return GlobalStep(batch, checksum, count)
    start = min(sum(dealt[:rank]), count - 1)
    own = layout.take(batch, start, start + max(dealt[rank], 1))
    return GlobalStep(own if dealt[rank] else NoSamples(own), checksum, count)


def _name_of(loader: Any) -> str:
    kind = loader.dataset if isinstance(loader, DataLoader) else loader
    return type(kind).__name__


def _goes_on(loader: Any, start: Start) -> str:
    return (
        f"The stream {_name_of(loader)} begins with another sample each time that it is read, and"
        " its first samples are also read before training. If it goes on where its last reader has"
        f" stopped, as an open file does, training misses them: {start.read} that are compared"
        " between ranks, and those that show how batches are cut and how long they take. If it"
        " counts its readings, its order is a later one. So begin anew in __iter__, and take the"
        " epoch from set_epoch(). If it is random, seed it, or draw from the global generators."
    )


def _unequal(loader: Any, start: Start) -> str:
    if start.fingerprint is not None:
        return (
            f"The evaluation stream {_name_of(loader)} begins with other samples on other ranks."
            " Each rank evaluates what it reads. That is right if the stream divides itself between"
            " ranks. If it is shuffled differently on each rank, samples count several times."
            f" {_WAY_OUT}"
        )
    return (
        f"The evaluation stream {_name_of(loader)} has samples without visible content, so that"
        " ranks cannot compare it. Each rank evaluates what it reads: samples that several ranks"
        " read count several times. Use samples with tensors, arrays, numbers or strings."
    )


def _divided(loader: Any, sizes: Sequence[int], ready: bool, start: Start, every_rank: bool) -> str:
    idle = [rank for rank, size in enumerate(sizes) if not size]
    if start.fingerprint is None:
        why = "has samples without visible content, so that ranks cannot compare it"
    else:
        why = "begins with other samples on other ranks: it divides itself between ranks"
    each = "one batch of its own a step"
    if not ready:
        each = f"{', '.join(map(str, sizes))} samples of its own a step"
    lost = f" The parts of the ranks {idle} are lost: the plan gives them no samples."
    end = (
        "until the last rank has run out. So steps have other samples than on one device, and those"
        " after the end of a shorter part are smaller."
    )
    if every_rank:
        end = (
            "until the first rank has run out, since every rank runs training_step with manual"
            " optimization. So steps have other samples than on one device, and the rest of longer"
            " parts is left out."
        )
    return (
        f"The training stream {_name_of(loader)} {why}. Each rank trains {each}, {end}"
        f"{lost if idle else ''} {_WAY_OUT}"
    )
