"""Reads properties and samples of a user's loader before it is dealt, and copies it."""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_cephalo.common.errors import BatchSplitError, UnsupportedError
from lightning_cephalo.data.batch_layout import BatchLayout, Splitter
from lightning_cephalo.data.containers import own_copy
from lightning_cephalo.data.dealing import Broadcast
from lightning_cephalo.data.randomness import (
    generators_of,
    preserved_randomness,
    read_states,
    write_states,
)


def is_stream(loader: Any) -> bool:
    """Returns whether only reading gives a loader's samples; see ``streams.py``."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def yields_ready_batches(loader: Any) -> bool:
    """Returns whether a loader gives no single samples: no DataLoader, or ``batch_size=None``."""
    if not isinstance(loader, DataLoader):
        return True
    return loader.batch_size is None and loader.batch_sampler is None


def unwrapped_batch_sampler(loader: Any) -> Any:
    """Returns the batch sampler, without Lightning's wrapper for predict."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    # Compared by name: `lightning` and `pytorch_lightning` each have such a class.
    if type(batch_sampler).__name__ == "_IndexBatchSamplerWrapper":
        return batch_sampler._batch_sampler  # type: ignore[union-attr]
    return batch_sampler


def has_custom_lists(loader: Any) -> bool:
    """Returns whether the user's own batch sampler sets the number of samples of a list."""
    return loader.batch_size is None and type(unwrapped_batch_sampler(loader)) is not BatchSampler


def original_of(loader: Any) -> Any:
    """Returns the user's loader; Lightning puts rebuilt ones into the user's CombinedLoader."""
    return getattr(loader, "dealt_from", loader)


def global_batch_size(loader: Any, world_size: int) -> int | None:
    """Returns the samples per step over all ranks, as under DDP; None if only reading shows it."""
    loader = original_of(loader)
    if not isinstance(loader, DataLoader):
        return None
    size, lists = loader.batch_size, unwrapped_batch_sampler(loader)
    if size is None:
        size = getattr(lists, "batch_size", None)
    if not isinstance(size, int) and lists is not None:
        size = next((len(first) for first in first_items(lists, 1)), None)
    return None if size is None else size * world_size


def refuse_one_pass(loader: Any) -> None:
    """Raises for generators and the like: they lose the batches that are read before training."""
    # not every iterator: some classes start anew in their __iter__
    if isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools"):
        raise UnsupportedError(
            f"The dataloader is a {type(loader).__name__}, which can be read once, but its first"
            " batches are also read beforehand. Give an object whose __iter__ starts anew: a"
            " class with `def __iter__(self): yield ...`, or a DataLoader."
        )


def with_changes(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Returns a copy of a loader, without a running iterator, with other values of attributes."""
    changes["_iterator"] = None
    for name, value in vars(loader).items():
        if isinstance(value, _BaseDataLoaderIter) and name not in changes:
            raise UnsupportedError(
                f"{type(loader).__name__}.{name} is an iterator, whose batches were chosen before"
                " cephalo could deal them. Create it in __iter__, or give a plain DataLoader."
            )
    copied = copy.copy(loader)
    for name, value in changes.items():  # a DataLoader forbids to set some
        object.__setattr__(copied, name, value)
    return copied


def with_batch_size(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Returns a copy of a stream's loader with another batch size."""
    lists: Any = loader.batch_sampler
    lists = type(lists)(loader.sampler, size, loader.drop_last)
    return with_changes(loader, batch_size=size, batch_sampler=lists)


def agreed_seed(broadcast: Broadcast) -> int:
    """Returns rank 0's seed of the data order: ``PL_GLOBAL_SEED`` if set, else torch's seed."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(broadcast(torch.initial_seed() if seed is None else int(seed)))


@contextmanager
def untouched(loader: Any) -> Generator[None, None, None]:
    """Restores afterwards global generators, and those of a loader, or a sampler, and its data."""
    held = [*generators_of(loader), *generators_of(getattr(loader, "dataset", None))]
    states = read_states(held)
    with preserved_randomness():
        try:
            yield
        finally:
            write_states(held, states)


def first_batch(loader: Any, layout: BatchLayout) -> tuple[Any, int]:
    """Returns the first ready batch and its samples; None and 0 if there is none."""
    with untouched(loader):
        batch = next(iter(loader), None)
        return batch, 0 if batch is None else layout.batch_size(batch)


def sample_batches(
    loader: Any, sizes: Sequence[int], layout: BatchLayout | None = None
) -> list[Any]:
    """Returns collated batches of ``sizes`` of the loader's first samples, for profiling.

    Samples repeat if there are too few. Of ready batches the first is cut. Raises ValueError if
    that is smaller than asked for, or if there are no samples.
    """
    loader = original_of(loader)
    count = max(sizes)
    with untouched(loader):
        if yields_ready_batches(loader):
            layout = layout or BatchLayout()
            batch, rows = first_batch(loader, layout)
            if rows < count:
                raise ValueError(
                    f"Expects batches of at least {count} samples to profile with, but the first"
                    f" that {type(loader).__name__} yields has {rows}."
                )
            return [layout.take(batch, 0, size) for size in sizes]
        data = loader.dataset
        is_read = isinstance(data, IterableDataset)
        found = list(islice(iter(data), count)) if is_read else _keys(loader, count)
        if not found:
            raise ValueError(
                f"Expects at least one sample to read before training, but {type(data).__name__}"
                " gave none on this rank. Check its data."
            )
        found = list(islice(cycle(found), count))
        batches = []
        for size in sizes:
            samples = found[:size]
            if not is_read:  # as torch's DataLoader reads them
                fetch = getattr(data, "__getitems__", None)
                samples = fetch(samples) if fetch else [data[key] for key in samples]
            # some collate functions change what they get
            batches.append(loader.collate_fn(own_copy(samples, with_arrays=True)))
        return batches


def _keys(loader: DataLoader[Any], count: int) -> list[Any]:
    lists = unwrapped_batch_sampler(loader)
    if type(getattr(lists, "sampler", None)) in (SequentialSampler, RandomSampler):
        return list(range(min(count, len(loader.dataset))))  # type: ignore[arg-type]
    # a list holds at least one key, so ``count`` lists suffice
    return list(islice(chain.from_iterable(first_items(lists, count)), count))


def first_items(source: Any, count: int) -> list[Any]:
    """Returns the first items of a sampler; none if it cannot be iterated again from the start."""
    if isinstance(source, Iterator):
        return []
    with untouched(source):
        return list(islice(iter(source), count))


def learn_layout(loader: Any, *, splitter: Splitter | None = None) -> BatchLayout:
    """Returns the layout, learned from two batches; raises BatchSplitError without a cut."""
    loader = original_of(loader)
    if yields_ready_batches(loader):
        # Ready batches come in one size, so there is nothing to compare.
        return BatchLayout(splitter=splitter)

    def learned(sizes: tuple[int, int]) -> BatchLayout:
        larger, smaller = sample_batches(loader, sizes)
        return BatchLayout.learn(larger, smaller, sizes, splitter=splitter)

    try:
        return learned((3, 2))
    except BatchSplitError as error:
        # a padded length may equal the number of samples by chance, or collate_fn drop a sample
        with suppress(BatchSplitError):
            return learned((7, 5))
        raise error
