"""Reads properties and samples of a user's loader before it is dealt, and copies it."""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
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
from lightning_cephalo.data.collate import copied, fetch
from lightning_cephalo.data.dealing import Broadcast
from lightning_cephalo.data.lockstep import LockStepLoader
from lightning_cephalo.data.randomness import (
    generators_of,
    preserved_randomness,
    read_states,
    write_states,
)
from lightning_cephalo.data.samplers import RankBatchSampler


def agreed_seed(broadcast: Broadcast) -> int:
    """Returns rank 0's seed of the data order: ``PL_GLOBAL_SEED`` if set, else torch's seed."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(broadcast(torch.initial_seed() if seed is None else int(seed)))


def loader_batch_size(loader: Any) -> int | None:
    """Returns the samples per batch, or the first list's; None if only iterating would show it."""
    loader = original_of(loader)
    if not isinstance(loader, DataLoader):
        return None
    if loader.batch_size is not None:
        return loader.batch_size
    lists = unwrapped_batch_sampler(loader)
    if lists is None:
        return None
    size = getattr(lists, "batch_size", None)
    if isinstance(size, int):
        return size
    first = first_items(lists, 1)
    return len(first[0]) if first else None


def global_batch_size(loader: Any, world_size: int) -> int | None:
    """Returns the samples per step over all ranks, as under DDP; None for ready batches."""
    size = loader_batch_size(loader)
    return None if size is None else size * world_size


def original_of(loader: Any) -> Any:
    """Returns the user's loader; Lightning puts rebuilt ones into the user's CombinedLoader."""
    if isinstance(loader, LockStepLoader):
        return loader.original
    sampler = rank_batch_sampler(loader)
    return loader if sampler is None or sampler.original is None else sampler.original


