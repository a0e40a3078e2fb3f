"""Merges what microbatches of all ranks leave on modules into what one device would have.

| what microbatches leave | what the step leaves |
|---|---|
| the same in all of them | that value |
| tensors with rows of samples | joined between steps; each microbatch finds its own in the next |
| floats, 0-d tensors, floating-point buffers | the mean over the samples of all ranks |
| integers, and buffers of integers or flags, that differ | an error by name |
| buffers that ``summed_buffers`` names | the sum of what all microbatches add |
| anything else | the last microbatch's, and one warning by name |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # private, but torch, Lightning and others build on it

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.base import Readback
from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.graph import is_plain
from lightning_cephalo.execution.overlay_buffers import Buffers
from lightning_cephalo.execution.overlay_packed import Packed, Part
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.collectives import communicates

# -- values of one rank -----------------------------------------------------------------------


class _Kind(Enum):
    """What one value of several microbatches is: rows of all, that of all, or the last one's."""

    ROWS, WHOLE, LAST = range(3)


@dataclass(frozen=True)
class Joined:
    """What microbatches have left in a slot, and the one value that it shows instead."""

    values: Sequence[Any]
    sizes: tuple[int, ...]
    shown: Any
    has_rows: bool
    is_last: bool
    versions: tuple[int, ...]

    def is_shown_by(self, value: Any) -> bool:
        return value is self.shown and _versions(value) == self.versions


def joined(values: Sequence[Any], sizes: tuple[int, ...], *, compares: bool) -> Joined:
    """Join values along their samples; tensors are only compared on request: the host waits."""
    is_one = all(value is values[0] for value in values)
    values = [_detached(value) for value in (values[:1] if is_one else values)]
    shown, kinds = values[-1], [_Kind.LAST]
    values = values * (len(sizes) if is_one else 1)
    flat = [pytree.tree_flatten(value) for value in values]
    if all(spec == flat[0][1] for _, spec in flat):
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        leaves = [_joined_leaf(column, sizes, compares) for column in columns]
        kinds = [kind for _, kind in leaves]
        if not is_one:
            shown = pytree.tree_unflatten([leaf for leaf, _ in leaves], flat[0][1])
    has_rows, is_last = _Kind.ROWS in kinds, _Kind.LAST in kinds
    return Joined(values, sizes, shown, has_rows, is_last, _versions(shown))


def _joined_leaf(column: Sequence[Any], sizes: Sequence[int], compares: bool) -> tuple[Any, _Kind]:
    last, found = column[-1], _dimensions(column, sizes)
    if all(value is last for value in column):
        return last, _Kind.ROWS if found and len(column) == 1 else _Kind.WHOLE
    if found:
        return torch.cat(list(column), found[0]), _Kind.ROWS
    weights = [float(size or 1) for size in sizes]
    if all(map(is_number, column)) and float in map(type, column):
        return _mean(column, weights), _Kind.WHOLE
    if all(map(is_scalar, column)):
        parts = [x * (w / sum(weights)) for x, w in zip(column, weights, strict=True)]
        return torch.stack(parts).sum(), _Kind.WHOLE
    return last, _Kind.WHOLE if are_equal(column, compares=compares) else _Kind.LAST


def are_equal(column: Sequence[Any], *, compares: bool) -> bool:
    return all(is_equal(value, column[-1], compares=compares) for value in column)


def is_equal(one: Any, other: Any, *, compares: bool) -> bool:
    """Whether two values are equal; tensors that are not compared count as equal."""
    if one is other:
        return True
    try:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return not compares or torch.equal(one, other)
        return type(one) is type(other) and bool(one == other)
    except Exception:  # objects of users compare as they like
        return False


def is_number(value: Any) -> bool:
    """Whether a value is a plain number; flags, which tell that code has run, are not."""
    return type(value) in (int, float)


def is_scalar(value: Any) -> bool:
    """Whether a value is a floating-point tensor without a dimension."""
    return type(value) is Tensor and not value.ndim and value.is_floating_point()


