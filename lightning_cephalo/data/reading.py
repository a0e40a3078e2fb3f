"""What a user's loader tells about itself before it is rebuilt.

Reading has no effect on training: no iterator of the loader is started where that can be avoided,
and random generators are left as they were.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
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

from lightning_cephalo.common.errors import BatchSplitError
from lightning_cephalo.data.batch_layout import BatchLayout, Splitter
from lightning_cephalo.data.collate import fetch
from lightning_cephalo.data.lockstep import LockStepLoader
from lightning_cephalo.data.randomness import (
    generators_of,
    preserved_randomness,
    read_states,
    write_states,
)
from lightning_cephalo.data.samplers import RankBatchSampler

Broadcast = Callable[[Any], Any]
"""Rank 0's object on every rank; a collective."""


def agreed_seed(broadcast: Broadcast) -> int:
    """The seed of the data order: ``PL_GLOBAL_SEED`` if set, else torch's, as rank 0 has it.

    Args:
        broadcast: called once on every rank.
    """
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(broadcast(torch.initial_seed() if seed is None else int(seed)))


def loader_batch_size(loader: Any) -> int | None:
    """Samples per batch of the user's loader, or None where only iterating would tell.

    For a custom batch sampler without a ``batch_size``: the length of its first list, read without
    moving any random generator.
    """
    loader = original_of(loader)
    if not isinstance(loader, DataLoader):
        return None
    if loader.batch_size is not None:
        return loader.batch_size
    lists = unwrapped_batch_sampler(loader)
    if lists is None and is_bulk(loader):
        lists = loader.sampler
    if lists is None:
        return None
    size = getattr(lists, "batch_size", None)
    if isinstance(size, int):
        return size
    first = first_items(lists, 1)
    return len(first[0]) if first else None


def global_batch_size(loader: Any, world_size: int) -> int | None:
    """Samples per step over all ranks: batch size times ``world_size``, as under DDP.

    None where the loader does not tell: a ``batch_size=None`` loader, or not a DataLoader.
    """
    size = loader_batch_size(loader)
    return None if size is None else size * world_size


def original_of(loader: Any) -> Any:
    """The user's loader behind one that was rebuilt here; ``loader`` itself otherwise.

    Lightning hands a rebuilt loader in again when the user's CombinedLoader is used for a second
    run, since it replaces the loaders inside that object.
    """
    if isinstance(loader, LockStepLoader):
        return loader.original
    sampler = rank_batch_sampler(loader)
    return loader if sampler is None or sampler.original is None else sampler.original


def rank_batch_sampler(loader: Any) -> RankBatchSampler | None:
    """The `RankBatchSampler` that a rebuilt loader draws from, or None."""
    for sampler in (unwrapped_batch_sampler(loader), getattr(loader, "sampler", None)):
        if isinstance(sampler, RankBatchSampler):
            return sampler
    return None


def sample_batches(loader: Any, sizes: Sequence[int]) -> list[Any]:
    """Collated batches of the loader's first samples, for profiling and for `learn_layout`.

    For a map-style dataset no iterator is started: keys are taken in dataset order (from the
    user's sampler if it is not one of torch's sequential or random ones), repeated if there are
    fewer than ``max(sizes)``. An iterable dataset is iterated afresh once, in this process. A
    loader that yields ready batches is iterated afresh once and its first batch is cut; a loader
    that cannot be iterated twice loses that batch. CPU random generators are left as they were,
    with those that the loader's samplers hold.

    Args:
        loader: the user's loader.
        sizes: samples in each batch to return.

    Returns:
        One batch per size; all start at the same first sample.

    Raises:
        ValueError: the dataset is empty, or a ready batch is smaller than asked for.
    """
    loader = original_of(loader)
    count = max(sizes)
    with preserved_randomness():
        if _yields_ready_batches(loader):
            return _cut_ready_batch(loader, sizes)
        if isinstance(loader.dataset, IterableDataset):
            found = list(islice(iter(loader.dataset), count))
            _require_samples(found, loader)
            samples = list(islice(cycle(found), count))
            return [loader.collate_fn(samples[:size]) for size in sizes]
        keys = _first_keys(loader, count)
        _require_samples(keys, loader)
        keys = list(islice(cycle(keys), count))
        if is_bulk(loader):
            return [loader.collate_fn(loader.dataset[keys[:size]]) for size in sizes]
        # Fetched anew for each: some collate functions change the samples they are given.
        return [loader.collate_fn(fetch(loader.dataset, keys[:size])) for size in sizes]


