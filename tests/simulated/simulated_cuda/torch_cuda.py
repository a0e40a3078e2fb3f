"""Fills in the functions of ``torch.cuda`` that torch's CPU build lacks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from simulated_cuda.device import device_name, operators

_ALLOCATED, _ALLOCATED_PEAK, _RESERVED, _RESERVED_PEAK, _CAPACITY = range(5)


def index_of(device: Any = None) -> int:
    """Return the number of a device given in any of the ways that torch takes."""
    if device is None or (isinstance(device, int) and device < 0):
        return int(operators().current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(operators().current_device()) if index is None else index


class Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if "stream_id" in known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device(device_name(), index_of(device)))

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """``torch.cuda.Event``."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._timed = enable_timing
        self._event = torch.Event(device_name(), enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Stream | None = None) -> None:
        self._event.record(stream or current_stream())

    def wait(self, stream: Stream | None = None) -> None:
        self._event.wait(stream or current_stream())

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return float(self._event.elapsed_time(end._event))


class StreamContext:
    """``with torch.cuda.stream(stream):``."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = [current_stream(self._stream.device_index), current_stream()]
            set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        for stream in self._before:
            set_stream(stream)


class Properties:
    """``torch.cuda.get_device_properties()``, of a GPU that does all that is asked for."""

    major, minor, warp_size = 9, 0, 32
    multi_processor_count, max_threads_per_multi_processor = 100, 2048
    is_integrated, gcnArchName = 0, ""

    def __init__(self, device: Any = None) -> None:
        index = index_of(device)
        self.name, self.uuid = f"NVIDIA Simulated {index}", f"simulated-{index}"
        self.total_memory = memory_figure(_CAPACITY)(device)


def current_stream(device: Any = None) -> Stream:
    found = torch.accelerator.current_stream(torch.device(device_name(), index_of(device)))
    return Stream(
        stream_id=found.stream_id,
        device_index=found.device_index,
        device_type=found.device_type,
    )


def default_stream(device: Any = None) -> Stream:
    now = current_stream(device)
    return Stream(stream_id=0, device_index=now.device_index, device_type=now.device_type)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        operators().exchange_device(stream.device_index)
        operators().set_stream(stream.device_index, stream.stream_id)


def memory_figure(which: int) -> Callable[..., int]:
    def read(device: Any = None) -> int:
        return int(operators().memory(index_of(device))[which])

    return read


def _free_and_total(device: Any = None) -> tuple[int, int]:
    figures = operators().memory(index_of(device))
    return max(0, figures[_CAPACITY] - figures[_RESERVED]), figures[_CAPACITY]


def _statistics(device: Any = None) -> dict[str, int]:
    figures = operators().memory(index_of(device))
    return {
        "allocated_bytes.all.current": figures[_ALLOCATED],
        "allocated_bytes.all.peak": figures[_ALLOCATED_PEAK],
        "reserved_bytes.all.current": figures[_RESERVED],
        "reserved_bytes.all.peak": figures[_RESERVED_PEAK],
        "num_alloc_retries": 0,
    }


def replacements(generators: tuple[torch.Generator, ...]) -> dict[str, Any]:
    """Return what ``torch.cuda`` gets, by name."""
    exchange = operators().exchange_device
    return {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_initialized": True,
        "device_count": lambda: int(operators().device_count()),
        "current_device": lambda: int(operators().current_device()),
        "set_device": lambda device: exchange(index_of(device)) and None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(
            torch.device(device_name(), index_of(device))
        ),
        "memory_allocated": memory_figure(_ALLOCATED),
        "max_memory_allocated": memory_figure(_ALLOCATED_PEAK),
        "memory_reserved": memory_figure(_RESERVED),
        "max_memory_reserved": memory_figure(_RESERVED_PEAK),
        "reset_peak_memory_stats": lambda device=None: operators().reset_peak(index_of(device)),
        "empty_cache": lambda: operators().empty_cache(),
        "mem_get_info": _free_and_total,
        "memory_stats": _statistics,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "get_device_properties": Properties,
        "get_device_name": lambda device=None: Properties(device).name,
        "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "set_sync_debug_mode": lambda mode: operators().set_sync_debug_mode(
            {"default": 0, "warn": 1, "error": 2}.get(mode, mode)
        ),
        "default_generators": generators,
    }


def install(devices: int) -> None:
    """Replace what ``torch.cuda`` cannot do without CUDA, wherever torch has imported it."""
    exchange = operators().exchange_device
    for name, function in {
        "_cuda_getDeviceCount": lambda: int(operators().device_count()),
        "_cuda_getDevice": lambda: int(operators().current_device()),
        "_cuda_setDevice": exchange,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getCurrentRawStream": lambda device: current_stream(device).stream_id,
    }.items():
        setattr(torch._C, name, function)
    generators = tuple(operators().default_generator(device) for device in range(devices))
    modules = [
        module
        for name, module in list(sys.modules.items())
        if module is not None and (name == "torch" or name.startswith("torch."))
    ]
    for name, new in replacements(generators).items():
        old = getattr(torch.cuda, name, None)
        setattr(torch.cuda, name, new)
        if not callable(old):
            continue
        for module in modules:
            for other, value in list(vars(module).items()):
                if value is old:
                    setattr(module, other, new)
    install_storages()


def install_storages() -> None:
    """Let storages of the device be resized and copied, which the CPU build does not know."""
    torch.UntypedStorage.resize_ = _resize_storage(torch.UntypedStorage.resize_)
    torch.UntypedStorage.clone = _clone_storage(torch.UntypedStorage.clone)


def _clone_storage(plain: Callable[..., Any]) -> Callable[..., Any]:
    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type != device_name():
            return plain(self)
        # the CPU build makes no storage of a device by its type; copy.deepcopy asks for one
        with torch.no_grad(), _disable_current_modes():
            view = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
            return view.clone().untyped_storage()

    return clone


def _resize_storage(plain: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(self: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if self.device.type != device_name():
            plain(self, nbytes)
            return self
        with torch.no_grad(), _disable_current_modes():
            view = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
            operators().resize_storage(view, nbytes)
        return self

    return resize_
