"""Saves and restores the state around greenlet switches and recomputation.

The state is torch's modes per thread, modes of modules, and buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class _SavedBuffer:
    module: nn.Module
    name: str
    value: Tensor


class ChangingBuffers:
    """Tracks the buffers that a unit's forward changes (running statistics, counters).

    Recomputation starts from the values of the first forward, and counts no microbatch twice.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = [inner for inner in module.modules() if inner._buffers]
        # any module may change its buffers; the first forward shows which ones do
        self._suspects = list(self.modules)
        self._looked = False

    def versions(self) -> list[tuple[int, int]]:
        return [
            (id(buffer), buffer._version)
            for inner in self.modules
            for buffer in inner._buffers.values()
            if buffer is not None
        ]

    def save(self) -> list[_SavedBuffer]:
        """Copy the buffers that are known to change; before the first forward, copy all."""
        return _copies(self._suspects)

    def changed_since(
        self, versions: list[tuple[int, int]], saved: list[_SavedBuffer]
    ) -> list[_SavedBuffer]:
        """Return the saved buffers of every module of which at least one buffer has changed.

        All buffers of such a module count. Batch normalisation changes its running mean without
        raising the version, but also counts its batches in another buffer.
        """
        before = dict(versions)
        changed = [
            inner
            for inner in self.modules
            if any(
                buffer is not None and before.get(id(buffer)) != buffer._version
                for buffer in inner._buffers.values()
            )
        ]
        if not self._looked:
            self._suspects, self._looked = changed, True
        # a module that never changed before has no saved values: with its new values the
        # microbatch at least counts only once
        surprises = [inner for inner in changed if not _is_in(inner, self._suspects)]
        self._suspects = [*self._suspects, *surprises]
        return [entry for entry in saved if _is_in(entry.module, changed)] + _copies(surprises)

    @staticmethod
    @contextmanager
    def replayed(saved: list[_SavedBuffer]) -> Iterator[None]:
        """Show the saved values in a ``with`` block, then the current buffers again, untouched."""
        now = [(entry, entry.module._buffers[entry.name]) for entry in saved]
        for entry in saved:
            entry.module._buffers[entry.name] = entry.value
        try:
            yield
        finally:
            for entry, buffer in now:
                entry.module._buffers[entry.name] = buffer


def _copies(modules: Iterable[nn.Module]) -> list[_SavedBuffer]:
    return [
        _SavedBuffer(inner, name, buffer.clone())
        for inner in modules
        for name, buffer in inner._buffers.items()
        if buffer is not None
    ]


def _is_in(module: nn.Module, modules: Iterable[nn.Module]) -> bool:
    return any(module is other for other in modules)


_TRAINING = "training"

Modes = tuple[bool, ...]
"""Whether each module is in training mode."""


class TrainingModes:
    """Reads and sets the modes, training or evaluation, of some modules.

    Each microbatch finds modules as it has left them. A unit is computed again in its old modes.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        # every visit reads the modes of all modules, where a loop in Python would cost the most; a
        # scripted module keeps its mode elsewhere than among its attributes
        holders: list[Any] = [vars(module) for module in self._modules]
        read: Callable[[Any], bool] = itemgetter(_TRAINING)
        if any(_TRAINING not in names for names in holders):
            holders, read = self._modules, attrgetter(_TRAINING)
        self._read = partial(map, read, holders)
        self._all_train = (True,) * len(holders)

    def now(self) -> Modes:
        return self._all_train if all(self._read()) else tuple(self._read())

    def show(self, modes: Modes) -> None:
        """Set the modes; those that are so already cost no write."""
        if modes == self.now():
            return
        for module, mode in zip(self._modules, modes, strict=True):
            if module.training != mode:
                module.training = mode

    @contextmanager
    def shown(self, modes: Modes) -> Iterator[None]:
        """Show modes in a ``with`` block, then those of before."""
        before = self.now()
        self.show(modes)
        try:
            yield
        finally:
            self.show(before)
