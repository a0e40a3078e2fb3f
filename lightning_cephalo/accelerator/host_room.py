"""Host memory that is taken once and cut into pieces, for optimizer state outside of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.common.quantities import format_mib

_ALIGNMENT_BYTES = 64
_LEAST_CHUNK_BYTES = 2**16


@dataclass
class _Part:
    chunk: int
    start: int
    end: int


class HostRoom:
    """Host memory of one rank, pinned where copies need that.

    If the device pins, it takes pieces of powers of two: torch rounds up to such sizes and takes
    nothing back (pytorch#95823).
    """

    def __init__(self, accelerator: Accelerator, capacity_bytes: float) -> None:
        self._accelerator, self._capacity_bytes = accelerator, capacity_bytes
        self._chunks: list[Tensor] = []
        self._used: list[int] = []
        self._parts: dict[int, list[_Part]] = {}

    @property
    def held_bytes(self) -> int:
        return sum(chunk.numel() for chunk in self._chunks)

    def holds(self, tensor: Tensor) -> bool:
        own = tensor.untyped_storage()._cdata
        return any(chunk.untyped_storage()._cdata == own for chunk in self._chunks)

    def reserve(self, needed: Sequence[int]) -> None:
        """Take what owners will need from the host now, a part in one piece for each.

        Raises:
            HostMemoryError: If that exceeds the capacity, or the host lacks the memory.
        """
        placed = _placed(needed, self._accelerator.pins_host_memory)
        nbytes = sum(size for size, _ in placed)
        if nbytes > self._capacity_bytes - self.held_bytes:
            self._refuse(nbytes)
        for size, owners in placed:
            self._add(size)
            start = 0
            for owner in owners:
                end = start + aligned_bytes(needed[owner])
                part = _Part(len(self._chunks) - 1, start, end)
                self._parts.setdefault(owner, []).append(part)
                start = end
            self._used[-1] = start

    def take(self, numel: int, dtype: torch.dtype, owner: int) -> Tensor:
        """Return 1-d memory for ``numel`` elements; of what its owner has reserved, if it fits."""
        nbytes = numel * dtype.itemsize
        part = self._part_for(aligned_bytes(nbytes), owner)
        start = part.start
        part.start += aligned_bytes(nbytes)
        return self._chunks[part.chunk][start : start + nbytes].view(dtype)

    def _part_for(self, needed: int, owner: int) -> _Part:
        for part in self._parts.get(owner, ()):
            if part.start + needed <= part.end:
                return part
        for index, chunk in enumerate(self._chunks):
            if self._used[index] + needed <= chunk.numel():
                break
        else:
            size = max(needed, _LEAST_CHUNK_BYTES)
            free = int(min(self._capacity_bytes - self.held_bytes, 2**62))
            if self._accelerator.pins_host_memory:
                size = power_from(needed if power_from(size) > free else size)
                needs = size
            else:
                size, needs = max(needed, min(size, free)), needed
            if needs > free:
                self._refuse(needs)
            self._add(size)
            index = len(self._chunks) - 1
        start = self._used[index]
        self._used[index] += needed
        return _Part(index, start, start + needed)

    def _add(self, nbytes: int) -> None:
        try:
            self._chunks.append(self._accelerator.allocate_host(nbytes))
        except (MemoryError, RuntimeError) as error:  # torch raises either, by the platform
            raise HostMemoryError(
                f"This rank's host did not give {format_mib(nbytes)} for optimizer state: {error}"
                " Lower Planner(host_memory_cap=...), or use a plan that keeps more of it on the"
                " devices (resident_fraction)."
            ) from error
        self._used.append(0)

    def _refuse(self, nbytes: int) -> None:
        raise HostMemoryError(
            f"Optimizer state needs {format_mib(self.held_bytes + nbytes)} of host memory; this"
            f" rank may use {format_mib(self._capacity_bytes)}. Raise"
            " Planner(host_memory_cap=...), or use a plan that keeps more of it on the devices"
            " (resident_fraction)."
        )


def aligned_bytes(nbytes: int) -> int:
    """Return the bytes that a piece of ``nbytes`` takes of a room."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def taken_bytes(needed: Sequence[float], pins: bool) -> int:
    """Return the bytes that a room takes of the host for what owners need: less than the double.

    >>> taken_bytes([600 * 2**10] * 3, pins=False), taken_bytes([600 * 2**10] * 3, pins=True)
    (1843200, 2097152)
    """
    return sum(size for size, _ in _placed([int(each) for each in needed], pins))


def _placed(needed: Sequence[int], pins: bool) -> list[tuple[int, list[int]]]:
    """Return the sizes of chunks, each with the owners whose parts lie in it."""
    sizes = [aligned_bytes(each) for each in needed]
    # the largest first fill chunks best
    owners = sorted((o for o, size in enumerate(sizes) if size), key=lambda o: -sizes[o])
    if not owners:
        return []
    if not pins:
        return [(sum(sizes), owners)]
    most, found = power_from(sizes[owners[0]]), []
    while True:
        chunks: list[list[int]] = []
        free: list[int] = []
        for owner in owners:
            index = next((i for i, left in enumerate(free) if sizes[owner] <= left), len(free))
            if index == len(free):
                chunks.append([])
                free.append(most)
            chunks[index].append(owner)
            free[index] -= sizes[owner]
        pairs = zip(chunks, free, strict=True)
        found.append([(power_from(most - left), own) for own, left in pairs])
        if len(chunks) == 1:
            return min(found, key=lambda placed: sum(size for size, _ in placed))
        most *= 2


def power_from(nbytes: int) -> int:
    """Return the smallest power of two that is at least ``nbytes``."""
    return int(2 ** max(0, nbytes - 1).bit_length())
