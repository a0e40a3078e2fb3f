"""Device support: the CPU, the devices of ``torch.accelerator``, and emulated devices.

No other folder depends on the type of a device: the others use the methods of an
:class:`~lightning_cephalo.accelerator.base.Accelerator`. To support another device, write a
subclass in a file here and return it below.
"""

from __future__ import annotations

import torch

from lightning_cephalo.accelerator.base import Accelerator, Device
from lightning_cephalo.accelerator.cpu import Cpu
from lightning_cephalo.accelerator.emulated.accelerator import Emulated
from lightning_cephalo.accelerator.emulated.device import active_device
from lightning_cephalo.accelerator.torch_device import TorchDevice

__all__ = ["Accelerator", "Device", "accelerator_of"]


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the accelerator for a torch device.

    For the CPU inside the ``with`` block of an emulated device, this is the emulated device. Call
    this function after entering the block, and again after leaving it.

    Args:
        device: This rank's device.
    """
    if device.type != "cpu":
        return TorchDevice(device)
    emulated = active_device()
    return Cpu(device) if emulated is None else Emulated(device, emulated)
