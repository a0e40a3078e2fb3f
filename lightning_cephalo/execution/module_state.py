"""Gives each microbatch its own values of the tensors that the user's code stores on modules.

Each finds what it has stored itself, in this step or in the last one. Between steps the module
shows the values of all samples of this rank, joined along the dimension that follows their number.
Numbers become those of the whole step, on all ranks: ``module_numbers.py``. Any other value is the
last microbatch's. Values that are changed in place are shared: ``shared_values.py`` warns of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, ValuesView
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # private, but torch, Lightning and others build on it

from lightning_cephalo.execution.module_numbers import Row, is_number, mean_number
from lightning_cephalo.execution.shared_values import SharedValues
from lightning_cephalo.execution.undone_step import MISSING as _MISSING
from lightning_cephalo.execution.undone_step import OF_TORCH, StoredAttribute, UndoneStep

# their modules store no tensors of a batch, or keep account of what microbatches add
_SKIPPED = ("torch.", "torchmetrics.", "lightning.")


@dataclass(frozen=True)
class _Retained:
    """A shown tensor whose gradient the user's code has asked for (``x.retain_grad()``)."""

    shown: Tensor
    sources: Sequence[Tensor]
    dimension: int

    def show_gradient(self) -> None:
        """Join the gradients of the microbatches, if each has one."""
        gradients = [each.grad for each in self.sources if each.grad is not None]
        if len(gradients) == len(self.sources):
            whole = gradients[0] if len(gradients) == 1 else torch.cat(gradients, self.dimension)
            self.shown.grad = whole


@dataclass(frozen=True)
class Stored:
    """What a microbatch finds on the modules at one time of its step."""

    microbatch: int
    values: dict[int, Any]


@dataclass(frozen=True)
class _Before:
    names: dict[str, Any]
    values: dict[str, Any]
    in_order: list[Any]
    now: ValuesView[Any]

    @classmethod
    def of(cls, names: dict[str, Any]) -> _Before:
        return cls(names, dict(names), [*names.values()], names.values())

    def is_touched(self) -> bool:
        """Whether the module holds other objects or another order; in C, for every visit."""
        return len(self.now) != len(self.in_order) or not all(map(is_, self.now, self.in_order))


