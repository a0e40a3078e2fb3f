"""Finds what a step keeps on modules that depends on how its batch is cut.

A number becomes the mean over microbatches (``execution/overlay_merge.py``), which is right only
for means over samples. Generators and iterators advance in each. Comparing losses shows all.
"""

from __future__ import annotations

import gc
import math
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count, cycle, repeat
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_cephalo.data.randomness import GENERATOR_TYPES, mark_of
from lightning_cephalo.execution.overlay_slots import OF_TORCH
from lightning_cephalo.ranks.control import ControlGroup

# Relative, by the dtype of computing; a mean of float32 losses over parts rounds otherwise
_ROUNDING, _ROUNDING_IN_HALF = 1e-4, 3e-2
_TINY = 1e-12
_MOST_ITEMS = 1000
_DEEPEST = 4  # iterators that take from iterators


@dataclass(frozen=True)
class Kept:
    """What a rank's step keeps on modules that depends on how its batch is cut."""

    numbers: tuple[tuple[str, float, tuple[float, ...]], ...] = ()
    drawn: tuple[tuple[str, str], ...] = ()


class StoredValues:
    """Compares what a step stores for a batch and for its parts.

    ::

        stored = StoredValues(places)
        for size in (4, 2, 2):
            stored.begin()
            ...                        # the step, on so many samples
            stored.end(size)
        stored.gather(control)         # stored.rows is what all ranks have found

    ``places`` are the attributes of modules that may store something, by path. Numbers are compared
    only if parts of all ranks have the same share of their batches, as they are means over samples.
    """

    def __init__(self, places: Mapping[str, dict[str, Any]]) -> None:
        self._places = [*places.items()]
        self._start: list[dict[str, Any]] = []
        self._marks: dict[str, tuple[Any, Any]] = {}
        self._sizes: list[int] = []
        self._values: list[dict[str, Any]] = []
        self._new: set[str] = set()
        self._drawn: dict[str, str] = {}
        self.rows: Sequence[Kept] = ()
        self.takes_gradients = False
        self.compares_numbers = True

    def begin(self) -> None:
        """Note what the step finds."""
        self._start = [dict(names) for _, names in self._places]
        self._marks = {name: (each, _mark(each)) for name, each in self._drawing()}

    def watching(self) -> AbstractContextManager[Any]:
        """Look for gradients that the code of a ``with`` block computes itself."""
        return _Gradients(self)

    def end(self, samples: int) -> None:
        """Note what it leaves behind, on so many samples."""
        values: dict[str, Any] = {}
        for (path, names), start in zip(self._places, self._start, strict=True):
            for name, value in names.items():
                if name in OF_TORCH or not _is_number(value):
                    continue
                full = _named(path, name)
                values[full] = value.item() if isinstance(value, Tensor) else value
                if value is not start.get(name):
                    self._new.add(full)
        self._values.append(values)
        self._sizes.append(samples)
        for name, (each, mark) in self._marks.items():
            if _mark(each) != mark:
                self._drawn[name] = type(each).__name__
        self._start, self._marks = [], {}

    def kept(self, in_half: bool = False) -> Kept:
        """Return what depends on the cut: of the first run, the parts, and the first one again."""
        drawn = tuple(sorted(self._drawn.items()))
        if len(self._values) < 3 or not self.compares_numbers:
            return Kept((), drawn)
        (whole, *parts), again = self._values[:3], self._values[3:]
        found = []
        for name in sorted(self._new):
            if not all(name in values for values in (whole, *parts)):
                continue
            own = [values[name] for values in (whole, *parts)]
            if any(name in run and not _are_close(run[name], own[0], in_half) for run in again):
                continue  # a random one
            if _differs(own, self._sizes[1:3], in_half):
                found.append((name, own[0], tuple(own[1:])))
        return Kept(tuple(found), drawn)

    def need_another_run(self, control: ControlGroup, in_half: bool = False) -> bool:
        """Whether any rank has numbers that may be random; collective."""
        return any(control.gather(len(self._values) == 3 and bool(self.kept(in_half).numbers)))

    def gather(self, control: ControlGroup, in_half: bool = False) -> None:
        """Tell all ranks what this one has found; collective."""
        self.rows = control.gather(self.kept(in_half))

    def _drawing(self) -> Iterator[tuple[str, Any]]:
        """Yield generators and iterators that modules hold, also in containers."""
        for path, names in self._places:
            for name, value in names.items():
                if name in OF_TORCH:
                    continue
                full = _named(path, name)
                if _draws(value):
                    yield full, value
                elif isinstance(value, dict) and len(value) <= _MOST_ITEMS:
                    yield from ((f"{full}[{k!r}]", v) for k, v in value.items() if _draws(v))
                elif isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
                    yield from ((f"{full}[{k}]", v) for k, v in enumerate(value) if _draws(v))


