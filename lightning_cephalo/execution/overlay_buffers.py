"""Gives each microbatch its own buffers in a step, so that all start from the step's values.

Each microbatch writes to a copy. Until the first write microbatches share one copy. Between steps,
and on a rank without samples, the module holds its own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.graph import is_plain

# a larger buffer has a copy in the first step only, if that step does not write it
COPIED_BYTES = 2**20
# batch normalisation writes these without raising their version
_WITHOUT_VERSION = ("running_mean", "running_var")


@dataclass(eq=False)
class StepBuffer:
    """A buffer that several modules may hold. In a step they show the tensors of microbatches."""

    name: str
    places: list[tuple[nn.Module, str]]
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

    @property
    def is_quiet(self) -> bool:
        return self.places[0][1] in _WITHOUT_VERSION

    @property
    def is_large(self) -> bool:
        return self.own.numel() * self.own.element_size() > COPIED_BYTES

    def read(self) -> Any:
        module, key = self.places[0]
        return module._buffers.get(key)

    def show(self, tensor: Any) -> None:
        for module, key in self.places:
            module._buffers[key] = tensor

    def begin(self, microbatches: int, *, is_first: bool) -> None:
        stale = self.start is None or self.own._version != self.version
        self.version = self.own._version
        if any(self.is_quiet and module.training for module, _ in self.places):
            self.is_written = True
        if stale:
            copies = self.is_written or is_first or not self.is_large
            self.start = self.own.clone() if copies else None
        if self.is_written:
            self.make_values(microbatches)
        else:
            self.start_version = self.shared._version
            self.show(self.shared)

    def make_values(self, microbatches: int) -> None:
        """Give each microbatch a copy of the values at the beginning of the step."""
        self.is_written = True
        self.values = [self.own.clone() for _ in range(microbatches)]
        self.versions = [value._version for value in self.values]
        self.copies = {}

    def is_touched(self, microbatch: int) -> bool:
        """Whether a microbatch has written its tensor, or shows another in its place."""
        value = self.values[microbatch]
        return value._version != self.versions[microbatch] or value is not self.read()

    def wrote(self) -> bool:
        is_quiet = bool(self.values) and self.is_quiet and self.places[0][0].training
        pairs = zip(self.values, self.versions, strict=True)
        return is_quiet or any(value._version != version for value, version in pairs)

    def copy_of(self, microbatch: int) -> Tensor:
        """Copy a microbatch's tensor, once for all visits between two writes."""
        now, known = self.read(), self.copies.get(microbatch)
        if known is None or self.is_quiet or known[0] is not now or known[1] != now._version:
            known = self.copies[microbatch] = now, now._version, now.detach().clone()
        return known[2]


