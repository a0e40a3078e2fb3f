"""Host memory that is taken once and cut into pieces, for optimizer state outside of the device."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.offload import powers_of_two

_ALIGNMENT_BYTES = 256
_LEAST_CHUNK_BYTES = 2**16


class HostRoom:
    """Host memory of one rank, pinned where copies need that.

    ::

        room = HostRoom(accelerator, capacity_bytes=8 * 2**30)
        room.reserve(2**30)
        moments = room.take(1000, torch.float32)

    Args:
        accelerator: This rank's device. If it pins host memory, the room takes pieces of powers of
            two: torch rounds up to such sizes and takes nothing back (pytorch#95823).
        capacity_bytes: Upper limit of the bytes to take.
    """

    def __init__(self, accelerator: Accelerator, capacity_bytes: float) -> None:
        self._accelerator, self._capacity_bytes = accelerator, capacity_bytes
        self._chunks: list[Tensor] = []
        self._used: list[int] = []

    @property
    def held_bytes(self) -> int:
        """Bytes taken from the host."""
        return sum(chunk.numel() for chunk in self._chunks)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the room."""
        own = tensor.untyped_storage()._cdata
        return any(chunk.untyped_storage()._cdata == own for chunk in self._chunks)

    def reserve(self, nbytes: int) -> None:
        """Take ``nbytes`` from the host now.

        Raises:
            HostMemoryError: If that exceeds the capacity, or the host lacks the memory.
        """
        if nbytes > self._capacity_bytes - self.held_bytes:
            self._refuse(nbytes)
        pins = self._accelerator.pins_host_memory
        for piece in powers_of_two(nbytes) if pins else [nbytes]:
            if piece:
                self._add(piece)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for ``numel`` elements, 1-d.

        Raises:
            HostMemoryError: As for :meth:`reserve`.
        """
        nbytes = numel * dtype.itemsize
        needed = aligned_bytes(nbytes)
        for index, chunk in enumerate(self._chunks):
            if self._used[index] + needed <= chunk.numel():
                break
        else:
            size = max(needed, _LEAST_CHUNK_BYTES)
            if self._accelerator.pins_host_memory:
                size = int(2 ** (size - 1).bit_length())
            free = self._capacity_bytes - self.held_bytes
            if needed > free:
                self._refuse(needed)
            self._add(int(min(size, free)))
            index, chunk = len(self._chunks) - 1, self._chunks[-1]
        start = self._used[index]
        self._used[index] += needed
        return chunk[start : start + nbytes].view(dtype)

    def _add(self, nbytes: int) -> None:
        try:
            self._chunks.append(self._accelerator.allocate_host(nbytes))
        except (MemoryError, RuntimeError) as error:  # torch raises either, by the platform
            raise HostMemoryError(
                f"This rank's host did not give {format_mib(nbytes)} for optimizer state: {error}"
                " Lower host_memory_cap=, or use a plan that keeps more of it on the devices"
                " (resident_fraction)."
            ) from error
        self._used.append(0)

    def _refuse(self, nbytes: int) -> None:
        raise HostMemoryError(
            f"Optimizer state needs {format_mib(self.held_bytes + nbytes)} of host memory; this"
            f" rank may use {format_mib(self._capacity_bytes)}. Raise host_memory_cap=, or use a"
            " plan that keeps more of it on the devices (resident_fraction)."
        )


def aligned_bytes(nbytes: int) -> int:
    """Return the bytes that a piece of ``nbytes`` takes of a room."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
