"""Finds rows and numbers in what ``training_step`` changes in place, which microbatches share.

``self.cache["h"] = h.detach()`` changes an object that all microbatches have: each finds the rows
of another one. ``self.losses.append(loss.detach())`` adds a number for each microbatch, where one
device adds one of the whole batch. What a step assigns does not have this fault.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cephalo.execution.undone_step import CONTAINERS, OF_TORCH, are_same, copy_of

# what a step changes it mostly changes in its first one; a deque or a dict may be read first
_STEPS = 3
_GROWING = frozenset((list, deque))
_NOT_USERS = frozenset(["torch", "torchmetrics", "lightning", "pytorch_lightning", "transformers"])
_NOT_USERS |= {"lightning_cephalo", "numpy", "builtins", "collections", "functools", "enum"}
_NOT_USERS |= {"logging", "types"}


@dataclass(frozen=True)
class _Before:
    path: str
    names: dict[str, Any]
    values: dict[str, Any]
    inside: dict[str, Any]

    @classmethod
    def of(cls, path: str, names: dict[str, Any]) -> _Before:
        values = {name: value for name, value in names.items() if name not in OF_TORCH}
        found = {name: _inside(value) for name, value in values.items()}
        inside = {name: copy_of(held) for name, held in found.items() if held is not None}
        return cls(path, names, values, inside)


class SharedValues:
    def __init__(self, several_ranks: bool) -> None:
        self._several_ranks, self._finds_numbers = several_ranks, False
        self._left = _STEPS
        self._before: list[_Before] = []
        self._told: set[str] = set()

    def begin(
        self,
        places: Sequence[dict[str, Any]],
        paths: Mapping[int, str],
        microbatches: int,
        finds_numbers: bool = False,
    ) -> None:
        self._before = []
        is_cut = microbatches > 1 or (microbatches and self._several_ranks)
        self._finds_numbers = finds_numbers and bool(is_cut)
        if self._left and (microbatches > 1 or self._finds_numbers):
            self._left -= 1
            self._before = [_Before.of(paths.get(id(names), ""), names) for names in places]

    def finish(self, sizes: Sequence[int]) -> None:
        found, self._before = self._before, []
        for before in found:
            for name, value in before.names.items():
                full = f"{before.path}.{name}" if before.path else name
                if name in OF_TORCH or full in self._told:
                    continue
                new = _new_items(before, name)
                if self._finds_numbers and type(value) in _GROWING and any(map(_is_number, new)):
                    self._told.add(full)
                    _warn_of_numbers(full, value, len(sizes))
                    continue
                if len(sizes) < 2:
                    continue  # rows of one microbatch are no other one's
                leaves = [leaf for item in new for leaf in _tensors(item)]
                rows = [leaf for leaf in leaves if _has_rows(leaf, sizes)]
                # what all microbatches have alike, such as a copy of a buffer, is not of samples
                own = [leaf for leaf in rows if not _has_twin(leaf, leaves)]
                if own:
                    self._told.add(full)
                    _warn(full, value, own[0])


def _new_items(before: _Before, name: str) -> list[Any]:
    value = before.names[name]
    inside = _inside(value)
    if inside is None:
        return []
    now = copy_of(inside)
    if value is not before.values.get(name):
        # each microbatch has its own containers, if it makes them
        return [] if type(value) in CONTAINERS or isinstance(now, int) else now
    items = before.inside[name]
    if isinstance(items, int) or isinstance(now, int) or are_same(now, items):
        return []
    known = {id(item) for item in items}
    return [item for item in now if id(item) not in known]


def _inside(value: Any) -> Any:
    """Return the items of a container, or the attributes of an object of the user's."""
    if type(value) in CONTAINERS:
        return value
    owner = type(value).__module__.partition(".")[0]
    if owner in _NOT_USERS or isinstance(value, nn.Module | type) or callable(value):
        return None
    return getattr(value, "__dict__", None)


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < 3 and isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        for item in list(items)[:100]:
            yield from _tensors(item, depth + 1)


def _is_number(value: Any) -> bool:
    """Whether a value may be a mean over samples: a floating-point number, or a dict of some."""
    if isinstance(value, dict):
        return any(_is_number(item) for item in value.values())
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, float)


def _has_rows(tensor: Tensor, sizes: Sequence[int]) -> bool:
    """Whether one of the first two dimensions is as long as a microbatch, by shape alone."""
    if type(tensor) is not Tensor:
        return False
    if any(length > 1 and length in sizes for length in tensor.shape[:2]):
        return True
    return sizes[-1] == 1 and tensor.ndim > 1 and tensor.shape[0] == 1


def _has_twin(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(
        other is not tensor
        and other.shape == tensor.shape
        and other.dtype == tensor.dtype
        and bool(torch.equal(other, tensor))
        for other in others
    )


def _warn(name: str, value: Any, rows: Tensor) -> None:
    warnings.warn(
        f"training_step puts rows of samples (a tensor of shape {tuple(rows.shape)}) into {name!r},"
        f" a {type(value).__name__} that all microbatches of a rank share. A step that reads it"
        " finds the rows of another microbatch, and training differs from one device. Assign a new"
        " tensor, tuple, list or dict instead, such as self.cache = {**self.cache, 'h': h}: then"
        " each microbatch finds its own samples. If only hooks read it, ignore this warning; they"
        " find the rows of each microbatch.",
        stacklevel=2,
    )


def _warn_of_numbers(name: str, value: Any, microbatches: int) -> None:
    warnings.warn(
        f"training_step adds a number to {name!r}, a {type(value).__name__}, for each of this"
        f" rank's microbatches ({microbatches} in this step). On one device it adds that of the"
        " whole batch. So their mean depends on the plan. self.log(..., on_epoch=True,"
        " sync_dist=True) gives the mean over the epoch. For a list of your own, add the value of"
        " self.trainer.callback_metrics in on_train_batch_end(), where sync_dist=True makes it"
        " that of the global batch.",
        stacklevel=2,
    )
