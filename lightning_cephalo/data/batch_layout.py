"""Reads, copies and splits batches: nested encodings, dataclasses and per-sample lists.

torch's pytree knows only registered types; dataclasses and Hugging Face's encodings are none.

A batch is split along the leaves whose first dimension grows with it. One batch does not show which
leaves have one row per sample: a tensor of shape ``[8, 8]`` may be eight samples or a constant. So
two batches of different sizes are compared. Rows are only guessed if nothing was learned, or if a
hook has changed the batch since.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import setitem
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_cephalo.common.errors import BatchSplitError

Path: TypeAlias = tuple[Any, ...]
"""Keys, indices and field names from the root of a batch to a node."""

IsLeaf: TypeAlias = Callable[[Path, Any], bool]
"""Whether a container counts as a leaf."""

LEARNED = (7, 5)
"""Samples of the two batches: a constant or a padded length is seldom as long as both."""

Splitter = Callable[[Any, Sequence[int]], list[Any]]
"""The user's own ``split_batch(batch, sizes)``: one batch per size, in order."""


def not_splittable(reason: str, batch: object = None) -> BatchSplitError:
    """Returns the error to raise, with the reason, the batch (if given) and the remedy."""
    came = "" if batch is None else f" The batch: {describe(batch)}."
    return BatchSplitError(
        f"This batch cannot be split into microbatches: {reason}.{came} Tensors and lists with one"
        " row per sample are. For anything else give CephaloStrategy(split_batch=function):"
        " function(batch, sizes) returns one batch of sizes[i] samples for each i. An object of"
        " your own needs a len(), its number of samples."
    )


class NoSamples(NamedTuple):
    """The batch of a rank without samples (torch pins tuples); ``shown`` is what hooks see."""

    shown: Any


@dataclass(frozen=True)
class BatchLayout:
    """The leaves of a batch that have one row per sample; without arguments it guesses.

    A guess takes the batch size from dimension 0 of the first array, or without arrays from the
    first flat list. Every array, and every list without arrays, of that length is cut.
    """

    rows: frozenset[Path] = frozenset()
    leaves: frozenset[Path] = frozenset()  # rows and all arrays, in batches to which rows applies
    counted: tuple[Path, int] | None = None  # a leaf, and its dimension that is their number
    splitter: Splitter | None = None  # the user's, which cuts instead of the layout

    @classmethod
    def learn(cls, larger: Any, smaller: Any, splitter: Splitter | None = None) -> BatchLayout:
        """Learns from batches of `LEARNED` samples; BatchSplitError if a leaf cannot be cut."""
        found = list(_compared(larger, smaller))
        counts = [(path, dimension) for path, dimension, _ in found if dimension is not None]
        if splitter is not None:
            return cls(counted=counts[0] if counts else None, splitter=splitter)
        for path, _, problem in found:
            if problem:
                raise not_splittable(f"{spell(path)} is {problem}", larger)
        if not counts:
            raise not_splittable(f"no tensor or list grows with its samples, {LEARNED}", larger)
        rows = frozenset(path for path, _ in counts)
        return cls(rows, frozenset(_leaves(larger, rows)), counts[0])

    def batch_size(self, batch: Any) -> int:
        """Returns the number of samples; raises BatchSplitError if it is unknown."""
        # The name in graph libraries, whose batches have no rows to count.
        known = getattr(batch, "num_graphs", None)
        if isinstance(known, int):
            return known
        if self.counted is not None:
            path, dimension = self.counted
            leaf: Any = dict(walk(batch, lambda at, _: at == path)).get(path)
            shape = leaf.shape if is_array(leaf) else (len(leaf),) if is_sequence(leaf) else ()
            if dimension < len(shape):
                return int(shape[dimension])
            if self.splitter is not None:
                raise not_splittable(f"{spell(path)} showed the number of samples, but is missing")
        if self.splitter is not None and is_sized_object(batch):
            return len(batch)
        return _guessed_size(batch)

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Splits a batch into consecutive views of ``sizes`` samples; they keep its padding."""
        if self.splitter is not None:
            parts = list(self.splitter(batch, list(sizes)))
            if len(parts) != len(sizes):
                counts = f"{len(parts)} parts for the {len(sizes)} sizes {tuple(sizes)}"
                raise not_splittable(f"split_batch returned {counts}")
            return parts
        rows: Set[Path] = self.rows
        leaves = _leaves(batch, rows)
        if not rows or leaves.keys() != self.leaves:
            rows = _guessed_rows(batch)
            leaves = _leaves(batch, rows)
        count, lengths = sum(sizes), {spell(path): len(leaves[path]) for path in rows}
        if set(lengths.values()) - {count}:
            reason = f"its microbatches need {count} samples, but its leaves have {lengths}"
            raise not_splittable(reason, batch)
        ends = accumulate(sizes)
        return [_cut(batch, rows, end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Returns samples ``start`` to ``stop`` of ``batch``, cut as `split` cuts them."""
        sizes = [start, stop - start, self.batch_size(batch) - stop]
        if self.splitter is None:
            return self.split(batch, sizes)[1]
        if start == stop:
            raise not_splittable("split_batch makes no part without samples", batch)
        return self.split(batch, [size for size in sizes if size])[start > 0]


