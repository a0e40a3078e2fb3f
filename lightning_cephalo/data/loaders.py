"""Reads the user's loaders before a training, and deals each rank its part of every global batch.

================================  ==================================================================
the user's loader                 one global step
================================  ==================================================================
DataLoader(batch_size=b)          the next ``b * world_size`` samples of the user's sampler
DataLoader(batch_sampler=...)     the next ``world_size`` lists of the batch sampler, concatenated
DataLoader(IterableDataset)       the next ``b * world_size`` samples of the stream
ready batches, of any iterable    the next one, of any size, cut by the plan
================================  ==================================================================

All of them give the same samples, in the same order, as one device with the global batch size.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.batch_layout import LEARNED, BatchLayout, Splitter, own_copy
from lightning_cephalo.data.passes import (
    Broadcast,
    Dealing,
    Passes,
    RankBatchSampler,
    warn_of_too_few_samples,
)
from lightning_cephalo.data.randomness import (
    generators_of,
    preserved_randomness,
    read_states,
    samplers_within,
    write_states,
)
from lightning_cephalo.data.rank_loaders import DealtSamples, DealtStream, OwnPart, RankLoader


def dealt_loader(loader: Any, dealing: Dealing) -> RankLoader:
    """Returns a loader of this rank's part of each global batch; collective, or ValueError."""
    loader, ranks = original_of(loader), len(dealing.sizes)
    # A collective: called unconditionally, before anything can differ between ranks.
    generators = generators_of(loader)
    write_states(generators, dealing.broadcast(read_states(generators)))
    for sampler in samplers_within(loader):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ValueError(
                f"The DataLoader has a {type(sampler).__name__} for {sampler.num_replicas} ranks:"
                " every rank would get an even part. Remove it and pass shuffle=True or your own"
                " sampler. The samples of one global order are dealt to all ranks."
            )
    total = dealing.global_batch_size or global_batch_size(loader, ranks) or 0
    return (_deal_stream if is_stream(loader) else _deal_map_style)(loader, dealing, total)


def own_part(loader: Any, dealing: Dealing) -> OwnPart:
    """Returns a loader of this rank's own samples, which ends with the other ranks'; collective."""
    source = loader = original_of(loader)
    if dealing.trains and 0 in dealing.sizes:
        raise UnsupportedError(
            f"The plan gives rank {dealing.sizes.index(0)} no samples, so its own would be lost."
            " With use_distributed_sampler=False give each rank samples in the plan."
        )
    # the plan's memory holds for its batch sizes
    if dealing.trains and is_stream(loader) and not yields_ready_batches(loader):
        source = with_batch_size(loader, dealing.sizes[dealing.rank])
    return OwnPart(source, dealing, loader)


def _deal_stream(loader: Any, dealing: Dealing, total: int) -> DealtStream:
    source, items = loader, 0
    if dealing.trains and total and not yields_ready_batches(loader):
        source, items = with_batch_size(loader, total), total
    seeds = getattr(source, "worker_init_fn", None)
    is_lightnings = getattr(seeds, "func", None) is pl_worker_init_function
    if getattr(source, "num_workers", 0) and (seeds is None or is_lightnings):
        # Lightning's differs by rank, so that ranks would read different streams
        equally = partial(pl_worker_init_function, rank=0)
        source = with_changes(source, worker_init_fn=equally)
    return DealtStream(source, dealing, loader, Passes(dealing, items, source))


def _deal_map_style(loader: DataLoader[Any], dealing: Dealing, total: int) -> DealtSamples:
    lists, ranks = unwrapped_batch_sampler(loader), len(dealing.sizes)
    if lists is None:
        raise ValueError(
            "DataLoader(batch_size=None) with a map-style dataset yields ready batches, which"
            " cannot be dealt by sample. Let the dataset return single samples, or lists of them"
            " in __getitems__(indices), and give DataLoader(batch_size=...)."
        )
    if type(lists) is BatchSampler or loader.batch_size is not None:
        # the same samples, but drop_last must refer to the global batch
        rest = (sized_len(lists.sampler) or 0) % total
        is_left_out = dealing.every_rank and not lists.drop_last and 0 < rest < ranks
        if is_left_out:
            warn_of_too_few_samples(rest, ranks)
        steps = BatchSampler(lists.sampler, total, lists.drop_last or is_left_out)
        mine = RankBatchSampler(steps, dealing, items=total)
    else:
        each, size = ranks, global_batch_size(loader, 1) or 0
        if dealing.global_batch_size is not None:
            each = total // size if size and total % size == 0 else 0
        if not each:
            raise ValueError(
                "Expects a global_batch_size that is a multiple of the batch sampler's lists, but"
                f" got {total} and lists of {size} samples. Leave global_batch_size out: one list"
                " per rank is then one global batch."
            )
        mine = RankBatchSampler(lists, dealing, per_step=each, items=each)
    wrapper: Any = loader.batch_sampler
    # Lightning's predict loop reads the indices from its wrapper
    shown = mine if wrapper is lists else type(wrapper)(mine)
    # in order: the ranks' batches must be of the same steps
    source = with_changes(loader, batch_sampler=shown, in_order=True)
    return DealtSamples(source, dealing, loader, mine.passes)


