"""Splits a collated batch along the leaves whose first dimension grows with it.

One batch does not show which leaves have one row per sample: a tensor of shape ``[8, 8]`` may be
eight samples or a constant. So the layout is learned by comparing two batches of different sizes.
It is only guessed if nothing was learned, or if a hook has changed the batch since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
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


class _Compared(NamedTuple):
    """A leaf of two batches: the dimension that is the number of samples, and why it is no row."""

    path: Path
    dimension: int | None
    problem: str = ""


@dataclass(frozen=True)
class BatchLayout:
    """The leaves of a batch that have one row per sample; without arguments it guesses.

    A guess takes the batch size from dimension 0 of the first array, or without arrays from the
    first flat list. Every array, and every list without arrays, of that length is cut.

    Args:
        rows: paths of the leaves that have one row per sample.
        leaves: paths of these and of all arrays, in batches to which ``rows`` applies.
        counted: a leaf, and its dimension that is the number of samples.
        splitter: the user's own function, which cuts instead of the layout.
    """

    rows: frozenset[Path] = frozenset()
    leaves: frozenset[Path] = frozenset()
    counted: tuple[Path, int] | None = None
    splitter: Splitter | None = None

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

        Raises:
            BatchSplitError: a leaf neither has one row per sample nor is the same for all
                (time-major, packed, an object of unknown type), or no leaf has rows.
        """
        found = list(_compared(larger, smaller, sizes))
        shown = ((each.path, each.dimension) for each in found if each.dimension is not None)
        counted = next(shown, None)
        if splitter is not None:
            return cls(counted=counted, splitter=splitter)
        for each in found:
            if each.problem:
                raise not_splittable(each.problem)
        if counted is None:
            raise not_splittable(
                f"no tensor or list in it grows with the number of samples ({sizes[1]} and"
                f" {sizes[0]} were tried)",
                larger,
            )
        rows = frozenset(each.path for each in found if each.dimension is not None)
        return cls(rows, frozenset(path for path, _ in _leaves(larger, rows)), counted)

    def batch_size(self, batch: Any) -> int:
        """Returns the number of samples; raises BatchSplitError if it is unknown."""
        # The name in graph libraries, whose batches have no rows to count.
        known = getattr(batch, "num_graphs", None)
        if isinstance(known, int):
            return known
        if self.counted is not None:
            path, dimension = self.counted
            leaf: Any = _at(batch, path)
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
        """Splits ``batch`` into consecutive batches of ``sizes`` samples.

        Tensors and arrays are views. A padded batch keeps the padding of the whole batch, which the
        same samples have on one device.

        Raises:
            BatchSplitError: the batch cannot be cut, ``sizes`` do not sum to its samples, or the
                user's function returned a different number of parts.
        """
        if self.splitter is not None:
            parts = list(self.splitter(batch, list(sizes)))
            if len(parts) != len(sizes):
                raise not_splittable(
                    f"split_batch returned {len(parts)} parts for the {len(sizes)} sizes "
                    f"{tuple(sizes)}"
                )
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
        leaves = dict(_leaves(batch, self.rows))
        rows: Set[Path] = self.rows
        if not rows or leaves.keys() != self.leaves:
            rows = _guessed_rows(batch)
            leaves = dict(_leaves(batch, rows))
        lengths = {spell(path): len(leaves[path]) for path in rows}
        if set(lengths.values()) - {count}:
            raise not_splittable(
                f"its microbatches need {count} samples, but its leaves have {lengths}", batch
            )
        return rows


def _compared(
    larger: Any, smaller: Any, sizes: tuple[int, int], path: Path = ()
) -> Iterator[_Compared]:
    """Yields the leaves of two batches of ``sizes`` samples."""
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
        yield _Compared(path, grown[0] if grown else None, "" if is_fine else problem)
    elif is_sequence(larger) and is_sequence(smaller) and (len(larger), len(smaller)) == sizes:
        yield _Compared(path, 0)
    elif inside is None and other is None:
        hides = any(is_array(each) or hides_arrays(each) for each in (larger, smaller))
        yield _Compared(path, None, problem if hides else "")
    elif [key for key, _ in inside or ()] != [key for key, _ in other or ()]:
        yield _Compared(path, None, problem)
    else:
        for (key, one), (_, another) in zip(inside or (), other or (), strict=True):
            yield from _compared(one, another, sizes, (*path, key))


def _leaves(batch: Any, ends: Set[Path] = frozenset()) -> list[tuple[Path, Any]]:
    """Returns arrays, and what is at ``ends``, with their paths."""
    found: list[tuple[Path, Any]] = []

    def visit(node: Any, path: Path) -> None:
        if path in ends or is_array(node):
            found.append((path, node))
        else:
            for key, child in children_of(node) or ():
                visit(child, (*path, key))

    visit(batch, ())
    return found


def _at(batch: Any, path: Path) -> Any:
    for key in path:
        batch = dict(children_of(batch) or ()).get(key)
    return batch


def _cut(batch: Any, rows: Set[Path], start: int, stop: int) -> Any:
    def cut(path: Path, leaf: Any) -> Any:
        if path not in rows:
            return leaf
        part = leaf[start:stop]
        if type(part) is torch.Tensor and not part.requires_grad:
            # a view of its own version: autograd would take a write to one part for one to all
            return part.data
        return part if is_array(leaf) else rebuild(leaf, part)

    part = mapped(batch, cut, rows)
    # Hugging Face keeps the tokenizer's per-sample results in addition to an encoding's tensors.
    encodings = getattr(batch, "_encodings", None)
    if isinstance(encodings, list) and part is not batch:
        part._encodings = encodings[start:stop]
    return part


def _guessed_size(batch: Any) -> int:
    """Returns the length of the first array, or without any of the first flat list."""

    def flat(node: Any) -> Iterator[Any]:
        children = children_of(node) or []
        if is_sequence(node) and all(children_of(child) is None for _, child in children):
            yield node
        for _, child in children:
            yield from flat(child)

    arrays = (leaf for _, leaf in _leaves(batch) if leaf.ndim)
    first = next(arrays, None)
    if first is None:
        first = next(flat(batch), None)
    if first is None:
        raise not_splittable("it holds no tensor or list with a batch dimension", batch)
    return len(first)


def _guessed_rows(batch: Any) -> Set[Path]:
    """Returns the leaves with as many rows as the first array or flat list."""
    count, rows = _guessed_size(batch), set[Path]()

    def visit(node: Any, path: Path) -> None:
        if is_array(node):
            rows.update([path] if node.ndim and len(node) == count else [])
        elif is_sequence(node) and len(node) == count and not contains_arrays(node):
            rows.add(path)
        elif hides_arrays(node) and children_of(node) is None:
            raise not_splittable(f"{spell(path)} is {describe(node)}", batch)
        for key, child in () if path in rows else children_of(node) or ():
            visit(child, (*path, key))

    visit(batch, ())
    return rows
