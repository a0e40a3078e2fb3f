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

import os
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data import reading
from lightning_cephalo.data.dealing import Dealing, DealtSamples, as_it_is
from lightning_cephalo.data.fingerprints import fingerprint
from lightning_cephalo.data.randomness import (
    SeparateRandomness,
    generators_of,
    read_states,
    samplers_within,
    write_states,
)
from lightning_cephalo.data.samplers import RankBatchSampler
from lightning_cephalo.data.shares import deal
from lightning_cephalo.data.streams import DealtStream, OwnPart


def dealt_loader(loader: Any, dealing: Dealing) -> Any:
    """Returns a loader that yields this rank's part of each global batch; collective.

    A DataLoader with a sampler stays of the user's own class, with the same options.

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
    # A custom batch sampler's lists may have any lengths. Dealing the length of the first list here
    # would only make the proportions coarser.
    if total is not None and total != sum(dealing.sizes) and not reading.has_custom_lists(loader):
        dealing = replace(dealing, sizes=deal(total, dealing.sizes))
    return (_deal_stream if reading.is_stream(loader) else _deal_map_style)(loader, dealing)


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


def _deal_stream(loader: Any, dealing: Dealing) -> DealtStream:
    source, items = loader, 0
    if dealing.trains and not reading.yields_ready_batches(loader):
        if len(dealing.sizes) > 1:
            _warn_unless_it_begins_anew(loader, dealing.seed)
        items = sum(dealing.sizes)
        source = reading.with_batch_size(loader, items)
    changes = _equal_seeds(loader)
    if changes:
        source = reading.with_changes(source, **changes)
    return DealtStream(source, dealing, loader, items)


def _warn_unless_it_begins_anew(loader: DataLoader[Any], seed: int) -> None:
    def first() -> int:
        with reading.untouched(loader), SeparateRandomness((seed % 2**64, 0)).active():
            return fingerprint(next(iter(loader.dataset), None))

    if first() != first():
        rank_zero_warn(
            f"The stream {type(loader.dataset).__name__} begins with another sample each time that"
            " it is read, and its first samples are also read beforehand. One that goes on where"
            " its last reader has stopped, as an open file does, loses these. So begin anew in"
            " __iter__, and seed what is random, or draw from the global generators."
        )


def _equal_seeds(loader: Any) -> dict[str, Any]:
    """Returns the option that seeds workers as on one device: Lightning's differs by rank."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return {}
    own = loader.worker_init_fn
    by_rank = isinstance(own, partial) and own.func.__name__ == pl_worker_init_function.__name__
    seeds = int(os.environ.get("PL_SEED_WORKERS", "0")) and own is None
    equally = partial(pl_worker_init_function, rank=0)
    return {"worker_init_fn": equally} if by_rank or seeds else {}


def _deal_map_style(loader: DataLoader[Any], dealing: Dealing) -> DataLoader[Any]:
    ranks, lists = len(dealing.sizes), reading.unwrapped_batch_sampler(loader)
    if lists is None:
        raise ValueError(
            "DataLoader(batch_size=None) with a map-style dataset yields ready batches, which "
            "cephalo cannot deal out by sample. Let the dataset return single samples, or lists of "
            "them in __getitems__(indices), and give DataLoader(batch_size=...)."
        )
    if reading.has_custom_lists(loader):
        each = _lists_per_step(loader, ranks, dealing.global_batch_size)
        mine = RankBatchSampler(lists, dealing, lists_per_step=each)
    else:  # the same samples, but drop_last must refer to the global batch
        mine = RankBatchSampler(lists.sampler, dealing, drop_last=lists.drop_last)
    changes: dict[str, Any] = {"batch_sampler": mine, "passes": mine.passes, "dealt_from": loader}
    wrapper: Any = loader.batch_sampler
    if wrapper is not lists:  # Lightning's predict loop reads the indices from it
        changes["batch_sampler"] = type(wrapper)(mine)
    if ranks > 1:  # a single rank is never without samples
        changes["dataset"] = DealtSamples(loader.dataset, loader.collate_fn)
        changes["collate_fn"] = as_it_is
    return reading.with_changes(loader, **changes)


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
