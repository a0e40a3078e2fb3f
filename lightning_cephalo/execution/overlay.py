"""Gives each microbatch its own view of what steps write on modules, and merges the views.

Every microbatch starts from what the step has found. When one pauses, its attributes, modes and
buffers go into its overlay; when it goes on they are shown again. A recomputed unit sees those of
its visit, and what it writes is dropped. At the end of the step the table of ``overlay_merge.py``
makes one value of all. Flags, other objects and what code changes in place are shared; a warning
names what microbatches leave different there. In the backward modules hold the values of all
samples, and what a hook stores then is refused, as it sees the gradient of one microbatch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree  # private, but torch, Lightning and others build on it

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.guards import FIRST_STEPS
from lightning_cephalo.execution.overlay_buffers import Buffers, Found, show
from lightning_cephalo.execution.overlay_merge import (
    Joined,
    Merge,
    are_equal,
    first_values,
    is_equal,
    is_of_samples,
    is_own,
    joined,
    refuse_different,
    retains_gradient,
)
from lightning_cephalo.execution.overlay_slots import (
    CONTAINERS,
    MISSING,
    OF_TORCH,
    Look,
    Modes,
    Slot,
    Slots,
    Start,
    TrainingModes,
    are_same,
    is_metric,
    items_of,
    may_store,
)
from lightning_cephalo.ranks.control import ControlGroup

_NO_CHANGE = nullcontext()


@dataclass(frozen=True)
class View:
    """What a microbatch finds on modules at one time of its step."""

    microbatch: int
    values: list[Any]
    modes: Modes
    buffers: Found = ()


@dataclass(eq=False)
class _Step:
    """What a step finds on modules, and what its microbatches leave."""

    sizes: tuple[int, ...]
    start: Start
    walks: bool
    looked_at: Sequence[Look]
    modes: Modes
    begun: list[Any]
    firsts: list[list[Any]]
    joined: dict[Slot, Joined]
    views: list[View] = field(init=False)
    shown: int | None = field(default=None, init=False)
    others: dict[tuple[int, str], Any] = field(default_factory=dict, init=False)
    last: set[str] = field(default_factory=set, init=False)
    apart: list[tuple[str, Sequence[Any]]] = field(default_factory=list, init=False)
    before_backward: Start | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        rows = [[column[i] for column in self.firsts] for i, _ in enumerate(self.sizes)]
        self.views = [View(i, row, self.modes) for i, row in enumerate(rows)]

    def values_of(self, view: View) -> list[Any]:
        """Return a view's values, with those of slots that were found later."""
        later = self.firsts[len(view.values) :]
        return [*view.values, *(firsts[view.microbatch] for firsts in later)]