def with_changes(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Returns a copy of a loader, without a running iterator, with other values of attributes.

    A built DataLoader forbids to set some, as its sampler was made for its dataset. Ours was not.

    Raises:
        UnsupportedError: the loader holds an iterator, of which the copy would get the batches.
    """
    changes["_iterator"] = None
    for name, value in vars(loader).items():
        if isinstance(value, _BaseDataLoaderIter) and name not in changes:
            raise UnsupportedError(
                f"{type(loader).__name__}.{name} is an iterator, whose batches were chosen before"
                " cephalo could deal them. Create it in __iter__, or give a plain DataLoader."
            )
    copied = copy.copy(loader)
    for name, value in changes.items():
        object.__setattr__(copied, name, value)
    return copied


def with_batch_size(loader: DataLoader[Any], size: int, **changes: Any) -> DataLoader[Any]:
    """Returns a copy of a stream's loader with another batch size."""
    lists: Any = loader.batch_sampler
    lists = type(lists)(loader.sampler, size, loader.drop_last)
    return with_changes(loader, batch_size=size, batch_sampler=lists, **changes)


def rank_batch_sampler(loader: Any) -> RankBatchSampler | None:
    """Returns the `RankBatchSampler` of a rebuilt loader, or None."""
    sampler = unwrapped_batch_sampler(loader)
    return sampler if isinstance(sampler, RankBatchSampler) else None


def generators_of_loader(loader: Any) -> list[Any]:
    """Returns the generators that a loader and its samplers hold."""
    roots = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [generator for root in roots for generator in generators_of(root)]
    # a stream's workers are seeded from the loader's own generator
    own = getattr(loader, "generator", None)
    if isinstance(own, torch.Generator) and own is not torch.default_generator:
        found.append(own)
    return list({id(generator): generator for generator in found}.values())


@contextmanager
def generators_kept(loader: Any) -> Generator[None, None, None]:
    """Restores afterwards the generators that a loader and its dataset hold."""
    held = [*generators_of_loader(loader), *generators_of(getattr(loader, "dataset", loader))]
    states = read_states(held)
    try:
        yield
    finally:
        write_states(held, states)


def first_rows(loader: Any, layout: BatchLayout) -> int:
    """Returns the samples of the first ready batch; 0 if there is none."""
    with preserved_randomness(), generators_kept(loader):
        return _first_batch(loader, layout)[1]


def _first_batch(loader: Any, layout: BatchLayout) -> tuple[Any, int]:
    batch = next(iter(loader), None)
    return batch, 0 if batch is None else layout.batch_size(batch)


def sample_batches(
    loader: Any, sizes: Sequence[int], layout: BatchLayout | None = None
) -> list[Any]:
    """Returns collated batches of ``sizes`` of the loader's first samples, for profiling.

    For a map-style dataset no iterator is started; keys repeat if there are too few. Else one new
    iterator is started in this process, and its first ready batch is cut. A loader that cannot be
    iterated twice loses that batch. All random generators are restored.

    Raises:
        ValueError: the dataset is empty, or a ready batch is smaller than asked for.
    """
    loader = original_of(loader)
    count = max(sizes)
    with preserved_randomness(), generators_kept(loader):
        if yields_ready_batches(loader):
            return _cut_ready_batch(loader, sizes, layout or BatchLayout())
        if isinstance(loader.dataset, IterableDataset):
            found = list(islice(iter(loader.dataset), count))
            _require_samples(found, loader)
            samples = list(islice(cycle(found), count))
            return [loader.collate_fn(copied(samples[:size])) for size in sizes]
        keys = _first_keys(loader, count)
        _require_samples(keys, loader)
        keys = list(islice(cycle(keys), count))
        fetched = (copied(fetch(loader.dataset, keys[:size])) for size in sizes)
        return [loader.collate_fn(samples) for samples in fetched]


def learn_layout(loader: Any, *, splitter: Splitter | None = None) -> BatchLayout:
    """Returns the layout, learned from two batches; raises BatchSplitError without a cut."""
    loader = original_of(loader)
    if yields_ready_batches(loader):
        # Ready batches come in one size, so there is nothing to compare.
        return BatchLayout(splitter=splitter)
    failure: BatchSplitError | None = None
    # the padded length may equal the number of samples and look like a second batch dimension
    for sizes in ((3, 2), (7, 5)):
        larger, smaller = sample_batches(loader, sizes)
        try:
            return BatchLayout.learn(larger, smaller, sizes=sizes, splitter=splitter)
        except BatchSplitError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def unwrapped_batch_sampler(loader: Any) -> Any:
    """Returns the batch sampler, without Lightning's wrapper for predict."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    # Compared by name: `lightning` and `pytorch_lightning` each have such a class.
    if type(batch_sampler).__name__ == "_IndexBatchSamplerWrapper":
        return batch_sampler._batch_sampler  # type: ignore[union-attr]
    return batch_sampler


def is_standard(batch_sampler: Any) -> bool:
    """Returns whether it only cuts a sampler's order into batches: torch's, or torchdata's copy."""
    kind = type(batch_sampler)
    return kind is BatchSampler or (
        isinstance(batch_sampler, BatchSampler) and kind.__module__.startswith("torchdata.")
    )


def has_custom_lists(loader: DataLoader[Any]) -> bool:
    """Returns whether the user's own batch sampler sets the number of samples of a list."""
    batch_sampler = unwrapped_batch_sampler(loader)
    return batch_sampler is not None and not is_standard(batch_sampler)


def yields_ready_batches(loader: Any) -> bool:
    """Returns whether a loader gives no single samples: no DataLoader, or ``batch_size=None``."""
    if not isinstance(loader, DataLoader):
        return True
    return loader.batch_size is None and loader.batch_sampler is None


def is_stream(loader: Any) -> bool:
    """Returns whether only reading gives a loader's samples; see ``streams.py``."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def refuse_one_pass(loader: Any) -> None:
    """Raises for generators and the like: they lose the batches that are read before training."""
    # not every iterator: some classes start anew in their __iter__
    if isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools"):
        raise UnsupportedError(
            f"The dataloader is a {type(loader).__name__}, which can be read once, but its first"
            " batches are also read beforehand. Give an object whose __iter__ starts anew: a"
            " class with `def __iter__(self): yield ...`, or a DataLoader."
        )


def first_items(source: Any, count: int) -> list[Any]:
    """Returns the first items of a sampler; none if it cannot be iterated again from the start."""
    if isinstance(source, Iterator):
        return []
    generators = generators_of(source)
    states = read_states(generators)
    try:
        with preserved_randomness():
            return list(islice(iter(source), count))
    finally:
        write_states(generators, states)


def _first_keys(loader: DataLoader[Any], count: int) -> list[Any]:
    batch_sampler = unwrapped_batch_sampler(loader)
    sampler = getattr(batch_sampler, "sampler", None)
    if type(sampler) in (SequentialSampler, RandomSampler):
        return list(range(min(count, len(loader.dataset))))  # type: ignore[arg-type]
    keys: list[Any] = []
    # a list holds at least one key, so ``count`` lists suffice
    for batch in first_items(batch_sampler, count):
        keys.extend(batch)
    return keys[:count]


def _require_samples(samples: list[Any], loader: DataLoader[Any]) -> None:
    if not samples:
        raise ValueError(
            f"Expects at least one sample to read before training, but "
            f"{type(loader.dataset).__name__} gave none on this rank. Check its data."
        )


def _cut_ready_batch(loader: Any, sizes: Sequence[int], layout: BatchLayout) -> list[Any]:
    batch, rows = _first_batch(loader, layout)
    if rows < max(sizes):
        raise ValueError(
            f"Expects batches of at least {max(sizes)} samples to profile with, but the first that "
            f"{type(loader).__name__} yields has {rows}."
        )
    return [layout.take(batch, 0, size) for size in sizes]
