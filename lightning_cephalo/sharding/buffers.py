"""Pools of memory that units share in turn, so that a step allocates no new memory for them.

A unit's full parameters live as long as the unit is in use. The next unit's parameters reuse their
memory. Returning the memory to the allocator in between would cost page faults on the CPU. A
caching allocator might not find a block of that size in one piece again.
"""

from __future__ import annotations

import torch


class Buffer:
    """A piece of memory that one flat may use at a time."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage, self.nbytes = storage, storage.nbytes()

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return its beginning as a 1-d tensor."""
        empty = torch.empty(0, dtype=dtype, device=self.storage.device)
        return empty.set_(self.storage, 0, (numel,), (1,))


class BufferPool:
    """Lends buffers and keeps returned ones: as many as were ever lent at the same time.

    Args:
        keeps: False: returned buffers are given back to the allocator.
    """

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps
        self._idle: list[Buffer] = []
        self._lent: list[Buffer] = []

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers, lent or idle."""
        return (*self._idle, *self._lent)

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def take(self, nbytes: int, device: torch.device) -> Buffer:
        """Lend the smallest idle buffer of at least ``nbytes``.

        If none is large enough, a new buffer replaces the largest idle one. So units of several
        sizes soon share buffers of the largest size.

        Raises:
            torch.OutOfMemoryError: If there is no memory for a new one.
        """
        fitting = [buffer for buffer in self._idle if buffer.nbytes >= nbytes]
        chosen = min(fitting, key=lambda buffer: buffer.nbytes, default=None)
        if chosen is not None:
            self._idle.remove(chosen)
        else:
            if self._idle:
                self._idle.remove(max(self._idle, key=lambda buffer: buffer.nbytes))
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            chosen = Buffer(memory.untyped_storage())
        self._lent.append(chosen)
        return chosen

    def give(self, buffer: Buffer) -> None:
        """Take a lent buffer back."""
        self._lent.remove(buffer)
        if self._keeps:
            self._idle.append(buffer)

    def release(self) -> None:
        """Drop the idle buffers."""
        self._idle.clear()
