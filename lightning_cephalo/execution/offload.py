"""Holds boundary activations in host memory from a unit's forward to its backward.

The device holds the inputs of two visits. Host memory is allocated once, and reused from its
beginning in every step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.host_room import power_from
from lightning_cephalo.accelerator.transfers import Told
from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.graph import is_plain, take_memory

_ALIGNMENT_BYTES = 256
_LEAST_CHUNK_BYTES = 2**24


def powers_of_two(nbytes: int) -> list[int]:
    """Return powers of two, the largest first, that sum to ``nbytes`` or little more."""
    pieces: list[int] = []
    while (left := nbytes - sum(pieces)) > 0:
        pieces.append(max(_LEAST_CHUNK_BYTES, 2 ** (left.bit_length() - 1)))
    return pieces


@dataclass
class OffloadedTensor:
    """A leaf whose values are in host memory; ``returning``: a copy on its way, and its end."""

    leaf: Tensor
    host: Tensor
    copies: Told
    returning: tuple[Tensor, Any] | None = None

    def fetch(self) -> tuple[Tensor, Any]:
        """Begin to copy the values back, unless it has begun."""
        if self.returning is None:
            shape, stride = self.host.shape, self.host.stride()
            values = torch.empty_strided(
                shape, stride, dtype=self.leaf.dtype, device=self.leaf.device
            )
            self.returning = values, self.copies.start(values, self.host)
        return self.returning

    def restore(self) -> None:
        """Give the leaf its values; later work runs after their copy."""
        values, arrival = self.fetch()
        self.copies.wait(arrival)
        self.leaf.data, self.returning = values, None

    def discard(self) -> None:
        """Drop the values, and release the device memory of a copy that may be under way."""
        if self.returning is not None:  # only work that waits for the copy may reuse the memory
            self.copies.wait(self.returning[1])
        self.returning = None


class HostArena:
    """Copies leaves to the host and back.

    If the device pins, it keeps pieces of powers of two: torch rounds up to such sizes and takes
    nothing back (pytorch#95823). One piece of 33 GiB would take 64 GiB of the host.
    """

    def __init__(self, accelerator: Accelerator, capacity_bytes: float) -> None:
        self._accelerator = accelerator
        self.capacity_bytes = capacity_bytes
        self._by_powers_of_two = accelerator.pins_host_memory
        self._chunks: list[Tensor] = []
        self._chunk = 0
        self._offset = 0
        self._used_bytes = 0
        self.most_bytes = 0
        self._copies = Told(accelerator)
        self._leaving: deque[tuple[Tensor, Any]] = deque()

    @property
    def held_bytes(self) -> int:
        return sum(chunk.numel() for chunk in self._chunks)

    def reserve(self, nbytes: int) -> None:
        """Allocate ``nbytes`` in place of the earlier allocation."""
        self._chunks = []
        for piece in powers_of_two(nbytes) if self._by_powers_of_two else [nbytes]:
            if piece:
                self._chunks.append(self._new_chunk(piece, min(piece, nbytes - self.held_bytes)))
        self.start()

    def start(self) -> None:
        # a step that failed may have left copies under way
        self._let_go_of_copied(but=0)
        self._used_bytes = self._chunk = self._offset = 0
        # replace pieces that grew one by one by a single one
        if len(self._chunks) > 1 and not self._by_powers_of_two:
            self.reserve(self.most_bytes)

    def offload(self, leaf: Tensor) -> OffloadedTensor | None:
        """Copy a leaf's values to the host and release its memory; None if it must stay."""
        values = leaf.detach()
        if not is_plain(values) or not values.numel():
            return None
        if not self._accelerator.holds(values):
            return None  # it takes no room on the device
        if not torch.ops.aten.is_non_overlapping_and_dense(values):
            return None
        host = self._place(values)
        # all but the last: else the device would wait for a copy that has only just begun
        self._let_go_of_copied(but=1)
        copied = self._copies.start(host, values)
        if copied is not None:
            # only work that waits for the copy may reuse the memory
            self._leaving.append((values, copied))
        take_memory(leaf)
        return OffloadedTensor(leaf, host, self._copies)

    def _let_go_of_copied(self, but: int) -> None:
        while len(self._leaving) > but:
            _, copied = self._leaving.popleft()
            self._copies.wait(copied)

    def _place(self, values: Tensor) -> Tensor:
        nbytes = values.numel() * values.element_size()
        chunk = self._room_for(-(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        return torch.as_strided(chunk[:nbytes].view(values.dtype), values.shape, values.stride())

    def _room_for(self, nbytes: int) -> Tensor:
        while self._chunk < len(self._chunks):
            chunk = self._chunks[self._chunk]
            if self._offset + nbytes <= chunk.numel():
                break
            self._chunk, self._offset = self._chunk + 1, 0
        else:
            self._chunks.append(self._new_chunk(self._growth_for(nbytes), nbytes))
            chunk = self._chunks[self._chunk]
        piece = chunk[self._offset : self._offset + nbytes]
        self._offset += nbytes
        self._used_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self._used_bytes)
        return piece

    def _growth_for(self, nbytes: int) -> int:
        if not self._by_powers_of_two:
            return max(nbytes, _LEAST_CHUNK_BYTES)
        # grow by at least half of the held bytes: few pieces, each of which wastes less than a
        # leaf at its end
        return max(power_from(nbytes), _LEAST_CHUNK_BYTES, power_from(self.held_bytes) // 2)

    def _new_chunk(self, nbytes: int, least_bytes: int | None = None) -> Tensor:
        free = self.capacity_bytes - self.held_bytes
        least = nbytes if least_bytes is None else least_bytes
        if least > free:
            raise HostMemoryError(
                f"Offloaded boundaries need {format_mib(self.held_bytes + least)} of host"
                f" memory; this rank may use {format_mib(self.capacity_bytes)}. Raise"
                " Planner(host_memory_cap=...), use a smaller global batch, or a plan that offloads"
                " less."
            )
        try:
            return self._accelerator.allocate_host(int(min(nbytes, free)))
        except (MemoryError, RuntimeError) as error:  # torch raises either, by the platform
            raise HostMemoryError(
                f"This rank's host did not give {format_mib(nbytes)} for offloaded boundaries:"
                f" {error} Lower Planner(host_memory_cap=...), use a smaller global batch, or a"
                " plan that offloads less."
            ) from error
