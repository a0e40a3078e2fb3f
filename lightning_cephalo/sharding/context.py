"""The device, process groups and memory pools that flats share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_cephalo.sharding.across_groups import Across
from lightning_cephalo.sharding.buffers import BufferPool
from lightning_cephalo.sharding.collectives import Way
from lightning_cephalo.sharding.padding import Padding
from lightning_cephalo.sharding.placement import Meet
from lightning_cephalo.sharding.routes import STRAIGHT, Route
from lightning_cephalo.sharding.staging import HostStage


@dataclass(frozen=True)
class ShardingContext:
    """What flats share.

    Attributes:
        mesh: One-dimensional mesh over all ranks.
        reduce_group: Group of the reduces; a separate group lets gathers and reduces overlap.
        compute_dtype: Dtype of gathered floating-point parameters (None: their own).
        padding: Whether nearly equal slices are padded.
        stage: Moves device tensors over backends that run on the host; None: not needed.
        meet: Waits for all ranks before operators on sharded tensors communicate; None: not.
        reduce_dtype: The dtype that wider gradients travel in; None: their own.
        across: With hybrid sharding, the groups of ranks that each hold the whole state. Mesh,
            gather_group and reduce_group are then those of this rank's group.
    """

    device: torch.device
    mesh: DeviceMesh
    gather_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    compute_dtype: torch.dtype | None = None
    buffers: BufferPool = field(default_factory=BufferPool)
    gradient_buffers: BufferPool = field(default_factory=BufferPool)
    padding: Padding = field(default_factory=Padding)
    stage: HostStage | None = None
    meet: Meet | None = None
    reduce_dtype: torch.dtype | None = None
    across: Across | None = None

    # read for each unit of each step, where torch looks the group up each time
    @cached_property
    def rank(self) -> int:
        """This process's rank among those that hold the state together."""
        return dist.get_rank(self.gather_group)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks that hold the state together."""
        return dist.get_world_size(self.gather_group)

    @cached_property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.world_size == 1 and self.across is None

    def way(self, route: Route | None = None) -> Way:
        """Return how slices travel; reduces over groups have a route of their own."""
        return Way(self.padding, self.stage, route or STRAIGHT)

    @property
    def everyone(self) -> dist.ProcessGroup:
        """A process group of all ranks."""
        return self.gather_group if self.across is None else self.across.gathers
