"""Splits a collated batch into microbatches along its batch dimension.

One batch does not show which leaves have one row per sample: a tensor of shape ``[8, 8]`` may be
eight samples or a constant. So the layout is learned by comparing two batches of different sizes.
It is only guessed if nothing was learned, or if a hook has changed the batch since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
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
    repeat,
    spell,
)

Splitter = Callable[[Any, Sequence[int]], list[Any]]
"""The user's own ``split_batch(batch, sizes)``: one batch per size, in order."""

_WAYS_OUT = (
    "Ways out: CephaloStrategy(collate_per_microbatch=True) collates every microbatch on its own, "
    "so that nothing needs to be cut (hooks then see a list of batches); or "
    "CephaloStrategy(split_batch=function), where function(batch, sizes) returns one batch of "
    "sizes[i] samples for each i."
)


def not_splittable(reason: str, batch: object = None) -> BatchSplitError:
    """Returns the error to raise, with the reason, the batch (if given) and the remedies."""
    came = "" if batch is None else f" The batch: {describe(batch)}."
    return BatchSplitError(
        f"This batch cannot be split into microbatches: {reason}.{came} {_WAYS_OUT}"
    )


class MicrobatchList(list[Any]):
    """A list of batches that were collated separately, one per microbatch.

    Its class holds the sizes, so that Lightning's copies ``type(batch)(batches)`` have them.
    """

    sizes: tuple[int, ...] | None = None

    def __new__(
        cls, batches: Iterable[Any] = (), sizes: Sequence[int] | None = None
    ) -> MicrobatchList:
        return super().__new__(cls if sizes is None else _with_sizes(tuple(sizes)))

    def __init__(self, batches: Iterable[Any] = (), sizes: Sequence[int] | None = None) -> None:
        super().__init__(batches)

    def __reduce__(self) -> tuple[Any, ...]:
        return MicrobatchList, (list(self), self.sizes)

    def map(self, function: Callable[[Any], Any]) -> MicrobatchList:
        """Returns a list of ``function(batch)`` for each batch, with the same sizes."""
        return MicrobatchList([function(batch) for batch in self], self.sizes)


