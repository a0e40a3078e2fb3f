"""Puts the simulated device in place, and reads what its checker has found."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from simulated_cuda import build

_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch.so")


def unavailable() -> str | None:
    """Return why there can be no simulated device here; None if there can."""
    try:
        build.check()
    except build.Unavailable as reason:
        return str(reason)
    return None


def start(devices: int = 2, capacity_bytes: int | None = None, name: str = "cuda") -> None:
    """Make torch have simulated devices; once for a process, and "cuda" before torch is imported.

    Forks of the process have them too, each with a memory of its own.

    Args:
        devices: Number of devices.
        capacity_bytes: Memory of each; None: 16 GiB.
        name: "cuda", or a name that torch does not know: then the devices are those of a third
            party, with a module ``torch.<name>`` and the process group "<name>-ccl".

    Raises:
        Unavailable: Without a compiler, or with a torch for which this is not written.
        ImportError: If torch was imported before: it asks for CUDA's hooks once, at its import.
    """
    if name == "cuda" and "torch" in sys.modules:
        raise ImportError("start the simulated device before torch is imported")
    if name != "cuda":
        os.environ["SIMULATED_DEVICE_NAME"] = name  # the C++ part reads it when it is loaded
    library = build.library()
    folder = build.torch_folder() / "lib"
    for own in _LIBRARIES:
        ctypes.CDLL(str(folder / own))
    ctypes.CDLL(str(library))

    import torch

    from simulated_cuda import nccl, torch_cuda

    operators().set_device_count(devices)
    for device in range(devices if capacity_bytes is not None else 0):
        set_capacity(device, capacity_bytes)
    if name == "cuda":
        torch_cuda.install(devices)
        nccl.install()
    else:
        from simulated_cuda import other_device  # needs Lightning

        other_device.install(devices, name)
        nccl.install_for(name)
    torch.manual_seed(torch.initial_seed())


def operators() -> Any:
    """Return the functions of the C++ part."""
    import torch

    return torch.ops.simulated


def device_name() -> str:
    """Return the name of the devices: "cuda" unless another was asked for."""
    return os.environ.get("SIMULATED_DEVICE_NAME", "cuda")


def findings() -> list[str]:
    """Return what is not ordered, each once: its kind, both sides, and their Python lines."""
    return list(operators().findings())


def waits() -> dict[str, int]:
    """Return how often the host waited for the device, by what for and Python lines."""
    return dict(operators().waits())


def kernels() -> dict[str, int]:
    """Return how often each operator, copy and collective was launched."""
    return dict(operators().kernels())


def launches() -> int:
    """Return how many kernels, copies and collectives were launched, events included."""
    count: int = operators().launches()
    return count


def clear() -> None:
    """Forget findings, waits and counts."""
    operators().clear()


def set_capacity(device: int, nbytes: int) -> None:
    """Set the memory of a device."""
    operators().set_capacity(device, nbytes)


def set_denials(count: int) -> None:
    """Let events say "not yet" this many times, as those of a device that lags."""
    operators().set_denials(count)
