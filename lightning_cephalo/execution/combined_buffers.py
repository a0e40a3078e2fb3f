"""Combines what the microbatches of all ranks leave in the buffers, as one device would.

Floating-point buffers get the mean over the samples of all microbatches: exact for updates that are
linear in a mean over samples. Integers must be equal everywhere: a counter has counted one step.
Buffers that the user names get the sum of what all microbatches add.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.base import Readback
from lightning_cephalo.common.errors import PlanError, UnitUseError
from lightning_cephalo.execution.module_buffers import ModuleBuffers, Place, StepBuffer
from lightning_cephalo.execution.module_state import ModuleState
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.collectives import all_reduce, communicates

# what a rank says of its buffers in the exchange that ends the forward
_UNCHANGED, _WRITTEN, _NEW = 0.0, 1.0, 2.0


@dataclass(frozen=True)
class _Packed:
    """This rank's share of the combination, and what its microbatches hold of it."""

    means: tuple[StepBuffer, ...]
    sums: tuple[StepBuffer, ...]
    total: Tensor
    integers: tuple[Tensor, ...]


class CombinedBuffers:
    """The buffers of a model, which are the same on all ranks between steps."""

    def __init__(
        self,
        module: nn.Module,
        state: ModuleState,
        control: ControlGroup,
        accelerator: Accelerator,
    ) -> None:
        self._state = state
        self._control = control
        self._accelerator = accelerator
        self.of_microbatches = ModuleBuffers(module, self._adopt)
        self._summed: tuple[str, ...] = ()
        self._agreed: set[str] = set()
        self._local: set[str] = set()
        self._packed: _Packed | None = None
        self._verdict: tuple[Readback, list[str]] | None = None

    def _adopt(self, place: Place, first: Any, values: list[Any]) -> None:
        self._state.adopt(place.module._buffers, place.key, first, values)

    def sum_up(self, patterns: Sequence[str]) -> None:
        """Combine the buffers of these names by sums."""
        names = self.of_microbatches.names
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise PlanError(
                    f"summed_buffers has {pattern!r}, which is not the name of a buffer; expected"
                    f" names such as {', '.join(map(repr, names[:5])) or 'none, as there are none'}"
                    " (see module.named_buffers()), or a pattern such as '*.count'."
                )
        self._summed = tuple(patterns)

    def begin(self, sizes: Sequence[int]) -> None:
        self._packed = None
        self.of_microbatches.begin(sizes)

    def put_back(self) -> None:
        """Undo what the last step has written, also after its results were combined."""
        self._packed = self._verdict = None
        self.of_microbatches.put_back()

    def finish(self) -> float:
        """Return what the other ranks need to learn; call it before the exchange of the step."""
        self.check()
        buffers = self.of_microbatches
        buffers.finish(self._is_summed)
        is_new = any(entry.name not in self._agreed for entry in buffers.written)
        if is_new or buffers.localised:
            return _NEW
        if not buffers.wrote():
            return _UNCHANGED
        self._packed = self._pack()
        return _WRITTEN

    def agree(self, said: Sequence[float]) -> None:
        """Prepare the values of this rank for :meth:`combine`; collective."""
        if max(said) == _NEW:
            self._agree()
        if max(said) == _NEW or (max(said) == _WRITTEN and min(said) == _UNCHANGED):
            self._packed = self._control.together("combining buffers", self._pack)

    def combine(self) -> None:
        """Give all ranks the combined values; collective, after :meth:`agree`."""
        packed, self._packed = self._packed, None
        if packed is not None and (packed.means or packed.sums):
            total = packed.total
            if self._control.world_size > 1:
                all_reduce(total).wait()
            self._take(packed, total)
        self.of_microbatches.forget_values()

    def check(self) -> None:
        """Raise if microbatches left different integers; a step later, when no host need wait."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None and verdict[0].finish()[0]:
            raise UnitUseError(_different(" or ".join(map(repr, verdict[1])), quoted=True))

    # -- agreement ----------------------------------------------------------------------------

    def _agree(self) -> None:
        """Learn from all ranks which buffers are written, and which have changed their shape."""
        buffers = self.of_microbatches
        written = {entry.name: self._digests(entry) for entry in buffers.written}
        rows = self._control.gather((written, buffers.localised))
        local = {name for _, names in rows for name in names}
        new, self._local = local - self._local, self._local | local
        for entry in buffers.written:
            if entry.name in self._local:
                values = [*entry.values]
                buffers.make_local(entry, values)
                entry.show(values[-1] if values else entry.own)
        self._warn_of_local(new)
        self._agreed = {name for names, _ in rows for name in names} - self._local
        for name in sorted(self._agreed):
            digests = [names.get(name) for names, _ in rows]
            if len({digest for row in digests for digest in row or ()}) > 1:
                raise UnitUseError(_different(name))
        buffers.also_written(self._agreed)

    def _warn_of_local(self, names: set[str]) -> None:
        kept = [name for name in sorted(names) if self.of_microbatches.is_persistent(name)]
        if kept and self._control.rank == 0:
            warnings.warn(
                f"The buffers {kept} change their shape in training_step. Each microbatch keeps its"
                " own, and a checkpoint holds that of rank 0. A tensor of the samples belongs in a"
                " plain attribute, a table in register_buffer(..., persistent=False).",
                stacklevel=2,
            )

    def _is_summed(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._summed)

    def _digests(self, entry: StepBuffer) -> list[int] | None:
        """Return numbers that differ if a microbatch's integers do; None for other buffers."""
        if not _is_integer(entry) or self._is_summed(entry.name):
            return None
        return [zlib.crc32(value.cpu().numpy().tobytes()) for value in entry.values]

    # -- values -------------------------------------------------------------------------------

    def _pack(self) -> _Packed:
        buffers = self.of_microbatches
        agreed = [entry for entry in buffers.written if entry.name in self._agreed]
        sums = tuple(entry for entry in agreed if self._is_summed(entry.name))
        means = [entry for entry in agreed if not self._is_summed(entry.name)]
        means.sort(key=_is_integer)  # stable: the names stay in order
        integers = [entry for entry in means if _is_integer(entry)]
        numel = 1 + sum(map(_numel, means)) + sum(map(_numel, sums))
        total: Tensor | None = None
        found = []
        for index, size in enumerate(buffers.sizes):
            values = self._flat([entry.values[index] for entry in means])
            added = self._flat([entry.values[index] for entry in sums])
            added -= self._flat([entry.own for entry in sums])
            found.append(values[len(values) - sum(map(_numel, integers)) :])
            weight = float(size or 1)  # of unknown numbers of samples all count the same
            row = torch.cat([values.new_tensor([weight]), values * weight, added])
            total = row if total is None else total + row
        if total is None:
            total = self._flat([]).new_zeros(numel)
        return _Packed(tuple(means), sums, total, tuple(found))

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return all values in one tensor of float64, which holds means and integers exactly."""
        device = self._accelerator.device
        like = torch.empty(0, device=device)
        where = device if communicates(like, None) else torch.device("cpu")
        rows = [_real(t.detach()).reshape(-1).to(where).to(torch.float64) for t in tensors]
        return torch.cat([torch.zeros(0, dtype=torch.float64, device=where), *rows])

    def _take(self, packed: _Packed, total: Tensor) -> None:
        split = 1 + sum(map(_numel, packed.means))
        means = total[1:split] / total[0]
        integers = [entry for entry in packed.means if _is_integer(entry)]
        if integers and packed.integers:
            wanted = means[len(means) - sum(map(_numel, integers)) :].round()
            differs = torch.stack([(row != wanted).any() for row in packed.integers]).any()
            readback = self._accelerator.readback()
            readback.add(differs.to(self._accelerator.device))
            self._verdict = readback, [entry.name for entry in integers]
        with torch.no_grad():
            _write(packed.means, means, is_sum=False)
            _write(packed.sums, total[split:], is_sum=True)


def _write(entries: Sequence[StepBuffer], values: Tensor, *, is_sum: bool) -> None:
    pieces = values.split([_numel(entry) for entry in entries])
    for entry, piece in zip(entries, pieces, strict=True):
        own = entry.own
        value = piece.view(_real(own).shape)
        if is_sum:
            value = value + _real(own).to(value.device).double()
        if _is_integer(entry):
            value = value.round()
        if own.is_complex():
            torch.view_as_real(own).copy_(value)
        elif own.dtype is torch.int64:
            upper, lower = value.long().unbind(-1)
            own.copy_((upper << 32) + lower)
        else:
            own.copy_(value)


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers so that float64 holds each of them exactly."""
    if tensor.dtype is torch.int64:
        return torch.stack([tensor >> 32, tensor & 0xFFFFFFFF], -1)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _numel(entry: StepBuffer) -> int:
    in_two = entry.own.is_complex() or entry.own.dtype is torch.int64
    return entry.own.numel() * (2 if in_two else 1)


def _is_integer(entry: StepBuffer) -> bool:
    return not (entry.own.is_floating_point() or entry.own.is_complex())


def _different(name: str, *, quoted: bool = False) -> str:
    return (
        f"Microbatches leave different values in the integer buffer"
        f" {name if quoted else repr(name)}. On one device training_step writes it once a step,"
        " from the whole batch. For counts of samples or codes name it in"
        " CephaloStrategy(summed_buffers=[...]). Else return the values from training_step and"
        " write the buffer in on_train_batch_end."
    )
