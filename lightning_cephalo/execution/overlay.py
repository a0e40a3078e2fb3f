"""Gives each microbatch its own view of what steps write on modules, and merges the views.

Every microbatch starts from what the step has found. When one pauses, its attributes, modes and
buffers go into its overlay; when it goes on they are shown again. A recomputed unit sees those of
its visit, and what it writes is dropped. At the end of the step the table of ``overlay_merge.py``
makes one value of all. Flags, other objects and what code changes in place are shared; a warning
names what microbatches leave different there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # private, but torch, Lightning and others build on it

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.base import Readback
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.execution.overlay_buffers import StepBuffer, StepBuffers
from lightning_cephalo.execution.overlay_merge import (
    Packed,
    Part,
    Retained,
    different_integers,
    is_number,
    is_scalar,
    merged_numbers,
    retained,
    same,
    tensors_of,
)
from lightning_cephalo.execution.overlay_slots import (
    CONTAINERS,
    MISSING,
    OF_TORCH,
    Attribute,
    Look,
    Modes,
    Rows,
    Start,
    TrainingModes,
    copy_of,
    is_of_samples,
    is_own,
    may_store,
    warn_of_shared,
)
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.collectives import communicates

# steps that look for what the host must wait or walk for
_FIRST_STEPS = 3
_NO_CHANGE = nullcontext()

# what a rank says of its overlay in the exchange that ends the forward; they add up
_TENSORS, _NUMBERS, _NEW = 1, 2, 4


@dataclass(frozen=True)
class _Behind:
    """What modules show when a backward with hooks begins, and the leaves of all first values."""

    looks: Sequence[Look]
    shown: Sequence[Any]
    leaves: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class _Layout:
    """What a rank has to merge: names of buffers, of those of other shapes, and 0-d tensors."""

    buffers: Sequence[str]
    local: Sequence[str]
    scalars: dict[str, torch.dtype]


@dataclass(frozen=True)
class View:
    """What a microbatch finds on modules at one time of its step."""

    microbatch: int
    values: Sequence[Any]
    modes: Modes
    buffers: Sequence[tuple[StepBuffer, Tensor | None]] = ()


class Overlay:
    """Shows microbatches what is theirs on modules.

    ::

        overlay.begin(sizes)
        overlay.resume(0); ...; overlay.pause(0)      # in turns
        overlay.finish()
        overlay.combine(codes)                        # those of all ranks: `overlay.code`
    """

    def __init__(self, module: nn.Module, control: ControlGroup, accelerator: Accelerator) -> None:
        self._control, self._accelerator = control, accelerator
        self._paths = {id(vars(inner)): path for path, inner in module.named_modules()}
        # the top module comes first
        self.places: list[dict[str, Any]] = [
            vars(inner) for inner in module.modules() if inner is module or may_store(inner)
        ]
        self._places = {id(names): names for names in self.places}
        self.buffers = StepBuffers(module, self._adopt)
        self._summed: tuple[str, ...] = ()
        self._modes = TrainingModes([*module.modules()])
        self._first_modes = self._shown_modes = self._modes.now()
        self.keeps_start = False
        self.code = 0.0
        self._start: Start | None = None
        self._starts: list[tuple[Attribute, Any, Rows | None]] = []
        self._attributes: list[Attribute] = []
        self._new: list[Attribute] = []
        self._known: set[tuple[int, str]] = set()
        self._others: dict[tuple[int, str], Any] = {}
        self._last: set[str] = set()
        self._read: Callable[[], Iterator[Any]] = lambda: iter(())
        self._looked_at: Sequence[Look] = ()
        self._looks_everywhere = self._looks_everywhere_behind = True
        self._sizes: tuple[int, ...] = ()
        self._is_open = self._walks = False
        self._behind: _Behind | None = None
        self._first_steps = _FIRST_STEPS
        self._views: list[View] = []
        self._running = 0
        self._retained: list[Retained] = []
        self._told: set[str] = set()
        self._agreed: set[str] = set()
        self._agreed_scalars: dict[str, torch.dtype] = {}
        self._local: set[str] = set()
        self._packed: Packed | None = None
        self._verdict: tuple[Readback, list[str]] | None = None

    def sum_up(self, patterns: Sequence[str]) -> None:
        """Merge the buffers of these names by sums."""
        names = [*self.buffers.names]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise PlanError(
                    f"summed_buffers has {pattern!r}, which is not the name of a buffer; expected"
                    f" names such as {', '.join(map(repr, names[:5])) or 'none, as there are none'}"
                    " (see module.named_buffers()), or a pattern such as '*.count'."
                )
        self._summed = tuple(patterns)

    def _is_summed(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._summed)

    @property
    def resting_bytes(self) -> int:
        """Bytes of the copies that stay between steps."""
        return self.buffers.resting_bytes

    # -- a step -------------------------------------------------------------------------------

    def begin(self, sizes: Sequence[int], walks: bool = True) -> None:
        """Begin a step; ``walks``: look into containers for what microbatches share."""
        self._sizes, self.code, self._packed = tuple(sizes), 0.0, None
        self._retained, self._start, self._starts = [], None, []
        self._containers: dict[int, tuple[Any, list[Any]]] = {}
        self._others, self._last = {}, set()
        self._behind, self._is_open = None, bool(sizes)
        self.buffers.begin(self._sizes)
        self._first_modes = self._shown_modes = self._modes.now()
        if not sizes:  # this rank's values stay as they are
            return
        shares = len(sizes) > 1 or self._control.world_size > 1
        self._walks = walks and shares and self._first_steps > 0
        self._start = Start(self.places, walks=self._walks, copies=self.keeps_start)
        self._starts = [(each, each.read(), each.rows) for each in self._attributes]
        for each, begun, _ in self._starts:
            each.begun, each.firsts = begun, each.found_first(begun, self._sizes)
        columns = [each.firsts for each in self._attributes]
        self._open(self._start.looks, columns, everywhere=self._looks_everywhere)

    def _open(
        self, looks: Sequence[Look], columns: Sequence[list[Any]], *, everywhere: bool
    ) -> None:
        self._looked_at = looks if everywhere else looks[:1]
        self._views = [
            View(index, [column[index] for column in columns], self._first_modes)
            for index in range(len(self._sizes))
        ]

    def resume(self, microbatch: int) -> None:
        """Show a microbatch's values; outside of a training step, nothing changes."""
        if not self._is_open:
            return
        self._running, view = microbatch, self._views[microbatch]
        if self._attributes:
            self._write(view)
        if view.modes is not self._shown_modes and self._behind is None:
            self._modes.show(view.modes)
            self._shown_modes = view.modes
        if self.buffers.is_open:
            self.buffers.resume(microbatch)

    def pause(self, microbatch: int) -> None:
        """Keep a microbatch's values, and find those that it is the first to store."""
        if not self._is_open:
            return
        for look in self._looked_at:
            if look.is_touched():
                self._find(look)
        view = self._views[microbatch]
        values, modes = view.values, view.modes
        if self._behind is None:
            found = self._modes.now()
            if found is not modes and found != modes:
                modes = found
            self._shown_modes = modes
        if self._attributes:
            now = [*self._read()]
            if len(now) != len(values) or not all(map(is_, now, values)):
                values = now
        if values is not view.values or modes is not view.modes:
            self._views[microbatch] = View(microbatch, values, modes)
        if self.buffers.is_open:
            self.buffers.pause(microbatch)

    def _write(self, view: View) -> None:
        values, known = view.values, len(view.values)
        for each, value in zip(self._attributes, values, strict=False):
            each.write(value)
        for each in self._attributes[known:]:  # found in the meantime
            each.write(each.firsts[view.microbatch])

    def _find(self, look: Look) -> bool:
        known = len(self._attributes)
        for name, value in [*look.names.items()]:
            first, key = look.values.get(name, MISSING), (id(look.names), name)
            if value is first or name in OF_TORCH or key in self._known:
                continue
            if is_own(value):
                self._learn(look.names, name, first)
            elif not same(self._others.setdefault(key, value), value, compares=False):
                self._last.add(self._name(look.names, name))
        return len(self._attributes) > known

    def _name(self, names: dict[str, Any], key: str) -> str:
        """Return a name for messages and other ranks; none for a buffer."""
        path = self._paths.get(id(names))
        return "" if path is None else f"{path}.{key}" if path else key

    def _learn(self, names: dict[str, Any], key: str, first: Any) -> Attribute:
        attribute = Attribute(names, key, self._name(names, key), first)
        attribute.firsts = attribute.found_first(first, self._sizes)
        self._known.add((id(names), key))
        self._attributes.append(attribute)
        holders, keys = zip(*((each.names, each.key) for each in self._attributes), strict=True)
        self._read = partial(map, dict.get, holders, keys, repeat(MISSING))
        return attribute

    def _adopt(self, names: dict[str, Any], key: str, first: Any, values: list[Any]) -> None:
        """Treat a buffer as an attribute from now on."""
        attribute = self._learn(names, key, first)
        if values:
            attribute.firsts = values

    def finish(self) -> None:
        """Show one value of all microbatches, and set what other ranks need to learn."""
        self.check()
        self._new = self._close() if self._sizes else []
        self.buffers.finish(self._is_summed)
        if self._sizes:
            self._first_steps -= 1
        entries = self.buffers.written
        code = _TENSORS * any(entry.wrote() for entry in entries)
        if self.buffers.localised or any(entry.name not in self._agreed for entry in entries):
            code |= _NEW
        for each in self._new:
            code |= _NUMBERS * is_number(each.read()) | _TENSORS * is_scalar(each.read())
        scalars = {name: value.dtype for name, value in self._scalars().items()}
        if self._sizes and scalars != self._agreed_scalars:  # at least one rank has each of them
            code |= _NEW
        self.code = float(code)
        if code & _TENSORS and not code & _NEW:
            self._packed = self._pack()

    def _close(self) -> list[Attribute]:
        """Show one value of each attribute; return those that are new."""
        assert self._start is not None
        # one of an inner module may appear in a later step; the next step looks for more
        columns, self._looks_everywhere = self._columns(self._start.looks)
        compares, new, self._containers = self._first_steps > 0, [], {}
        for index, (each, column) in enumerate(zip(self._attributes, columns, strict=True)):
            if index < len(self._starts) and all(map(is_, column, each.firsts)):
                each.write(each.begun)
                continue
            new.append(each)
            integers = {value for value in column if type(value) is int}
            if len(integers) > 1 and all(type(value) is int for value in column):
                raise different_integers(each.name)
            if each.show(column, self._sizes, compares=compares) and each.name:
                self._last.add(each.name)
            if each.rows is None and all(type(value) in CONTAINERS for value in column):
                self._containers[id(each)] = each.read(), column
            if any(tensor.requires_grad for tensor in tensors_of(column)):
                self._retained += retained(column, each.read(), self._sizes)
        for each, _, _ in self._starts:
            each.firsts = []
        self._is_open, self._looked_at, self._views, self._others = False, (), [], {}
        if len(self._sizes) > 1:
            self._warn_of_last()
        if self._walks:
            self._warn_of_shared(self._start)
        return [each for each in new if each.name]

    def _columns(self, looks: Sequence[Look]) -> tuple[list[list[Any]], bool]:
        """Return each attribute's values, and whether some are only found now."""
        kept = len(self._attributes)
        late = sum(self._find(look) for look in looks if look.is_touched()) > 0
        columns = [
            [
                view.values[index] if index < len(view.values) else each.firsts[view.microbatch]
                for view in self._views
            ]
            for index, each in enumerate(self._attributes[:kept])
        ]
        # those that nobody has kept are the last microbatch's
        columns += [[each.read()] * len(self._sizes) for each in self._attributes[kept:]]
        return columns, late

    def begin_backward(self, has_hooks: bool) -> None:
        """Let hooks that run in the backward find what is of their microbatch."""
        self._shown_modes = self._modes.now()
        if has_hooks and self._sizes:
            looks = Start(self.places, copies=False).looks
            shown = [*self._read()]
            pairs = zip(self._attributes, shown, strict=True)
            columns = [self._found_behind(each, value) for each, value in pairs]
            self._behind = _Behind(looks, shown, [*map(pytree.tree_leaves, columns)])
            self._is_open = True
            self._open(looks, columns, everywhere=self._looks_everywhere_behind)

    def _found_behind(self, attribute: Attribute, value: Any) -> list[Any]:
        """Return what each microbatch finds in the backward: containers of its own, to fill."""
        shown, own = self._containers.get(id(attribute), (MISSING, []))
        return own if shown is value else attribute.found_first(value, self._sizes)

    def end_backward(self) -> None:
        """Show the values of all samples, with gradients and what hooks have stored."""
        for gradient in self._retained:
            gradient.show_gradient()
        self._retained = []
        behind = self._behind
        if behind is None:
            return
        columns, self._looks_everywhere_behind = self._columns(behind.looks)
        for index, (each, column) in enumerate(zip(self._attributes, columns, strict=True)):
            found = behind.leaves[index] if index < len(behind.leaves) else [MISSING]
            leaves = pytree.tree_leaves(column)
            if len(found) == len(leaves) and all(map(is_, found, leaves)):
                each.write(behind.shown[index])
            else:
                each.show(column, self._sizes, compares=False)
        self._behind, self._is_open, self._looked_at, self._views = None, False, (), []

    def abandon(self) -> None:
        """Show the module's own buffers again after a failure."""
        self._is_open = False
        self.buffers.hide()

    def put_back(self) -> None:
        """Undo what the last step has stored, unless code behind its forward stored it."""
        self._packed = self._verdict = None
        self.buffers.put_back()
        behind, self._behind, self._is_open = self._behind, None, False
        if behind is not None:
            for each, value in zip(self._attributes, behind.shown, strict=False):
                each.write(value)
        if self._start is None:
            return
        self._modes.show(self._first_modes)
        started = {id(each): (begun, rows) for each, begun, rows in self._starts}
        for each in self._attributes:
            begun, each.rows = started.get(id(each), (each.begun, None))
            if id(each.names) not in self._places:  # a buffer
                each.write(begun)
        self._start.put_back()

    def forget_start(self) -> None:
        self._start, self._starts = None, []

    # -- recomputation ------------------------------------------------------------------------

    def now(self, modules: Sequence[nn.Module]) -> View:
        """Return what the running microbatch finds since it was resumed; buffers of ``modules``."""
        view = self._views[self._running]
        shown = self.buffers.now(modules) if modules and self.buffers.is_open else ()
        return replace(view, buffers=shown) if shown else view

    def replayed(self, view: View | None) -> AbstractContextManager[None]:
        """Show attributes and modes of an earlier :meth:`now` in a ``with`` block."""
        if view is None:
            return _NO_CHANGE
        is_shown = view.modes is self._shown_modes or view.modes == self._shown_modes
        return _NO_CHANGE if is_shown and not self._attributes else self._replayed(view)

    @contextmanager
    def _replayed(self, view: View) -> Iterator[None]:
        before, modes = [*self._read()], self._shown_modes
        self._write(view)
        self._modes.show(view.modes)
        try:
            yield
        finally:
            for each, value in zip(self._attributes, before, strict=True):
                each.write(value)
            self._modes.show(modes)

    def replayed_buffers(self, view: View) -> AbstractContextManager[None]:
        """Show the buffers of an earlier :meth:`now` in a ``with`` block; what it writes goes."""
        return self.buffers.replayed(view.buffers)

    # -- all ranks ----------------------------------------------------------------------------

    def combine(self, codes: Sequence[float]) -> None:
        """Give all ranks the merged values, or raise on all of them; collective."""
        flags = [int(code) for code in codes]
        is_new = any(flag & _NEW for flag in flags)
        if is_new or any(flag & _NUMBERS for flag in flags):
            rows = self._control.gather((self._layout() if is_new else None, self._numbers()))
            if is_new:
                self._agree([layout for layout, _ in rows])
            for name, value in merged_numbers([numbers for _, numbers in rows]).items():
                self._take(name, value)
        packs = is_new or any(flag & _TENSORS for flag in flags)
        if packs and (self._agreed or self._agreed_scalars):
            if is_new or not all(flag & _TENSORS for flag in flags):
                self._packed = self._control.together("merging what the step writes", self._pack)
            self._merge()
            if is_new:
                self._control.together("comparing integer buffers", self.check)
        self.buffers.forget_values()
        if self._start is not None and self.keeps_start:
            self._start.finish()
        else:
            self.forget_start()

    def check(self) -> None:
        """Raise if microbatches left different integers; a step later, when no host need wait."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None and verdict[0].finish()[0]:
            raise different_integers(*verdict[1], buffers=True)

    def _numbers(self) -> dict[str, tuple[Any, float]]:
        """Return the plain numbers that the step has stored, with the weight of this rank."""
        weight = float(sum(self._sizes) or len(self._sizes))
        found = {each.name: each.read() for each in self._new}
        return {name: (value, weight) for name, value in found.items() if is_number(value)}

    def _scalars(self) -> dict[str, Tensor]:
        found = {each.name: each.read() for each in self._new}
        return {name: value for name, value in found.items() if is_scalar(value)}

    def _layout(self) -> _Layout:
        scalars = {name: value.dtype for name, value in self._scalars().items()}
        names = [entry.name for entry in self.buffers.written]
        return _Layout(names, self.buffers.localised, scalars)

    def _agree(self, layouts: Sequence[_Layout]) -> None:
        """Note what all ranks merge, and which buffers have changed their shape on any."""
        local = {name for layout in layouts for name in layout.local}
        new, self._local = local - self._local, self._local | local
        for entry in self.buffers.written:
            if entry.name in self._local:
                values = [*entry.values]
                self.buffers.make_local(entry, values)
                entry.show(values[-1] if values else entry.own)
        is_persistent = self.buffers.names
        kept = [name for name in sorted(new) if is_persistent[name]]
        if kept and self._control.rank == 0:
            warnings.warn(
                f"The buffers {kept} change their shape in training_step. Each microbatch keeps its"
                " own, and a checkpoint holds that of rank 0. A tensor of the samples belongs in a"
                " plain attribute, a table in register_buffer(..., persistent=False).",
                stacklevel=2,
            )
        self._agreed = {name for layout in layouts for name in layout.buffers} - self._local
        scalars = {name: dtype for layout in layouts for name, dtype in layout.scalars.items()}
        self._agreed_scalars = dict(sorted(scalars.items()))
        self.buffers.also_written(self._agreed)

    def _pack(self) -> Packed:
        device = self._accelerator.device
        is_sent = communicates(torch.empty(0, device=device), None)
        parts = [
            Part(entry.name, entry.own, entry.values, self._is_summed(entry.name))
            for entry in self.buffers.written
            if entry.name in self._agreed
        ]
        own = self._scalars()
        scalars = [own.get(name) for name in self._agreed_scalars]
        return Packed(parts, scalars, self._sizes, device if is_sent else torch.device("cpu"))

    def _merge(self) -> None:
        packed, self._packed = self._packed, None
        assert packed is not None
        means, differs, names = packed.merge(self._control.world_size > 1)
        device = self._accelerator.device
        for (name, dtype), mean in zip(self._agreed_scalars.items(), means.unbind(), strict=True):
            self._take(name, mean.to(device, dtype))
        if differs is not None:
            readback = self._accelerator.readback()
            readback.add(differs.to(device))
            self._verdict = readback, names

    def _take(self, name: str, value: Any) -> None:
        """Show the value of the whole step."""
        attribute = next((each for each in self._attributes if each.name == name), None)
        if attribute is not None:
            attribute.rows = None
            attribute.write(value)
            return
        path, _, key = name.rpartition(".")
        for names in self.places:
            if self._paths.get(id(names)) == path:
                names[key] = value

    # -- warnings -----------------------------------------------------------------------------

    def _warn_of_last(self) -> None:
        new, self._told = self._last - self._told, self._told | self._last
        if new:
            warnings.warn(
                f"Microbatches leave different values in {', '.join(map(repr, sorted(new)))}, which"
                " training_step stores on the module, and no rule makes one of them: they are no"
                " numbers, and no tensors with one row for each sample. Code between steps, and"
                " the next step, find that of this rank's last microbatch.",
                stacklevel=2,
            )

    def _warn_of_shared(self, start: Start) -> None:
        """Name objects that have got values of samples in place: microbatches share them."""
        for look in start.looks:
            for key, (held, before) in look.inside.items():
                name, now = self._name(look.names, key), copy_of(held)
                if isinstance(now, int) or isinstance(before, int) or name in self._told:
                    continue
                known = set(map(id, before))
                new = [item for item in now if id(item) not in known]
                value = look.values[key]
                if any(is_of_samples(item, value, self._sizes) for item in new):
                    self._told.add(name)
                    warn_of_shared(name, value, len(self._sizes))