def learn_layout(loader: Any, *, splitter: Splitter | None = None) -> BatchLayout:
    """The layout of the loader's batches, learned from two of their first samples.

    Raises:
        BatchSplitError: they cannot be cut; see `BatchLayout.learn`.
    """
    loader = original_of(loader)
    if _yields_ready_batches(loader):
        # Ready batches come in one size, so there is nothing to compare.
        return BatchLayout(splitter=splitter)
    failure: BatchSplitError | None = None
    # padding may be as long as there are samples, which looks like a second batch dimension
    for sizes in ((3, 2), (7, 5)):
        larger, smaller = sample_batches(loader, sizes)
        try:
            return BatchLayout.learn(larger, smaller, sizes=sizes, splitter=splitter)
        except BatchSplitError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def unwrapped_batch_sampler(loader: Any) -> Any:
    """The batch sampler, without the wrapper that Lightning puts around it for predict."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    # By name: `lightning` and `pytorch_lightning` have a class each.
    if type(batch_sampler).__name__ == "_IndexBatchSamplerWrapper":
        return batch_sampler._batch_sampler  # type: ignore[union-attr]
    return batch_sampler


def is_standard(batch_sampler: Any) -> bool:
    """Whether it only cuts a sampler's order into batches: torch's, or torchdata's own copy."""
    kind = type(batch_sampler)
    return kind is BatchSampler or (
        isinstance(batch_sampler, BatchSampler) and kind.__module__.startswith("torchdata.")
    )


def has_custom_lists(loader: DataLoader[Any]) -> bool:
    """Whether the user's own batch sampler decides how many samples a list has."""
    batch_sampler = unwrapped_batch_sampler(loader)
    return batch_sampler is not None and not is_standard(batch_sampler)


def is_bulk(loader: Any) -> bool:
    """Whether the dataset is indexed by whole lists: ``sampler=BatchSampler, batch_size=None``."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is None
        and isinstance(loader.sampler, BatchSampler)
    )


def _yields_ready_batches(loader: Any) -> bool:
    if not isinstance(loader, DataLoader):
        return True
    return loader.batch_size is None and loader.batch_sampler is None and not is_bulk(loader)


def first_items(source: Any, count: int) -> list[Any]:
    """The first items of a sampler; none of one that could not be iterated from the start again."""
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
    batch_sampler = loader.sampler if is_bulk(loader) else unwrapped_batch_sampler(loader)
    sampler = getattr(batch_sampler, "sampler", None)
    if type(sampler) in (SequentialSampler, RandomSampler):
        return list(range(min(count, len(loader.dataset))))  # type: ignore[arg-type]
    keys: list[Any] = []
    # a list may hold a single key, so this many suffice
    for batch in first_items(batch_sampler, count):
        keys.extend(batch)
    return keys[:count]


def _require_samples(samples: list[Any], loader: DataLoader[Any]) -> None:
    if not samples:
        raise ValueError(
            f"Expects at least one sample to profile with, but {type(loader.dataset).__name__} "
            "gave none on this rank."
        )


def _cut_ready_batch(loader: Any, sizes: Sequence[int]) -> list[Any]:
    batch = next(iter(loader), None)
    layout = BatchLayout()
    rows = 0 if batch is None else layout.batch_size(batch)
    if rows < max(sizes):
        raise ValueError(
            f"Expects batches of at least {max(sizes)} samples to profile with, but the first that "
            f"{type(loader).__name__} yields has {rows}."
        )
    return [layout.take(batch, 0, size) for size in sizes]