def _compared(larger: Any, smaller: Any, path: Path = ()) -> Iterator[tuple[Path, int | None, str]]:
    """Yields each leaf of two batches, its dimension of samples, and why it cannot be cut."""
    inside, other = children_of(larger), children_of(smaller)
    each = f"{describe(larger)} for {LEARNED[0]} samples and {describe(smaller)} for {LEARNED[1]}"
    if is_array(larger) and is_array(smaller):
        pairs = zip(larger.shape, smaller.shape, strict=False)
        grown = [at for at, pair in enumerate(pairs) if pair == LEARNED]
        is_same = not grown and larger.shape[:1] == smaller.shape[:1]
        is_fine = larger.ndim == smaller.ndim and (is_same or grown == [0])
        yield path, grown[0] if grown else None, "" if is_fine else each
    elif is_sequence(larger) and is_sequence(smaller) and (len(larger), len(smaller)) == LEARNED:
        yield path, 0, ""
    elif inside is None and other is None:
        hides = any(is_array(node) or hides_arrays(node) for node in (larger, smaller))
        yield path, None, each if hides else ""
    elif [key for key, _ in inside or ()] != [key for key, _ in other or ()]:
        yield path, None, each
    else:
        for (key, one), (_, another) in zip(inside or (), other or (), strict=True):
            yield from _compared(one, another, (*path, key))


def _leaves(batch: Any, rows: Set[Path]) -> dict[Path, Any]:
    """Returns arrays, and what is at ``rows``."""
    found = walk(batch, lambda path, _: path in rows)
    return {path: leaf for path, leaf in found if path in rows or is_array(leaf)}


def _cut(batch: Any, rows: Set[Path], start: int, stop: int) -> Any:
    def cut(path: Path, leaf: Any) -> Any:
        if path not in rows:
            return leaf
        part = leaf[start:stop]
        if type(part) is torch.Tensor and not part.requires_grad:
            # a view of its own version: autograd would take a write to one part for one to all
            return part.data
        return part if is_array(leaf) else rebuild(leaf, part)

    part = mapped(batch, cut, lambda path, _: path in rows)
    # Hugging Face keeps the tokenizer's per-sample results in addition to an encoding's tensors.
    if isinstance(getattr(batch, "_encodings", None), list) and part is not batch:
        part._encodings = batch._encodings[start:stop]
    return part


def _guessed_size(batch: Any) -> int:
    """Returns the length of the first array, or without any of the first flat list."""

    def is_flat(_: Path, node: Any) -> bool:
        return is_sequence(node) and all(children_of(child) is None for child in node)

    leaves = [leaf for _, leaf in walk(batch, is_flat)]
    arrays = [leaf for _, leaf in walk(batch) if is_array(leaf) and leaf.ndim]
    for first in chain(arrays, filter(is_sequence, leaves)):
        return len(first)
    raise not_splittable("it holds no tensor or list with a batch dimension", batch)


def _guessed_rows(batch: Any) -> Set[Path]:
    """Returns the leaves with as many rows as the first array or flat list."""
    count, rows = _guessed_size(batch), set()

    def is_row(_: Path, node: Any) -> bool:
        may_be = node.ndim if is_array(node) else is_sequence(node) and not contains_arrays(node)
        return bool(may_be) and len(node) == count

    for path, leaf in walk(batch, is_row):
        if hides_arrays(leaf):
            raise not_splittable(f"{spell(path)} is {describe(leaf)}", batch)
        if is_row(path, leaf):
            rows.add(path)
    return rows


