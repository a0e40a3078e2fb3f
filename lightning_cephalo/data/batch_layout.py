"""Cutting one collated batch into microbatches along its batch dimension.

Which leaves of a batch have one row per sample cannot be told from one batch: a tensor of shape
``[8, 8]`` may be eight samples or a constant. It is learned by comparing two batches of different
sizes, checked by cutting one and comparing with the other, and only guessed when nothing was
learned or a hook has changed the batch since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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

_WAYS_OUT = (
    "Ways out: CephaloStrategy(collate_per_microbatch=True) collates every microbatch on its own, "
    "so that nothing needs to be cut (hooks then see a list of batches); or "
    "CephaloStrategy(split_batch=function), where function(batch, sizes) returns one batch of "
    "sizes[i] samples for each i."
)


def not_splittable(reason: str, batch: object = None) -> BatchSplitError:
    """Returns the error to raise: the reason, what the batch is (where it is given), ways out."""
    came = "" if batch is None else f" The batch: {describe(batch)}."
    return BatchSplitError(
        f"This batch cannot be split into microbatches: {reason}.{came} {_WAYS_OUT}"
    )


class MicrobatchList(list[Any]):
    """Batches that were collated one by one, one per microbatch.

    Attributes:
        sizes: samples of each, or None once a copy that knows lists only (Lightning's conversion
            for 16-true and 64-true precision) has lost them.
    """

    def __init__(self, batches: Sequence[Any] = (), sizes: Sequence[int] | None = None) -> None:
        super().__init__(batches)
        self.sizes = None if sizes is None else tuple(sizes)

    def map(self, function: Callable[[Any], Any]) -> MicrobatchList:
        """A list of ``function(batch)``, with the same sizes."""
        return MicrobatchList([function(batch) for batch in self], self.sizes)


@dataclass(frozen=True)
class BatchLayout:
    """Which leaves of a batch have one row per sample.

    Without arguments it guesses, as Lightning's ``extract_batch_size`` does: the first tensor that
    has a dimension 0 gives the batch size, and every tensor, array, or list without tensors of
    that length is cut. Use `learn` where two batches can be had.

    Args:
        rows: paths of the leaves that have one row per sample.
        structure: what a batch must look like for ``rows`` to apply; another one is guessed.
        splitter: the user's own function, used by `split` in place of everything else.
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
        """Learns the layout from two collated batches of the first ``sizes`` samples.

        Args:
            larger: batch of ``sizes[0]`` samples.
            smaller: batch of ``sizes[1]`` samples, fewer.
            splitter: the user's own function. It is kept, and a batch that only it can split is
                no error then.

        Raises:
            BatchSplitError: a leaf does not have one row per sample (time-major, packed, an
                object of unknown type), or cutting does not give what collating gives.
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
        """Number of samples in ``batch``.

        Raises:
            BatchSplitError: it cannot be told, or its leaves disagree.
        """
        if isinstance(batch, MicrobatchList):
            if batch.sizes is not None:
                return sum(batch.sizes)
            return sum(self.batch_size(part) for part in batch)
        # What graph libraries call it; their batches have no rows to count.
        known = getattr(batch, "num_graphs", None)
        if isinstance(known, int):
            return known
        return self._resolve(batch)[1]

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Cuts ``batch`` into consecutive batches of ``sizes`` samples.

        Tensors and arrays are views; containers keep their types; leaves without rows are passed
        to every part. A padded batch keeps the padding of the whole, which is what the same
        samples see on one device.

        Args:
            batch: a collated batch, or a `MicrobatchList` of as many as there are ``sizes``.
            sizes: samples per part, 0 or more each.

        Raises:
            BatchSplitError: the batch cannot be cut, ``sizes`` do not sum to its samples, or the
                user's function returned another number of parts.
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
        """Samples ``start`` to ``stop`` of ``batch``, cut as by `split`."""
        rows, _ = self._resolve(batch)
        return _cut_rows(batch, (), rows, start, stop)

    def _resolve(self, batch: Any) -> tuple[frozenset[Path], int]:
        """Leaves with rows and the number of rows, learned or guessed."""
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
    """A batch like ``batch`` without samples: what a rank that has none in a step receives.

    Raises:
        BatchSplitError: ``batch`` cannot be cut.
    """
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
    """Adds to ``rows`` the paths whose leading dimension is the number of samples in both."""
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
    """Whether a list, or an object that can be sliced, has one item per sample."""
    if is_plain_sequence(larger):
        return (len(larger), len(smaller)) == sizes
    if isinstance(larger, str | bytes | dict) or not hasattr(larger, "__getitem__"):
        return False
    try:
        return (len(larger), len(smaller)) == sizes and (
            type(larger[0 : sizes[1]]) is type(larger) and len(larger[0 : sizes[1]]) == sizes[1]
        )
    except Exception:  # whatever a foreign object raises, it cannot be sliced
        return False


def _structure(node: Any, path: Path, rows: frozenset[Path]) -> Any:
    """What must stay the same for ``rows`` to apply: containers, keys, array dimensions."""
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
    # Hugging Face keeps the tokenizer's per-sample results beside the tensors of an encoding.
    encodings = getattr(node, "_encodings", None)
    if isinstance(encodings, list) and result is not node:
        result._encodings = encodings[start:stop]
    return result


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
    """Leading dimension of the first array, or length of the first list if not ``arrays``."""
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