def is_own(value: Any) -> bool:
    """Whether a value is a microbatch's own, as an empty container that a step may fill.

    Flags and other objects, which say that code has run, are there for all of them.
    """
    is_empty = isinstance(value, list | dict | deque) and not value
    return is_empty or is_number(value) or _holds_tensors(value)


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a container whose first item holds one."""
    if isinstance(value, dict):
        return bool(value) and _holds_tensors(next(iter(value.values())))
    if isinstance(value, list | tuple | deque):
        return bool(value) and _holds_tensors(value[0])
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    if all(value == values[0] for value in values):
        return values[-1]
    pairs = zip(values, weights, strict=True)
    return sum(float(value) * weight for value, weight in pairs) / sum(weights)


def _tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in _tensors_of(value) if not tensor.is_inference())


def _detached(value: Any) -> Any:
    """Return the value without graphs, which end with the step."""
    if not any(tensor.requires_grad for tensor in _tensors_of(value)):
        return value
    return pytree.tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, value)


# -- rows of samples --------------------------------------------------------------------------


def _dimensions(tensors: Sequence[Any], sizes: Sequence[int]) -> list[int]:
    """Return the dimensions that follow the number of samples, by shape alone."""
    shapes = [tuple(tensor.shape) for tensor in tensors] if all(map(is_plain, tensors)) else []
    return [
        dim
        for dim in range(min(map(len, shapes), default=0))
        if all(shape[dim] == size for shape, size in zip(shapes, sizes, strict=True))
        and len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) == 1
    ]


def first_values(value: Any, sizes: tuple[int, ...], left: Joined | None) -> list[Any]:
    """Return what each microbatch finds first in a slot that shows a value."""
    rows = sum(sizes)
    if left is not None and left.is_shown_by(value):
        if left.sizes == sizes:
            return [*left.values]
        if sum(left.sizes) != rows:
            # as on one device, the rows of a batch of other size fit no microbatch
            before = sum(left.sizes)
            copies = next(n for n in range(1, len(sizes) + 2) if n * before not in sizes)
            unfit = _with_rows(value, before, lambda t, dim: torch.cat([t] * copies, dim))
            return [unfit] * len(sizes)
    if len(sizes) < 2 or not rows or not _holds_tensors(value):
        return [value] * len(sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        _with_rows(value, rows, partial(_narrowed, start=start, length=length))
        for start, length in zip(starts, sizes, strict=True)
    ]


def _narrowed(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    return tensor.narrow(dim, start, length)


def _with_rows(value: Any, rows: int, change: Callable[[Tensor, int], Tensor]) -> Any:
    """Change all tensors with so many rows along the first such dimension."""

    def changed(leaf: Any) -> Any:
        if not is_plain(leaf) or rows not in leaf.shape:
            return leaf
        return change(leaf, leaf.shape.index(rows))

    return pytree.tree_map(changed, value)


def is_of_samples(item: Any, sizes: Sequence[int]) -> bool:
    """Whether an item of a container holds floats, or rows of one of several microbatches."""
    leaves = pytree.tree_leaves(item)
    if any(isinstance(leaf, float) or is_scalar(leaf) for leaf in leaves):
        return True
    shapes = [leaf.shape[:2] for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() > 1]
    return len(sizes) > 1 and any(size in shape for shape in shapes for size in sizes)


def retains_gradient(value: Any) -> bool:
    return any(tensor.requires_grad and tensor.retains_grad for tensor in _tensors_of(value))


# -- values of all ranks ----------------------------------------------------------------------


def refuse_different(name: str, numbers: Sequence[Any]) -> None:
    """Raise for integers that are not all the same."""
    if all(type(number) is int for number in numbers) and len(set(numbers)) > 1:
        raise different_integers(name)


@dataclass(frozen=True)
class Share:
    """What a rank writes: names of buffers, those of another shape, attributes with kinds."""

    buffers: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    scalars: Mapping[str, torch.dtype] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 0.0


# what a rank says of its overlay in the exchange that ends the forward; they add up
_TENSORS, _NUMBERS, _NEW = 1, 2, 4


class Merge:
    """Merges what all ranks write. What they merge changes seldom, and is exchanged then."""

    def __init__(self, buffers: Buffers, control: ControlGroup, accelerator: Accelerator) -> None:
        self._buffers, self._control, self._accelerator = buffers, control, accelerator
        self._share = self._agreed = Share()
        self._weights: list[float] = []
        self._scalars: dict[str, Tensor] = {}
        self._packed: Packed | None = None
        self._means: dict[str, Tensor] = {}
        self._verdict: tuple[Readback, list[str]] | None = None

    @property
    def is_alone(self) -> bool:
        return self._control.world_size == 1

    def finish(self, values: Mapping[str, Any], sizes: tuple[int, ...]) -> float:
        """Take the new values of attributes; return what other ranks need to learn."""
        self.check()
        agreed, buffers = self._agreed, self._buffers
        self._scalars = {name: value for name, value in values.items() if is_scalar(value)}
        scalars = {name: value.dtype for name, value in self._scalars.items()}
        numbers = {name: value for name, value in values.items() if is_number(value)}
        # of unknown numbers of samples all count the same
        self._weights = [float(size or 1) for size in sizes]
        weight = sum(self._weights)
        self._share = Share(buffers.written, buffers.left, scalars, numbers, weight)
        is_new = not buffers.left <= agreed.left or bool(sizes and scalars != agreed.scalars)
        is_new = is_new or not buffers.written <= agreed.buffers | agreed.left
        tensors = buffers.wrote() or bool(scalars)
        self._packed = self._pack() if tensors and not is_new else None
        return float(_TENSORS * tensors | _NUMBERS * bool(numbers) | _NEW * is_new)

    def combine(self, codes: Sequence[float]) -> dict[str, Any]:
        """Write the buffers, and return the values of attributes; collective."""
        flags, values = [int(code) for code in codes], {}
        packed, self._packed = self._packed, None
        is_new = any(flag & _NEW for flag in flags)
        if is_new or any(flag & _NUMBERS for flag in flags):
            shares = self._control.gather(self._share)
            if is_new:
                self._agree(shares)
            values = _merged_numbers(shares)
        if is_new or any(flag & _TENSORS for flag in flags):
            if is_new or not all(flag & _TENSORS for flag in flags):
                packed = self._control.together("merging what the step writes", self._pack)
            values |= self._merge(packed)
            if is_new:
                self._control.together("comparing integer buffers", self.check)
        return values

    def _agree(self, shares: Sequence[Share]) -> None:
        left = self._agreed.left.union(*(share.left for share in shares))
        names = frozenset[str]().union(*(share.buffers for share in shares)) - left
        scalars = {name: dtype for share in shares for name, dtype in share.scalars.items()}
        self._agreed = Share(names, left, dict(sorted(scalars.items())))

    def _pack(self) -> Packed:
        device = self._accelerator.device
        parts = self._buffers.parts(self._agreed.buffers)
        self._means = {
            name: torch.zeros((), dtype=dtype, device=device)
            for name, dtype in self._agreed.scalars.items()
        }
        for name, own in self._means.items():
            found = [self._scalars[name]] if name in self._scalars else []
            parts.append(Part(own, found * len(self._weights)))
        is_sent = communicates(torch.empty(0, device=device), None)
        where = device if is_sent else torch.device("cpu")
        return Packed(parts, torch.tensor(self._weights, dtype=torch.float64, device=where))

    def _merge(self, packed: Packed | None) -> dict[str, Tensor]:
        if packed is None:
            return {}
        differs, names = packed.merge(self._control.world_size > 1)
        if differs is not None:
            readback = self._accelerator.readback()
            readback.add(differs.to(self._accelerator.device))
            self._verdict = readback, names
        return self._means

    def check(self) -> None:
        """Raise if microbatches left different integers; a step later, when no host need wait."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None and verdict[0].finish()[0]:
            raise different_integers(*verdict[1], buffers=True)

    def drop(self) -> None:
        self._packed = self._verdict = None


def _merged_numbers(shares: Sequence[Share]) -> dict[str, Any]:
    """Return the step's plain numbers by name, from every rank's with their weights."""
    values = {}
    for name in {name: None for share in shares for name in share.numbers}:
        pairs = [(each.numbers[name], each.weight) for each in shares if name in each.numbers]
        numbers, weights = zip(*pairs, strict=True)
        refuse_different(name, numbers)
        values[name] = _mean(numbers, weights)
    return values


def different_integers(*names: str, buffers: bool = False) -> UnitUseError:
    kind = "the integer buffer" if buffers else "the integer"
    return UnitUseError(
        f"Microbatches leave different values in {kind} {' or '.join(map(repr, names))}. On one"
        " device training_step writes it once a step, from the whole batch. For counts of samples"
        " or codes use a buffer, and name it in CephaloStrategy(summed_buffers=[...]). Else return"
        " the values from training_step and write them in on_train_batch_end."
    )
