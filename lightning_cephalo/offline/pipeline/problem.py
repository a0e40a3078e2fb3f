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

    @property
    def capacity_bytes(self) -> float:
        """Memory of all its ranks together."""
        return math.fsum(rank.capacity_bytes for rank in self.ranks)


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
        twice = [name for name, n in Counter(one.name for one in self.blocks).items() if n > 1]
        if twice:
            raise PlanError(
                f"PipelineProblem.blocks: expected nodes that can be told apart, but {twice[0]!r} "
                f"names {sum(one.name == twice[0] for one in self.blocks)} of them. Give each one "
                f"its own name."
            )
        for block in self.blocks:
            if not block.ranks or not 0 <= block.node < len(self.network.inside):
                raise PlanError(
                    f"PipelineProblem.blocks: {block.name!r}: expected at least one rank, and a "
                    f"node from 0 to {len(self.network.inside) - 1}, but got {len(block.ranks)} "
                    f"ranks on node {block.node}."
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
        if not nbytes:
            return 0.0
        total = math.fsum(self.blocks[block].capacity_bytes for block in blocks)
        rates = [
            (rank.capacity_bytes, self.blocks[block].update_bytes_per_s)
            for block in blocks
            for rank in self.blocks[block].ranks
        ]
        if math.isinf(total):
            unlimited = sum(math.isinf(capacity) for capacity, _ in rates)
            return max(nbytes / unlimited / rate for capacity, rate in rates if capacity == total)
        return max(nbytes * capacity / total / rate for capacity, rate in rates)