@cache
def _with_sizes(sizes: tuple[int, ...]) -> type[MicrobatchList]:
    return type(MicrobatchList.__name__, (MicrobatchList,), {"sizes": sizes})


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
        splitter: the user's own function, which `split` uses instead of the layout.
    """

    rows: frozenset[Path] = frozenset()
    structure: Any = None
    splitter: Splitter | None = None

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
        try:
            rows: set[Path] = set()
            _compare(larger, smaller, (), sizes, rows)
            if not rows:
                raise not_splittable(
                    f"no tensor or list in it grows with the number of samples "
                    f"({sizes[1]} and {sizes[0]} were tried)",
                    larger,
                )
            layout = cls(frozenset(rows), _structure(larger, (), frozenset(rows)), splitter)
            layout._verify(larger, smaller, sizes)
        except BatchSplitError:
            if splitter is None:
                raise
            return cls(splitter=splitter)
        return layout

    def batch_size(self, batch: Any) -> int:
        """Returns the samples; raises BatchSplitError if unknown, or if leaves disagree."""
        if isinstance(batch, MicrobatchList):
            if batch.sizes is not None:
                return sum(batch.sizes)
            return sum(self.batch_size(part) for part in batch)
        # The name in graph libraries, whose batches have no rows to count.
        known = getattr(batch, "num_graphs", None)
        if isinstance(known, int):
            return known
        try:
            return self._resolve(batch)[1]
        except BatchSplitError:
            # the user's own function cuts objects that cephalo cannot see into
            if self.splitter is None or not hasattr(batch, "__len__"):
                raise
            return len(batch)

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Splits ``batch`` into consecutive batches of ``sizes`` samples.

        Tensors and arrays are views. A padded batch keeps the padding of the whole batch, which the
        same samples have on one device.

        Raises:
            BatchSplitError: the batch cannot be cut, ``sizes`` do not sum to its samples, or the
                user's function returned a different number of parts.
        """
        if isinstance(batch, MicrobatchList):
            if len(batch) != len(sizes):
                raise not_splittable(
                    f"it was collated as {len(batch)} microbatches, but {len(sizes)} are asked for"
                )
            return list(batch)
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
        parts, start = [], 0
        for size in sizes:
            parts.append(_cut_rows(batch, (), rows, start, start + size))
            start += size
        return parts

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Returns samples ``start`` to ``stop`` of ``batch``, cut as `split` cuts them."""
        rows, _ = self._resolve(batch)
        return _cut_rows(batch, (), rows, start, stop)

    def repeated(self, batch: Any, times: int) -> Any:
        """Returns so many copies in one batch; raises BatchSplitError if they cannot be joined."""
        if isinstance(batch, MicrobatchList) or self.splitter is not None:
            raise not_splittable("only cephalo's own parts are put together", batch)
        return _repeat_rows(batch, (), self._resolve(batch)[0], times)

    def _resolve(self, batch: Any) -> tuple[frozenset[Path], int]:
        """Returns the leaves with rows and the number of rows, learned or guessed."""
        if self.rows and _structure(batch, (), self.rows) == self.structure:
            lengths = dict(_lengths(batch, (), self.rows))
            if len(set(lengths.values())) == 1:
                return self.rows, next(iter(lengths.values()))
            found = ", ".join(f"{spell(path)} {count}" for path, count in lengths.items())
            raise not_splittable(f"its leaves disagree about the number of samples: {found}")
        return _guess(batch)

    def _verify(self, larger: Any, smaller: Any, sizes: tuple[int, int]) -> None:
        try:
            part = self.take(larger, 0, sizes[1])
        except BatchSplitError:
            raise
        except Exception as error:
            raise not_splittable(f"cutting it raised {error!r}", larger) from error
        expected = _structure(smaller, (), self.rows)
        if _structure(part, (), self.rows) != expected or dict(
            _lengths(part, (), self.rows)
        ) != dict(_lengths(smaller, (), self.rows)):
            raise not_splittable(
                f"its first {sizes[1]} samples give {describe(part)}, but collating them gives "
                f"{describe(smaller)}",
                larger,
            )


def zero_rows(batch: Any, layout: BatchLayout | None = None) -> Any:
    """Returns a batch like ``batch`` without samples."""
    if isinstance(batch, MicrobatchList):
        return MicrobatchList((), ())
    return (layout or BatchLayout()).take(batch, 0, 0)


def _reject_uncuttable(node: Any, path: Path) -> None:
    if isinstance(node, PackedSequence):
        raise not_splittable(f"{spell(path)} is a PackedSequence, which is ordered by time step")
    if isinstance(node, torch.Tensor) and (node.is_nested or node.layout != torch.strided):
        kind = "nested" if node.is_nested else "sparse"
        raise not_splittable(f"{spell(path)} is a {kind} tensor")


def _compare(
    larger: Any, smaller: Any, path: Path, sizes: tuple[int, int], rows: set[Path]
) -> None:
    """Adds to ``rows`` the paths whose length is the number of samples in both batches."""
    _reject_uncuttable(larger, path)
    if is_array(larger) and is_array(smaller):
        _compare_arrays(larger, smaller, path, sizes, rows)
        return
    if type(larger) is not type(smaller):
        if contains_arrays(larger) or contains_arrays(smaller):
            raise not_splittable(
                f"{spell(path)} is {describe(larger)} for {sizes[0]} samples and "
                f"{describe(smaller)} for {sizes[1]}"
            )
        return
    if _has_rows(larger, smaller, sizes):
        rows.add(path)
        return
    inside, inside_smaller = children_of(larger), children_of(smaller)
    if inside is None or inside_smaller is None:
        if hides_arrays(larger):
            raise not_splittable(
                f"{spell(path)} is a {type(larger).__module__}.{type(larger).__qualname__}, whose "
                "tensors cephalo cannot see"
            )
        return
    if [key for key, _ in inside] != [key for key, _ in inside_smaller]:
        raise not_splittable(
            f"{spell(path)} is {describe(larger)} for {sizes[0]} samples and {describe(smaller)} "
            f"for {sizes[1]}"
        )
    for (key, child), (_, other) in zip(inside, inside_smaller, strict=True):
        _compare(child, other, (*path, key), sizes, rows)


def _compare_arrays(
    larger: Any, smaller: Any, path: Path, sizes: tuple[int, int], rows: set[Path]
) -> None:
    shapes = tuple(larger.shape), tuple(smaller.shape)
    seen = f"{spell(path)} has shape {list(shapes[0])} for {sizes[0]} samples and {list(shapes[1])}"
    if len(shapes[0]) != len(shapes[1]):
        raise not_splittable(f"{seen} for {sizes[1]}")
    follows = [pair == sizes for pair in zip(*shapes, strict=True)]
    if follows and follows[0]:
        if any(follows[1:]):
            raise not_splittable(f"{seen} for {sizes[1]}: it pairs every sample with every other")
        rows.add(path)
    elif any(follows):
        raise not_splittable(
            f"{seen} for {sizes[1]}: the samples are in dimension {follows.index(True)}, not 0"
        )
    elif shapes[0][:1] != shapes[1][:1]:
        raise not_splittable(f"{seen} for {sizes[1]}: dimension 0 is not one row per sample")


def _has_rows(larger: Any, smaller: Any, sizes: tuple[int, int]) -> bool:
    """Returns whether a list, or an object that can be sliced, has one item per sample."""
    if is_plain_sequence(larger):
        return (len(larger), len(smaller)) == sizes
    if isinstance(larger, str | bytes | dict) or not hasattr(larger, "__getitem__"):
        return False
    try:
        return (len(larger), len(smaller)) == sizes and (
            type(larger[0 : sizes[1]]) is type(larger) and len(larger[0 : sizes[1]]) == sizes[1]
        )
    except Exception:  # any error of a foreign object means that it cannot be sliced
        return False


def _structure(node: Any, path: Path, rows: frozenset[Path]) -> Any:
    """Returns the containers, keys and array dimensions, which must not change for ``rows``."""
    if path in rows:
        return ("rows", node.ndim if is_array(node) else type(node))
    if is_array(node):
        return ("array", node.ndim)
    children = children_of(node)
    if children is None:
        return "constant"
    inside = tuple((key, _structure(child, (*path, key), rows)) for key, child in children)
    return (type(node), inside)


def _lengths(node: Any, path: Path, rows: frozenset[Path]) -> list[tuple[Path, int]]:
    if path in rows:
        return [(path, len(node))]
    children = None if is_array(node) else children_of(node)
    if children is None:
        return []
    return [pair for key, child in children for pair in _lengths(child, (*path, key), rows)]


def _cut_rows(node: Any, path: Path, rows: frozenset[Path], start: int, stop: int) -> Any:
    if path in rows:
        return cut(node, start, stop)
    children = None if is_array(node) else children_of(node)
    if children is None:
        return node
    parts = [_cut_rows(child, (*path, key), rows, start, stop) for key, child in children]
    result = rebuild(node, parts)
    # Hugging Face keeps the tokenizer's per-sample results in addition to an encoding's tensors.
    encodings = getattr(node, "_encodings", None)
    if isinstance(encodings, list) and result is not node:
        result._encodings = encodings[start:stop]
    return result


def _repeat_rows(node: Any, path: Path, rows: frozenset[Path], times: int) -> Any:
    if path in rows:
        return repeat(node, times)
    children = None if is_array(node) else children_of(node)
    if children is None:
        return node
    return rebuild(
        node, [_repeat_rows(child, (*path, key), rows, times) for key, child in children]
    )


def _guess(batch: Any) -> tuple[frozenset[Path], int]:
    count = _first_length(batch, (), arrays=True)
    if count is None:
        count = _first_length(batch, (), arrays=False)
    if count is None:
        raise not_splittable("it holds no tensor or list with a batch dimension", batch)
    rows: set[Path] = set()

    def visit(node: Any, path: Path) -> None:
        if is_array(node):
            if node.ndim and node.shape[0] == count:
                rows.add(path)
            return
        if is_plain_sequence(node) and len(node) == count and not contains_arrays(node):
            rows.add(path)
            return
        for key, child in children_of(node) or ():
            visit(child, (*path, key))

    visit(batch, ())
    return frozenset(rows), count


def _first_length(node: Any, path: Path, *, arrays: bool) -> int | None:
    """Returns the length of the first array, or of the first flat list if not ``arrays``."""
    _reject_uncuttable(node, path)
    if is_array(node):
        return int(node.shape[0]) if arrays and node.ndim else None
    children = children_of(node) or []
    flat = all(children_of(child) is None for _, child in children)
    if not arrays and is_plain_sequence(node) and flat:
        return len(node)
    for key, child in children:
        length = _first_length(child, (*path, key), arrays=arrays)
        if length is not None:
            return length
    return None
