"""Copies the user's DataLoader so that each rank loads its part of every global batch.

================================  ==================================================================
the user's loader                 one global step
================================  ==================================================================
DataLoader(batch_size=b)          the next ``b * world_size`` samples of the user's sampler
DataLoader(batch_sampler=...)     the next ``world_size`` lists of the batch sampler, concatenated
DataLoader(IterableDataset)       the next ``b * world_size`` samples of the stream (`deal_stream`)
IterableDataset, batch_size=None  the next ready batch of any size, cut by the plan
not a DataLoader                  the same
================================  ==================================================================

All of them give the same samples, in the same order, as one device with the global batch size.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from lightning_cephalo.data import reading
from lightning_cephalo.data.collate import EmptyFetchDataset, RankCollate, tolerates_empty_fetch
from lightning_cephalo.data.dealing import Broadcast, Dealing
from lightning_cephalo.data.randomness import read_states, samplers_within, write_states
from lightning_cephalo.data.reading import original_of
from lightning_cephalo.data.samplers import RankBatchSampler
from lightning_cephalo.data.shares import deal
from lightning_cephalo.data.streams import deal_stream


def dealt_loader(loader: Any, dealing: Dealing) -> Any:
    """Returns a loader of the user's own class that yields this rank's part of each global batch.

    This is a collective: every rank calls it for every loader, in the same order. The result shows
    the same options as the user's loader, and the attributes of its sampler.

    Args:
        loader: the user's, before Lightning has put a DistributedSampler into it, or a rebuilt one.
        dealing: sizes of evaluation are proportions; each sample is on exactly one rank.

    Raises:
        ValueError: a DistributedSampler for several ranks, ``batch_size=None`` with a map-style
            dataset, or a global batch size that does not fit the batch sampler.
        BatchSplitError: a ready batch that cannot be cut.
        UnsupportedError: a loader that can be read only once, or holds an iterator.
    """
    loader, ranks = original_of(loader), len(dealing.sizes)
    # A collective: called unconditionally, before anything can differ between ranks.
    _share_generator_states(loader, dealing.broadcast)
    if ranks > 1 or not dealing.trains:
        reading.refuse_one_pass(loader)
    _reject_distributed_sampler(loader, ranks)
    total = dealing.global_batch_size or reading.global_batch_size(loader, ranks)
    # A custom batch sampler's lists may have any lengths. Dealing the length of the first list here
    # would only make the proportions coarser.
    if total is not None and total != sum(dealing.sizes) and not reading.has_custom_lists(loader):
        dealing = replace(dealing, sizes=deal(total, dealing.sizes))
    if reading.is_stream(loader):
        return deal_stream(loader, dealing)
    return _deal_map_style(loader, dealing)


def _deal_map_style(loader: DataLoader[Any], dealing: Dealing) -> DataLoader[Any]:
    ranks = len(dealing.sizes)
    batch_sampler = reading.unwrapped_batch_sampler(loader)
    if batch_sampler is None:
        raise ValueError(
            "DataLoader(batch_size=None) with a map-style dataset yields ready batches, which "
            "cephalo cannot deal out by sample. Let the dataset return single samples, or lists of "
            "them in __getitems__(indices), and give DataLoader(batch_size=...)."
        )
    drop_last = False
    lists_per_step: int | None = None
    if reading.is_standard(batch_sampler):
        # Reads the sampler directly: same samples, but drop_last must refer to the global batch.
        source: Any = batch_sampler.sampler
        drop_last = batch_sampler.drop_last
    else:
        source = batch_sampler
        lists_per_step = _lists_per_step(loader, ranks, dealing.global_batch_size)
    mine = RankBatchSampler(source, dealing, drop_last=drop_last, lists_per_step=lists_per_step)
    mine.warn_of_samples_left_out()
    # Lightning's predict loop reads the indices from its own wrapper, around our sampler.
    recorder = loader.batch_sampler if loader.batch_sampler is not batch_sampler else None
    lists: Any = mine if recorder is None else type(recorder)(mine)  # type: ignore[call-arg]
    changes: dict[str, Any] = {"batch_sampler": lists}
    if mine.sampler.source is loader.sampler:
        changes["sampler"] = mine.sampler
    if ranks > 1:  # a single rank is never without samples
        changes["collate_fn"] = RankCollate(loader.collate_fn, loader.dataset)
        if not tolerates_empty_fetch(loader.dataset):
            changes["dataset"] = EmptyFetchDataset(loader.dataset)
    # Not earlier: Lightning's wrapper copies attributes, and would pickle the loader.
    mine.original = loader
    return reading.with_changes(loader, **changes)


def _reject_distributed_sampler(loader: Any, world_size: int) -> None:
    roots = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    for sampler in chain.from_iterable(samplers_within(root) for root in roots):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ValueError(
                f"The DataLoader has a {type(sampler).__name__} for {sampler.num_replicas} ranks "
                f"({world_size} are running), so every rank would get an even part, and cephalo "
                "could deal only that part. Remove it and pass shuffle=True or your own sampler: "
                "cephalo deals the samples of one global order to all ranks."
            )


def _lists_per_step(loader: DataLoader[Any], world_size: int, total: int | None) -> int:
    if total is None:
        return world_size
    size = reading.loader_batch_size(loader)
    if not size or total % size:
        raise ValueError(
            f"Expects a global_batch_size that is a multiple of the batch sampler's lists, but got "
            f"{total} and lists of {size} samples. Leave global_batch_size out: {world_size} lists "
            "(one per rank) are then one global batch."
        )
    return total // size


def _share_generator_states(loader: Any, broadcast: Broadcast) -> None:
    """Sets the generators of a loader and of its samplers to rank 0's states; collective.

    Raises ValueError if samplers hold different generators on different ranks.
    """
    generators = reading.generators_of_loader(loader)
    write_states(generators, broadcast(read_states(generators)))
