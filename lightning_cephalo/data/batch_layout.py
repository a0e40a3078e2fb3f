"""Splits a collated batch into microbatches along the leaves whose first dimension grows with it.

One batch does not show which leaves have one row per sample: a tensor of shape ``[8, 8]`` may be
eight samples or a constant. So the layout is learned by comparing two batches of different sizes.
It is only guessed if nothing was learned, or if a hook has changed the batch since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_cephalo.common.errors import BatchSplitError
from lightning_cephalo.data.containers import (
    Path,
    children_of,
    contains_arrays,
    cut,
    describe,
    hides_arrays,
    is_array,
    is_plain_sequence,
    rebuild,
    spell,
)

Splitter = Callable[[Any, Sequence[int]], list[Any]]
"""The user's own ``split_batch(batch, sizes)``: one batch per size, in order."""


def not_splittable(reason: str, batch: object = None) -> BatchSplitError:
    """Returns the error to raise, with the reason, the batch (if given) and the remedy."""
    came = "" if batch is None else f" The batch: {describe(batch)}."
    return BatchSplitError(
        f"This batch cannot be split into microbatches: {reason}.{came} Give"
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

    Args:
        rows: paths of the leaves that have one row per sample.
        structure: the structure of batches to which ``rows`` applies; others are guessed.
        splitter: the user's own function, which cuts instead of the layout.
        counted: for that function, a leaf and its dimension that is the number of samples.
    """

    rows: frozenset[Path] = frozenset()
    structure: Any = None
    splitter: Splitter | None = None
    counted: tuple[Path, int] | None = None

    @classmethod
    def learn(
        cls,
        larger: Any,
        smaller: Any,
        *,
        sizes: tuple[int, int] = (3, 2),
        splitter: Splitter | None = None,
    ) -> BatchLayout:
        """Learns the layout from two collated batches of the first ``sizes`` samples, larger first.

        Raises:
            BatchSplitError: a leaf does not have one row per sample (time-major, packed, an
                object of unknown type), or cutting and collating give different results.
        """
        compared = _Comparison(sizes)
        compared.visit(larger, smaller, ())
        if splitter is not None:
            return cls(splitter=splitter, counted=compared.counted)
        if compared.problem:
            raise not_splittable(compared.problem)
        if not compared.rows:
            raise not_splittable(
                f"no tensor or list in it grows with the number of samples ({sizes[1]} and"
                f" {sizes[0]} were tried)",
                larger,
            )
        rows = frozenset(compared.rows)
        layout = cls(rows, _look(larger, rows)[0])
        try:
            part = layout.take(larger, 0, sizes[1])
        except Exception as error:
            raise not_splittable(f"cutting it raised {error!r}", larger) from error
        if _look(part, rows) != _look(smaller, rows):
            raise not_splittable(
                f"its first {sizes[1]} samples give {describe(part)}, but collating them gives "
                f"{describe(smaller)}",
                larger,
            )
        return layout

    def batch_size(self, batch: Any) -> int:
        """Returns the samples; raises BatchSplitError if unknown, or if leaves disagree."""
        # The name in graph libraries, whose batches have no rows to count.
        known = getattr(batch, "num_graphs", None)
        if isinstance(known, int):
            return known
        if self.splitter is None:
            return self._resolve(batch)[1]
        if self.counted is not None:
            path, dimension = self.counted
            for key in path:
                batch = dict(children_of(batch) or ()).get(key)
            if is_array(batch) and dimension < batch.ndim:
                return int(batch.shape[dimension])
            if dimension == 0 and hasattr(batch, "__len__"):
                return len(batch)
            raise not_splittable(f"{spell(path)} showed the number of samples, but is missing")
        is_own = children_of(batch) is None and not is_array(batch)
        return len(batch) if is_own and hasattr(batch, "__len__") else self._resolve(batch)[1]

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
        rows, count = self._resolve(batch)
        if sum(sizes) != count:
            raise not_splittable(
                f"it has {count} samples, but the microbatches {tuple(sizes)} need {sum(sizes)}",
                batch,
            )
        ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
        return [
            _cut_rows(batch, rows, end - size, end) for size, end in zip(sizes, ends, strict=True)
        ]

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Returns samples ``start`` to ``stop`` of ``batch``, cut as `split` cuts them."""
        if self.splitter is None:
            return _cut_rows(batch, self._resolve(batch)[0], start, stop)
        sizes = (start, stop - start, self.batch_size(batch) - stop)
        if not sizes[1]:
            raise not_splittable("split_batch makes no part without samples", batch)
        parts = self.split(batch, [size for size in sizes if size]) if any(sizes[::2]) else [batch]
        return parts[start > 0]

    def _resolve(self, batch: Any) -> tuple[frozenset[Path], int]:
        """Returns the leaves with rows and the number of rows, learned or guessed."""
        if self.rows:
            structure, lengths = _look(batch, self.rows)
            if structure == self.structure:
                if len(set(lengths.values())) == 1:
                    return self.rows, next(iter(lengths.values()))
                found = ", ".join(f"{spell(path)} {count}" for path, count in lengths.items())
                raise not_splittable(f"its leaves disagree about the number of samples: {found}")
        return _guess(batch)


class _Comparison:
    """The leaves whose length is the number of samples in both of two batches."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        self.rows: list[Path] = []
        self.counted: tuple[Path, int] | None = None
        self.problem: str | None = None

    def visit(self, larger: Any, smaller: Any, path: Path) -> None:
        """Compares two nodes; the first problem is kept."""
        reason = _uncuttable(larger)
        if reason is not None:
            self._refuse(f"{spell(path)} {reason}")
        elif is_array(larger) and is_array(smaller):
            self._visit_arrays(larger, smaller, path)
        elif type(larger) is not type(smaller):
            if contains_arrays(larger) or contains_arrays(smaller):
                self._refuse(self._both(path, describe(larger), describe(smaller)))
        elif is_plain_sequence(larger) and (len(larger), len(smaller)) == self.sizes:
            self._add(path, 0)
            self.rows.append(path)
        else:
            self._visit_children(larger, smaller, path)

    def _visit_children(self, larger: Any, smaller: Any, path: Path) -> None:
        inside, other = children_of(larger), children_of(smaller)
        if inside is None or other is None:
            if hides_arrays(larger):
                kind = f"{type(larger).__module__}.{type(larger).__qualname__}"
                self._refuse(f"{spell(path)} is a {kind}, whose tensors cephalo cannot see")
        elif [key for key, _ in inside] != [key for key, _ in other]:
            self._refuse(self._both(path, describe(larger), describe(smaller)))
        else:
            for (key, one), (_, another) in zip(inside, other, strict=True):
                self.visit(one, another, (*path, key))

    def _visit_arrays(self, larger: Any, smaller: Any, path: Path) -> None:
        shapes = tuple(larger.shape), tuple(smaller.shape)
        both = self._both(path, *(f"of shape {list(shape)}" for shape in shapes))
        if len(shapes[0]) != len(shapes[1]):
            self._refuse(both)
            return
        pairs = list(zip(*shapes, strict=True))
        follows = [at for at, pair in enumerate(pairs) if pair == self.sizes]
        if follows:
            self._add(path, follows[0])
        if follows == [0]:
            self.rows.append(path)
        elif follows[:1] == [0]:
            self._refuse(f"{both}: it pairs every sample with every other")
        elif follows:
            self._refuse(f"{both}: the samples are in dimension {follows[0]}, not 0")
        elif pairs and pairs[0][0] != pairs[0][1]:
            self._refuse(f"{both}: dimension 0 is not one row per sample")

    def _both(self, path: Path, larger: str, smaller: str) -> str:
        one, other = self.sizes
        return f"{spell(path)} is {larger} for {one} samples and {smaller} for {other}"

    def _add(self, path: Path, dimension: int) -> None:
        self.counted = self.counted or (path, dimension)

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem


def _uncuttable(node: Any) -> str | None:
    if isinstance(node, PackedSequence):
        return "is a PackedSequence, which is ordered by time step"
    if isinstance(node, torch.Tensor) and (node.is_nested or node.layout != torch.strided):
        return f"is a {'nested' if node.is_nested else 'sparse'} tensor"
    return None


def _look(batch: Any, rows: frozenset[Path]) -> tuple[Any, dict[Path, int]]:
    """Returns the structure, which must not change for ``rows``, and the lengths of these."""
    lengths: dict[Path, int] = {}

    def visit(node: Any, path: Path) -> Any:
        if path in rows:
            lengths[path] = len(node)
            return ("rows", node.ndim if is_array(node) else type(node))
        if is_array(node):
            return ("array", node.ndim)
        children = children_of(node)
        if children is None:
            return "constant"
        return type(node), tuple((key, visit(child, (*path, key))) for key, child in children)

    return visit(batch, ()), lengths


def _map_rows(node: Any, path: Path, rows: frozenset[Path], function: Callable[[Any], Any]) -> Any:
    """Returns a batch like ``node`` with ``function(leaf)`` for each leaf that has rows."""
    if path in rows:
        return function(node)
    children = None if is_array(node) else children_of(node)
    if children is None:
        return node
    return rebuild(node, [_map_rows(each, (*path, key), rows, function) for key, each in children])


def _cut_rows(batch: Any, rows: frozenset[Path], start: int, stop: int) -> Any:
    part = _map_rows(batch, (), rows, partial(cut, start=start, stop=stop))
    # Hugging Face keeps the tokenizer's per-sample results in addition to an encoding's tensors.
    encodings = getattr(batch, "_encodings", None)
    if isinstance(encodings, list) and part is not batch:
        part._encodings = encodings[start:stop]
    return part


def _guess(batch: Any) -> tuple[frozenset[Path], int]:
    count = _first_length(batch, arrays=True)
    if count is None:
        count = _first_length(batch, arrays=False)
    if count is None:
        raise not_splittable("it holds no tensor or list with a batch dimension", batch)
    rows: set[Path] = set()

    def visit(node: Any, path: Path) -> None:
        if is_array(node):
            if node.ndim and node.shape[0] == count:
                rows.add(path)
        elif is_plain_sequence(node) and len(node) == count and not contains_arrays(node):
            rows.add(path)
        else:
            for key, child in children_of(node) or ():
                visit(child, (*path, key))

    visit(batch, ())
    return frozenset(rows), count


def _first_length(node: Any, *, arrays: bool) -> int | None:
    """Returns the length of the first array, or of the first flat list if not ``arrays``."""
    reason = _uncuttable(node)
    if reason is not None:
        raise not_splittable(f"a part of it {reason}")
    if is_array(node):
        return int(node.shape[0]) if arrays and node.ndim else None
    children = children_of(node) or []
    flat = all(children_of(child) is None for _, child in children)
    if not arrays and is_plain_sequence(node) and flat:
        return len(node)
    lengths = (_first_length(child, arrays=arrays) for _, child in children)
    return next((length for length in lengths if length is not None), None)
