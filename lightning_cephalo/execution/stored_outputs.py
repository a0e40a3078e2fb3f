"""Tensors that the code of a unit stores on its modules, such as auxiliary losses.

Such a tensor leaves the unit beside its outputs, so it becomes one: the attribute shows a stand-in
for a leaf, whose gradient goes into the unit's graph.

A step that looks for tensors that leave units (``Boundaries.refuse_leaks``) learns the attributes,
and which of them hold a graph: with recomputation later steps have none. Later steps look only at
those that may come to hold a tensor, and at new ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.boundaries import can_have_gradient
from lightning_cephalo.execution.call_tree import flatten_result
from lightning_cephalo.execution.overlay_slots import MISSING, OF_TORCH, may_store


@dataclass(frozen=True)
class Place:
    """An attribute of a module in a unit, in which the unit has stored tensors."""

    names: dict[str, Any]
    name: str
    count: int
    is_shown: bool = True

    def values(self) -> list[Any]:
        """Return what the attribute holds now, without containers."""
        values = flatten_result(self.names.get(self.name, MISSING))[0]
        if len(values) != self.count or values == [MISSING]:
            raise UnitUseError(
                f"A unit stored other tensors in its attribute {self.name!r} when it was computed"
                " again for the backward. Store the same ones each time, or use"
                " CephaloStrategy(recompute=False)."
            )
        return values

    def show(self, values: list[Any]) -> None:
        structure = flatten_result(self.names[self.name])[1]
        self.names[self.name] = structure.unflatten(values)


class _Watched:
    """Attributes of a unit's modules that may get tensors, as one search has found them."""

    def __init__(
        self, modules: list[dict[str, Any]], places: list[tuple[dict[str, Any], str]]
    ) -> None:
        self._modules, self._places = modules, places
        self.has_places = bool(places)
        self._names = [frozenset(names) for names in modules]
        # no functions of Python's: every visit calls them
        holders, keys = [names for names, _ in places], [name for _, name in places]
        self.read: Callable[[], Iterator[Any]] = partial(
            map, dict.get, holders, keys, repeat(MISSING)
        )
        self.count: Callable[[], Iterator[int]] = partial(map, len, modules)
        self.counts = [*self.count()]

    def fresh(self, values: list[Any]) -> list[tuple[dict[str, Any], str]]:
        """Return the attributes that have another value, or were not there."""
        pairs = zip(self._places, self.read(), values, strict=True)
        found = [at for at, value, old in pairs if value is not old]
        if [*self.count()] != self.counts:
            modules = zip(self._modules, self._names, strict=True)
            found += [(names, name) for names, old in modules for name in names if name not in old]
        return found


_NOTHING: list[Any] = []

Before = tuple[_Watched, list[Any]]
"""What a unit finds on its modules. It is complete: others may look before the unit returns."""


class _Attributes:
    """The attributes of a unit's modules; those of torch's own base class are left out."""

    def __init__(self, modules: list[dict[str, Any]]) -> None:
        self.modules = modules
        self.shown: set[tuple[int, str]] = set()
        self.watch_all()

    def _all(self) -> list[tuple[dict[str, Any], str]]:
        return [(n, name) for n in self.modules for name in n if name not in OF_TORCH]

    def watch_all(self) -> None:
        self.watched = _Watched(self.modules, self._all())

    def watch_few(self) -> None:
        """Watch those that have held a graph, or may come to hold one."""
        few = [
            (names, name)
            for names, name in self._all()
            if (id(names), name) in self.shown or _may_change(names[name])
        ]
        self.watched = _Watched(self.modules, few)


class StoredOutputs:
    def __init__(self, units: Iterable[Iterable[nn.Module]]) -> None:
        self._of = [_Attributes([vars(each) for each in of if may_store(each)]) for of in units]
        self._detached: set[tuple[int, str]] = set()

    def before(self, unit: int, *, searches: bool) -> Before:
        of = self._of[unit]
        if searches:
            of.watch_all()
        watched = of.watched
        return watched, [*watched.read()] if watched.has_places else _NOTHING

    def written(
        self, unit: int, before: Before, *, has_graph: bool, searches: bool
    ) -> Sequence[Place]:
        """Return the attributes to which the unit's code has given tensors with a graph."""
        watched, found = before
        is_same = not watched.has_places or all(map(is_, watched.read(), found))
        if is_same and [*watched.count()] == watched.counts and not searches:
            return ()
        of, fresh = self._of[unit], watched.fresh(found)
        places, known = [], len(of.shown)
        for names, name in fresh:
            key, values = (id(names), name), flatten_result(names.get(name, MISSING))[0]
            tensors = [value for value in values if _is_value(value)]
            if has_graph and not any(tensor.requires_grad for tensor in tensors):
                if searches and tensors:
                    self._detached.add(key)
                continue
            if tensors:
                is_shown = has_graph or key not in self._detached
                places.append(Place(names, name, len(values), is_shown))
                if is_shown:
                    of.shown.add(key)
        if searches or len(of.shown) > known or [*watched.count()] != watched.counts:
            of.watch_few()
        return places

    def seen_again(self, place: Place, values: Sequence[Any]) -> None:
        """Warn once if an attribute that held no graph in a search has got one."""
        key = (id(place.names), place.name)
        if key in self._detached and any(_is_value(v) and v.requires_grad for v in values):
            self._detached.discard(key)
            warnings.warn(
                f"A unit has stored a tensor with a graph in its attribute {place.name!r}, which"
                " held none in the first step. If the loss of this step uses it, a part of its"
                " gradient is lost; from the next step on it counts. Store it with its graph from"
                " the first step on, or use CephaloStrategy(recompute=False).",
                stacklevel=2,
            )


def _is_value(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor and can_have_gradient(value)


def _may_change(value: Any) -> bool:
    """Whether an attribute with this value may be meant for a tensor of later steps."""
    if isinstance(value, Tensor):
        return _is_value(value)
    if isinstance(value, list | tuple | dict):
        return not value
    return value is None or (type(value) in (int, float) and value == 0)
