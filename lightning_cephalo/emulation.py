"""Emulates slow devices with small memories: the public name of ``accelerator/emulated``.

::

    Trainer(strategy="cephalo", callbacks=[Emulation(speeds=[3, 1])], devices=2)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_cephalo.accelerator.emulated import EmulatedDevice, MemoryTracker, active_device

if TYPE_CHECKING:
    from lightning_cephalo.accelerator.emulated.callback import Emulation

__all__ = ["EmulatedDevice", "Emulation", "MemoryTracker", "active_device"]


def __getattr__(name: str) -> Any:
    # Emulation imports Lightning, which takes seconds.
    if name != "Emulation":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_cephalo.accelerator.emulated.callback import Emulation

    return Emulation
