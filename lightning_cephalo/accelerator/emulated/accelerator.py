"""The accelerator of an emulated device."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_cephalo.accelerator.backends import Backend
from lightning_cephalo.accelerator.base import Copies, Device, HostWorker, MemoryFigures
from lightning_cephalo.accelerator.cpu import Cpu
from lightning_cephalo.accelerator.emulated.device import EmulatedDevice
from lightning_cephalo.accelerator.emulated.lanes import Lane, LaneCopies, LaneWorker
from lightning_cephalo.accelerator.host import host_share
from lightning_cephalo.accelerator.marks import HostMarks, Marks


class Emulated(Cpu):
    """The CPU at the pace and in the memory of another device.

    Tensors made while the emulated device is paused are host memory.
    """

    host_is_apart = True

    def __init__(self, device: torch.device, emulated: EmulatedDevice) -> None:
        super().__init__(device)
        self.emulated = emulated
        self._to_device, self._to_host = (Lane(emulated.link_bytes_per_s) for _ in range(2))
        self._host = Lane(emulated.host_updates_per_s)

    @property
    def name(self) -> str:
        return self.emulated.name

    def describe(self, processes_on_host: int) -> Device:
        given = self.emulated.capacity_bytes
        # its speed depends on the other work of this machine during the measurement
        if given is not None:
            return Device(self.name, float(given), float(given), speed_lasts=False)
        host = host_share(processes_on_host)
        return Device(
            self.name,
            host.free_bytes,
            host.total_bytes,
            speed_lasts=False,
            limited_by=host.limited_by,
        )

    def now_s(self) -> float:
        return self.emulated.now_s

    def synchronize(self) -> None:
        self.emulated.synchronize()

    def marks(self, backend: Backend) -> Marks:
        return HostMarks(self.now_s, lambda: self.emulated.done_s)

    @property
    def memory(self) -> MemoryFigures | None:
        return self.emulated

    def limit_memory(self, limit_bytes: float) -> Callable[[], None]:
        limited = not math.isinf(limit_bytes)
        before = self.emulated.capacity_bytes
        if limited:
            self.emulated.change_capacity(math.floor(limit_bytes))

        def lift() -> None:
            nonlocal limited
            if limited:
                self.emulated.change_capacity(before)
                limited = False

        return lift

    def allocate_host(self, nbytes: int) -> Tensor:
        with self.on_host():
            memory = super().allocate_host(nbytes)
        self.emulated.leave_out(memory)
        return memory

    def copies(self) -> Copies:
        if self.emulated.link_bytes_per_s is None:
            return super().copies()
        return LaneCopies(self.emulated, self._to_device, self._to_host, self.emulated.counts)

    def host_worker(self) -> HostWorker:
        return LaneWorker(self.emulated, self._host)

    def on_host(self) -> AbstractContextManager[None]:
        return self.emulated.paused()
