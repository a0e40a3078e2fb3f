"""Gives each microbatch its own buffers in a step, so that all start from the step's values.

Until a buffer is first written, microbatches find one copy of it, whose version shows a write. From
then on each has a copy. Between steps, and on a rank without samples, modules hold their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cephalo.common.errors import PlanError, UnitUseError
from lightning_cephalo.execution.graph import is_plain
from lightning_cephalo.execution.overlay_packed import Part
from lightning_cephalo.execution.overlay_slots import Slot, Slots, is_metric

# a larger buffer has a copy in the first step only, if that step does not write it
COPIED_BYTES = 2**20
_NEW = -1
# batch normalisation writes these without raising their version
_WITHOUT_VERSION = ("running_mean", "running_var")


@dataclass(eq=False)
class Buffer:
    """A buffer, and the tensors that the microbatches of a step find and leave in its slot."""

    slot: Slot
    module: nn.Module
    own: Tensor
    is_shared: bool
    is_written: bool = False
    version: int = field(default=_NEW, init=False)
    start: Tensor | None = field(default=None, init=False)
    firsts: list[Tensor] = field(default_factory=list, init=False)
    values: Sequence[Tensor] = field(default=(), init=False)

    @property
    def first(self) -> Tensor:
        """What microbatches find until one of them writes."""
        return self.own if self.start is None else self.start

    @property
    def is_quiet(self) -> bool:
        return self.slot.key in _WITHOUT_VERSION

    @property
    def is_large(self) -> bool:
        return self.own.nbytes > COPIED_BYTES

    def begin(self, microbatches: int) -> None:
        self.is_written |= self.is_quiet and self.module.training and not self.is_shared
        is_kept = self.start is not None and not self.start._version
        if not is_kept or self.own._version != self.version:
            copies = self.is_written or not self.is_large or self.version == _NEW
            self.start = self.own.clone() if copies and not self.is_shared else None
        self.version, self.values = self.own._version, ()
        self.firsts = [self.first] * microbatches
        if self.is_written:
            self.give(microbatches)

    def give(self, microbatches: int) -> None:
        """Give each microbatch a copy of the values at the beginning of the step."""
        if self.start is None or self.start._version:
            self.start = self.own.clone()
        self.is_written = True
        self.firsts = [self.own.clone() for _ in range(microbatches)]

    def is_touched(self, microbatch: int, value: Any) -> bool:
        """Whether a value is not what a microbatch has found; copies begin with version 0."""
        if value is not self.firsts[microbatch]:
            return True
        return value._version != (self.version if value is self.own else 0)

    def wrote(self) -> bool:
        if self.values and self.is_quiet and self.module.training:
            return True
        return any(self.is_touched(*each) for each in enumerate(self.values))


Found = Sequence[tuple[Buffer, Tensor | None]]
"""Buffers and their values at a visit; None: as at the beginning of the step."""


class Buffers:
    """The buffers of a model in a step."""

    def __init__(self, module: nn.Module) -> None:
        named = module.named_modules()
        self._modules = [(path, inner) for path, inner in named if not is_metric(inner)]
        self._all: list[Buffer] = []
        self._of_module: dict[int, list[Buffer]] = {}
        self._slots = Slots()
        self.left: frozenset[str] = frozenset()
        self._empty: set[tuple[int, str]] = set()
        self._summed: Sequence[str] = ()
        self._sizes: tuple[int, ...] = ()
        self.rows: list[list[Any]] = []
        self._found: list[Buffer] = []
        self._watched: list[tuple[int, Buffer]] = []
        self._shown: int | None = None

    def sum_up(self, patterns: Sequence[str]) -> None:
        """Merge the buffers of these names by sums."""
        names = [slot.name for slot, _, _ in self._named()]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise PlanError(
                    f"summed_buffers has {pattern!r}, which is not the name of a buffer; expected"
                    f" names such as {', '.join(map(repr, names[:5])) or 'none, as there are none'}"
                    " (see module.named_buffers()), or a pattern such as '*.count'."
                )
        self._summed = patterns

    def _is_summed(self, buffer: Buffer) -> bool:
        return any(fnmatchcase(buffer.slot.name, pattern) for pattern in self._summed)

    def _named(self) -> Iterator[tuple[Slot, nn.Module, Any]]:
        for path, inner in self._modules:
            for key, own in inner._buffers.items():
                yield Slot(inner._buffers, key, f"{path}.{key}" if path else key), inner, own

    @property
    def resting_bytes(self) -> int:
        """Bytes of the copies that stay between steps."""
        self._find_all()
        kept = [each for each in self._all if each.is_written or not each.is_large]
        return sum(each.own.nbytes for each in kept if not each.is_shared)

    # -- a step -------------------------------------------------------------------------------

    def begin(self, sizes: tuple[int, ...]) -> list[Slot]:
        """Begin a step; return the slots of buffers that are None, which may become anything."""
        empty = self._find_all()
        self._shown, self._found, self._sizes = None, [], sizes
        for buffer in self._all:
            if sizes or buffer.is_written:
                buffer.begin(len(sizes))
        self._slots = Slots(buffer.slot for buffer in self._all)
        rows = [[buffer.firsts[i] for buffer in self._all] for i, _ in enumerate(sizes)]
        self.rows = rows if self._all else []
        self._watched = [each for each in enumerate(self._all) if not each[1].is_written]
        return empty

    def _find_all(self) -> list[Slot]:
        """Find the buffers anew: code between steps may have set others."""
        known = {(id(each.slot.names), each.slot.key): each for each in self._all}
        holders = Counter(id(own) for _, _, own in self._named())
        self._all, self._of_module, empty = [], {}, []
        for slot, inner, own in self._named():
            at = id(slot.names), slot.key
            if own is None:
                empty.append(Slot(slot.names, slot.key))
                self._empty.add(at)
            if at in self._empty or not _is_ordinary(own):
                continue
            buffer = known.get(at)
            if buffer is None or buffer.own is not own:
                was_written = buffer is not None and buffer.is_written
                buffer = Buffer(slot, inner, own, holders[id(own)] > 1, was_written)
            self._all.append(buffer)
            self._of_module.setdefault(id(inner), []).append(buffer)
        return empty

    def resume(self, microbatch: int) -> None:
        self._shown = microbatch
        self._slots.write(self.rows[microbatch])

    def pause(self, microbatch: int) -> None:
        """Keep a microbatch's buffers, and find those that it is the first to write."""
        row = self.rows[microbatch] = self._slots.read()
        for index, buffer in self._watched:
            value = row[index]
            if buffer.is_touched(microbatch, value):
                self._refuse_late(buffer, value)
                self._found.append(buffer)
                buffer.give(len(self._sizes))
                for other, first in enumerate(buffer.firsts):
                    self.rows[other][index] = value if other == microbatch else first
        self._watched = [each for each in self._watched if not each[1].is_written]

    def _refuse_late(self, buffer: Buffer, now: Any) -> None:
        if buffer.is_shared:
            raise UnitUseError(
                f"training_step writes the buffer {buffer.slot.name!r}, which several modules"
                " share. Register it in one module only, which the others hold or are called with."
            )
        if now is buffer.own:
            raise UnitUseError(
                f"training_step writes the buffer {buffer.slot.name!r} for the first time in a"
                f" later step, and it is larger than {COPIED_BYTES >> 20} MiB. Its values from"
                " before the write are gone, and other microbatches need them. Write it in the"
                " first step too (a factor of 1 changes nothing), or in on_train_batch_end."
            )

    def hide(self) -> None:
        """Show the module's own tensors again."""
        if self._shown is not None:
            self._shown = None
            self._slots.write([buffer.own for buffer in self._all])

    def finish(self) -> dict[str, Sequence[Any]]:
        """Show the module's own tensors again; return what has got another shape, by name."""
        self.hide()
        left: dict[str, Sequence[Any]] = {}
        for buffer, values in zip(self._all, zip(*self.rows, strict=True), strict=False):
            buffer.values, own, name = values, buffer.own, buffer.slot.name
            if own._version != buffer.version:
                raise UnitUseError(
                    f"training_step writes the buffer {name!r} through a reference that was taken"
                    " before the step, which bypasses the module. Read the buffer from the module"
                    " in each step, or write it in on_train_batch_end."
                )
            if not buffer.is_written and buffer.is_large:
                buffer.start = None
            if any(not _is_ordinary(value) or _kind(value) != _kind(own) for value in values):
                left[name] = values
                buffer.slot.write(values[-1])
            elif buffer in self._found and not self._is_summed(buffer):
                _refuse_queue(buffer, self._sizes)
        self.left = frozenset(left)
        return left

    @property
    def written(self) -> frozenset[str]:
        """The names of the buffers that some step has written."""
        return frozenset(each.slot.name for each in self._all if each.is_written) - self.left

    def wrote(self) -> bool:
        return any(buffer.wrote() for buffer in self._all if buffer.is_written)

    def parts(self, names: Container[str]) -> list[Part]:
        """Return what microbatches have left in the buffers that any rank writes, by name."""
        found = []
        for buffer in sorted(self._all, key=lambda each: each.slot.name):
            name, is_sum = buffer.slot.name, self._is_summed(buffer)
            if name in names:
                if not buffer.is_written:
                    buffer.give(len(self._sizes))
                    buffer.values = buffer.firsts
                found.append(Part(buffer.own, buffer.values, is_sum, name))
            elif buffer.is_written and buffer.values and name not in self.left:
                with torch.no_grad():  # it has another shape on another rank, or had one before
                    buffer.own.copy_(buffer.values[-1])
        return found

    def put_back(self) -> None:
        self.hide()
        with torch.no_grad():
            for buffer in self._all:
                if buffer.is_written and buffer.start is not None:
                    buffer.own.copy_(buffer.start)
        self.forget_values()

    def forget_values(self) -> None:
        self.rows = []
        for buffer in self._all:
            buffer.firsts, buffer.values = [], ()

    # -- recomputation ------------------------------------------------------------------------

    def now(self, modules: Sequence[nn.Module]) -> Found:
        """Return what these modules' buffers are now."""
        microbatch, found = self._shown, list[tuple[Buffer, Tensor | None]]()
        if microbatch is None:
            return found
        for module in modules:
            buffers = self._of_module.get(id(module), ())
            written = [buffer for buffer in buffers if buffer.is_written]
            # what raises no version is written with its neighbours, or may be at any time
            copies = any(each.is_touched(microbatch, each.slot.read()) for each in written)
            copies = copies or all(each.is_quiet for each in written)
            for each in buffers:
                is_copied = copies and each.is_written
                found.append((each, each.slot.read().detach().clone() if is_copied else None))
        return found


def show(found: Found) -> tuple[Slots, list[Any]]:
    """Show copies of the buffers of a visit; return their slots, and what they have held."""
    found = [(buffer, value) for buffer, value in found if buffer.is_written]
    slots = Slots(buffer.slot for buffer, _ in found)
    before = slots.read()
    slots.write([(buffer.first if value is None else value).clone() for buffer, value in found])
    return slots, before


def _is_ordinary(value: Any) -> bool:
    return is_plain(value) and not value.is_inference()


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _refuse_queue(buffer: Buffer, sizes: Sequence[int]) -> None:
    """Raise if each microbatch has changed one row, or column, per sample of a buffer."""
    before = buffer.own
    pairs = zip(buffer.values, sizes, strict=True)
    if before.ndim > 1 and all(_has_new_rows(now, before, n) for now, n in pairs):
        raise UnitUseError(
            f"training_step writes {sum(sizes)} rows, one for each sample, into the buffer"
            f" {buffer.slot.name!r} of shape {tuple(before.shape)}. On one device it holds"
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
