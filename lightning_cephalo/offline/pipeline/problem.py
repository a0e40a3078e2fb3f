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
from lightning_cephalo.plan import Problem, RankProfile


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
        for name, count in Counter(block.name for block in self.blocks).items():
            if count > 1:
                raise PlanError(
                    "PipelineProblem.blocks: expected nodes that can be told apart, but"
                    f" {name!r} names {count} of them. Give each one its own name."
                )
        last = len(self.network.inside) - 1
        for block in self.blocks:
            if not block.ranks or not 0 <= block.node <= last:
                raise PlanError(
                    f"PipelineProblem.blocks: {block.name!r}: expected at least one rank, and a"
                    f" node from 0 to {last}, but got {len(block.ranks)} ranks on node"
                    f" {block.node}."
                )

    @property
    def units(self) -> int:
        return self.whole.units

    @property
    def batch(self) -> int:
        return self.whole.global_batch_size

    def nodes(self, blocks: Collection[int]) -> tuple[int, ...]:
        """Return the nodes of some blocks, in order, each once."""
        return tuple(sorted({self.blocks[block].node for block in blocks}))

    def collective_s(self, blocks: Collection[int], nbytes: float) -> float:
        """Return the seconds to gather or reduce ``nbytes`` over the ranks of some blocks."""
        ranks: Counter[int] = Counter()
        for block in blocks:
            ranks[self.blocks[block].node] += len(self.blocks[block].ranks)
        return self.uneven_factor * self.network.ring_s(ranks, nbytes)

    def crossing(self, one: Collection[int], other: Collection[int], samples: int) -> Crossing:
        """Return what a wave's boundary takes, on the slowest link between the two groups."""
        link = self.network.between_groups(self.nodes(one), self.nodes(other))
        nbytes = samples * self.crossing_bytes
        return Crossing(nbytes / link.bandwidth_bytes_per_s, link.latency_s)

    def update_s(self, blocks: Sequence[int], nbytes: float) -> float:
        """Return the slowest rank's seconds to update ``nbytes``, shared by the ranks' memory."""
        own = [self.blocks[block] for block in blocks]
        rates = [(rank.capacity_bytes, block.update_bytes_per_s)
                 for block in own for rank in block.ranks]  # fmt: skip
        total = math.fsum(capacity for capacity, _ in rates)
        if math.isinf(total):  # unlimited ranks share all of it
            rates = [(1.0, rate) for capacity, rate in rates if capacity == total]
            total = len(rates)
        return max(nbytes * capacity / total / rate for capacity, rate in rates) if nbytes else 0.0