class ModuleState:
    def __init__(self, module: nn.Module, several_ranks: bool = False) -> None:
        self.keeps_start = self.is_used = False
        self._undo: UndoneStep | None = None
        self._paths = {id(vars(inner)): path for path, inner in module.named_modules()}
        # the top module comes first
        self.places: list[dict[str, Any]] = [
            vars(inner) for inner in module.modules() if inner is module or may_store(inner)
        ]
        self._known: dict[tuple[int, str], StoredAttribute] = {}
        self._before: list[_Before] = []
        self._looked_at: list[_Before] = []
        self._sizes: tuple[int, ...] = ()
        self._looks_everywhere = self._looks_everywhere_behind = True
        self._is_behind = False
        self._running = 0
        self._nothing: Sequence[Stored] = [Stored(0, {})]
        self._in_places = SharedValues(several_ranks)
        self.differing: list[str] = []
        self._retained: list[_Retained] = []

    # -- a step -------------------------------------------------------------------------------

    def begin(self, sizes: Sequence[int], finds_numbers: bool = False) -> None:
        self._sizes = tuple(sizes)
        self.differing, self._retained = [], []
        self._undo, self._is_behind = None, False
        if not sizes:  # this rank's values stay as they are
            return
        if self.keeps_start:
            self._undo = UndoneStep(self.places, self._known.values())
        self._before = [_Before.of(names) for names in self.places]
        self._looked_at = self._before if self._looks_everywhere else self._before[:1]
        self._nothing = [Stored(index, {}) for index in range(len(sizes))]
        self._in_places.begin(self.places, self._paths, len(sizes), finds_numbers)
        for attribute in self._known.values():
            attribute.begun = attribute.read()
            attribute.values = self._first_values(attribute)
            attribute.firsts = []  # of the step that found it, with its number of microbatches

    def _first_values(self, attribute: StoredAttribute) -> list[Any]:
        now, sizes = attribute.read(), self._sizes
        is_untouched = now is attribute.shown and _versions(now) == attribute.versions
        if is_untouched and attribute.sizes == sizes:
            return attribute.values
        if is_untouched and attribute.sizes and sum(attribute.sizes) != sum(sizes):
            return [_unfit(now, sum(attribute.sizes), sizes)] * len(sizes)
        return [_cut(now, sizes, index) for index in range(len(sizes))]

    def resume(self, microbatch: int) -> None:
        """Show a microbatch's values; outside of a training step, nothing changes."""
        if not self._before:
            return
        self._running = microbatch
        if self._known:
            for attribute in self._known.values():
                attribute.write(attribute.values[microbatch])

    def pause(self, microbatch: int) -> None:
        """Keep a microbatch's values, and find attributes that it is the first to store."""
        if not self._before:
            return
        for before in self._looked_at:
            if before.is_touched():
                self._find(before)
        if self._known:
            for attribute in self._known.values():
                attribute.values[microbatch] = attribute.read()

    def _find(self, before: _Before) -> bool:
        names, found = before.names, False
        for name, value in names.items():
            first = before.values.get(name, _MISSING)
            if value is first or (id(names), name) in self._known:
                continue
            is_stored = _holds_tensors(value) or _is_empty(value)
            if is_stored or (is_number(value) and name not in OF_TORCH):
                self._learn(names, name, first)
                found = True
        return found

    def _find_late(self) -> bool:
        """Find attributes of all modules; those that nobody has kept are the last microbatch's."""
        late = [self._find(before) for before in self._before if before.is_touched()]
        if not any(late):
            return False
        for attribute in self._known.values():
            if all(value is attribute.first for value in attribute.values):
                attribute.values = [attribute.read()] * len(self._sizes)
        return True

    def _learn(self, names: dict[str, Any], name: str, first: Any) -> StoredAttribute:
        firsts = [_cut(first, self._sizes, index) for index in range(len(self._sizes))]
        attribute = StoredAttribute(names, name, first, firsts, list(firsts), begun=first)
        self._known[id(names), name] = attribute
        self.is_used = True
        return attribute

    def adopt(self, names: dict[str, Any], name: str, first: Any, values: Sequence[Any]) -> None:
        """Treat a buffer as an attribute from now on."""
        attribute = self._learn(names, name, first)
        if values:
            attribute.values = list(values)

    def finish(self) -> None:
        if not self._sizes:
            return
        # one of an inner module may appear in a later step; the next step looks for more
        self._looks_everywhere = self._find_late()
        for attribute in self._known.values():
            sources = attribute.values
            self._show(attribute)
            if any(map(_retains_gradient, _tensors(sources))):
                self._retained += _retained(sources, attribute.shown, self._sizes)
            if _are_different_integers(attribute.values):
                self.differing.append(self._name_of(attribute))
        self._before, self._looked_at = [], []
        self._in_places.finish(self._sizes)
        if self._undo is not None:
            self._undo.finish()

    def _show(self, attribute: StoredAttribute) -> None:
        values = [_detached(value) for value in attribute.values]
        attribute.shown = _joined(values, self._sizes)
        attribute.values, attribute.sizes = values, self._sizes
        attribute.versions = _versions(attribute.shown)
        attribute.write(attribute.shown)

    def begin_backward(self) -> None:
        """Let microbatches find their own values again, for hooks that run in the backward."""
        if not self._sizes:
            return
        self._before = [_Before.of(names) for names in self.places]
        self._looked_at = self._before if self._looks_everywhere_behind else self._before[:1]
        self._is_behind = True
        for attribute in self._known.values():
            attribute.values = self._first_values(attribute)
            attribute.found = pytree.tree_leaves(attribute.values)

    def end_backward(self) -> None:
        """Show the values of all samples, with what hooks have stored."""
        if not self._is_behind:
            return
        self._looks_everywhere_behind = self._find_late()
        for attribute in self._known.values():
            found, leaves = attribute.found, pytree.tree_leaves(attribute.values)
            if len(found) == len(leaves) and all(map(is_, found, leaves)):
                attribute.write(attribute.shown)
            else:
                self._show(attribute)
            attribute.found = []
        self._is_behind, self._before, self._looked_at = False, [], []

    def show_gradients(self) -> None:
        """Let the tensors that modules show have the gradients that microbatches have retained."""
        for each in self._retained:
            each.show_gradient()
        self._retained = []

    def put_back(self) -> None:
        """Undo what the last step has stored, unless code behind its forward stored it."""
        self._is_behind, self._before, self._looked_at = False, [], []
        if self._undo is not None:
            self._undo.put_back(self._known.values())

    def forget_start(self) -> None:
        self._undo = None

    # -- numbers of whole steps ---------------------------------------------------------------

    def _name_of(self, attribute: StoredAttribute) -> str:
        path = self._paths.get(id(attribute.names), "")
        return f"{path}.{attribute.name}" if path else attribute.name

    @property
    def _new_numbers(self) -> dict[str, StoredAttribute]:
        if not self._sizes:
            return {}
        return {
            self._name_of(one): one
            for one in self._known.values()
            if id(one.names) in self._paths and one.is_number  # no buffer, which has other places
        }

    def has_numbers(self) -> bool:
        return bool(self._new_numbers)

    def numbers(self) -> tuple[dict[str, Row], dict[str, Tensor]]:
        """Return the numbers of this rank and their weights, and those that lie in tensors."""
        weight = float(sum(self._sizes) or len(self._sizes))
        found = {name: one.shown for name, one in self._new_numbers.items()}
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        rows = {
            name: (value.dtype if isinstance(value, Tensor) else value, weight)
            for name, value in found.items()
        }
        return rows, tensors

    def take_numbers(self, values: dict[str, Any]) -> None:
        """Show the numbers of the whole step: of all ranks."""
        own = {self._name_of(one): one for one in self._known.values()}
        names_of = {path: key for key, path in self._paths.items()}
        by_id = {id(names): names for names in self.places}
        for full, value in values.items():
            attribute = own.get(full)
            if attribute is None:
                path, _, name = full.rpartition(".")
                names = by_id.get(names_of.get(path, 0))
                if names is not None:
                    names[name] = value
                continue
            if isinstance(attribute.shown, Tensor):
                value = torch.as_tensor(value).to(attribute.shown)
            if not self._sizes:
                attribute.sizes = ()  # the next step finds what is shown
            attribute.values = [value] * len(self._sizes)
            attribute.shown, attribute.versions = value, _versions(value)
            attribute.write(value)

    # -- recomputation ------------------------------------------------------------------------

    def now(self) -> Stored:
        """Return what the running microbatch finds now, for :meth:`replayed`."""
        if not self._known:
            return self._nothing[self._running]
        values = {id(attribute): attribute.read() for attribute in self._known.values()}
        return Stored(self._running, values)

    def replayed(self, stored: Stored) -> AbstractContextManager[None]:
        """Show the values of an earlier :meth:`now` in a ``with`` block, then the current ones."""
        return self._replayed(stored) if self._known else nullcontext()

    @contextmanager
    def _replayed(self, stored: Stored) -> Iterator[None]:
        current = [(attribute, attribute.read()) for attribute in self._known.values()]
        for attribute, value in current:
            # one that was not known then was as it is at the beginning of a step
            firsts = attribute.firsts or [value] * (stored.microbatch + 1)
            attribute.write(stored.values.get(id(attribute), firsts[stored.microbatch]))
        try:
            yield
        finally:
            for attribute, value in current:
                attribute.write(value)


