"""Splits a collated batch along the leaves whose first dimension grows with it.

One batch does not show which leaves have one row per sample: a tensor of shape ``[8, 8]`` may be
eight samples or a constant. So the layout is learned by comparing two batches of different sizes.
It is only guessed if nothing was learned, or if a hook has changed the batch since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch

from lightning_cephalo.common.errors import BatchSplitError
from lightning_cephalo.data.containers import (
    Path,
    children_of,
    contains_arrays,
    describe,
    hides_arrays,
    is_array,
    is_sequence,
    mapped,
    rebuild,
    spell,
    walk,
)

Splitter = Callable[[Any, Sequence[int]], list[Any]]
"""The user's own ``split_batch(batch, sizes)``: one batch per size, in order."""


def not_splittable(reason: str, batch: object = None) -> BatchSplitError:
    """Returns the error to raise, with the reason, the batch (if given) and the remedy."""
    came = "" if batch is None else f" The batch: {describe(batch)}."
    return BatchSplitError(
        f"This batch cannot be split into microbatches: {reason}.{came} Tensors and lists with one"
        " row per sample, and what is the same for all samples, are split. For anything else give"
        " CephaloStrategy(split_batch=function), where function(batch, sizes) returns one batch of"
        " sizes[i] samples for each i. An object of your own needs a len(), its number of samples."
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
    def learn(
        cls,
        larger: Any,
        smaller: Any,
        sizes: tuple[int, int] = (3, 2),
        *,
        splitter: Splitter | None = None,
    ) -> BatchLayout:
        """Learns the layout from two collated batches of the first ``sizes`` samples.

        Raises BatchSplitError if a leaf neither has one row per sample nor is the same for all
        (time-major, packed, an object of unknown type), or if no leaf has rows.
        """
        found = list(_compared(larger, smaller, sizes))
        counts = [(path, dimension) for path, dimension, _ in found if dimension is not None]
        if splitter is not None:
            return cls(counted=counts[0] if counts else None, splitter=splitter)
        problems = [problem for *_, problem in found if problem]
        if problems or not counts:
            none = f"no tensor or list in it grows with the number of samples {sizes[::-1]}"
            raise not_splittable((problems or [none])[0], larger)
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
            leaf: Any = batch
            for key in path:
                leaf = dict(children_of(leaf) or ()).get(key)
            if is_array(leaf) and dimension < leaf.ndim:
                return int(leaf.shape[dimension])
            if not is_array(leaf) and dimension == 0 and hasattr(leaf, "__len__"):
                return len(leaf)
            if self.splitter is not None:
                raise not_splittable(f"{spell(path)} showed the number of samples, but is missing")
        is_own = children_of(batch) is None and not is_array(batch)
        if self.splitter is not None and is_own and hasattr(batch, "__len__"):
            return len(batch)
        return _guessed_size(batch)

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Splits ``batch`` into consecutive batches of ``sizes`` samples, which are views.

        A padded batch keeps the padding of the whole batch, which the same samples have on one
        device. Raises BatchSplitError if it cannot be cut so.
        """
        if self.splitter is not None:
            parts = list(self.splitter(batch, list(sizes)))
            if len(parts) != len(sizes):
                counts = f"{len(parts)} parts for the {len(sizes)} sizes {tuple(sizes)}"
                raise not_splittable(f"split_batch returned {counts}")
            return parts
        rows = self._rows_of(batch, sum(sizes))
        ends = list(accumulate(sizes))
        return [_cut(batch, rows, end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Returns samples ``start`` to ``stop`` of ``batch``, cut as `split` cuts them."""
        sizes = [start, stop - start, self.batch_size(batch) - stop]
        if self.splitter is None:
            return self.split(batch, sizes)[1]
        if start == stop:
            raise not_splittable("split_batch makes no part without samples", batch)
        return self.split(batch, [size for size in sizes if size])[start > 0]

    def _rows_of(self, batch: Any, count: int) -> Set[Path]:
        """Returns the leaves with rows, learned or guessed; all have ``count`` of them."""
        rows: Set[Path] = self.rows
        leaves = _leaves(batch, rows)
        if not rows or leaves.keys() != self.leaves:
            rows = _guessed_rows(batch)
            leaves = _leaves(batch, rows)
        lengths = {spell(path): len(leaves[path]) for path in rows}
        if set(lengths.values()) - {count}:
            raise not_splittable(
                f"its microbatches need {count} samples, but its leaves have {lengths}", batch
            )
        return rows


def _compared(
    larger: Any, smaller: Any, sizes: tuple[int, int], path: Path = ()
) -> Iterator[tuple[Path, int | None, str]]:
    """Yields each leaf of two batches, its dimension of ``sizes``, and why it cannot be cut."""
    inside, other = children_of(larger), children_of(smaller)
    problem = (
        f"{spell(path)} is {describe(larger)} for {sizes[0]} samples and"
        f" {describe(smaller)} for {sizes[1]}"
    )
    if is_array(larger) and is_array(smaller):
        pairs = list(zip(larger.shape, smaller.shape, strict=False))
        grown = [at for at, pair in enumerate(pairs) if pair == sizes]
        is_same = not grown and (not pairs or pairs[0][0] == pairs[0][1])
        is_fine = larger.ndim == smaller.ndim and (is_same or grown == [0])
        yield path, grown[0] if grown else None, "" if is_fine else problem
    elif is_sequence(larger) and is_sequence(smaller) and (len(larger), len(smaller)) == sizes:
        yield path, 0, ""
    elif inside is None and other is None:
        hides = any(is_array(each) or hides_arrays(each) for each in (larger, smaller))
        yield path, None, problem if hides else ""
    elif [key for key, _ in inside or ()] != [key for key, _ in other or ()]:
        yield path, None, problem
    else:
        for (key, one), (_, another) in zip(inside or (), other or (), strict=True):
            yield from _compared(one, another, sizes, (*path, key))


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
    encodings = getattr(batch, "_encodings", None)
    if isinstance(encodings, list) and part is not batch:
        part._encodings = encodings[start:stop]
    return part


def _guessed_size(batch: Any) -> int:
    """Returns the length of the first array, or without any of the first flat list."""

    def is_flat(_: Path, node: Any) -> bool:
        return is_sequence(node) and all(children_of(child) is None for child in node)

    arrays = (leaf for _, leaf in walk(batch) if is_array(leaf) and leaf.ndim)
    lists = (leaf for _, leaf in walk(batch, is_flat) if is_sequence(leaf))
    first = next(chain(arrays, lists), None)
    if first is None:
        raise not_splittable("it holds no tensor or list with a batch dimension", batch)
    return len(first)


def _guessed_rows(batch: Any) -> Set[Path]:
    """Returns the leaves with as many rows as the first array or flat list."""
    count = _guessed_size(batch)

    def is_row(_: Path, node: Any) -> bool:
        may_be = node.ndim if is_array(node) else is_sequence(node) and not contains_arrays(node)
        return bool(may_be) and len(node) == count

    found = dict(walk(batch, is_row))
    for path, leaf in found.items():
        if hides_arrays(leaf):
            raise not_splittable(f"{spell(path)} is {describe(leaf)}", batch)
    return {path for path, leaf in found.items() if is_row(path, leaf)}
