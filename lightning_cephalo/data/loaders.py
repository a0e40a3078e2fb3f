"""Copies the user's DataLoader so that each rank loads its part of every global batch.

================================  ==================================================================
the user's loader                 one global step
================================  ==================================================================
DataLoader(batch_size=b)          the next ``b * world_size`` samples of the user's sampler
DataLoader(batch_sampler=...)     the next ``world_size`` lists of the batch sampler, concatenated
DataLoader(IterableDataset)       the next ``b * world_size`` samples of the stream
IterableDataset, batch_size=None  the next ready batch of any size, cut by the plan
not a DataLoader                  the same
================================  ==================================================================

All of them give the same samples, in the same order, as one device with the global batch size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data import reading
from lightning_cephalo.data.containers import known_length
from lightning_cephalo.data.dealing import Dealing
from lightning_cephalo.data.randomness import (
    generators_of,
    read_states,
    samplers_within,
    write_states,
)
from lightning_cephalo.data.rank_loaders import DealtSamples, DealtStream, OwnPart, RankLoader
from lightning_cephalo.data.samplers import RankBatchSampler, warn_of_too_few_samples


def dealt_loader(loader: Any, dealing: Dealing) -> RankLoader:
    """Returns a loader that yields this rank's part of each global batch; collective.

    It reads a DataLoader of the user's own class, with the same options.

    Raises:
        ValueError: a DistributedSampler for several ranks, ``batch_size=None`` with a map-style
            dataset, or a global batch size that does not fit the batch sampler.
        UnsupportedError: a loader that holds an iterator.
    """
    loader, ranks = reading.original_of(loader), len(dealing.sizes)
    # A collective: called unconditionally, before anything can differ between ranks.
    generators = generators_of(loader)
    write_states(generators, dealing.broadcast(read_states(generators)))
    _reject_distributed_sampler(loader, ranks)
    total = dealing.global_batch_size or reading.global_batch_size(loader, ranks)
    return (_deal_stream if reading.is_stream(loader) else _deal_map_style)(loader, dealing, total)


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


def _deal_stream(loader: Any, dealing: Dealing, total: int | None) -> DealtStream:
    source, items = loader, 0
    if dealing.trains and total and not reading.yields_ready_batches(loader):
        source, items = reading.with_batch_size(loader, total), total
    seeds = getattr(source, "worker_init_fn", None)
    is_lightnings = getattr(seeds, "func", None) is pl_worker_init_function
    if getattr(source, "num_workers", 0) and (seeds is None or is_lightnings):
        # Lightning's differs by rank, so that ranks would read other streams than one device
        equally = partial(pl_worker_init_function, rank=0)
        source = reading.with_changes(source, worker_init_fn=equally)
    return DealtStream(source, dealing, loader, items)


def _deal_map_style(loader: DataLoader[Any], dealing: Dealing, total: int | None) -> DealtSamples:
    lists, ranks = reading.unwrapped_batch_sampler(loader), len(dealing.sizes)
    if lists is None:
        raise ValueError(
            "DataLoader(batch_size=None) with a map-style dataset yields ready batches, which "
            "cephalo cannot deal out by sample. Let the dataset return single samples, or lists of "
            "them in __getitems__(indices), and give DataLoader(batch_size=...)."
        )
    if total is None or reading.has_custom_lists(loader):
        each = _lists_per_step(loader, ranks, dealing.global_batch_size)
        mine = RankBatchSampler(lists, dealing, per_step=each, items=each)
    else:  # the same samples, but drop_last must refer to the global batch
        rest = (known_length(lists.sampler) or 0) % total
        is_left_out = dealing.every_rank and not lists.drop_last and 0 < rest < ranks
        if is_left_out:
            warn_of_too_few_samples(rest, ranks)
        steps = BatchSampler(lists.sampler, total, lists.drop_last or is_left_out)
        mine = RankBatchSampler(steps, dealing, items=total)
    wrapper: Any = loader.batch_sampler
    # Lightning's predict loop reads the indices from its wrapper
    shown = mine if wrapper is lists else type(wrapper)(mine)
    # every rank's batches must be of the same steps
    return DealtSamples(
        reading.with_changes(loader, batch_sampler=shown, in_order=True),
        dealing,
        loader,
        mine.passes,
    )


def _reject_distributed_sampler(loader: Any, world_size: int) -> None:
    for sampler in samplers_within(loader):
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
    size = reading.global_batch_size(loader, 1)
    if not size or total % size:
        raise ValueError(
            f"Expects a global_batch_size that is a multiple of the batch sampler's lists, but got "
            f"{total} and lists of {size} samples. Leave global_batch_size out: {world_size} lists "
            "(one per rank) are then one global batch."
        )
    return total // size
