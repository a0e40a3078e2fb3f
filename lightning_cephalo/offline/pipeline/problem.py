"""Input of the advisor: blocks of ranks, the links between them, and bytes of a model's parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.records import Amount, Checked, Name, Positive, PositiveOrInfinite
from lightning_cephalo.offline.estimate.network import Network
from lightning_cephalo.offline.pipeline.times import Crossing
from lightning_cephalo.plan import Links, Problem, RankProfile


@dataclass(frozen=True)
class Block(Checked):
    """Ranks of one node that stay together; a stage is one or more blocks."""

    name: Name
    node: int
    ranks: tuple[RankProfile, ...]
    update_bytes_per_s: PositiveOrInfinite = math.inf


@dataclass(frozen=True)
class PartBytes(Checked):
    """Bytes of one unit, or of the root."""

    gather: Amount = 0.0
    reduce: Amount = 0.0
    state: Amount = 0.0
    buffers: Amount = 0.0
    update: Amount = 0.0


@dataclass(frozen=True)
class PipelineProblem(Checked):
    """Everything that the advisor needs to know about a cluster and a model."""

    whole: Problem
    blocks: tuple[Block, ...]
    network: Network
    unit: PartBytes
    _: KW_ONLY
    # The first and the last stage each hold all of the root (embedding, head). That is safe whether
    # embedding and head share their weights or not.
    root: PartBytes = PartBytes()
    crossing_bytes: Amount = 0.0
    uneven_factor: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = sum(len(block.ranks) for block in self.blocks)
        if ranks != len(self.whole.ranks):
            raise PlanError(
                f"PipelineProblem.blocks: expected the {len(self.whole.ranks)} ranks of the whole "
                f"problem in blocks, but got {ranks}."
            )

    @property
    def units(self) -> int:
        return self.whole.units

    @property
    def batch(self) -> int:
        return self.whole.global_batch_size

    def links(self, blocks: Collection[int], part: PartBytes) -> Links:
        """Return what it takes to gather and to reduce a part over the ranks of some blocks."""
        ranks: Counter[int] = Counter()
        for block in blocks:
            ranks[self.blocks[block].node] += len(self.blocks[block].ranks)
        sizes = part.gather, part.reduce
        return Links(*(self.uneven_factor * self.network.ring_s(ranks, size) for size in sizes))

    def crossing(self, one: Collection[int], other: Collection[int], nbytes: float) -> Crossing:
        """Return what bytes take on the slowest link between two groups of blocks."""
        nodes = ({self.blocks[block].node for block in group} for group in (one, other))
        link = self.network.between_groups(*nodes)
        return Crossing(nbytes / link.bandwidth_bytes_per_s, link.latency_s)

    def update_s(self, blocks: Sequence[int], nbytes: float) -> float:
        """Return the slowest rank's seconds to update ``nbytes``, shared by the ranks' memory."""
        own = [(rank.capacity_bytes, self.blocks[block].update_bytes_per_s)
               for block in blocks for rank in self.blocks[block].ranks]  # fmt: skip
        total = math.fsum(capacity for capacity, _ in own)
        if math.isinf(total):  # unlimited ranks share all of it
            own = [(1.0, rate) for capacity, rate in own if capacity == total]
            total = len(own)
        return max(nbytes * capacity / total / rate for capacity, rate in own)
