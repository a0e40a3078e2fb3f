"""Equal slots for slices that are nearly equal, so that they travel in single-tensor collectives.

Cuts lie between rows, so even shares are slices that differ by a few rows. Single-tensor
collectives take equal slices only. Lists of unequal slices are a group of one broadcast or one
reduce per rank, which was found slower on GPUs (pytorch/pytorch#198344). So slices are copied into
slots of the largest slice's size, and out of them, as ``fully_shard`` does. Whether that is faster
is measured: docs/design/collectives.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_cephalo.sharding.buffers import Buffer, BufferPool

# Slots may hold this much in all, relative to the slices: what is added travels too.
_MOST = 1.05
# Elements; 16 bytes in the narrowest dtype, the unit in which GPUs move memory fastest.
_ALIGNED = 16


class Padding:
    """The choice whether slices are padded, and the memory of the slots."""

    def __init__(self) -> None:
        self.is_on = False
        self.gathers, self.reduces = BufferPool(), BufferPool()

    def slots(
        self, full: torch.Tensor, sizes: Sequence[int], *, has_sum: bool = False
    ) -> Slots | None:
        """Return slots for slices of ``full``, and for a reduce's sum; None: not padded."""
        slot = slot_numel(sizes) if self.is_on else None
        pool = self.reduces if has_sum else self.gathers
        return None if slot is None else Slots(full, sizes, slot, pool, more=int(has_sum))


def slot_numel(sizes: Sequence[int]) -> int | None:
    """Return the elements of a slot; None if slices are equal, or slots would be much larger."""
    if len(set(sizes)) == 1:
        return None
    slot = -(-max(sizes) // _ALIGNED) * _ALIGNED
    return slot if slot * len(sizes) <= _MOST * sum(sizes) else None


class Slots:
    """One slot per rank in a borrowed buffer."""

    def __init__(
        self,
        like: torch.Tensor,
        sizes: Sequence[int],
        slot: int,
        pool: BufferPool,
        more: int = 0,
    ) -> None:
        self._sizes, self._pool = list(sizes), pool
        count = len(sizes) + more
        self._buffer: Buffer = pool.take(count * slot * like.element_size(), like.device)
        slots = self._buffer.view(count * slot, like.dtype).split(slot)
        self.of_ranks = slots[: len(sizes)]
        self.more = slots[len(sizes) :]
        self.whole = self._buffer.view(len(sizes) * slot, like.dtype)

    def fill(self, full: torch.Tensor) -> None:
        """Copy all slices into their slots; what is behind a slice in its slot does not matter."""
        _copy_all(self._slices(), full.split(self._sizes))

    def empty_into(self, full: torch.Tensor) -> None:
        """Copy all slices out of their slots, and give the buffer back."""
        # `.data` has a version counter of its own: graphs that point into `full` stay valid
        _copy_all(full.data.split(self._sizes), self._slices())
        self.give_back()

    def give_back(self) -> None:
        """Give the buffer back."""
        self._pool.give(self._buffer)

    def _slices(self) -> list[torch.Tensor]:
        return [slot[:size] for slot, size in zip(self.of_ranks, self._sizes, strict=True)]


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    # Private, as in torch's own fully_shard: one kernel for many slices, where copies one by one
    # take a launch each. tests/sharding/test_padding.py fails when it changes.
    torch._foreach_copy_(list(targets), list(sources))
