"""Puts back what a step that is repeated has stored on modules.

Rebound attributes get their old values. Lists, dicts, sets and deques that modules hold directly
get their old items. Other objects that the user's code changes in place stay changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_cephalo.execution.module_numbers import is_number, is_scalar

MISSING = object()
OF_TORCH = frozenset(vars(nn.Module()))
CONTAINERS = frozenset((list, dict, set, deque))
# a container of more items is data: only its length is looked at
_MOST_ITEMS = 10_000


@dataclass
class StoredAttribute:
    """An attribute of a module that holds tensors of the user's code, one for each microbatch."""

    names: dict[str, Any]
    name: str
    first: Any = MISSING
    firsts: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    begun: Any = MISSING
    sizes: tuple[int, ...] = ()
    shown: Any = MISSING
    versions: tuple[int, ...] = ()
    found: list[Any] = field(default_factory=list)

    @property
    def is_number(self) -> bool:
        """Whether all microbatches have left numbers, of which one is new."""
        return all(is_number(value) or is_scalar(value) for value in self.values) and any(
            value is not self.begun for value in self.values
        )

    def read(self) -> Any:
        return self.names.get(self.name, MISSING)

    def write(self, value: Any) -> None:
        if value is MISSING:
            self.names.pop(self.name, None)
        else:
            self.names[self.name] = value


class _Look:
    def __init__(self, names: dict[str, Any], containers: Iterable[Any]) -> None:
        self.values = dict(names)
        self.items = [(container, copy_of(container)) for container in containers]


def _containers(names: dict[str, Any]) -> list[Any]:
    return [
        value for name, value in names.items() if type(value) in CONTAINERS and name not in OF_TORCH
    ]


class UndoneStep:
    def __init__(
        self, places: Sequence[dict[str, Any]], attributes: Iterable[StoredAttribute]
    ) -> None:
        self._places = places
        self._before = [_Look(names, _containers(names)) for names in places]
        self._after: list[_Look] | None = None
        self._known = {
            id(one): (one.read(), one.firsts, list(one.values), one.sizes, one.shown, one.versions)
            for one in attributes
        }

    def finish(self) -> None:
        """Note what the forward leaves: hooks behind it may store something else."""
        self._after = [
            _Look(names, (container for container, _ in before.items))
            for names, before in zip(self._places, self._before, strict=True)
        ]

    def put_back(self, attributes: Iterable[StoredAttribute]) -> None:
        """Undo what the forward has stored; ``attributes`` have a value for each microbatch."""
        for one in attributes:
            new: tuple[Any, ...] = (one.first, [], [], (), MISSING, ())
            value, one.firsts, one.values, one.sizes, one.shown, one.versions = self._known.get(
                id(one), new
            )
            one.write(value)
        after: Sequence[_Look | None] = self._after or [None] * len(self._before)
        for names, old, new_look in zip(self._places, self._before, after, strict=True):
            _put_back_names(names, old.values, None if new_look is None else new_look.values)
            changed = {} if new_look is None else {id(o): items for o, items in new_look.items}
            for container, items in old.items:
                if new_look is None or are_same(copy_of(container), changed.get(id(container))):
                    _refill(container, items)


def _put_back_names(
    names: dict[str, Any], before: dict[str, Any], after: dict[str, Any] | None
) -> None:
    for name in {*names, *before} - OF_TORCH:
        now, old = names.get(name, MISSING), before.get(name, MISSING)
        is_of_step = after is None or after.get(name, MISSING) is now
        if now is old or not is_of_step:
            continue
        if old is MISSING:
            del names[name]
        else:
            names[name] = old


def copy_of(container: Any) -> Any:
    if len(container) > _MOST_ITEMS:
        return len(container)
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def are_same(now: Any, then: Any) -> bool:
    if isinstance(now, int) or not isinstance(then, list):
        return bool(now == then)
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def _refill(container: Any, items: Any) -> None:
    if isinstance(items, int):
        if isinstance(container, list):
            del container[items:]
        return
    container.clear()
    if isinstance(container, dict):
        container.update(zip(items[::2], items[1::2], strict=True))
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)