class Overlay:
    """Shows microbatches what is theirs on modules.

    ::

        overlay.begin(sizes)
        overlay.resume(0); ...; overlay.pause(0)      # in turns
        overlay.finish()
        overlay.combine(codes)                        # those of all ranks: `overlay.code`
    """

    def __init__(self, module: nn.Module, control: ControlGroup, accelerator: Accelerator) -> None:
        # the top module comes first
        self.places: dict[str, dict[str, Any]] = {
            path: vars(inner)
            for path, inner in module.named_modules()
            if inner is module or may_store(inner)
        }
        self._of_torch = {
            path: vars(inner)
            for path, inner in module.named_modules()
            if path not in self.places and not is_metric(inner)
        }
        self.keeps_start, self.code = False, 0.0
        self._slots = Slots()
        self.buffers = Buffers(module)
        self._modes = TrainingModes([*module.modules()])
        self.merge = Merge(self.buffers, control, accelerator)
        self._joined: dict[Slot, Joined] = {}
        self._step: _Step | None = None
        self._now: _Step | None = None  # until its forward ends
        self._first_steps = FIRST_STEPS  # that look for what the host must wait or walk for
        self._looks_everywhere = True
        self._told: set[str] = set()

    # -- a step -------------------------------------------------------------------------------

    def begin(self, sizes: Sequence[int], walks: bool = True) -> None:
        """Begin a step; ``walks``: look into containers for what microbatches share."""
        self._step = self._now = None
        empty = self.buffers.begin(tuple(sizes))
        if sizes:  # else this rank's values stay as they are
            for slot in empty:
                self._slots.add(slot)
            walks = walks and self._first_steps > 0 and (len(sizes) > 1 or not self.merge.is_alone)
            start = Start(self.places, with_items=walks or self.keeps_start)
            begun = self._slots.read()
            firsts = [
                first_values(value, tuple(sizes), self._joined.get(slot))
                for slot, value in zip(self._slots, begun, strict=True)
            ]
            modes, looked_at = self._modes.now(), start.looks
            looked_at = looked_at if self._looks_everywhere else looked_at[:1]
            self._step = self._now = _Step(
                tuple(sizes), start, walks, looked_at, modes, begun, firsts, dict(self._joined)
            )

    def resume(self, microbatch: int) -> None:
        """Show a microbatch's values; outside of a training step, nothing changes."""
        now = self._now
        if now is None or now.shown == microbatch:  # hooks may have stored something meanwhile
            return
        view, now.shown = now.views[microbatch], microbatch
        if self._slots.keys:
            self._slots.write(now.values_of(view))
        if view.modes is not self._modes.shown:
            self._modes.show(view.modes)
        if self.buffers.rows:
            self.buffers.resume(microbatch)

    def pause(self, microbatch: int) -> None:
        """Keep a microbatch's values, and find those that it is the first to store."""
        now = self._now
        if now is None:
            return
        for look in now.looked_at:
            if look.is_touched():
                self._find(now, look)
        view, modes = now.views[microbatch], self._modes.now()
        values = view.values
        if self._slots.keys:
            values = self._slots.read()
            if len(values) == len(view.values) and are_same(values, view.values):
                values = view.values
        if values is not view.values or modes is not view.modes:
            now.views[microbatch] = View(microbatch, values, modes)
        if self.buffers.rows:
            self.buffers.pause(microbatch)

    def _find(self, now: _Step, look: Look) -> None:
        for key, value in [*look.names.items()]:
            first = look.values.get(key, MISSING)
            if value is first or key in OF_TORCH or self._slots.find(look.names, key) is not None:
                continue
            if is_own(value):
                self._learn(now, Slot(look.names, key, look.name(key)), first)
            else:
                other = now.others.setdefault((id(look.names), key), value)
                now.last |= set() if is_equal(other, value, compares=False) else {look.name(key)}

    def _learn(self, now: _Step, slot: Slot, first: Any) -> None:
        self._slots.add(slot)
        now.begun.append(first)
        now.firsts.append(first_values(first, now.sizes, None))

    def finish(self) -> None:
        """Show one value of all microbatches, and set what other ranks need to learn."""
        now, new = self._step, list[Slot]()
        left = self.buffers.finish()
        if now is not None:
            before = len(self._slots.keys)
            columns = self._columns(now)
            compares = self._first_steps > 0
            now.last |= {name for name in left if not are_equal(left[name], compares=compares)}
            # an inner module may store something in a later step; the next step looks for more
            self._looks_everywhere = len(self._slots.keys) > before
            new = self._close(now, columns)
            self._first_steps -= 1
            self._warn_of_shared(now)
        self._now = None
        values, sizes = {slot.name: slot.read() for slot in new}, () if now is None else now.sizes
        self.code = self.merge.finish(values, sizes)

    def _columns(self, now: _Step) -> list[Sequence[Any]]:
        """Return what all microbatches leave in each slot."""
        known = len(self._slots.keys)
        for look in now.start.looks:
            if look.is_touched():
                self._find(now, look)
        rows = [now.values_of(view)[:known] for view in now.views]
        # what nobody has kept is the last microbatch's
        found = [[value] * len(rows) for value in self._slots.read()[known:]]
        return [*zip(*rows, strict=True), *found]

    def _close(self, now: _Step, columns: list[Sequence[Any]]) -> list[Slot]:
        """Show one value in each slot; return the attributes that are new."""
        new = []
        for index, (slot, column) in enumerate(zip(self._slots, columns, strict=True)):
            if are_same(column, now.firsts[index]):
                slot.write(now.begun[index])
                continue
            refuse_different(slot.name, column)
            if any(map(retains_gradient, column)):
                raise _retained(slot.name)
            left = joined(column, now.sizes, compares=self._first_steps > 0)
            self._joined.pop(slot, None)
            if left.has_rows:
                self._joined[slot] = left
            if type(left.shown) in CONTAINERS and all(value is not left.shown for value in column):
                now.apart.append((slot.name, column))
            slot.write(left.shown)
            if slot.name:
                new.append(slot)
                now.last |= {slot.name} if left.is_last else set()
        now.views, now.others = [], {}
        names = sorted(now.last - self._told) if len(now.sizes) > 1 else []
        if names:
            self._told.update(names)
            warnings.warn(
                f"Microbatches leave different values in {', '.join(map(repr, names))}, which"
                " training_step stores on the module, and no rule makes one of them: they are no"
                " numbers, and no tensors with one row for each sample. Code between steps, and"
                " the next step, find that of this rank's last microbatch.",
                stacklevel=2,
            )
        return new

    @contextmanager
    def backward(self, *, has_hooks: bool) -> Iterator[None]:
        """Refuse what hooks in a ``with`` block store, if there are several microbatches."""
        self._modes.now()  # hooks before it may have switched some
        step, apart = self._step, []
        if step is not None:
            apart, step.apart = step.apart, []
        if step is None or not has_hooks:
            apart.clear()
            yield
            return
        start = step.before_backward = Start(self.places)
        known = {path: {*names} for path, names in self._of_torch.items()}
        before = [pytree.tree_leaves(containers) for _, containers in apart]
        yield
        if len(step.sizes) < 2:
            return
        names = [name for look in start.looks for name in _stored(look)]
        for path, found in self._of_torch.items():  # a recomputed unit sets what it has set
            new = found.keys() - known[path]
            names += [f"{path}.{key}" for key in new if is_own(found[key])]
        for (name, containers), leaves in zip(apart, before, strict=True):
            now = pytree.tree_leaves(containers)
            names += [] if len(now) == len(leaves) and are_same(now, leaves) else [name]
        if names:
            raise _stored_in_backward(names[0], len(step.sizes))

    def abandon(self) -> None:
        """Show the module's own buffers again after a failure."""
        self._now = None
        self.buffers.hide()

    def put_back(self) -> None:
        """Undo what the last step has stored, unless code behind its forward stored it."""
        self.merge.drop()
        self.buffers.put_back()
        step, self._now = self._step, None
        if step is None:
            return
        if step.before_backward is not None:
            step.before_backward.put_back()
        self._modes.show(step.modes)
        self._joined = step.joined
        for slot, begun in zip(self._slots, step.begun, strict=False):
            if not slot.name:  # a buffer
                slot.write(begun)
        step.start.put_back()

    def forget_start(self) -> None:
        self._step = None

    # -- recomputation ------------------------------------------------------------------------

    def now(self, modules: Sequence[nn.Module]) -> View | None:
        """Return what the running microbatch finds since it was resumed; buffers of ``modules``."""
        now = self._now
        if now is None or now.shown is None:
            return None
        view = now.views[now.shown]
        found = self.buffers.now(modules) if modules else ()
        return replace(view, buffers=found) if found else view

    def replayed(self, view: View | None) -> AbstractContextManager[None]:
        """Show an earlier :meth:`now` in a ``with`` block, and drop what its code writes."""
        if view is None:
            return _NO_CHANGE
        is_shown = view.modes is self._modes.shown or view.modes == self._modes.shown
        if is_shown and not self._slots.keys and not view.buffers:
            return _NO_CHANGE
        return self._replayed(view)

    @contextmanager
    def _replayed(self, view: View) -> Iterator[None]:
        assert self._step is not None
        before, modes = self._slots.read(), self._modes.shown
        found = self._step.values_of(view)
        self._slots.write([copy(each) if type(each) in CONTAINERS else each for each in found])
        self._modes.show(view.modes)
        buffers, tensors = show(view.buffers)
        try:
            yield
        finally:
            buffers.write(tensors)
            self._slots.write(before)
            self._modes.show(modes)

    # -- all ranks ----------------------------------------------------------------------------

    def combine(self, codes: Sequence[float]) -> None:
        """Give all ranks the merged values, or raise on all of them; collective."""
        for name, value in self.merge.combine(codes).items():
            path, _, key = name.rpartition(".")
            names = self.places.get(path)
            if names is not None:  # else a module of another rank
                names[key] = value
        self.buffers.forget_values()
        if self._step is not None and self.keeps_start:
            self._step.start.finish()

    def _warn_of_shared(self, now: _Step) -> None:
        """Name containers that have got values of samples in place: microbatches share them."""
        for look in now.start.looks if now.walks else ():
            for key, (held, before) in look.items.items():
                name, known = look.name(key), set(map(id, before))
                new = [item for item in items_of(held) if id(item) not in known]
                if name not in self._told and any(is_of_samples(item, now.sizes) for item in new):
                    self._told.add(name)
                    warnings.warn(
                        f"training_step changes {name!r}, a {type(held).__name__}, in place, once"
                        f" for each of this rank's microbatches ({len(now.sizes)} in this step),"
                        " which share it. One device changes it once, from the whole batch, and a"
                        " step that reads it may find what is of other samples. Assign a new value"
                        " instead, such as self.cache = {**self.cache, 'h': h}: then each"
                        " microbatch finds its own. For numbers, self.log(..., on_epoch=True,"
                        " sync_dist=True) gives the mean over the epoch, and"
                        " callback_metrics of the Trainer that of the global batch in"
                        " on_train_batch_end(). If only hooks read it, ignore this warning.",
                        stacklevel=2,
                    )


