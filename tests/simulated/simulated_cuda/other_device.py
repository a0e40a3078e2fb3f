"""A device of a third party: what its module and its Lightning accelerator offer.

The names are those that torch asks of such a module ("Facilitating New Backend Integration by
PrivateUse1" in torch's tutorials), and those that lightning_cephalo asks of any device.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry

from simulated_cuda import torch_cuda
from simulated_cuda.device import operators

_SHARED = (
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "empty_cache",
    "get_device_properties",
    "is_available",
    "is_initialized",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "set_device",
    "set_stream",
    "stream",
    "synchronize",
    "Event",
    "Stream",
    "_is_in_bad_fork",
)


def install(devices: int, name: str) -> None:
    """Give torch a module for devices of this name, and Lightning an accelerator."""
    torch.utils.rename_privateuse1_backend(name)
    generators = tuple(operators().default_generator(device) for device in range(devices))
    known = torch_cuda.replacements(generators)
    module: Any = types.ModuleType(f"torch.{name}")
    for function in _SHARED:
        setattr(module, function, known[function])

    def generator(device: Any) -> torch.Generator:
        return generators[torch_cuda.index_of(device)]

    module.get_device_name = lambda device=None: f"{name} {torch_cuda.index_of(device)}"
    module.get_rng_state = lambda device=name: generator(device).get_state()
    module.set_rng_state = lambda state, device=name: generator(device).set_state(state)
    module.manual_seed_all = lambda seed: [each.manual_seed(seed) for each in generators]
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[torch.quint8])
    torch_cuda.install_storages()
    AcceleratorRegistry.register(name, accelerator_named(name), description="simulated")


def accelerator_named(name: str) -> type[Accelerator]:
    """Return the class that a third party would write for Lightning."""

    class OtherAccelerator(Accelerator):
        @classmethod
        def name(cls) -> str:
            return name

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return list(range(int(devices)))

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device(name, index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return int(operators().device_count())

        @staticmethod
        def is_available() -> bool:
            return True

        def setup_device(self, device: torch.device) -> None:
            torch.get_device_module(device).set_device(device)

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

        def teardown(self) -> None:
            pass

    return OtherAccelerator
