"""Runs the code of several microbatches between two meetings so that it has effect once.

[Note: rounds]
With manual optimization the code between units reads and writes parameters, gradients, flags and
schedules. Each microbatch runs this code. So between two places where ranks meet or gather, the
*round*, all microbatches start from the same parameters, and only the first one's writes stay:

::

    round   microbatch 0   w0 -> target.lerp_(online, 0.01) -> w1       stays
            microbatch 1   w0 again -> the same code        -> w1       compared
    after                                                      w1       once, as on one device

A microbatch that comes to another result is refused: the write depends on its samples, or is not
made by all. What an optimizer or clipping does is done by the first microbatch alone, and all start
from there (:meth:`Turns.acting`).

Operators on sharded parameters may communicate, such as ``target.add_(online)`` of parameters that
are cut in different ways. The first microbatch of each rank runs these, and the others get its
result (:meth:`Turns.call`). All ranks then communicate equally often.

What is written is kept, before the first write in a round, by the torch function that writes it
(:meth:`Turns.before`). So rounds without writes copy nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.step_values import WAY_OUT, StepValues
from lightning_cephalo.execution.written_rows import VALUES, address, kind_of, memory_of
from lightning_cephalo.sharding.flat import Marks
from lightning_cephalo.sharding.placement import as_dtensor, local_part
from lightning_cephalo.sharding.unit import Unit


class Settings(Protocol):
    """What code may change in addition to parameters: learning rates, schedules."""

    def read(self) -> Any:
        """Return a copy of them."""

    def show(self, settings: Any) -> None:
        """Put back an earlier copy."""

    def difference(self, one: Any, other: Any) -> str | None:
        """Return the name of what differs between two copies; None: nothing."""

    def said(self, settings: Any) -> str:
        """Return text about a copy that is the same on ranks whose settings are."""

    def tensors(self) -> Sequence[Tensor]:
        """Return the tensors of optimizers' state."""


class NoSettings:
    """Settings of code that has none."""

    def read(self) -> Any:
        """Return nothing."""

    def show(self, settings: Any) -> None:
        """Do nothing."""

    def difference(self, one: Any, other: Any) -> str | None:
        """Return None."""

    def said(self, settings: Any) -> str:
        """Return nothing."""
        return ""

    def tensors(self) -> Sequence[Tensor]:
        """Return nothing."""
        return ()


class _Result:
    """What a microbatch has left behind in a round.

    Attributes:
        marks: Flags and gradients of each flat; None: as at the beginning of the round.
        memory: By address, the values of what is written; others are as at the beginning.
        settings: The settings.
        writes: A number for the functions that wrote.
    """

    def __init__(
        self, marks: list[Marks] | None, memory: dict[int, Tensor], settings: Any, writes: int
    ) -> None:
        self.marks, self.memory, self.settings, self.writes = marks, memory, settings, writes


@dataclass
class _Call:
    """A torch function that the first microbatch of a round called on sharded parameters.

    Attributes:
        key: The function, its shapes and numbers.
        operands: Copies of the rows of its operands, if it has communicated.
        result: What it returned, if it has communicated.
        written: The rows that it has then written.
    """

    key: str
    operands: list[Tensor]
    result: Any = None
    written: list[Tensor] = field(default_factory=list)
    has_communicated: bool = False


