"""Gives each microbatch its own buffers in a step, so that all start from the step's values.

If microbatches shared a buffer, a running mean would decay several times a step, by other numbers
on every rank. So each microbatch writes to a copy, and ``combined_buffers.py`` makes the mean over
all samples. Until the first write microbatches share one copy. Between steps, and on a rank without
samples, the module holds its own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.boundaries import is_plain

# a larger buffer has a copy in the first step only, if that step does not write it
COPIED_BYTES = 2**20
# batch normalisation writes these without raising their version
_WITHOUT_VERSION = ("running_mean", "running_var")


@dataclass(frozen=True)
class Place:
    module: nn.Module
    key: str

    def read(self) -> Any:
        return self.module._buffers.get(self.key)

    def write(self, value: Any) -> None:
        self.module._buffers[self.key] = value


@dataclass(eq=False)
class StepBuffer:
    name: str
    places: list[Place]
    own: Tensor
    version: int = 0
    start: Tensor | None = None
    start_version: int = 0
    values: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_written: bool = False
    copies: dict[int, tuple[Tensor, int, Tensor]] = field(default_factory=dict)

    @property
    def shared(self) -> Tensor:
        """The tensor that microbatches share until one of them writes."""
        return self.own if self.start is None else self.start

    def show(self, tensor: Any) -> None:
        for place in self.places:
            place.write(tensor)

    def make_values(self, microbatches: int) -> None:
        """Give each microbatch a copy of the values at the beginning of the step."""
        self.values = [self.own.clone() for _ in range(microbatches)]
        self.versions = [value._version for value in self.values]
        self.copies.clear()

    def is_touched(self, microbatch: int) -> bool:
        """Whether a microbatch has written its tensor, or shows another in its place."""
        value = self.values[microbatch]
        return value._version != self.versions[microbatch] or value is not self.places[0].read()


Shown = Sequence[tuple[StepBuffer, Tensor | None]]
"""What a unit's buffers were when a microbatch entered it; None: as when the step began."""


