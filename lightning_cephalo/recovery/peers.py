"""Sends pieces to other hosts, whose memory keeps copies of them.

Bytes go from file to file, over a group of its own, in a thread. A copy gets its header when it has
arrived whole. So a host that is lost in between leaves copies whole or void.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import astuple
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cephalo.accelerator.host import kernel_of_host
from lightning_cephalo.common.errors import CephaloError, RecoveryError
from lightning_cephalo.recovery.placing import Placement
from lightning_cephalo.recovery.store import Piece, Sizes, Slot, Store

DOMAIN = "LIGHTNING_CEPHALO_DOMAIN"
"""Environment variable that names what is lost together, such as a rack; else it is the host."""
# where a receiver without room puts what it must still receive
_SCRATCH_BYTES = 1 << 24


def own_domain() -> Hashable:
    """Return what is equal for ranks that are lost together: those under one kernel."""
    return os.environ.get(DOMAIN) or kernel_of_host()


class _Coming(NamedTuple):
    """A piece that arrives."""

    sender: int
    piece: Piece
    sizes: Sizes
    slot: Slot | None
    chunks: list[Tensor]


class Peers:
    """Exchanges pieces between hosts."""

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self._group, self._store = group, store
        self._rank = dist.get_rank(group)

    def exchange(
        self, placement: Placement, piece: Piece, slot: Slot | None, spared: Piece | None
    ) -> None:
        """Send this rank's piece, and receive the others' that it is to hold; collective."""
        receivers, senders = placement.receivers[self._rank], placement.senders(self._rank)
        sizes = Sizes(0, 0, 0)
        content: Tensor | None = None
        lack: Exception | None = None
        try:
            if slot is not None:
                sizes, content = slot.content()
        except RecoveryError as error:  # the receivers wait for a head
            lack = error
        numbers = [int(content is not None), *astuple(piece), *sizes]
        head = torch.tensor(numbers, dtype=torch.int64)
        heads = [torch.empty_like(head) for _ in senders]
        self._transfer([([head], receivers)], dict(zip(senders, [[h] for h in heads], strict=True)))
        coming = []
        for sender, found in zip(senders, heads, strict=True):
            is_whole, *rest = (int(number) for number in found.tolist())
            if is_whole:
                try:
                    coming.append(self._prepared(sender, rest, spared))
                except OSError as error:
                    lack = error
                    coming.append(_drained(sender, rest))
        sent = [] if content is None else [(_chunks(content), receivers)]
        self._transfer(sent, {one.sender: one.chunks for one in coming})
        for one in coming:
            if one.slot is not None:
                one.slot.finish(one.piece)
        if lack is not None:
            raise lack
        if len(coming) < len(senders):
            raise VoidPieceError

    def _prepared(self, sender: int, numbers: list[int], spared: Piece | None) -> _Coming:
        piece, sizes = Piece(*numbers[:5]), Sizes(*numbers[5:])
        kept = None if spared is None else spared.of(sender)
        slot = self._store.slot(sender, kept, is_copy=True)
        return _Coming(sender, piece, sizes, slot, _chunks(slot.make_room(sizes)))

    def _transfer(
        self,
        sent: Sequence[tuple[Sequence[Tensor], Sequence[int]]],
        received: dict[int, list[Tensor]],
    ) -> None:
        works = [
            dist.irecv(chunk, group=self._group, group_src=sender)
            for sender, chunks in received.items()
            for chunk in chunks
        ]
        works += [
            dist.isend(chunk, group=self._group, group_dst=receiver)
            for chunks, receivers in sent
            for receiver in receivers
            for chunk in chunks
        ]
        for work in works:
            if work is not None:
                work.wait()


class VoidPieceError(CephaloError, RuntimeError):
    """Another rank's piece is void, so that its copy cannot be kept."""


def _chunks(content: Tensor) -> list[Tensor]:
    return list(content.split(_SCRATCH_BYTES))


def _drained(sender: int, numbers: list[int]) -> _Coming:
    """Return where the bytes of a piece go for which there is no room."""
    sizes = Sizes(*numbers[5:])
    scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)
    total = sizes.payload_bytes + sizes.meta_bytes
    lengths = [min(_SCRATCH_BYTES, total - at) for at in range(0, total, _SCRATCH_BYTES)]
    return _Coming(sender, Piece(*numbers[:5]), sizes, None, [scratch[:n] for n in lengths])