class StepBuffers:
    """The buffers of a model in a step."""

    def __init__(
        self, module: nn.Module, on_local: Callable[[dict[str, Any], str, Any, list[Any]], None]
    ) -> None:
        kinds = {id(m): type(m).__mro__ for m in module.modules()}
        self._modules = [
            (path, inner)
            for path, inner in module.named_modules()
            if not any(kind.__module__.startswith("torchmetrics.") for kind in kinds[id(inner)])
        ]
        self._on_local = on_local
        self.entries: dict[int, StepBuffer] = {}
        self._of_module: dict[int, list[StepBuffer]] = {}
        self._local: set[tuple[int, str]] = set()
        self._empty: list[tuple[str, nn.Module, str]] = []
        self.sizes: tuple[int, ...] = ()
        self._is_first = True
        self._shown: int | None = None
        self.is_open = False
        self.localised: list[str] = []
        self._found: list[StepBuffer] = []

    @property
    def names(self) -> dict[str, bool]:
        """All names, and whether a checkpoint holds the buffer."""
        return {
            f"{path}.{key}" if path else key: key not in inner._non_persistent_buffers_set
            for path, inner in self._modules
            for key in inner._buffers
        }

    @property
    def written(self) -> list[StepBuffer]:
        """The buffers that some step has written, by name."""
        entries = [entry for entry in self.entries.values() if entry.is_written]
        return sorted(entries, key=lambda entry: entry.name)

    @property
    def resting_bytes(self) -> int:
        self._find_places()
        kept = [e.own for e in self.entries.values() if e.is_written or not e.is_large]
        return sum(own.numel() * own.element_size() for own in kept)

    def begin(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self._shown, self.localised, self._found = sizes, None, [], []
        self._find_places()
        self.forget_values()
        self.is_open = bool(sizes) and bool(self.entries or self._empty)
        for entry in self.entries.values():
            if sizes or entry.is_written:
                entry.begin(len(sizes), is_first=self._is_first)

    def _find_places(self) -> None:
        """Find the buffers anew: code between steps may have set others."""
        known = {entry.name: entry for entry in self.entries.values()}
        self.entries, self._empty, self._of_module = {}, [], {}
        for path, inner in self._modules:
            for key, own in inner._buffers.items():
                name = f"{path}.{key}" if path else key
                if (id(inner), key) in self._local:
                    continue
                if own is None:
                    self._empty.append((name, inner, key))
                elif is_plain(own) and not own.is_inference():
                    entry = self.entries.get(id(own))
                    if entry is None:
                        old = known.get(name)
                        entry = StepBuffer(name, [], own, is_written=bool(old and old.is_written))
                        if old is not None and old.own is own:
                            entry = replace(old, places=[])
                        self.entries[id(own)] = entry
                    entry.places.append((inner, key))
                    self._of_module.setdefault(id(inner), []).append(entry)

    def resume(self, microbatch: int) -> None:
        if microbatch == self._shown:
            return
        self._shown = microbatch
        for entry in self.entries.values():
            if entry.is_written:
                entry.show(entry.values[microbatch])

    def pause(self, microbatch: int) -> None:
        """Keep a microbatch's buffers, and find those that it is the first to write."""
        for entry in [*self.entries.values()]:
            now = entry.read()
            if entry.is_written:
                if now is not entry.values[microbatch]:
                    self._replace(entry, microbatch, now)
            elif now is not entry.shared or now._version != entry.start_version:
                self._find(entry, microbatch, now)
        for each in [*self._empty]:
            name, module, key = each
            if module._buffers.get(key) is not None:
                self._empty.remove(each)
                self._make_local(name, module, key, None, [])

    def _find(self, entry: StepBuffer, microbatch: int, now: Any) -> None:
        if entry.start is None and now is entry.own:
            raise UnitUseError(
                f"training_step writes the buffer {entry.name!r} for the first time in a later"
                f" step, and it is larger than {COPIED_BYTES >> 20} MiB. Its values from before"
                " the write are gone, and other microbatches need them. Write it in the first step"
                " too (a factor of 1 changes nothing), or in on_train_batch_end."
            )
        self._found.append(entry)
        entry.start = entry.own.clone()
        entry.make_values(len(self.sizes))
        self._replace(entry, microbatch, now)

    def _replace(self, entry: StepBuffer, microbatch: int, now: Any) -> None:
        """Take a tensor that a microbatch shows in place of the one that it was given."""
        own = entry.own
        is_like = isinstance(now, Tensor) and is_plain(now) and not now.is_inference()
        if not is_like or (now.shape, now.dtype, now.device) != (own.shape, own.dtype, own.device):
            values: list[Any] = [*entry.values]
            values[microbatch] = now
            self.make_local(entry, values)
            return
        if any(module._buffers.get(key) is not now for module, key in entry.places[1:]):
            raise UnitUseError(
                f"training_step sets the buffer {entry.name!r}, which several modules share, in one"
                " of them only. Write to it in place, by copy_(), mul_() or add_()."
            )
        entry.values[microbatch], entry.versions[microbatch] = now, -1  # counts as a write

    def make_local(self, entry: StepBuffer, values: list[Any]) -> None:
        """Leave a buffer to the microbatches: it has other shapes in each of them."""
        del self.entries[id(entry.own)]
        for module, key in entry.places:
            self._make_local(entry.name, module, key, entry.own, values)

    def _make_local(
        self, name: str, module: nn.Module, key: str, first: Any, values: list[Any]
    ) -> None:
        self._local.add((id(module), key))
        self.localised.append(name)
        self._on_local(module._buffers, key, first, values)

    def hide(self) -> None:
        """Show the module's own tensors again."""
        if self.is_open:
            self.is_open, self._shown = False, None
            for entry in self.entries.values():
                entry.show(entry.own)

    def finish(self, is_summed: Callable[[str], bool]) -> None:
        """Show the module's own tensors again, and check what was written."""
        self._is_first = self._is_first and not self.sizes
        if not self.is_open:
            return
        self.hide()
        for entry in self.entries.values():
            if entry.own._version != entry.version:
                raise UnitUseError(
                    f"training_step writes the buffer {entry.name!r} through a reference that was"
                    " taken before the step, which bypasses the module. Read the buffer from the"
                    " module in each step, or write it in on_train_batch_end."
                )
            if not entry.is_written and entry.is_large:
                entry.start = None
        for entry in self._found:
            if id(entry.own) in self.entries and not is_summed(entry.name):
                _refuse_queue(entry, self.sizes)

    def put_back(self) -> None:
        self.hide()
        self.forget_values()
        with torch.no_grad():
            for entry in self.written:
                if entry.start is not None:
                    entry.own.copy_(entry.start)

    def forget_values(self) -> None:
        for entry in self.entries.values():
            entry.values, entry.versions = [], []

    def also_written(self, names: set[str]) -> None:
        """Treat these buffers as written: another rank has written them."""
        for entry in self.entries.values():
            if entry.name in names and not entry.is_written:
                entry.start = entry.own.clone()
                entry.make_values(len(self.sizes))

    def now(self, modules: Sequence[nn.Module]) -> Sequence[tuple[StepBuffer, Tensor | None]]:
        """Return what these modules' buffers are now; None: as when the step began."""
        microbatch = self._shown
        if microbatch is None:
            return ()
        shown: dict[int, tuple[StepBuffer, Tensor | None]] = {}
        for module in modules:
            entries = self._of_module.get(id(module), ())
            written = [entry for entry in entries if entry.is_written]
            # what raises no version is written with its neighbours, or may be at any time
            is_touched = any(entry.is_touched(microbatch) for entry in written)
            is_touched = is_touched or all(entry.is_quiet for entry in written)
            for entry in entries:
                copies = entry.is_written and is_touched
                shown[id(entry)] = entry, entry.copy_of(microbatch) if copies else None
        return [*shown.values()]

    @contextmanager
    def replayed(self, shown: Sequence[tuple[StepBuffer, Tensor | None]]) -> Iterator[None]:
        changed = [(entry, value, entry.read()) for entry, value in shown if entry.is_written]
        for entry, value, _ in changed:  # copies, as the unit may write them again
            entry.show((entry.shared if value is None else value).clone())
        try:
            yield
        finally:
            for entry, _, before in changed:
                entry.show(before)


def _refuse_queue(entry: StepBuffer, sizes: Sequence[int]) -> None:
    """Raise if each microbatch has changed one row, or column, per sample of a buffer."""
    before = entry.own
    pairs = zip(entry.values, sizes, strict=True)
    if before.ndim > 1 and all(_has_new_rows(now, before, n) for now, n in pairs):
        raise UnitUseError(
            f"training_step writes {sum(sizes)} rows, one for each sample, into the buffer"
            f" {entry.name!r} of shape {tuple(before.shape)}. On one device it holds"
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
