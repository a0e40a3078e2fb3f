"""Flattens nested arguments and results to leaves, and rebuilds them.

torch's pytree treats dataclass objects as leaves; this module also finds the tensors in them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # private, but torch, Lightning and others build on it

from lightning_cephalo.common.errors import UnitUseError


@dataclasses.dataclass(frozen=True)
class _Fields:
    """A dataclass object found among the leaves, and the tree of its fields."""

    value: Any
    names: tuple[str, ...]
    structure: Structure


@dataclasses.dataclass(frozen=True)
class Structure:
    spec: Any
    objects: dict[int, _Fields]

    @property
    def num_leaves(self) -> int:
        """Number of leaves, including those inside dataclass objects."""
        inside = sum(fields.structure.num_leaves for fields in self.objects.values())
        return int(self.spec.num_leaves) - len(self.objects) + inside

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Build the tree; dataclass objects are copies of the flattened ones."""
        if not self.objects:
            return pytree.tree_unflatten(leaves, self.spec)
        outer: list[Any] = []
        start = 0
        for position in range(self.spec.num_leaves):
            fields = self.objects.get(position)
            if fields is None:
                outer.append(leaves[start])
                start += 1
                continue
            end = start + fields.structure.num_leaves
            values = fields.structure.unflatten(leaves[start:end])
            start = end
            twin = copy.copy(fields.value)
            for name, value in zip(fields.names, values, strict=True):
                object.__setattr__(twin, name, value)  # frozen ones too
            outer.append(twin)
        return pytree.tree_unflatten(outer, self.spec)


@dataclasses.dataclass(frozen=True)
class Single:
    num_leaves: int = 1

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        return leaves[0]


@dataclasses.dataclass(frozen=True)
class CallStructure:
    """The structure of a call whose arguments are leaves, and tuples of leaves: the usual case."""

    positional: int
    names: tuple[str, ...]
    tuples: tuple[tuple[int, int], ...] = ()

    @property
    def num_leaves(self) -> int:
        inside = sum(length - 1 for _, length in self.tuples)
        return self.positional + len(self.names) + inside

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = leaves
        if self.tuples:
            values = list(leaves)
            for place, length in self.tuples:
                values[place : place + length] = [tuple(values[place : place + length])]
        if not self.names:
            return tuple(values), {}
        named = dict(zip(self.names, values[self.positional :], strict=True))
        return tuple(values[: self.positional]), named


@dataclasses.dataclass(frozen=True)
class TupleStructure:
    num_leaves: int

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        return tuple(leaves)


# types that are leaves for pytree too; a test of the exact type is many times as fast
_LEAVES = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype})


def flatten_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], Structure | CallStructure]:
    """Return the leaves and the structure of a call's arguments, like :func:`flatten` of both."""
    if not kwargs and len(args) == 1 and type(args[0]) in _LEAVES:
        return [args[0]], _ONE
    leaves: list[Any] = [*args, *kwargs.values()] if kwargs else list(args)
    tuples: list[tuple[int, int]] = []
    for place, value in enumerate(leaves):
        if type(value) in _LEAVES:
            continue
        if type(value) is not tuple or not _are_leaves(value):
            return flatten((args, kwargs))
        tuples.append((place, len(value)))
    for place, _ in reversed(tuples):
        leaves[place : place + 1] = leaves[place]
    return leaves, _call_of(len(args), tuple(kwargs), tuple(tuples))


# the same few calls are made in every visit
_call_of = functools.lru_cache(maxsize=256)(CallStructure)
_ONE = _call_of(1, (), ())


def flatten_result(result: Any) -> tuple[list[Any], Structure | Single | TupleStructure]:
    """Return the leaves and the structure of a call's result, like :func:`flatten`."""
    if type(result) in _LEAVES:
        return [result], SINGLE
    if type(result) is tuple and _are_leaves(result):
        return list(result), TupleStructure(len(result))
    return flatten(result)


def _are_leaves(values: tuple[Any, ...]) -> bool:
    return _LEAVES.issuperset(map(type, values))


SINGLE = Single()
"""The structure of every single leaf."""


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Return the leaves and structure of nested containers, and of dataclasses with tensors."""
    outer, spec = pytree.tree_flatten(tree)
    leaves: list[Any] = []
    objects: dict[int, _Fields] = {}
    for position, value in enumerate(outer):
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = tuple(field.name for field in dataclasses.fields(value))
            inner, structure = flatten([getattr(value, name, None) for name in names])
            if any(isinstance(leaf, Tensor) for leaf in inner):
                objects[position] = _Fields(value, names, structure)
                leaves.extend(inner)
                continue
        leaves.append(value)
    return leaves, Structure(spec, objects)


def without_empty_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace Hugging Face's empty key-value caches by None: recomputation would fill them."""

    def without(value: Any) -> Any:
        if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
            return value
        if int(value.get_seq_length()) > 0:
            raise UnitUseError(
                f"A unit is called with a filled {type(value).__name__} (prefix tuning?); computed"
                " again in the backward it would append to it twice. Use recompute=False."
            )
        return None

    return tuple(without(a) for a in args), {key: without(v) for key, v in kwargs.items()}