def is_array(node: object) -> bool:
    """Returns whether ``node`` is a numpy array or a tensor that has rows."""
    if isinstance(node, torch.Tensor):
        return node.layout == torch.strided and not node.is_nested
    return isinstance(node, np.ndarray)


def is_sequence(node: object) -> bool:
    """Returns whether ``node`` is a list or tuple, but no namedtuple and no ``torch.Size``."""
    is_fixed = hasattr(node, "_fields") or isinstance(node, torch.Size)
    return isinstance(node, list | tuple) and not is_fixed


def is_sized_object(node: Any) -> bool:
    """Returns whether ``node`` is an object of the user's own with a length."""
    return children_of(node) is None and not is_array(node) and hasattr(node, "__len__")


def children_of(node: Any) -> list[tuple[Any, Any]] | None:
    """Returns the keys and children of a container in its own order; None for anything else."""
    if isinstance(node, MutableMapping):
        return list(node.items())
    if is_sequence(node):
        return list(enumerate(node))
    if isinstance(node, tuple) and not isinstance(node, PackedSequence | torch.Size):
        return list(zip(getattr(node, "_fields", ()), node, strict=True))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def walk(node: Any, is_leaf: IsLeaf | None = None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields paths and leaves; containers for which ``is_leaf`` is true are leaves, too."""
    children = None if is_leaf and is_leaf(path, node) else children_of(node)
    if children is None:
        yield path, node
    for key, child in children or ():
        yield from walk(child, is_leaf, (*path, key))


def mapped(
    node: Any, function: Callable[[Path, Any], Any], is_leaf: IsLeaf | None = None, path: Path = ()
) -> Any:
    """Returns a batch with ``function(path, leaf)`` for each leaf that `walk` yields."""
    children = None if is_leaf and is_leaf(path, node) else children_of(node)
    if children is None:
        return function(path, node)
    return rebuild(node, [mapped(each, function, is_leaf, (*path, key)) for key, each in children])


def rebuild(node: Any, children: list[Any]) -> Any:
    """Returns a container like ``node`` with ``children`` instead, in the same order."""
    if isinstance(node, tuple):
        return type(node)(children) if is_sequence(node) else type(node)(*children)
    # a copy shares every other attribute, which Hugging Face's encodings need
    clone: Any = copy.copy(node)
    if isinstance(node, list):
        clone[:] = children
        return clone
    # frozen dataclasses reject assignment
    put = setitem if isinstance(node, MutableMapping) else object.__setattr__
    for (key, _), child in zip(children_of(node) or (), children, strict=True):
        put(clone, key, child)
    return clone


def own_copy(node: Any, *, with_arrays: bool) -> Any:
    """Returns a copy in containers of its own; ``with_arrays``: with arrays of its own, too."""

    def copied(_: Path, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad) if with_arrays else leaf
        if isinstance(leaf, np.ndarray) or hides_arrays(leaf):
            with suppress(Exception):  # of an object of the user's that cannot be copied
                return copy.deepcopy(leaf) if with_arrays else copy.copy(leaf)
        return leaf

    return mapped(node, copied)


def contains_arrays(node: object) -> bool:
    """Returns whether ``node``, or a known container inside it, holds a tensor or numpy array."""
    return any(isinstance(leaf, torch.Tensor | np.ndarray) for _, leaf in walk(node))


def hides_arrays(node: object) -> bool:
    """Returns whether ``node`` is an object, without known rows, that seems to hold tensors."""
    if is_array(node) or isinstance(node, type) or callable(node):
        return False
    values = getattr(node, "__dict__", {}).values()
    may_move = isinstance(node, Mapping) or callable(getattr(node, "to", None))
    return may_move or any(map(contains_arrays, values))


def describe(node: object, depth: int = 2) -> str:
    """Returns a short description of a batch for error messages: types, shapes, a few keys."""
    name = type(node).__name__
    if isinstance(node, torch.Tensor | np.ndarray):
        return f"{name}{list(node.shape)}" if is_array(node) else f"{name} without rows"
    children = children_of(node)
    if not children or depth == 0:
        return name
    shown = ", ".join(f"{key}: {describe(child, depth - 1)}" for key, child in children[:6])
    return f"{name}({shown}{', ...' if len(children) > 6 else ''})"


def spell(path: Path) -> str:
    """Returns ``path`` as a user would write it: ``batch['images'][0]``."""
    return "batch" + "".join(f"[{key!r}]" for key in path)
