"""What modules hold apart from parameters and buffers: attributes and training modes."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor, nn

from lightning_cephalo.execution.overlay_merge import (
    cut,
    detached,
    is_number,
    joined,
    tensors_of,
    unfit,
)

MISSING = object()
OF_TORCH = frozenset(vars(nn.Module()))

# their modules store no tensors of a batch, or keep account of what microbatches add
_SKIPPED = ("torch.", "torchmetrics.", "lightning.")
CONTAINERS = frozenset((list, dict, set, deque))
_NOT_USERS = frozenset(["torch", "torchmetrics", "lightning", "pytorch_lightning", "transformers"])
_NOT_USERS |= {"lightning_cephalo", "numpy", "builtins", "collections", "functools", "enum"}
_NOT_USERS |= {"logging", "types"}
# a container of more items is data: only its length is looked at
_MOST_ITEMS = 10_000


def may_store(module: nn.Module) -> bool:
    return not any(
        kind.__module__.startswith(_SKIPPED)
        for kind in (type(module), *(k for k in type(module).__mro__ if k.__name__ == "Metric"))
    )


# -- the start of a step ----------------------------------------------------------------------


def copy_of(container: Any) -> Any:
    if len(container) > _MOST_ITEMS:
        return len(container)
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def _same(now: Any, then: Any) -> bool:
    if isinstance(now, int) or isinstance(then, int):
        return bool(now == then)
    return len(now) == len(then) and all(map(is_, now, then))


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


def _inside(value: Any) -> Any:
    """Return the items of a container, or the attributes of an object of the user's."""
    if type(value) in CONTAINERS:
        return value
    owner = type(value).__module__.partition(".")[0]
    if owner in _NOT_USERS or isinstance(value, nn.Module | type) or callable(value):
        return None
    return getattr(value, "__dict__", None)


class Look:
    """The attributes of one module at one time."""

    def __init__(self, names: dict[str, Any], *, walks: bool, copies: bool) -> None:
        self.names, self.values, self._now = names, dict(names), names.values()
        self._in_order = [*self._now]
        self.inside: dict[str, tuple[Any, Any]] = {}
        for name, value in self.values.items() if walks or copies else ():
            if name not in OF_TORCH and (walks or type(value) in CONTAINERS):
                held = _inside(value)
                if held is not None:
                    self.inside[name] = held, copy_of(held)

    def is_touched(self) -> bool:
        """Whether the module holds other objects or another order; in C, for every visit."""
        return len(self._now) != len(self._in_order) or not all(map(is_, self._now, self._in_order))

    def put_back(self, after: Look | None) -> None:
        """Undo what came before ``after``; what came behind it stays."""
        for name in {*self.names, *self.values} - OF_TORCH:
            now, old = self.names.get(name, MISSING), self.values.get(name, MISSING)
            if now is not old and (after is None or after.values.get(name, MISSING) is now):
                _assign(self.names, name, old)
        for name, (held, items) in self.inside.items():
            if type(self.values[name]) in CONTAINERS:
                then = None if after is None else after.items_of(held)
                if then is None or _same(copy_of(held), then):
                    _refill(held, items)

    def items_of(self, held: Any) -> Any:
        return next((items for each, items in self.inside.values() if each is held), None)


