"""Memory that units take turns to be gathered into, so that a step allocates none of it anew.

A unit's full parameters live for as long as the unit is in use; the next unit's take their place.
Giving the memory back to the allocator in between would cost page faults on the CPU, and with a
caching allocator leave it to chance whether the next block of that size is found in one piece.
"""

from __future__ import annotations

import torch


class Buffer:
    """A piece of memory that one flat at a time may use.

    Attributes:
        storage: The memory.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return its beginning as a 1-d tensor."""
        empty = torch.empty(0, dtype=dtype, device=self.storage.device)
        return empty.set_(self.storage, 0, (numel,), (1,))


class BufferPool:
    """Lends buffers, and keeps what comes back: as many as were ever lent at once."""

    def __init__(self) -> None:
        self._idle: list[Buffer] = []
        self._lent: list[Buffer] = []

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers, lent or idle."""
        return (*self._idle, *self._lent)

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.storage.nbytes() for buffer in self.buffers)

    def take(self, nbytes: int, device: torch.device) -> Buffer:
        """Lend a buffer of at least so many bytes: the smallest that will do.

        Where none will do the largest idle one is replaced: units of several sizes soon share
        buffers of the largest.

        Raises:
            torch.OutOfMemoryError: If there is no memory for a new one.
        """
        fitting = [buffer for buffer in self._idle if buffer.storage.nbytes() >= nbytes]
        if fitting:
            chosen = min(fitting, key=lambda buffer: buffer.storage.nbytes())
            self._idle.remove(chosen)
        else:
            if self._idle:
                self._idle.remove(max(self._idle, key=lambda buffer: buffer.storage.nbytes()))
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            chosen = Buffer(memory.untyped_storage())
        self._lent.append(chosen)
        return chosen

    def give(self, buffer: Buffer) -> None:
        """Take a lent buffer back."""
        self._lent.remove(buffer)
        self._idle.append(buffer)

    def release(self) -> None:
        """Let go of the idle buffers."""
        self._idle.clear()