def is_stream(loader: Any) -> bool:
    """Returns whether only reading gives a loader's samples."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def yields_ready_batches(loader: Any) -> bool:
    """Returns whether a loader gives no single samples: no DataLoader, or ``batch_size=None``."""
    return not isinstance(loader, DataLoader) or loader.batch_sampler is None


def unwrapped_batch_sampler(loader: Any) -> Any:
    """Returns the batch sampler, without Lightning's wrapper for predict."""
    lists = getattr(loader, "batch_sampler", None)
    # Compared by name: `lightning` and `pytorch_lightning` each have such a class.
    is_wrapper = type(lists).__name__ == "_IndexBatchSamplerWrapper"
    return lists._batch_sampler if is_wrapper else lists  # type: ignore[union-attr]


def original_of(loader: Any) -> Any:
    """Returns the user's loader; Lightning puts rebuilt ones into the user's CombinedLoader."""
    return getattr(loader, "dealt_from", loader)


def global_batch_size(loader: Any, world_size: int) -> int | None:
    """Returns the samples per step over all ranks, as under DDP; None if only reading shows it."""
    loader = original_of(loader)
    if not isinstance(loader, DataLoader):
        return None
    lists = unwrapped_batch_sampler(loader)
    size = loader.batch_size or getattr(lists, "batch_size", None)
    if not isinstance(size, int) and lists is not None and not isinstance(lists, Iterator):
        with untouched(lists):
            size = next(map(len, lists), None)
    return None if size is None else size * world_size


def refuse_one_pass(loader: Any) -> None:
    """Raises for generators and the like: they lose the batches that are read before training."""
    # not every iterator: some classes start anew in their __iter__
    if isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools"):
        raise UnsupportedError(
            f"The dataloader is a {type(loader).__name__}, which can be read once, but its first"
            " batches are also read beforehand. Give one whose __iter__ starts anew."
        )


def with_changes(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Returns a copy of a loader, without a running iterator, with other values of attributes."""
    copied = copy.copy(loader)
    vars(copied).update(changes, _iterator=None)  # a DataLoader forbids to set some
    return copied


def with_batch_size(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Returns a copy of a stream's loader with another batch size."""
    lists = BatchSampler(loader.sampler, size, loader.drop_last)
    return with_changes(loader, batch_size=size, batch_sampler=lists)


def agreed_seed(broadcast: Broadcast) -> int:
    """Returns rank 0's seed of the data order: ``PL_GLOBAL_SEED`` if set, else torch's seed."""
    return int(broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))))


def untouched(loader: Any) -> AbstractContextManager[None]:
    """Restores afterwards global generators, and those of a loader, or a sampler, and its data."""
    data = getattr(loader, "dataset", None)
    return preserved_randomness(generators_of(loader) + generators_of(data))


def first_batch(loader: Any, layout: BatchLayout) -> tuple[Any, int]:
    """Returns the first ready batch and its samples; None and 0 if there is none."""
    with untouched(loader):
        batch = next(iter(loader), None)
        return batch, 0 if batch is None else layout.batch_size(batch)


def sample_batches(
    loader: Any, sizes: Sequence[int], layout: BatchLayout | None = None
) -> list[Any]:
    """Returns collated batches of ``sizes`` of the loader's first samples, which may repeat.

    Of ready batches the first is cut. Raises ValueError if it is too small, or without samples.
    """
    loader, count, layout = original_of(loader), max(sizes), layout or BatchLayout()
    if yields_ready_batches(loader):
        batch, rows = first_batch(loader, layout)
        if rows < count:
            raise ValueError(
                f"Expects batches of at least {count} samples to profile with, but the first that"
                f" {type(loader).__name__} yields has {rows}."
            )
        return [layout.take(batch, 0, size) for size in sizes]
    data, batches = loader.dataset, []
    is_read, fetch = isinstance(data, IterableDataset), getattr(data, "__getitems__", None)
    with untouched(loader):
        found = list(islice(data if is_read else _keys(loader), count))
        if not found:
            raise ValueError(
                f"Expects at least one sample to read before training, but {type(data).__name__}"
                " gave none on this rank. Check its data."
            )
        for size in sizes:
            samples = list(islice(cycle(found), size))
            if not is_read:  # as torch's DataLoader reads them
                samples = fetch(samples) if fetch else [data[key] for key in samples]
            # some collate functions change what they get
            batches.append(loader.collate_fn(own_copy(samples, with_arrays=True)))
    return batches


def _keys(loader: DataLoader[Any]) -> Iterator[Any]:
    lists = unwrapped_batch_sampler(loader)
    if type(getattr(lists, "sampler", None)) in (SequentialSampler, RandomSampler):
        return iter(range(len(loader.dataset)))  # type: ignore[arg-type]
    # reading an iterator would take its first lists from the training
    return iter(()) if isinstance(lists, Iterator) else chain.from_iterable(lists)


def learn_layout(loader: Any, *, splitter: Splitter | None = None) -> BatchLayout:
    """Returns the layout, learned from two batches; raises BatchSplitError without a cut."""
    if yields_ready_batches(original_of(loader)):
        # Ready batches come in one size, so there is nothing to compare.
        return BatchLayout(splitter=splitter)
    larger, smaller = sample_batches(loader, LEARNED)
    return BatchLayout.learn(larger, smaller, splitter)