def _assign(names: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        names.pop(name, None)
    else:
        names[name] = value


class Start:
    """What modules hold when a step begins; their containers too, for :meth:`put_back`."""

    def __init__(
        self, places: Sequence[dict[str, Any]], *, walks: bool = False, copies: bool = True
    ) -> None:
        self.looks = [Look(names, walks=walks, copies=copies) for names in places]
        self._after: Sequence[Look | None] = [None] * len(places)

    def finish(self) -> None:
        """Note what the forward leaves: hooks behind it may store something else."""
        self._after = [Look(look.names, walks=False, copies=True) for look in self.looks]
        for look, after in zip(self.looks, self._after, strict=True):
            assert after is not None
            after.inside = {n: (held, copy_of(held)) for n, (held, _) in look.inside.items()}

    def put_back(self) -> None:
        for look, after in zip(self.looks, self._after, strict=True):
            look.put_back(after)


# -- attributes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """What a step has left for each of its microbatches, and shows between steps."""

    values: Sequence[Any]
    sizes: tuple[int, ...]
    shown: Any
    versions: tuple[int, ...]


class Attribute:
    def __init__(self, names: dict[str, Any], key: str, name: str, first: Any) -> None:
        self.names, self.key, self.name, self.begun = names, key, name, first
        self.firsts: list[Any] = []
        self.rows: Rows | None = None

    def read(self) -> Any:
        return self.names.get(self.key, MISSING)

    def write(self, value: Any) -> None:
        _assign(self.names, self.key, value)

    def found_first(self, value: Any, sizes: tuple[int, ...]) -> list[Any]:
        """Return what each microbatch finds first where the module shows a value."""
        rows = self.rows
        if rows is not None and value is rows.shown and _versions(value) == rows.versions:
            if rows.sizes == sizes:
                return [*rows.values]
            if sum(rows.sizes) != sum(sizes):
                return [unfit(value, sum(rows.sizes), sizes)] * len(sizes)
        if len(sizes) < 2 or not sum(sizes) or not holds_tensors(value):
            return [value] * len(sizes)
        return [cut(value, sizes, index) for index in range(len(sizes))]

    def show(self, values: Sequence[Any], sizes: tuple[int, ...], *, compares: bool) -> bool:
        """Show the microbatches' values as one; return whether that is only the last one's."""
        if all(value is values[0] for value in values):
            values = [detached(values[0])] * len(values)
        else:
            values = [detached(value) for value in values]
        one = joined(values, sizes, compares=compares)
        self.rows = None
        if one.has_rows:
            self.rows = Rows(values, sizes, one.shown, _versions(one.shown))
        self.write(one.shown)
        return one.is_last


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors_of(value) if not tensor.is_inference())


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a container whose first item holds one."""
    if isinstance(value, dict):
        return bool(value) and holds_tensors(next(iter(value.values())))
    if isinstance(value, list | tuple | deque):
        return bool(value) and holds_tensors(value[0])
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def is_own(value: Any) -> bool:
    """Whether a value is a microbatch's own, as an empty container that a step may fill.

    Flags and other objects, which say that code has run, are there for all of them.
    """
    is_empty = isinstance(value, list | dict | deque) and not value
    return is_empty or is_number(value) or holds_tensors(value)


Modes = tuple[bool, ...]
"""Whether each module is in training mode."""


class TrainingModes:
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        # every pause reads the modes of all modules, where a loop in Python would cost the most; a
        # scripted module keeps its mode elsewhere than among its attributes
        holders: Sequence[Any] = [vars(module) for module in modules]
        read: Callable[[Any], bool] = itemgetter("training")
        if any("training" not in names for names in holders):
            holders, read = modules, attrgetter("training")
        self._read = partial(map, read, holders)
        self._all_train = (True,) * len(holders)

    def now(self) -> Modes:
        return self._all_train if all(self._read()) else tuple(self._read())

    def show(self, modes: Modes) -> None:
        for module, mode in zip(self._modules, modes, strict=True):
            if module.training != mode:
                module.training = mode


# -- objects that microbatches share ----------------------------------------------------------


def is_of_samples(item: Any, held_by: Any, sizes: Sequence[int]) -> bool:
    """Whether an item holds rows of one of several microbatches, or a container has got a float."""
    if len(sizes) > 1 and any(_has_rows(tensor, sizes) for tensor in tensors_of(item)):
        return True
    return type(held_by) in CONTAINERS and _is_float(item)


def _is_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_float, value.values()))
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, float)


def _has_rows(tensor: Tensor, sizes: Sequence[int]) -> bool:
    """Whether one of the first two dimensions is as long as a microbatch."""
    if any(length > 1 and length in sizes for length in tensor.shape[:2]):
        return True
    return 1 in sizes and tensor.ndim > 1 and tensor.shape[0] == 1


def warn_of_shared(name: str, value: Any, microbatches: int) -> None:
    warnings.warn(
        f"training_step changes {name!r}, a {type(value).__name__}, in place, once for each of this"
        f" rank's microbatches ({microbatches} in this step), which share it. One device changes it"
        " once, from the whole batch, and a step that reads it may find what is of other samples."
        " Assign a new value instead, such as self.cache = {**self.cache, 'h': h}: then each"
        " microbatch finds its own. For numbers, self.log(..., on_epoch=True, sync_dist=True) gives"
        " the mean over the epoch, and self.trainer.callback_metrics that of the global batch in"
        " on_train_batch_end(). If only hooks read it, ignore this warning.",
        stacklevel=2,
    )