def may_store(module: nn.Module) -> bool:
    return not any(
        kind.__module__.startswith(_SKIPPED)
        for kind in (type(module), *(k for k in type(module).__mro__ if k.__name__ == "Metric"))
    )


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a container whose first item holds one."""
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if isinstance(value, dict):
        return bool(value) and _holds_tensors(next(iter(value.values())))
    return isinstance(value, list | tuple | deque) and bool(value) and _holds_tensors(value[0])


def _is_empty(value: Any) -> bool:
    """Whether a value is an empty container, which may be filled later in the step."""
    return isinstance(value, list | dict | deque) and not value


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, nn.Parameter)
        and value.layout is torch.strided
        and not value.is_nested
    )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in _tensors(value) if not tensor.is_inference())


def _detached(value: Any) -> Any:
    """Return the value without graphs, which end with the step."""
    if not any(tensor.requires_grad for tensor in _tensors(value)):
        return value
    return pytree.tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, value)


def _retains_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and (tensor.retains_grad or tensor.is_leaf)


def _retained(values: Sequence[Any], shown: Any, sizes: Sequence[int]) -> list[_Retained]:
    """Return the tensors of a shown value whose gradients microbatches retain."""
    columns = [pytree.tree_leaves(value) for value in values]
    leaves = pytree.tree_leaves(shown)
    if any(len(column) != len(leaves) for column in columns):
        return []
    found = []
    for leaf, *sources in zip(leaves, *columns, strict=True):
        if not all(isinstance(each, Tensor) and _retains_gradient(each) for each in sources):
            continue
        dimensions = _dimensions(sources, sizes)
        if dimensions and leaf is not sources[0]:
            found.append(_Retained(leaf, sources, dimensions[0]))
    return found


def _dimensions(tensors: Sequence[Any], sizes: Sequence[int]) -> list[int]:
    """Return the dimensions that follow the number of samples, by shape alone."""
    if not all(_is_plain(tensor) for tensor in tensors):
        return []
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len({len(shape) for shape in shapes}) > 1:
        return []
    return [
        dim
        for dim in range(len(shapes[0]))
        if all(shape[dim] == size for shape, size in zip(shapes, sizes, strict=True))
        and len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) == 1
    ]


def _are_different_integers(values: Sequence[Any]) -> bool:
    return all(type(value) is int for value in values) and len(set(values)) > 1


def _joined(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the microbatches' values; one that does not follow the samples is the last one's."""
    if all(value is values[0] for value in values):
        return values[0]
    flat = [pytree.tree_flatten(value) for value in values]
    if any(spec != flat[0][1] for _, spec in flat):
        return values[-1]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_joined_leaf(c, sizes) for c in columns], flat[0][1])


