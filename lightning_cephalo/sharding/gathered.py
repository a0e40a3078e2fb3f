"""The full parameters of a flat, which have memory only while they are gathered.

[Note: residence]
``full`` has its memory in one of three places:

- POOLED, the usual case: borrowed from a pool, like the memory of gradients. Other flats borrow
  the same memory later.
- OWN: a storage of the flat, which shrinks to nothing between forward and backward. A graph that is
  retained from forward to backward points into ``full`` and must find the parameters there again.
  In between their versions are others: torch refuses to compute with what is freed.
- RESIDENT: a storage of the flat, which stays allocated. The flat is gathered from the forward to
  the backward, and hooks may free it in between. All RESIDENT flats are gathered at the same time
  anyway.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from lightning_cephalo.sharding.buffers import Buffer
from lightning_cephalo.sharding.collectives import gather_slices
from lightning_cephalo.sharding.contents import Contents, Cut, Memory
from lightning_cephalo.sharding.transfers import Pending
from lightning_cephalo.sharding.write_guard import GatheredParameter, RowGuard, changed, point_to

# by how much the versions of freed parameters differ from those that a graph has noted
FREED = 1 << 30


class Residence(Enum):
    """Kinds of memory for the gathered parameters of a flat; see [Note: residence]."""

    POOLED = "pooled"
    OWN = "own"
    RESIDENT = "resident"


class Gathered:
    """All parameters of a flat, in the compute dtype; flags and tags are those of the shards."""

    def __init__(self, contents: Contents, sharded: list[nn.Parameter], guard: RowGuard) -> None:
        self._contents, self._sharded = contents, sharded
        device = contents.context.device
        full = torch.empty(contents.numel, dtype=contents.dtype, device=device)
        self._own = self._memory = Memory(contents, full)
        self.parameters: list[nn.Parameter] = []
        for view, like, name in zip(self._own.parameters, sharded, contents.names, strict=True):
            parameter = GatheredParameter(view, requires_grad=like.requires_grad)
            parameter.__dict__.update(vars(like))
            parameter.full_name, parameter.guard = name, guard
            self.parameters.append(parameter)
        self._storage = full.untyped_storage()
        self._storage.resize_(0)
        other = torch.float64 if contents.dtype != torch.float64 else torch.float32
        self._of_other_dtype = torch.empty(0, dtype=other, device=device)
        self.residence = Residence.OWN
        self._buffer: Buffer | None = None
        self._shift = 0
        self._read_versions = self.versions
        self._shown_flags = [parameter.requires_grad for parameter in self.parameters]

    @property
    def full(self) -> Tensor:
        """All parameters, end to end."""
        return self._memory.whole

    @property
    def is_lent(self) -> bool:
        """Whether :attr:`full` uses memory of a pool now."""
        return self._buffer is not None

    # -- memory -------------------------------------------------------------------------------

    def gather(self, shard: Tensor, cut: Cut) -> Pending:
        """Allocate or borrow memory, and begin to fill it with the slices of all ranks."""
        context = self._contents.context
        # what is made in inference mode could not be used outside of it
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if is_inference else nullcontext():
            if self._buffer is None and self._storage.nbytes() == 0:
                self._find_memory()
            self._shift_versions(0)
            # saved tensors of a retained graph point into `full`; refilling it with equal values
            # is sound
            slices = self._memory.slices(cut)
            slices.own.copy_(shard)
            self.show_flags([sharded.requires_grad for sharded in self._sharded])
            if cut.layout is None or context.world_size == 1:
                return Pending()
            group, way, full = context.gather_group, context.way(), self._memory.whole
            return gather_slices(full, cut.sizes, group, way, slices.of_ranks)

    def _find_memory(self) -> None:
        contents = self._contents
        if self.residence is not Residence.POOLED or not contents.numel:
            self._storage.resize_(contents.full_bytes)
            return
        pool, device = contents.context.buffers, contents.context.device
        self._buffer = pool.take(contents.full_bytes, device)
        self._point_to(contents.memory_in(self._buffer, contents.dtype))

    def _point_to(self, memory: Memory) -> None:
        self._memory = memory
        for parameter, view in zip(self.parameters, memory.parameters, strict=True):
            point_to(parameter, view)

    def free(self) -> None:
        """Free the memory, except for a RESIDENT flat; graphs that still need it raise."""
        if self._buffer is not None:
            self._point_to(self._own)
            self._contents.context.buffers.give(self._buffer)
            self._buffer = None
        elif self.residence is Residence.RESIDENT:
            return
        self.release()
        self._shift_versions(FREED)

    def release(self) -> None:
        """Free the flat's own storage; no memory of a pool may be borrowed."""
        assert self._buffer is None
        self._storage.resize_(0)

    def renew_accumulators(self) -> list[Node]:
        """Let graphs from now on add to gradients in place, and not to graphs of before.

        The engine sums what comes to one node of a parameter, in memory of its own, until all of it
        is there. A parameter that gets another dtype for a moment has another node then.

        Returns:
            On a device, the nodes; hold them while the graph is made. A node adds on the stream on
            which it was made: that of this call, which reduces follow, and no stream of the user's.
        """
        for parameter, view in zip(self.parameters, self._memory.parameters, strict=True):
            if parameter.requires_grad:
                point_to(parameter, self._of_other_dtype)
                point_to(parameter, view)
        if self._of_other_dtype.is_cpu:
            return []
        return [get_gradient_edge(p).node for p in self.parameters if p.requires_grad]

    # -- versions -----------------------------------------------------------------------------

    @property
    def versions(self) -> list[int]:
        """Per parameter, a number that rises whenever its values change."""
        return [parameter._version - self._shift for parameter in self.parameters]

    def _shift_versions(self, shift: int) -> None:
        """Let graphs raise that need the values while they are freed; see [Note: residence].

        Private API, as in torch's own FSDP: versions cannot be put back otherwise.
        """
        change, self._shift = shift - self._shift, shift
        if change:
            versions = [parameter._version + change for parameter in self.parameters]
            torch._C._autograd._unsafe_set_version_counter(tuple(self.parameters), tuple(versions))

    def written(self) -> list[str]:
        """Return the names of parameters that code wrote to since the last call."""
        before, self._read_versions = self._read_versions, self.versions
        return changed(self._contents.names, self._read_versions, before)

    def raise_versions(self, names: Container[str]) -> None:
        """Refuse graphs that need old values of these parameters, whose rows have changed."""
        for index, name in enumerate(self._contents.names):
            if name in names:
                torch.autograd.graph.increment_version(self.parameters[index])
                self._read_versions[index] += 1

    # -- flags --------------------------------------------------------------------------------

    def show_flags(self, flags: Sequence[bool]) -> None:
        """Set which parameters need gradients, without a change of the sharded ones."""
        for parameter, flag in zip(self.parameters, flags, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        self._shown_flags = list(flags)

    def adopt_flags(self) -> None:
        """Pass on to the shards which gathered parameters need gradients, or the other way."""
        before = self._shown_flags
        self._shown_flags = passed_on("requires_grad", self.parameters, self._sharded, before)


def passed_on(
    attribute: str, gathered: Sequence[Tensor], sharded: Sequence[Tensor], shown: Sequence[Any]
) -> list[Any]:
    """Pass on what code has assigned to an attribute of two lists, and return what they have."""
    for parameter, own, before in zip(gathered, sharded, shown, strict=True):
        if getattr(parameter, attribute) is not before:
            setattr(own, attribute, getattr(parameter, attribute))
        elif getattr(own, attribute) is not before:
            setattr(parameter, attribute, getattr(own, attribute))
    return [getattr(own, attribute) for own in sharded]