class ModuleBuffers:
    def __init__(
        self, module: nn.Module, on_local: Callable[[Place, Any, list[Any]], None]
    ) -> None:
        self._modules = [(n, inner) for n, inner in module.named_modules() if not _is_metric(inner)]
        self._on_local = on_local
        self._entries: dict[int, StepBuffer] = {}
        self._of_module: dict[int, list[StepBuffer]] = {}
        self._local: set[tuple[int, str]] = set()
        self._empty: list[tuple[str, Place]] = []
        self.sizes: tuple[int, ...] = ()
        self._is_first = True
        self._shown: int | None = None
        self.is_open = False
        self.localised: list[str] = []
        self.found: list[str] = []

    @property
    def written(self) -> list[StepBuffer]:
        """The buffers that some step has written, by name."""
        entries = [entry for entry in self._entries.values() if entry.is_written]
        return sorted(entries, key=lambda entry: entry.name)

    @property
    def names(self) -> list[str]:
        return [
            f"{prefix}.{key}" if prefix else key
            for prefix, inner in self._modules
            for key in inner._buffers
        ]

    @property
    def resting_bytes(self) -> int:
        """Bytes of the copies that stay between steps."""
        self._read_places()
        sizes = {e: e.own.numel() * e.own.element_size() for e in self._entries.values()}
        return sum(n for e, n in sizes.items() if e.is_written or n <= COPIED_BYTES)

    # -- a step -------------------------------------------------------------------------------

    def begin(self, sizes: Sequence[int]) -> None:
        self.sizes, self._shown = tuple(sizes), None
        self.localised, self.found = [], []
        self._read_places()
        self.forget_values()
        self.is_open = bool(sizes) and bool(self._entries or self._empty)
        for entry in self._entries.values():
            if not sizes and not entry.is_written:
                continue
            stale = entry.start is None or entry.own._version != entry.version
            entry.version = entry.own._version
            if entry.is_written or any(p.module.training and _is_quiet(p) for p in entry.places):
                entry.is_written = True
                if stale:
                    entry.start = entry.own.clone()
                entry.make_values(len(sizes))
                continue
            nbytes = entry.own.numel() * entry.own.element_size()
            if stale:
                copied = self._is_first or nbytes <= COPIED_BYTES
                entry.start = entry.own.clone() if copied else None
            entry.start_version = entry.shared._version
            entry.show(entry.shared)

    def _read_places(self) -> None:
        """Find the buffers anew: code between steps may have set others."""
        places: dict[int, list[tuple[str, Place]]] = {}
        self._empty = []
        tensors: dict[int, Tensor] = {}
        for prefix, inner in self._modules:
            for key, tensor in inner._buffers.items():
                if (id(inner), key) in self._local:
                    continue
                named = (f"{prefix}.{key}" if prefix else key, Place(inner, key))
                if tensor is None:
                    self._empty.append(named)
                elif is_plain(tensor) and not tensor.is_inference():
                    tensors[id(tensor)] = tensor
                    places.setdefault(id(tensor), []).append(named)
        known = {entry.name: entry for entry in self._entries.values()}
        self._entries = {}
        for key, found in places.items():
            name, own = found[0][0], tensors[key]
            entry = known.get(name)
            if entry is None or entry.own is not own or len(entry.places) != len(found):
                is_written = entry is not None and entry.is_written
                entry = StepBuffer(name, [p for _, p in found], own, is_written=is_written)
            self._entries[key] = entry
        self._of_module = {}
        for entry in self._entries.values():
            for place in entry.places:
                self._of_module.setdefault(id(place.module), []).append(entry)

    def resume(self, microbatch: int) -> None:
        """Show a microbatch's buffers; outside of a training step, nothing changes."""
        if not self.is_open or microbatch == self._shown:
            return
        self._shown = microbatch
        for entry in self._entries.values():
            if entry.is_written:
                entry.show(entry.values[microbatch])

    def pause(self, microbatch: int) -> None:
        """Keep a microbatch's buffers, and find those that it is the first to write."""
        if not self.is_open:
            return
        for entry in [*self._entries.values()]:
            now = entry.places[0].read()
            if entry.is_written:
                if now is not entry.values[microbatch]:
                    self._replace(entry, microbatch, now)
            elif now is not entry.shared or now._version != entry.start_version:
                self._find(entry, microbatch, now)
        for name, place in [*self._empty]:
            if place.read() is not None:
                self._empty.remove((name, place))
                self._make_local(name, place, None, [])

    def _find(self, entry: StepBuffer, microbatch: int, now: Any) -> None:
        if entry.start is None and now is entry.own:
            raise UnitUseError(
                f"training_step writes the buffer {entry.name!r} for the first time in a later"
                f" step, and it is larger than {COPIED_BYTES >> 20} MiB. Its values from before"
                " the write are gone, and other microbatches need them. Write it in the first step"
                " too (a factor of 1 changes nothing), or in on_train_batch_end."
            )
        entry.is_written = True
        self.found.append(entry.name)
        entry.start = entry.own.clone()
        entry.make_values(len(self.sizes))
        self._replace(entry, microbatch, now)

    def _replace(self, entry: StepBuffer, microbatch: int, now: Any) -> None:
        """Take a tensor that a microbatch shows in place of the one that it was given."""
        if not _is_like(now, entry.own):
            values: list[Any] = [*entry.values]
            values[microbatch] = now
            self.make_local(entry, values)
            return
        if any(place.read() is not now for place in entry.places[1:]):
            raise UnitUseError(
                f"training_step sets the buffer {entry.name!r}, which several modules share, in one"
                " of them only. Write to it in place, by copy_(), mul_() or add_()."
            )
        entry.values[microbatch] = now
        entry.versions[microbatch] = -1  # another tensor counts as a write

    def make_local(self, entry: StepBuffer, values: list[Any]) -> None:
        """Leave a buffer to the microbatches: it has other shapes in each of them."""
        del self._entries[id(entry.own)]
        for place in entry.places:
            self._make_local(entry.name, place, entry.own, values)

    def _make_local(self, name: str, place: Place, first: Any, values: list[Any]) -> None:
        self._local.add((id(place.module), place.key))
        self.localised.append(name)
        self._on_local(place, first, values)

    def finish(self, adds_rows: Callable[[str], bool] = lambda name: False) -> None:
        """Show the module's own tensors again, and check what was written."""
        if self.sizes:
            self._is_first = False
        if not self.is_open:
            return
        self._hide()
        for entry in self._entries.values():
            if entry.own._version != entry.version:
                raise UnitUseError(
                    f"training_step writes the buffer {entry.name!r} through a reference that was"
                    " taken before the step, which bypasses the module. Read the buffer from the"
                    " module in each step, or write it in on_train_batch_end."
                )
            if not entry.is_written and entry.own.numel() * entry.own.element_size() > COPIED_BYTES:
                entry.start = None
            if entry.name in self.found and not adds_rows(entry.name):
                _refuse_queue(entry.name, entry.own, entry.values, self.sizes)

    def abandon(self) -> None:
        """Show the module's own tensors again after a failure."""
        if self.is_open:
            self._hide()

    def put_back(self) -> None:
        """Undo what the last step has written, also after its results were combined."""
        self.abandon()
        self.forget_values()
        with torch.no_grad():
            for entry in self.written:
                if entry.start is not None:
                    entry.own.copy_(entry.start)

    def _hide(self) -> None:
        self.is_open, self._shown = False, None
        for entry in self._entries.values():
            entry.show(entry.own)

    def wrote(self) -> bool:
        """Whether a microbatch of this step has written a buffer that is not local."""
        return any(
            (_is_quiet(entry.places[0]) and entry.places[0].module.training)
            or any(v._version != n for v, n in zip(entry.values, entry.versions, strict=True))
            for entry in self._entries.values()
            if entry.is_written and entry.values
        )

    def forget_values(self) -> None:
        """Drop the tensors of the microbatches, when they are combined."""
        for entry in self._entries.values():
            entry.values, entry.versions = [], []

    def also_written(self, names: set[str]) -> None:
        """Treat these buffers as written: another rank has written them."""
        for entry in self._entries.values():
            if entry.name in names and not entry.is_written:
                entry.is_written = True
                entry.start = entry.own.clone()
                entry.make_values(len(self.sizes))

    def is_persistent(self, name: str) -> bool:
        owner, _, key = name.rpartition(".")
        found = [inner for prefix, inner in self._modules if prefix == owner]
        return any(key not in inner._non_persistent_buffers_set for inner in found)

    # -- recomputation ------------------------------------------------------------------------

    def now(self, modules: Sequence[nn.Module]) -> Shown:
        """Return what these modules' buffers are now, for :meth:`replayed`."""
        if not modules or self._shown is None:
            return []
        entries = {id(e): e for module in modules for e in self._of_module.get(id(module), ())}
        shown: list[tuple[StepBuffer, Tensor | None]] = []
        for entry in entries.values():
            value = None
            if entry.is_written and entry.is_touched(self._shown):
                value = self._copy(entry, self._shown)
            shown.append((entry, value))
        return shown

    @staticmethod
    def _copy(entry: StepBuffer, microbatch: int) -> Tensor:
        """Copy a microbatch's tensor, once for all visits between two writes."""
        now = entry.places[0].read()
        known = entry.copies.get(microbatch)
        if known is None or known[0] is not now or known[1] != now._version:
            known = (now, now._version, now.detach().clone())
            entry.copies[microbatch] = known
        return known[2]

    @contextmanager
    def replayed(self, shown: Shown) -> Iterator[None]:
        """Show the buffers of an earlier :meth:`now` in a ``with`` block, then the current ones."""
        changed = [(e, value, e.places[0].read()) for e, value in shown if e.is_written]
        for entry, value, _ in changed:
            entry.show(entry.shared if value is None else value)
        try:
            yield
        finally:
            for entry, _, before in changed:
                entry.show(before)


