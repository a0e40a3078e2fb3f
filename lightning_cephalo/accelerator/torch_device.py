"""Devices with streams and events: CUDA, and every other device of ``torch.accelerator``.

This file uses torch's generic interface: ``torch.Stream``, ``torch.Event``, ``torch.accelerator``.
If a function is missing there, it uses the device's own module (``torch.get_device_module``), whose
functions have the same names in all backends. :data:`TRAITS` lists properties of single types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

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
from lightning_cephalo.accelerator.marks import Marks, StreamMarks
from lightning_cephalo.common.quantities import USABLE_SHARE


@dataclass(frozen=True)
class Traits:
    """Properties of one type of device."""

    maker: str = ""
    sleeping_event: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


TRAITS: Mapping[str, Traits] = MappingProxyType(
    {"cuda": Traits(maker="NVIDIA ", sleeping_event=MappingProxyType({"blocking": True}))}
)

# Signs of a lack of memory in errors of the device's libraries, which torch passes on.
OUT_OF_MEMORY_SIGNS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class TorchDevice(Accelerator):
    """A device with a queue of kernels, which the host fills."""

    computes_on_host = False
    host_is_apart = True
    pins_host_memory = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module = torch.get_device_module(device)
        self._traits = TRAITS.get(device.type, Traits())
        self._allocator = AllocatorFigures(self)
        self._shown_generator: torch.Generator | None = None

    def ask(self, name: str) -> Callable[..., Any]:
        """Return a function of the device's module, or else of ``torch.accelerator``.

        The module comes first, because ``torch.accelerator`` reports 0 bytes for a device without
        an allocator of torch's kind.
        """
        function: Callable[..., Any] = getattr(self._module, name, None) or getattr(
            torch.accelerator, name
        )
        return function

    @property
    def name(self) -> str:
        name: str = self._module.get_device_name(self.device)
        return name.removeprefix(self._traits.maker)

    def describe(self, processes_on_host: int) -> Device:
        free, total = self._free_and_total()
        used_by_us = self.ask("memory_reserved")(self.device)
        return Device(self.name, (free + used_by_us) * USABLE_SHARE, float(total))

    def _free_and_total(self) -> tuple[int, int]:
        function = getattr(self._module, "mem_get_info", None)
        found: tuple[int, int] = (function or torch.accelerator.get_memory_info)(self.device)
        return found

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def marks(self, backend: Backend) -> Marks:
        return StreamMarks(self.device, backend.runs_on_device, self.now_s)

    def end_of_work(self) -> EndOfWork | None:
        options = self._traits.sleeping_event
        event = self._module.Event(**options) if options else torch.Event(self.device)
        event.record()
        found: EndOfWork = event
        return found

    @property
    def allocator(self) -> MemoryFigures | None:
        return self._allocator

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def allocate_host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def on_host(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copies(self) -> Copies:
        return StreamCopies(self.device)

    def own_queue(self) -> AbstractContextManager[Any]:
        return torch.Stream(self.device)

    def readback(self) -> Readback:
        return StreamReadback(self.end_of_work)

    def random_states(self) -> tuple[Tensor, ...]:
        own = self._generator
        if own is None:
            return torch.get_rng_state(), self._module.get_rng_state(self.device)
        return torch.default_generator.get_state(), own.get_state()

    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        own = self._generator
        if own is None:
            torch.set_rng_state(states[0])
            self._module.set_rng_state(states[1], self.device)
            return
        torch.default_generator.set_state(states[0])
        own.set_state(states[1])

    @property
    def _generator(self) -> torch.Generator | None:
        """The generator that the module's functions use, which take several times as long.

        Every visit of a unit reads its state. None: the module does not show it (yet).
        """
        if self._shown_generator is None:
            generators, index = getattr(self._module, "default_generators", ()), self.device.index
            if index is not None and index < len(generators):
                self._shown_generator = generators[index]
        return self._shown_generator


class StreamCopies:
    """Copies on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def start(
        self, target: Tensor, source: Tensor, after: Sequence[torch.Event | None] | None = None
    ) -> torch.Event:
        if after is None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        for arrival in after or ():
            if arrival is not None:
                self._stream.wait_event(arrival)
        with self._stream:
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, arrival: torch.Event | None) -> None:
        if arrival is not None:
            torch.accelerator.current_stream(self._device).wait_event(arrival)

    def finish(self, arrival: torch.Event | None) -> None:
        if arrival is not None:
            arrival.synchronize()


class StreamReadback:
    """Numbers that are copied in the order of the device's work."""

    def __init__(self, end_of_work: Callable[[], EndOfWork | None]) -> None:
        self._end_of_work = end_of_work
        self._numbers: list[Tensor] = []
        self._end: EndOfWork | None = None

    def add(self, number: Tensor) -> None:
        on_host = torch.empty((), dtype=number.dtype, pin_memory=True)
        on_host.copy_(number.detach().reshape(()), non_blocking=True)
        self._numbers.append(on_host)
        self._end = self._end_of_work()

    def finish(self) -> list[float]:
        if self._end is not None:
            self._end.synchronize()
        return [float(number) for number in self._numbers]


class AllocatorFigures:
    """Figures of a device's caching allocator."""

    def __init__(self, device: TorchDevice) -> None:
        self._device = device
        self._left_out_bytes = 0

    @property
    def current_bytes(self) -> int:
        allocated: int = self._device.ask("memory_allocated")(self._device.device)
        return allocated - self._left_out_bytes

    @property
    def peak_bytes(self) -> int:
        peak: int = self._device.ask("max_memory_allocated")(self._device.device)
        return peak

    def reset_peak(self) -> None:
        self._device.ask("reset_peak_memory_stats")(self._device.device)

    def untrack(self, *tensors: Tensor) -> None:
        held = [tensor for tensor in tensors if self._device.holds(tensor)]
        self._left_out_bytes = distinct_bytes(held)

    def track(self, *tensors: Tensor) -> None:
        self._left_out_bytes = 0


def distinct_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of these tensors' storages, counting each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