def _joined_leaf(column: Sequence[Any], sizes: Sequence[int]) -> Any:
    dimensions = _dimensions(column, sizes)
    if dimensions:
        return torch.cat(list(column), dimensions[0])
    if all(map(is_number, column)):
        return mean_number(column, [float(size or 1) for size in sizes])
    scalars = [leaf for leaf in column if _is_plain(leaf) and not leaf.ndim]
    if len(scalars) == len(sizes) and all(leaf.is_floating_point() for leaf in scalars):
        shares = [size / sum(sizes) if sum(sizes) else 1.0 / len(sizes) for size in sizes]
        return torch.stack([x * share for x, share in zip(scalars, shares, strict=True)]).sum()
    return column[-1]


def _unfit(value: Any, rows: int, sizes: Sequence[int]) -> Any:
    """Return the values of a batch of other size: as on one device, they fit no microbatch."""
    copies = next(n for n in range(1, len(sizes) + 2) if n * rows not in sizes)

    def repeated(leaf: Any) -> Any:
        if not _is_plain(leaf) or rows not in leaf.shape:
            return leaf
        return torch.cat([leaf] * copies, leaf.shape.index(rows))

    return pytree.tree_map(repeated, value) if copies > 1 else value


def _cut(value: Any, sizes: Sequence[int], index: int) -> Any:
    """Return a microbatch's samples of a value that was set for all samples of this rank."""
    if len(sizes) < 2 or not sum(sizes) or not _holds_tensors(value):
        return value
    start, rows = sum(sizes[:index]), sum(sizes)

    def cut(leaf: Any) -> Any:
        if not _is_plain(leaf) or rows not in leaf.shape:
            return leaf
        return leaf.narrow(leaf.shape.index(rows), start, sizes[index])

    return pytree.tree_map(cut, value)
