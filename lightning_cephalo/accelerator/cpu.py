"""The CPU: the host runs the kernels itself, in its own memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_cephalo.accelerator.backends import Backend
from lightning_cephalo.accelerator.base import (
    Accelerator,
    Copies,
    Device,
    EndOfWork,
    MemoryFigures,
    Readback,
)
from lightning_cephalo.accelerator.host import host_share
from lightning_cephalo.accelerator.marks import HostMarks, Marks


class HostCopies:
    """Copies that are done when :meth:`start` returns."""

    def start(self, target: Tensor, source: Tensor, after: Sequence[None] | None = None) -> None:
        target.copy_(source)

    def wait(self, arrival: None) -> None:
        pass

    def finish(self, arrival: None) -> None:
        pass


class HostReadback:
    """Numbers that are read when :meth:`add` returns."""

    def __init__(self) -> None:
        self._numbers: list[float] = []

    def add(self, number: Tensor) -> None:
        self._numbers.append(float(number))

    def finish(self) -> list[float]:
        return self._numbers


class Cpu(Accelerator):
    """The processors of this host. The ranks of a host share its memory."""

    computes_on_host = True
    host_is_apart = False
    pins_host_memory = False

    @property
    def name(self) -> str:
        return "cpu"

    def describe(self, processes_on_host: int) -> Device:
        host = host_share(processes_on_host)
        return Device(self.name, host.free_bytes, host.total_bytes, limited_by=host.limited_by)

    def synchronize(self) -> None:
        """Do nothing: there is no work to wait for."""

    def marks(self, backend: Backend) -> Marks:
        return HostMarks(self.now_s)

    def end_of_work(self) -> EndOfWork | None:
        return None

    @property
    def allocator(self) -> MemoryFigures | None:
        return None

    def empty_cache(self) -> None:
        """Do nothing: the host's allocator has no cache to release."""

    def allocate_host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def on_host(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copies(self) -> Copies:
        return HostCopies()

    def readback(self) -> Readback:
        return HostReadback()

    def random_states(self) -> tuple[Tensor, ...]:
        # as torch.get_rng_state(), without its wrappers: every visit of a unit calls it
        return (torch.default_generator.get_state(),)

    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        torch.default_generator.set_state(states[0])
