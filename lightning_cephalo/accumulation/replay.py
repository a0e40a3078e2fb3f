"""What must be as it was when a microbatch goes on, or when a unit is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ThreadState:
    """Modes that torch keeps per thread, not per greenlet.

    Microbatches share a thread: each must find the modes that it left when it parked.

    Attributes:
        grad_enabled: Whether autograd records.
        autocast: Per device type ``(type, enabled, dtype)``.
        autocast_cache: Whether autocast keeps casted weights.
        default_dtype: Dtype of new floating-point tensors.
    """

    grad_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_dtype: torch.dtype

    @classmethod
    def capture(cls, device_types: tuple[str, ...]) -> ThreadState:
        """Read the modes of this thread."""
        return cls(
            torch.is_grad_enabled(),
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in device_types
            ),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
        )

    def restore(self) -> None:
        """Set the modes of this thread."""
        torch._C._set_grad_enabled(self.grad_enabled)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        if torch.get_default_dtype() != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)


class RandomState:
    """The random number generators that a unit may draw from: CPU and this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Put the generators back to where they were."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw the same numbers again, then go on as if nothing had been drawn."""
        now = RandomState(self._device)
        self.restore()
        try:
            yield
        finally:
            now.restore()


class ChangingBuffers:
    """Buffers that a unit's forward changes (running statistics, counters).

    Computing the forward again must not count a microbatch twice.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [inner for inner in module.modules() if inner._buffers]

    def versions(self) -> list[tuple[int, int]]:
        """Identity and version of every buffer."""
        return [
            (id(buffer), buffer._version)
            for inner in self._modules
            for buffer in inner._buffers.values()
            if buffer is not None
        ]

    def changed_since(self, versions: list[tuple[int, int]]) -> list[nn.Module]:
        """Return the modules of which any buffer has changed.

        All buffers of such a module count: batch normalisation changes its running mean without
        raising the version, but counts its batches in a buffer beside it.
        """
        before = dict(versions)
        return [
            inner
            for inner in self._modules
            if any(
                buffer is not None and before.get(id(buffer)) != buffer._version
                for buffer in inner._buffers.values()
            )
        ]

    @staticmethod
    @contextmanager
    def kept(modules: list[nn.Module]) -> Iterator[None]:
        """Leave the buffers of these modules as they were."""
        saved = [
            (inner, name, buffer, buffer.clone())
            for inner in modules
            for name, buffer in inner._buffers.items()
            if buffer is not None
        ]
        try:
            yield
        finally:
            for inner, name, buffer, value in saved:
                buffer.data.copy_(value)
                inner._buffers[name] = buffer