def _stored(look: Look) -> Iterator[str]:
    """Yield the names of attributes, and of containers, that have got what is of a microbatch."""
    for key, value in look.names.items():
        if key not in OF_TORCH and value is not look.values.get(key) and is_own(value):
            yield look.name(key)
    for name, (held, before) in look.items.items():
        # a list keeps what all microbatches append; a recomputed unit fills the same keys
        new = held.keys() - {*before[::2]} if isinstance(held, dict) else ()
        if any(is_own(held[key]) for key in new):
            yield look.name(name)


_INSTEAD = (
    "Append it to a list: h.register_hook(lambda gradient: self.gradients.append(gradient)) gives"
    " one for each microbatch. Join them in on_after_backward(), and clear the list."
)


def _stored_in_backward(name: str, microbatches: int) -> UnitUseError:
    return UnitUseError(
        f"A hook stores {name!r} on a module during the backward. It sees the gradient of one"
        f" microbatch, of which this rank has {microbatches}, so that only the last one's would"
        f" stay. {_INSTEAD} CephaloStrategy(planner=Planner(single_microbatch=True)), or a plan"
        " with one microbatch per rank, allows the hook as it is. For gradients of parameters"
        " read p.grad in on_after_backward()."
    )


def _retained(name: str) -> UnitUseError:
    return UnitUseError(
        f"training_step stores a tensor in {name!r} whose gradient it retains (retain_grad()). Each"
        f" microbatch has another one. {_INSTEAD}"
    )
