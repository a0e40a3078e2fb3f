"""Deals each global batch unevenly to the ranks, and splits a rank's batch into microbatches.

Nothing here communicates: ranks agree through functions that the caller passes in.
"""

from lightning_cephalo.common.errors import BatchSplitError
from lightning_cephalo.data.batch_layout import BatchLayout
from lightning_cephalo.data.collate import RankCollate
from lightning_cephalo.data.dealing import Dealing
from lightning_cephalo.data.loaders import dealt_loader
from lightning_cephalo.data.lockstep import LockStepLoader
from lightning_cephalo.data.reading import (
    agreed_seed,
    global_batch_size,
    learn_layout,
    loader_batch_size,
    original_of,
    rank_batch_sampler,
    sample_batches,
)
from lightning_cephalo.data.samplers import GlobalOrder, RankBatchSampler
from lightning_cephalo.data.shares import deal, split_sizes

__all__ = [
    "BatchLayout",
    "BatchSplitError",
    "Dealing",
    "GlobalOrder",
    "LockStepLoader",
    "RankBatchSampler",
    "RankCollate",
    "agreed_seed",
    "deal",
    "dealt_loader",
    "global_batch_size",
    "learn_layout",
    "loader_batch_size",
    "original_of",
    "rank_batch_sampler",
    "sample_batches",
    "split_sizes",
]
