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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # private, but torch, Lightning and others build on it

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.sharding.collectives import all_reduce

# -- values of one rank -----------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """The values of a rank's microbatches as one; ``is_last``: others differ from it."""

    shown: Any
    has_rows: bool = False
    is_last: bool = False


def joined(values: Sequence[Any], sizes: Sequence[int], *, compares: bool) -> Joined:
    """Join values along their samples; tensors are only compared on request: the host waits."""
    flat = [pytree.tree_flatten(value) for value in values]
    if all(value is values[0] for value in values):
        own = len(values) == 1
        return Joined(values[0], own and any(dimensions([leaf], sizes) for leaf in flat[0][0]))
    if any(spec != flat[0][1] for _, spec in flat):
        return Joined(values[-1], is_last=True)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [_joined_leaf(column, sizes, compares) for column in columns]
    return Joined(
        pytree.tree_unflatten([leaf.shown for leaf in leaves], flat[0][1]),
        any(leaf.has_rows for leaf in leaves),
        any(leaf.is_last for leaf in leaves),
    )


def _joined_leaf(column: Sequence[Any], sizes: Sequence[int], compares: bool) -> Joined:
    found = dimensions(column, sizes)
    if found:
        return Joined(torch.cat(list(column), found[0]), has_rows=True)
    weights = [float(size or 1) for size in sizes]
    if all(map(is_number, column)) and float in map(type, column):
        return Joined(mean_number(column, weights))
    if all(map(is_scalar, column)):
        shares = [weight / sum(weights) for weight in weights]
        parts = [x * share for x, share in zip(column, shares, strict=True)]
        return Joined(torch.stack(parts).sum())
    last = column[-1]
    return Joined(last, is_last=not all(same(x, last, compares=compares) for x in column))


def same(one: Any, other: Any, *, compares: bool) -> bool:
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


def mean_number(values: Sequence[float], weights: Sequence[float]) -> float:
    if all(value == values[0] for value in values):
        return values[-1]
    pairs = zip(values, weights, strict=True)
    return sum(float(value) * weight for value, weight in pairs) / sum(weights)


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def detached(value: Any) -> Any:
    """Return the value without graphs, which end with the step."""
    if not any(tensor.requires_grad for tensor in tensors_of(value)):
        return value
    return pytree.tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, value)