class _Gradients(TorchFunctionMode):
    """Looks for ``torch.autograd.grad`` of parameters."""

    def __init__(self, stored: StoredValues) -> None:
        super().__init__()
        self._stored = stored

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.grad:
            inputs = [*args, *(kwargs or {}).values()][1]
            each = inputs if isinstance(inputs, list | tuple) else (inputs,)
            self._stored.takes_gradients |= any(isinstance(one, nn.Parameter) for one in each)
        return func(*args, **(kwargs or {}))


def _draws(value: Any) -> bool:
    return isinstance(value, (*GENERATOR_TYPES, Iterator))


def _mark(value: Any) -> Any:
    """Return what changes when a generator or an iterator advances."""
    if isinstance(value, GENERATOR_TYPES):
        return mark_of(value)
    try:
        return _position_of(value)
    except Exception:  # the user's own code, on this rank alone perhaps: the others would wait
        return None


def _position_of(iterator: Any, depth: int = 0) -> Any:
    """Return how far an iterator is, as far as Python says."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, [*map(id, frame.f_locals.values())])
    if isinstance(iterator, count | repeat):
        return repr(iterator)
    yielded = getattr(iterator, "_num_yielded", None)  # torch's iterators of DataLoaders
    hint = operator.length_hint(iterator, -1) if yielded is None else yielded
    if hint >= 0 or depth == _DEEPEST:
        return hint
    held = list(getattr(iterator, "__dict__", {}).values())
    return [*map(id, held), *_positions_inside(iterator, depth)]


def _positions_inside(iterator: Any, depth: int) -> list[Any]:
    """Return how far the iterators are from which others take (``zip``, ``map``, ``cycle``)."""
    found: list[Any] = []
    inside = gc.get_referents(iterator)
    if isinstance(iterator, cycle):
        # Python up to 3.13 tells the place in later rounds; the first one shows in the length
        with suppress(TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            inside = [*inside, *iterator.__reduce__()[1]]
        found = [len(each) for each in inside if type(each) is list]
    for each in inside:
        inner = each if isinstance(each, tuple) else (each,)
        found += [_position_of(one, depth + 1) for one in inner if isinstance(one, Iterator)]
    return found


def _named(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_number(value: Any) -> bool:
    if type(value) is not Tensor or value.ndim or value.is_meta:
        return type(value) in (int, float)
    return value.dtype is not torch.bool and not value.is_complex()


def _are_close(one: float, other: float, in_half: bool) -> bool:
    tolerance = _ROUNDING_IN_HALF if in_half else _ROUNDING
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=_TINY)


def _differs(own: Sequence[Any], sizes: Sequence[int], in_half: bool) -> bool:
    """Whether the number of a batch is not what its parts make of it."""
    whole, *parts = own
    if all(type(value) is int for value in own):
        return any(value != whole for value in parts)
    if not all(map(math.isfinite, own)):
        return False
    mean = sum(value * size for value, size in zip(parts, sizes, strict=True)) / sum(sizes)
    # parts that cancel each other leave the rounding of the larger ones
    largest = max(map(abs, own))
    return not _are_close(whole, mean, in_half) and abs(whole - mean) > 1e-6 * largest


def warn_of_kept(rows: Sequence[Kept]) -> None:
    """Warn of what the steps of any rank keep that depends on how batches are cut."""
    numbers = {name: (whole, parts) for row in rows for name, whole, parts in row.numbers}
    if numbers:
        name, (whole, parts) = min(numbers.items())
        others = sorted(numbers.keys() - {name})
        said = " and ".join(f"{value:.6g}" for value in parts)
        also = f" The same holds for {', '.join(map(repr, others))}." if others else ""
        warnings.warn(
            f"training_step stores {whole:.6g} in {name!r} for a batch, and {said} for its parts:"
            " that is no mean over samples, such as a count of samples or a running maximum."
            " Microbatches and ranks are such parts, so that it will differ from one device."
            f"{also} Write it in on_train_batch_end, from what all ranks have:"
            " trainer.callback_metrics of self.log(..., reduce_fx='max' or 'sum', sync_dist=True).",
            stacklevel=2,
        )
    drawn = {name: kind for row in rows for name, kind in row.drawn}
    if drawn:
        held = ", ".join(f"{name!r} (a {kind})" for name, kind in sorted(drawn.items()))
        warnings.warn(
            f"training_step draws from {held}, which the module holds. Each microbatch does, and on"
            " each rank, so that training will differ from one device: ranks draw the same values"
            " for other samples, and each rank advances it by its number of microbatches. Draw for"
            " the whole batch in on_train_batch_start, let the dataset draw for each sample, or use"
            " the global random generators.",
            stacklevel=2,
        )
