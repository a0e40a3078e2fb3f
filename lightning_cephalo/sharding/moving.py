"""Moves the slices of a flat, and all that has their rows, from one layout to another.

Cuts only shift: what a rank sends lies in its old slice in the order of receivers, and what it gets
lies in its new slice in the order of senders (:func:`~lightning_cephalo.sharding.layout.overlaps`).
So one uneven all-to-all from slice to slice moves a flat, without copies. It sends the rows that
change their rank, and no others.

Considered: gathering the whole flat and cutting it anew. Every rank then needs memory for all of
it, and receives rows that it does not keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from lightning_cephalo.sharding.collectives import all_to_all
from lightning_cephalo.sharding.layout import FlatLayout, overlaps
from lightning_cephalo.sharding.placement import local_part, set_rows


def moved(
    slice_: Tensor, old_cuts: Sequence[int], new_cuts: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Return this rank's slice by the new cuts; blocking and collective."""
    rank, counts = dist.get_rank(group), overlaps(old_cuts, new_cuts)
    size = slice_.element_size()
    sends = [count * size for count in counts[rank]]
    receives = [row[rank] * size for row in counts]
    # as bytes: state may have any dtype, and not every backend knows each
    sent = slice_.contiguous().view(torch.uint8)
    return all_to_all(sent, sends, receives, group).view(slice_.dtype)


@dataclass(frozen=True)
class Column:
    """Tensors that have the rows of a flat's parameters: optimizer state of one kind, averages.

    Attributes:
        tensors: One DTensor per parameter of the flat, or None. All have one dtype and lie on one
            device. Every rank has them at the same places.
    """

    name: str
    tensors: tuple[DTensor | None, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        """The parameters that have such a tensor, by their number in the flat."""
        return tuple(index for index, tensor in enumerate(self.tensors) if tensor is not None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all of them."""
        return next(tensor.dtype for tensor in self.tensors if tensor is not None)

    def move(
        self,
        old: FlatLayout,
        new: FlatLayout,
        placements: Sequence[Placement],
        group: dist.ProcessGroup,
    ) -> None:
        """Give every tensor its rows by the new layout, in place; blocking and collective."""
        held = {slot: tensor for slot, tensor in enumerate(self.tensors) if tensor is not None}
        rows = [local_part(tensor) for tensor in held.values()]
        device = next(iter(held.values())).device_mesh.device_type
        # averages may lie in host memory, which the ranks do not communicate
        slice_ = torch.cat([part.reshape(-1) for part in rows]).to(device)
        slots = self.slots
        slice_ = moved(slice_, old.cuts_of(slots), new.cuts_of(slots), group).to(rows[0].device)
        rank, start = dist.get_rank(group), 0
        for slot, tensor in held.items():
            first, end = new.rows(slot)[rank]
            size = (end - first) * new.slots[slot].row_numel
            part = slice_[start : start + size].view(end - first, *tensor.shape[1:])
            set_rows(tensor, part, placements[slot])
            start += size