class Turns:
    """Lets code of several microbatches have effect once; see [Note: rounds].

    Args:
        units: All units.
        values: What the code stores on modules.

    Attributes:
        settings: Learning rates and schedules.
        is_on: Whether the plan has several microbatches on any rank.
        copied_bytes: The most that rounds have copied of what they write.
        written: A number for all writes since ranks have compared it.
        samples: Samples of this rank's microbatches in the running step.
    """

    def __init__(self, units: Sequence[Unit], values: StepValues) -> None:
        self._units = units
        self.values = values
        self.settings: Settings = NoSettings()
        self.is_on = False
        self.copied_bytes = 0
        self.written = 0
        self.samples: tuple[int, ...] = ()
        self.counts: tuple[int, ...] = ()
        self._members: Sequence[int] = ()
        self._start_settings: Any = None
        self._start_marks: list[Marks] | None = None
        self._memory: dict[int, Tensor] = {}
        self._saved: dict[int, Tensor] = {}
        # by their ids, as addresses of ranks without rows say nothing
        self._known: dict[int, Tensor] = {}
        self._versions: list[int] = []
        self._writes = 0
        self._first: _Result | None = None
        self._running: int | None = None
        # of the first microbatch in this round, and how many of them this one has called
        self._calls: list[_Call] = []
        self._called = 0
        self._call: _Call | None = None
        self.is_acting = False

    # -- a step -------------------------------------------------------------------------------

    def begin_step(self, samples: Sequence[int], counts: Sequence[int]) -> None:
        """Begin a step.

        Args:
            samples: Samples of this rank's microbatches.
            counts: Microbatches of every rank.
        """
        self.samples, self.counts = tuple(samples), tuple(counts)
        self.written, self.is_acting, self._running = 0, False, None
        self.values.begin(samples)

    def end_step(self) -> None:
        """Let go of what the step holds; after a failure, show the values of before the step."""
        self.values.abandon()
        self._forget()
        self._running, self.is_acting, self._members = None, False, ()

    @property
    def leads(self) -> bool:
        """Whether the running microbatch does what is done once for all."""
        return not self.is_on or not self._running

    def refuse_collective(self, doing: str) -> None:
        """Raise where some ranks would run a collective of the user's code more often.

        Raises:
            UnsupportedError: The message gives the way out.
        """
        if self._call is not None and self._running == 0:
            self._call.has_communicated = True
            return
        is_code = self.is_on and self._running is not None and not self.is_acting
        if is_code and len(set(self.counts)) > 1:
            raise UnsupportedError(
                f"training_step communicates ({doing}), once per microbatch, but the ranks run"
                f" {list(self.counts)} microbatches with manual optimization: it would hang."
                " Communicate in a hook (on_before_optimizer_step, on_train_batch_end), use"
                f" self.clip_gradients() to clip, {WAY_OUT}."
            )

    # -- rounds -------------------------------------------------------------------------------

    def begin_round(self, members: Sequence[int]) -> None:
        """Begin a round.

        Args:
            members: The microbatches that run in it, in their order.
        """
        self._members, self._first = members, None
        self._forget()
        self._start_settings = self.settings.read()

    def _forget(self) -> None:
        self._start_marks, self._start_settings = None, None
        self._memory, self._saved, self._known = {}, {}, {}
        self._first, self._calls, self._call, self._called = None, [], None, 0

    def resume(self, microbatch: int) -> None:
        """Let a microbatch run its turn of the round."""
        self._running, self._writes, self._called, self._call = microbatch, 0, 0, None
        self.values.resume(microbatch)
        if len(self.samples) > 1:
            self._versions = self._row_versions()

    def pause(self, microbatch: int) -> None:
        """End its turn, and compare what it has written with the turns of others.

        Raises:
            UnitUseError: If it has written something else, or less than all microbatches write.
        """
        self._running = None
        self.values.pause(microbatch)
        if self._first is None:
            self._say_what_is_written()
        if len(self.samples) < 2:
            return
        if self._row_versions() != self._versions and not self._saved:
            raise UnitUseError(
                "training_step writes to a parameter in a place that cannot be followed, such as a"
                " unit's forward or the module's own backward(): with manual optimization and"
                " several microbatches per rank, each would write once. Write in training_step"
                f" itself, or in a hook such as on_after_backward, {WAY_OUT}."
            )
        result = self._result()
        if self._first is None:
            self._first = result
        else:
            self._compare(self._first, result)
        if microbatch != self._members[-1]:
            self._show_start()
        elif len(self._members) < len(self.samples):
            self._refuse_change(self._first)

    def _say_what_is_written(self) -> None:
        """Let ranks compare what they write: functions, flags, gradients, settings."""
        said = str(self._writes) if self._writes else ""
        if self._start_marks is not None:
            then, now = self._said_marks(self._start_marks), self._said_marks(self._marks())
            said += now if now != then else ""
        settings = self.settings.read()
        if self.settings.difference(self._start_settings, settings) is not None:
            said += self.settings.said(settings)
        if said:
            self.written = zlib.crc32(said.encode(), self.written)

    def _said_marks(self, marks: list[Marks]) -> str:
        flats = [flat for unit in self._units for flat in unit.flats]
        return str(
            [
                (flag, gradient is None)
                for flat, (marked, _, _) in zip(flats, marks, strict=True)
                for flag, gradient in marked[: len(flat.sharded)]
            ]
        )

    def _row_versions(self) -> list[int]:
        return [v for unit in self._units for flat in unit.flats for v in flat.row_versions]

    def _marks(self) -> list[Marks]:
        return [flat.marks() for unit in self._units for flat in unit.flats]

    def _result(self) -> _Result:
        marks = None if self._start_marks is None else self._marks()
        memory = {at: self._memory[at].clone() for at in self._saved}
        # what is saved, and the results of the first microbatch and of another one
        copied_bytes = 3 * sum(map(len, memory.values()))
        self.copied_bytes = max(self.copied_bytes, copied_bytes)
        return _Result(marks, memory, self.settings.read(), self._writes)

    def _show_start(self) -> None:
        if self._start_marks is not None:
            flats = [flat for unit in self._units for flat in unit.flats]
            for flat, marks in zip(flats, self._start_marks, strict=True):
                flat.set_marks(marks)
        with torch.no_grad():
            for at, saved in self._saved.items():
                self._memory[at].copy_(saved)
        self.settings.show(self._start_settings)

    def _compare(self, one: _Result, other: _Result) -> None:
        name = self.settings.difference(one.settings, other.settings)
        if name is None and one.writes != other.writes:
            name = "parameters or gradients, by other functions or numbers"
        if name is None and any(
            not torch.equal(one.memory.get(at, saved), other.memory.get(at, saved))
            for at, saved in self._saved.items()
        ):
            name = "parameters or gradients"
        if name is None and not self._same_marks(one.marks, other.marks):
            name = "requires_grad or the gradients of parameters"
        if name is not None:
            raise UnitUseError(
                f"Microbatches set other values in training_step ({name}). With manual optimization"
                " and several microbatches per rank, what it writes must not depend on samples, and"
                f" all must write it at the same place. Write it in a hook, {WAY_OUT}."
            )

    def _same_marks(self, one: list[Marks] | None, other: list[Marks] | None) -> bool:
        one, other = one or self._start_marks, other or self._start_marks
        if one is None or other is None:
            return True
        return all(
            flag == its_flag and _same_gradient(grad, its_grad)
            for (marks, _, _), (its, _, _) in zip(one, other, strict=True)
            for (flag, grad), (its_flag, its_grad) in zip(marks, its, strict=True)
        )

    def _refuse_change(self, result: _Result) -> None:
        """Raise if something was written in a round in which not all microbatches run."""
        start = _Result(self._start_marks, dict(self._saved), self._start_settings, 0)
        self._compare(start, result)

    # -- what is done once --------------------------------------------------------------------

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Do something once for all microbatches in a ``with`` block of the first one's code.

        All have come to the same meeting, and the first one has done nothing since.

        Raises:
            UnsupportedError: If it has, in a ``backward()`` of the user's module.
        """
        if not self.is_on or self.is_acting or self._running is None:
            yield
            return
        if self._calls or self._writes:
            raise UnsupportedError(
                "backward() of the module computes with parameters or gradients after"
                " loss.backward(). With manual optimization and several microbatches per rank, each"
                f" microbatch would do that. Do it in on_after_backward, {WAY_OUT}."
            )
        self.is_acting = True
        try:
            with self.values.for_all():
                yield
        finally:
            self.is_acting = False
        self._forget()
        self._start_settings = self.settings.read()
        if len(self.samples) > 1:
            self._versions = self._row_versions()

    # -- writes -------------------------------------------------------------------------------

    def before(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep what a torch function of the running microbatch is about to write."""
        kind = kind_of(func, kwargs)
        if self.is_acting or self._running is None or kind is None:
            return
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if self._start_marks is None:
            self._start_marks = self._marks()
        if len(self.samples) > 1:
            self._keep(tensors if kind == VALUES else ())
        if kind == VALUES and any(local_part(each) is not each for each in tensors):
            numbers: list[Any] = _numbers(pytree.tree_leaves((args, kwargs)))
            numbers += [_number_of(each) for each in tensors if local_part(each) is each]
            said = f"{func.__name__} {[tuple(each.shape) for each in tensors]} {numbers}"
            self._writes = zlib.crc32(said.encode(), self._writes)

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        self._find_memory()
        for tensor in tensors:
            at = address(local_part(tensor))
            if at in self._memory and at not in self._saved:
                self._saved[at] = self._memory[at].clone()

    def _find_memory(self) -> None:
        if self._memory:
            return
        for unit in self._units:
            for flat in unit.flats:
                for held in flat.rows_and_gradients():
                    self._hold(held)
        for held in (*self.settings.tensors(), *self.values.shared):
            self._hold(local_part(held))

    # -- operators on sharded parameters ------------------------------------------------------

    def follow(self, func: Any, args: Any, result: Any) -> None:
        """Note what a function returns of a parameter: its ``.grad``, its ``.data``."""
        if self.is_acting or self._running is None or not isinstance(result, DTensor):
            return
        is_part = getattr(func, "__name__", "") in ("__get__", "detach")
        if is_part and args and id(args[0]) in self._find_known():
            self._known[id(result)] = result

    def _find_known(self) -> dict[int, Tensor]:
        """Return parameters, gradients and optimizers' state, the same on all ranks."""
        if not self._known:
            held = [each for unit in self._units for flat in unit.flats for each in flat.sharded]
            found = (*held, *self.settings.tensors(), *self.values.shared)
            self._known = {id(each): each for each in found}
            for each in held:
                if each.grad is not None:
                    self._known[id(each.grad)] = each.grad
        return self._known

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a torch function; the first microbatch communicates for all.

        That needs operands that are equal in all microbatches: rows of parameters, gradients and
        optimizers' state, and numbers.
        """
        if self.is_acting or self._running is None:
            return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        rows = [local_part(each) for each in tensors]
        if not tensors or any(own is each for own, each in zip(rows, tensors, strict=True)):
            return func(*args, **kwargs)
        known_tensors = self._find_known()
        # all ranks must choose alike, also those without rows
        if any(id(each) not in known_tensors for each in tensors):
            return func(*args, **kwargs)
        shapes = [tuple(each.shape) for each in tensors]
        key = f"{getattr(func, '__name__', func)} {shapes} {_numbers(leaves)}"
        written: list[Tensor] = []
        changed: Any = None
        if kind_of(func, kwargs) == VALUES:
            changed = kwargs.get("out")
            if changed is None:
                changed = args[0] if args else next(iter(kwargs.values()))
            written = [local_part(each) for each in pytree.tree_leaves(changed)]
        result = self._call_known(key, func, args, kwargs, rows, written, changed)
        # what is computed of them is equal in all microbatches, too
        for each in pytree.tree_leaves(result):
            if isinstance(each, DTensor):
                self._known[id(each)] = each
        return result

    def _call_known(
        self,
        key: str,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        rows: Sequence[Tensor],
        written: Sequence[Tensor],
        changed: Any,
    ) -> Any:
        if self._running == 0:
            return self._first_call(key, func, args, kwargs, rows, written)
        at, self._called = self._called, self._called + 1
        known = self._calls[at] if at < len(self._calls) else None
        if known is None or known.key != key:
            raise UnitUseError(
                f"Microbatches call other functions on parameters in training_step ({key}). With"
                " manual optimization and several microbatches per rank, all must do the same."
                f" Do it in a hook, {WAY_OUT}."
            )
        if not known.has_communicated:
            return func(*args, **kwargs)
        if not all(map(_same_bits, known.operands, rows)):
            raise UnitUseError(
                f"Microbatches compute with other values of parameters in training_step ({key})."
                " With manual optimization and several microbatches per rank, what they write must"
                f" not depend on samples. Do it in a hook, {WAY_OUT}."
            )
        with torch.no_grad():
            for own, value in zip(written, known.written, strict=True):
                own.copy_(value)
        return changed if written else _copy(known.result)

    def _first_call(
        self,
        key: str,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        rows: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> Any:
        has_followers = len(self.samples) > 1
        # it may write to its operands
        call = self._call = _Call(key, [])
        before = [own.detach().clone() for own in rows] if has_followers and written else rows
        try:
            result = func(*args, **kwargs)
        finally:
            self._call = None
        if call.has_communicated and has_followers:
            if (
                any(
                    isinstance(each, Tensor) and each.requires_grad
                    for each in pytree.tree_leaves(result)
                )
                and not written
            ):
                raise UnsupportedError(
                    f"training_step computes with parameters of several ranks ({key}), with"
                    " gradients. With manual optimization and several microbatches per rank, do it"
                    f" under torch.no_grad(), {WAY_OUT}."
                )
            call.operands = list(before) if written else [own.detach().clone() for own in rows]
            call.written = [own.detach().clone() for own in written]
            call.result = None if written else _copy(result)
        self._calls.append(call)
        return result

    def _hold(self, tensor: Tensor) -> None:
        at = address(tensor)
        if at and at not in self._memory:
            self._memory[at] = memory_of(tensor)


def _numbers(leaves: Sequence[Any]) -> list[Any]:
    return [each for each in leaves if isinstance(each, int | float | bool | str)]


def _number_of(tensor: Tensor) -> int:
    """Return a number that differs if values do, except by rare chance."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().tobytes())


def _copy(result: Any) -> Any:
    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, DTensor):
            return value.detach().clone()
        return as_dtensor(local_part(value).detach().clone(), value._spec)

    return pytree.tree_map(copied, result)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    own, its = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(own, its)


def _same_gradient(one: Tensor | None, other: Tensor | None) -> bool:
    if one is other:
        return True
    if one is None or other is None:
        return False
    return _same_bits(local_part(one), local_part(other))
