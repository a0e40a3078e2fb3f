"""Saves and restores torch's modes per thread, around greenlet switches and recomputation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from lightning_cephalo.accelerator.attention import ATTENTION_KERNELS

_ATTENTION_ALLOWED = tuple(allowed for allowed, _ in ATTENTION_KERNELS)
_ALLOW_ATTENTION = tuple(allow for _, allow in ATTENTION_KERNELS)
_KERNELS = len(ATTENTION_KERNELS)


@cache
def _readers(device_types: tuple[str, ...]) -> tuple[Callable[[], Any], ...]:
    """Return the functions that read the modes of a thread, in the order of a ThreadState."""
    return (
        torch.is_grad_enabled,
        torch.is_autocast_cache_enabled,
        torch.get_default_dtype,
        *_ATTENTION_ALLOWED,
        *(partial(torch.is_autocast_enabled, kind) for kind in device_types),
        *(partial(torch.get_autocast_dtype, kind) for kind in device_types),
    )


class ThreadState:
    """Modes that torch keeps per thread, not per greenlet; each microbatch has its own."""

    __slots__ = ("_device_types", "_readers", "_values", "autocast_cache")

    # In order: whether autograd records; whether autocast caches; the dtype of new floating-point
    # tensors; whether each attention kernel is allowed (`sdpa_kernel` around the model); and for
    # each device type, whether autocast is on, and its dtype. A list: every visit reads one.
    def __init__(self, device_types: tuple[str, ...], values: list[Any]) -> None:
        self._device_types = device_types
        self._readers = _readers(device_types)
        self._values = values
        self.autocast_cache: bool = values[1]

    @classmethod
    def capture(cls, device_types: tuple[str, ...]) -> ThreadState:
        return cls(device_types, [read() for read in _readers(device_types)])

    def now(self) -> ThreadState:
        """Read the modes of this thread; return this object if they are the same."""
        values = [read() for read in self._readers]
        return self if values == self._values else ThreadState(self._device_types, values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ThreadState) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        # private: the public function is a context manager, which costs several times as much
        torch._C._set_grad_enabled(self._values[0])
        torch.set_autocast_cache_enabled(self.autocast_cache)
        # to set the others takes longer than to read them, and few models set any
        if [read() for read in self._readers] != self._values:
            self._restore_others()

    def _restore_others(self) -> None:
        _, _, default_dtype, *others = self._values
        autocast = others[_KERNELS:]
        for place, kind in enumerate(self._device_types):
            torch.set_autocast_enabled(kind, autocast[place])
            torch.set_autocast_dtype(kind, autocast[place + len(self._device_types)])
        if torch.get_default_dtype() != default_dtype:
            torch.set_default_dtype(default_dtype)
        attention = others[:_KERNELS]
        if [allowed() for allowed in _ATTENTION_ALLOWED] != attention:
            for allow, value in zip(_ALLOW_ATTENTION, attention, strict=True):
                allow(value)