def _is_plain(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor and value.layout is torch.strided and not value.is_nested


def dimensions(tensors: Sequence[Any], sizes: Sequence[int]) -> list[int]:
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


def cut(value: Any, sizes: Sequence[int], index: int) -> Any:
    """Return a microbatch's samples of a value that was set for all samples of this rank."""
    start, rows = sum(sizes[:index]), sum(sizes)

    def of_samples(leaf: Any) -> Any:
        if not _is_plain(leaf) or rows not in leaf.shape:
            return leaf
        return leaf.narrow(leaf.shape.index(rows), start, sizes[index])

    return pytree.tree_map(of_samples, value)


def unfit(value: Any, rows: int, sizes: Sequence[int]) -> Any:
    """Return the values of a batch of other size: as on one device, they fit no microbatch."""
    copies = next(n for n in range(1, len(sizes) + 2) if n * rows not in sizes)

    def repeated(leaf: Any) -> Any:
        if not _is_plain(leaf) or rows not in leaf.shape:
            return leaf
        return torch.cat([leaf] * copies, leaf.shape.index(rows))

    return pytree.tree_map(repeated, value) if copies > 1 else value


@dataclass(frozen=True)
class Retained:
    """A shown tensor whose gradient the user's code retains (``x.retain_grad()``)."""

    shown: Tensor
    sources: Sequence[Tensor]
    dimension: int

    def show_gradient(self) -> None:
        """Join the gradients of the microbatches, if each has one."""
        gradients = [each.grad for each in self.sources if each.grad is not None]
        if len(gradients) == len(self.sources):
            whole = gradients[0] if len(gradients) == 1 else torch.cat(gradients, self.dimension)
            self.shown.grad = whole


def retained(values: Sequence[Any], shown: Any, sizes: Sequence[int]) -> list[Retained]:
    """Return the tensors of a shown value whose gradients microbatches retain."""
    columns = [pytree.tree_leaves(value) for value in values]
    leaves = pytree.tree_leaves(shown)
    if any(len(column) != len(leaves) for column in columns):
        return []
    found = []
    for leaf, *sources in zip(leaves, *columns, strict=True):
        if all(isinstance(each, Tensor) and _retains(each) for each in sources):
            along = dimensions(sources, sizes)
            if along and leaf is not sources[0]:
                found.append(Retained(leaf, sources, along[0]))
    return found


def _retains(tensor: Tensor) -> bool:
    return tensor.requires_grad and (tensor.retains_grad or tensor.is_leaf)


# -- values of all ranks ----------------------------------------------------------------------


def merged_numbers(rows: Sequence[Mapping[str, tuple[Any, float]]]) -> dict[str, Any]:
    """Return the step's plain numbers by name, from every rank's with their weights."""
    found: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        for name, number in row.items():
            found.setdefault(name, []).append(number)
    values = {}
    for name, pairs in found.items():
        numbers, weights = zip(*pairs, strict=True)
        if all(type(number) is int for number in numbers) and len(set(numbers)) > 1:
            raise different_integers(name)
        values[name] = mean_number(numbers, weights)
    return values


@dataclass(frozen=True)
class Part:
    """A buffer, and what each microbatch of this rank has left of it."""

    name: str
    own: Tensor
    values: Sequence[Tensor]
    is_sum: bool

    @property
    def is_integer(self) -> bool:
        return not (self.own.is_floating_point() or self.own.is_complex())

    @property
    def numel(self) -> int:
        in_two = self.own.is_complex() or self.own.dtype is torch.int64
        return self.own.numel() * (2 if in_two else 1)


class Packed:
    """This rank's share of all means and sums, in one tensor of float64 for one all-reduce.

    ``parts`` and the names of ``scalars`` are the same on all ranks. A rank without a scalar has
    None there.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        scalars: Sequence[Tensor | None],
        sizes: Sequence[int],
        where: torch.device,
    ) -> None:
        self._means = sorted((p for p in parts if not p.is_sum), key=lambda p: p.is_integer)
        self._sums = [part for part in parts if part.is_sum]
        self._integers = [part for part in self._means if part.is_integer]
        self._rows: list[Tensor] = []
        self._where = where
        zero = torch.zeros((), dtype=torch.float64, device=where)
        means, sums = (sum(p.numel for p in group) for group in (self._means, self._sums))
        self._split = [1, means, sums, len(scalars), len(scalars)]
        weights = [float(size or 1) for size in sizes]  # of unknown numbers all count the same
        total = zero.new_zeros(1 + means + sums)
        for index, weight in enumerate(weights):
            values = self._flat([part.values[index] for part in self._means])
            added = self._flat([part.values[index] for part in self._sums])
            added = added - self._flat([part.own for part in self._sums])
            self._rows.append(values[means - sum(part.numel for part in self._integers) :])
            total = total + torch.cat([zero.new_tensor([weight]), values * weight, added])
        tail = []
        if scalars:
            weight = sum(weights)
            found = [zero if x is None else x.detach().to(where, torch.float64) for x in scalars]
            has = zero.new_tensor([0.0 if x is None else weight for x in scalars])
            tail = [torch.stack(found) * has, has]
        self._total = torch.cat([total, *tail])

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        rows = [real(t.detach()).reshape(-1).to(self._where, torch.float64) for t in tensors]
        return torch.cat([torch.zeros(0, dtype=torch.float64, device=self._where), *rows])

    def merge(self, several_ranks: bool) -> tuple[Tensor, Tensor | None, list[str]]:
        """Write the buffers; collective.

        Returns the scalars, whether integers differ (on the device, None for none) and their names.
        """
        if several_ranks:
            all_reduce(self._total).wait()
        weight, means, sums, scalars, weights = self._total.split(self._split)
        means = means / weight
        differs = None
        if self._integers and self._rows:
            wanted = means[len(means) - len(self._rows[0]) :].round()
            differs = torch.stack([(row != wanted).any() for row in self._rows]).any()
        with torch.no_grad():
            _write(self._means, means)
            _write(self._sums, sums)
        return scalars / weights, differs, [part.name for part in self._integers]


def _write(parts: Sequence[Part], values: Tensor) -> None:
    pieces = values.split([part.numel for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        own = part.own
        value = piece.view(real(own).shape)
        if part.is_sum:
            value = value + real(own).to(value.device).double()
        if part.is_integer:
            value = value.round()
        if own.is_complex():
            torch.view_as_real(own).copy_(value)
        elif own.dtype is torch.int64:
            upper, lower = value.long().unbind(-1)
            own.copy_((upper << 32) + lower)
        else:
            own.copy_(value)


def real(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers so that float64 holds each of them exactly."""
    if tensor.dtype is torch.int64:
        return torch.stack([tensor >> 32, tensor & 0xFFFFFFFF], -1)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def different_integers(*names: str, buffers: bool = False) -> UnitUseError:
    kind = "the integer buffer" if buffers else "the integer"
    return UnitUseError(
        f"Microbatches leave different values in {kind} {' or '.join(map(repr, names))}. On one"
        " device training_step writes it once a step, from the whole batch. For counts of samples"
        " or codes use a buffer, and name it in CephaloStrategy(summed_buffers=[...]). Else return"
        " the values from training_step and write them in on_train_batch_end."
    )
