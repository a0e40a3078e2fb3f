"""The one room that knows devices: the CPU, those of ``torch.accelerator``, and emulated ones.

Other rooms get an :class:`~lightning_cephalo.accelerator.base.Accelerator` and ask it by meaning.
To support another device, write a subclass in a file here and return it below.
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
    """The accelerator that stands for a device of torch.

    For the CPU inside the ``with`` block of an emulated device, that is the emulated one: call it
    after the block was entered, and anew after it was left.

    Args:
        device: This rank's device.
    """
    if device.type != "cpu":
        return TorchDevice(device)
    emulated = active_device()
    return Cpu(device) if emulated is None else Emulated(device, emulated)
