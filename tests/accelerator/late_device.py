"""A device of which only the interface is known: it copies late, allocates, and runs behind."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_cephalo.accelerator.cpu import Cpu


class LateCopies:
    """Copies that are made when they are waited for, and not before: whoever does not wait sees it.

    A source whose memory is gone by then was given up too early.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Tensor, weakref.ref, tuple]] = deque()
        self._issued = 0

    def start(self, target: Tensor, source: Tensor, after: Sequence[int] | None = None) -> int:
        storage = source.untyped_storage()
        layout = (source.dtype, source.storage_offset(), source.shape, source.stride())
        self._issued += 1
        self._queue.append((self._issued, target, weakref.ref(storage), layout))
        return self._issued

    def wait(self, arrival: int | None) -> None:
        while arrival is not None and self._queue and self._queue[0][0] <= arrival:
            _, target, storage_reference, (dtype, offset, shape, stride) = self._queue.popleft()
            storage = storage_reference()
            assert storage is not None, "the source was given up before it was copied"
            target.copy_(torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride))


class Event:
    def __init__(self, device: LateDevice) -> None:
        self._device, self._at = device, device.issued

    def synchronize(self) -> None:
        self._device.done = max(self._device.done, self._at)


class Figures:
    """An allocator that says what the test says."""

    current_bytes = peak_bytes = 0

    def reset_peak(self) -> None:
        self.peak_bytes = self.current_bytes

    def untrack(self, *tensors: Tensor) -> None:
        pass

    def track(self, *tensors: Tensor) -> None:
        pass


class LateDevice(Cpu):
    """Tensors of the CPU stand for its own; ``issued`` and ``done`` count its pieces of work."""

    computes_on_host = False
    host_is_apart = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.issued = self.done = 0
        self.figures = Figures()

    @property
    def name(self) -> str:
        return "late"

    def synchronize(self) -> None:
        self.done = self.issued

    def end_of_work(self) -> Event:
        return Event(self)

    @property
    def allocator(self) -> Figures:
        return self.figures

    def copies(self) -> LateCopies:
        return LateCopies()