def _is_metric(module: nn.Module) -> bool:
    """Metrics keep account of what microbatches add."""
    return any(k.__module__.startswith("torchmetrics.") for k in type(module).__mro__)


def _is_quiet(place: Place) -> bool:
    return place.key in _WITHOUT_VERSION


def _is_like(value: Any, own: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and is_plain(value)
        and not value.is_inference()
        and value.shape == own.shape
        and value.dtype == own.dtype
        and value.device == own.device
    )


def _refuse_queue(
    name: str, before: Tensor, values: Sequence[Tensor], sizes: Sequence[int]
) -> None:
    """Raise if each microbatch has changed one row, or column, per sample of a buffer."""
    if before.ndim < 2:
        return
    if all(_has_new_rows(now, before, n) for now, n in zip(values, sizes, strict=True)):
        raise UnitUseError(
            f"training_step writes {sum(sizes)} rows, one for each sample, into the buffer"
            f" {name!r} of shape {tuple(before.shape)}. On one device it holds"
            " those of the whole batch; here microbatches and ranks would hold different"
            " ones. Return the rows from training_step, and write them in"
            " on_train_batch_end(outputs), where they are those of this rank's whole"
            " batch; get those of other ranks by torch.distributed.all_gather_object()."
        )


def _has_new_rows(now: Tensor, before: Tensor, samples: int) -> bool:
    """Return whether along some dimension exactly one row per sample differs."""
    differs = now != before
    return samples > 0 and any(
        int(differs.movedim(dim, 0).flatten(1).any(1).sum()) == samples
        for dim in range(now.ndim)
        if now.shape[dim] > samples
    )
