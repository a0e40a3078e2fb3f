"""Slots, where modules hold what a step may write, and what they hold at one time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter, is_, itemgetter, setitem
from typing import Any

from torch import nn

MISSING = object()
OF_TORCH = frozenset(vars(nn.Module()))
CONTAINERS = frozenset((list, dict, set, deque))

# their modules store no tensors of a batch, or keep account of what microbatches add
_SKIPPED = ("torch.", "torchmetrics.", "lightning.")
# a container of more items is data, and not looked into
MOST_ITEMS = 10_000


def is_metric(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__)


def may_store(module: nn.Module) -> bool:
    return not (type(module).__module__.startswith(_SKIPPED) or is_metric(module))


@dataclass(frozen=True, eq=False)
class Slot:
    """A key of ``vars(module)`` or ``module._buffers``; a buffer has no name of an attribute."""

    names: dict[str, Any]
    key: str
    name: str = ""

    def read(self) -> Any:
        return self.names.get(self.key, MISSING)

    def write(self, value: Any) -> None:
        _assign(self.names, self.key, value)


def _assign(names: dict[str, Any], key: str, value: Any) -> None:
    if value is MISSING:
        names.pop(key, None)
    else:
        names[key] = value


class Slots:
    """Slots that are read and written together: in C, as every visit does it."""

    def __init__(self, slots: Iterable[Slot] = ()) -> None:
        self._all: dict[tuple[int, str], Slot] = {}
        self._holders: list[dict[str, Any]] = []
        self.keys: list[str] = []
        for slot in slots:
            self.add(slot)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._all.values())

    def add(self, slot: Slot) -> None:
        at = id(slot.names), slot.key
        if at not in self._all:
            self._all[at] = slot
            self._holders.append(slot.names)
            self.keys.append(slot.key)

    def find(self, names: dict[str, Any], key: str) -> Slot | None:
        return self._all.get((id(names), key))

    def read(self) -> list[Any]:
        return [*map(dict.get, self._holders, self.keys, repeat(MISSING))]

    def write(self, values: Sequence[Any]) -> None:
        deque(map(setitem, self._holders, self.keys, values), maxlen=0)
        if any(map(is_, values, repeat(MISSING))):
            for slot, value in zip(self, values, strict=False):
                slot.write(value)


def are_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether two rows hold the same objects; rows are as long as each other."""
    return all(map(is_, some, others))


# -- training modes ---------------------------------------------------------------------------

Modes = tuple[bool, ...]
"""Whether each module is in training mode."""


class TrainingModes:
    """The slots ``training`` of all modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        # in C, as every pause reads all of them; a scripted module keeps its mode elsewhere
        self._read: Callable[[], Iterator[bool]] = partial(map, attrgetter("training"), modules)
        if all("training" in vars(module) for module in modules):
            self._read = partial(map, itemgetter("training"), [*map(vars, modules)])
        self._all_train = (True,) * len(modules)
        self.shown: Modes = tuple(self._read())

    def now(self) -> Modes:
        """Return the modes: one object for as long as they stay the same."""
        now = self._all_train if all(self._read()) else tuple(self._read())
        if now is not self.shown and now != self.shown:
            self.shown = now
        return self.shown

    def show(self, modes: Modes) -> None:
        self.shown = modes
        for module, mode in zip(self._modules, modes, strict=True):
            if module.training != mode:
                module.training = mode


# -- what modules hold at one time ------------------------------------------------------------


def items_of(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def refill(container: Any, items: Sequence[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        for key, value in zip(items[::2], items[1::2], strict=True):  # a Counter's update() adds
            container[key] = value
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


class Look:
    """The attributes of one module at one time, and the items of its containers."""

    def __init__(self, path: str, names: dict[str, Any], *, with_items: bool) -> None:
        self.path, self.names, self.values, self._now = path, names, dict(names), names.values()
        self._then = self.values.values()
        self.items: dict[str, tuple[Any, list[Any]]] = {}
        for name, value in self.values.items() if with_items else ():
            if type(value) in CONTAINERS and name not in OF_TORCH and len(value) <= MOST_ITEMS:
                self.items[name] = value, items_of(value)

    def is_touched(self) -> bool:
        """Whether the module holds other objects or another order; in C, for every visit."""
        return len(self._now) != len(self._then) or not are_same(self._now, self._then)

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


class Start:
    """What modules hold when a step begins."""

    def __init__(self, places: Mapping[str, dict[str, Any]], *, with_items: bool = True) -> None:
        self.looks = [Look(*place, with_items=with_items) for place in places.items()]
        self._after: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def finish(self) -> None:
        """Note what the forward leaves: hooks behind it may store something else."""
        self._after = [
            (dict(look.names), {name: items_of(held) for name, (held, _) in look.items.items()})
            for look in self.looks
        ]

    def put_back(self) -> None:
        """Undo what the forward has stored; what came behind it stays."""
        after = self._after or [(look.names, {}) for look in self.looks]
        for look, (values, items) in zip(self.looks, after, strict=True):
            for name, (held, before) in look.items.items():
                now = items_of(held)
                then = items.get(name, now)
                if len(now) == len(then) and are_same(now, then):
                    refill(held, before)
            for name in {*look.names, *look.values} - OF_TORCH:
                present, old = look.names.get(name, MISSING), look.values.get(name, MISSING)
                if present is not old and values.get(name, MISSING) is present:
                    _assign(look.names, name, old)
